"""The page that says what other code may import (docs/reference/python.md) holds every name of ours that the
documentation and the examples import, all that `stability.curvature` exports, and each of its names is there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path
from textwrap import dedent

import pytest

from stability import curvature

ROOT = Path(__file__).resolve().parent.parent
OURS = ("stability", "analysis", "sweeps")
PAGE = ROOT / "docs" / "reference" / "python.md"


def imported(source):
    """The names of ours that a piece of Python imports from their modules."""
    nodes = [node for node in ast.walk(ast.parse(dedent(source))) if isinstance(node, ast.ImportFrom)]
    return {f"{node.module}.{name.name}" for node in nodes if node.module.split(".")[0] in OURS for name in node.names}


def pieces():
    """The Python of the documentation and of the examples, by where it stands."""
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]):
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)):
            yield f"{page.name} {number}", block
    for script in sorted((ROOT / "examples").rglob("*.py")):
        yield script.name, script.read_text("utf-8")


def listed():
    return set(re.findall(r"^::: ([\w.]+)$", PAGE.read_text("utf-8"), re.MULTILINE))


def test_what_the_documentation_imports_is_on_the_page():
    found = {where: imported(block) for where, block in pieces()}
    assert sum(map(len, found.values())) > 20
    assert {where: names - listed() for where, names in found.items() if names - listed()} == {}


def test_every_name_on_the_page_is_there():
    for name in listed():
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__, name


def test_all_that_curvature_exports_is_on_the_page():
    on_it = {name.removeprefix("stability.curvature.") for name in listed() if name.startswith("stability.curvature.")}
    adapters = {"adapters.hf_callback", "adapters.lightning_callback"}  # of libraries that may not be there
    assert on_it == set(curvature.__all__) | adapters and len(curvature.__all__) > 40


def test_the_imports_of_a_piece_are_seen():
    planted = "from stability.norms import build, _own\nimport torch\nfrom math import nan"
    assert imported(planted) == {"stability.norms.build", "stability.norms._own"}


def test_links_of_the_site_lead_to_pages_of_the_site():
    """`mkdocs build --strict` refuses any other; in a checkout a page may name a file beside ``docs``."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("settings_page", ROOT / "docs" / "settings_page.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    docs = ROOT / "docs"
    for page in docs.rglob("*.md"):
        text = hook.replace_links(page.read_text("utf-8"), docs, page.relative_to(docs).as_posix())
        targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
        assert [each for each in targets if not (page.parent / each).resolve().is_relative_to(docs)] == [], page.name
    planted = "[a](../pyproject.toml) [b](../no_such_file) [c](faq.md)"
    assert hook.replace_links(planted, docs, "index.md") == "a (`pyproject.toml`) [b](../no_such_file) [c](faq.md)"
