"""The table of public architectures: it names those that are measured, and a few of them agree with float64 here."""

import re
from pathlib import Path

import pytest

from benchmarks.public_models import MODELS, measure

PAGE = Path(__file__).resolve().parents[2] / "docs" / "curvature.md"


# mobilenet_v2: relu6 at its bounds; mixtral: writes in place; marian: a frozen table of positions
@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("ImageClassification", "mobilenet_v2", "taylor"),
        ("CausalLM", "mixtral", "double_backward"),
        ("Seq2SeqLM", "marian", "taylor"),
    ],
)
def test_a_public_architecture_is_measured_by_its_method_and_agrees_with_float64(kind, name, expected):
    pytest.importorskip("transformers")
    method, error = measure(kind, name)
    assert method == expected
    assert error < 2e-5


def test_the_page_lists_every_architecture_of_the_benchmark():
    rows = re.findall(r"^\| `(taylor|double_backward)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    listed = [entry.split()[0] for _, names in rows for entry in names.split(", ")]
    assert sorted(listed) == sorted(name for models in MODELS.values() for name in models)
    assert len(listed) >= 60
