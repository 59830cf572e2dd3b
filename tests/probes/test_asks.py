"""Probes ask a layer for its class; none finds out what a layer is by looking whether it has an attribute."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# by file, what may be looked for: fields of Hugging Face's configs, which have no class in common, and what
# transformers raises where a folder has no tokenizer
ALLOWED = {
    ("stability/probes/pretrained/loading.py", "AttributeError"),
    ("stability/probes/generation/text_oracle.py", "max_position_embeddings"),
    ("stability/probes/generation/protein_letters_oracle.py", "max_position_embeddings"),
    ("stability/probes/generation/evo2_oracle.py", "config"),
    ("stability/probes/generation/evo2_oracle.py", "max_seqlen"),
    ("stability/probes/pretrained/probe.py", "max_position_embeddings"),
}


def guesses(source: str) -> list[str]:
    """Names of attributes that code looks for: by hasattr, by getattr under a fixed name or with a default, in what
    vars gives, by catching AttributeError."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name, arguments = node.func.id, node.args
            is_fixed = len(arguments) > 1 and isinstance(arguments[1], ast.Constant)
            if name in ("hasattr", "vars") or (name == "getattr" and (is_fixed or len(arguments) > 2)):
                found.append(ast.literal_eval(arguments[1]) if is_fixed else ast.unparse(node))
        elif isinstance(node, ast.Attribute) and node.attr == "__dict__":
            found.append(ast.unparse(node))
        elif isinstance(node, ast.ExceptHandler) and "AttributeError" in ast.unparse(node.type or node):
            found.append("AttributeError")
    return found


def test_no_probe_looks_for_an_attribute():
    files = sorted((ROOT / "stability" / "probes").rglob("*.py"))
    found = {(str(file.relative_to(ROOT)), name) for file in files for name in guesses(file.read_text())}
    assert len(files) > 20
    assert found == ALLOWED


@pytest.mark.parametrize(
    "source",
    [
        "hasattr(layer, 'gamma')",
        "hasattr(layer, name)",
        "getattr(layer, 'rope')",
        "getattr(layer, name, None)",
        "vars(layer)['rope']",
        "layer.__dict__.get('rope')",
        "try:\n    layer.gamma\nexcept AttributeError:\n    pass",
    ],
)
def test_every_way_of_looking_is_seen(source):
    assert len(guesses(source)) == 1


def test_reading_a_field_by_its_name_is_no_guess():
    assert guesses("[getattr(spec, name) for name in fields]") == []
