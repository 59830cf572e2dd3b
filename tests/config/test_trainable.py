"""A mechanism that is not to be trained is refused wherever something would train it, and named as a choice nowhere."""

from __future__ import annotations

import pytest

from stability.config.base import validate
from stability.config.parts import part
from stability.config.tokenizer import TokenizerSpec
from stability.mechanisms import build
from stability.mechanisms.ca import CrossAttention
from stability.registry import add_plugin
from tests.mechanisms.names import TRAINED, listed
from tests.reading import read_spec

REFUSAL = f"cannot be trained: it is for generation from models trained with sa; these can: {listed(*TRAINED)}"


@pytest.fixture(autouse=True)
def skipping():
    add_plugin("tests.mechanisms.plugins.skipping")


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        ({"name": "skipping"}, f"mechanism=skipping {REFUSAL}"),
        ({"name": "mix", "pattern": ["sa", "skipping"]}, f"mechanism=mix contains skipping, which {REFUSAL}"),
        ({"name": "two_way", "of": "skipping"}, f"mechanism=two_way contains skipping, which {REFUSAL}"),
    ],
)
def test_a_run_refuses_it_in_one_line(lab, mechanism, message):
    with pytest.raises(ValueError) as caught:
        lab.spec(mechanism=mechanism)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) == 1


def test_a_sweep_on_the_command_line_refuses_it_before_anything_runs(entered, tmp_path):
    done = entered(
        "stability.sweep",
        "plugins=[tests.mechanisms.plugins.skipping]",
        "mechanism=[sa,skipping]",
        "dry_run=true",
        f"runs_dir={tmp_path}",
    )
    assert done.returncode == 2
    assert f"mechanism=skipping {REFUSAL}" in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_refuses_it():
    values = read_spec("train_tokenizer", []).model_dump(mode="json")
    with pytest.raises(ValueError, match=f"^mechanism=skipping {REFUSAL}"):
        validate(TokenizerSpec, {**values, "cross": "auto", "mechanism": {"name": "skipping"}})


def test_a_cross_mechanism_is_refused_too(lab, monkeypatch):
    monkeypatch.setattr(CrossAttention, "trainable", False)
    with pytest.raises(ValueError, match=r"^cross=ca cannot be trained: it is for .*; these can: cc$"):
        lab.spec(objective={"name": "mlm", "context": 4}, cross="ca")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mechanism": 3}, "expected a name, got 3"),
        ({"mechanism": "skiping"}, "no mechanism called 'skiping'"),
        ({"mechanism": "sc", "objective": {"name": "ar"}}, "objective=ar needs a causal mechanism"),
    ],
)
def test_no_list_of_choices_names_it(lab, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        lab.spec(**changes)
    assert "attentionx" in str(caught.value)
    assert "skipping" not in str(caught.value)


def test_it_can_be_built_and_looked_at():
    assert part("mechanisms", "skipping").name == "skipping"
    assert build("skipping", width=16, heads=2).heads == 2
