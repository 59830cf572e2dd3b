"""A part of our own has a .py and a yaml; where one of them is missing, the message names both."""

import pytest

from stability.cli import mistakes
from tests.reading import compose

PARTS = {
    "mechanism": ("mechanisms", "retnet"),
    "residual": ("residuals", "mhc"),
    "optimizer": ("optimizers", "lion"),
    "norm": ("norms", "dyt"),
    "objective": ("objectives", "ar"),
    "data": ("data", "mqar"),
    "ffn": ("ffns", "glu"),
    "position": ("positions", "learned"),
    "linear": ("linears", "bitnet"),
    "cross": ("mechanisms", "cc"),
}


@pytest.mark.parametrize("group", PARTS)
def test_code_without_its_yaml_is_told_by_both_names(group, monkeypatch):
    family, name = PARTS[group]
    real = mistakes.choices
    monkeypatch.setattr(mistakes, "choices", lambda of: tuple(each for each in real(of) if (of, each) != (group, name)))
    said = f"{group}={name}: stability/{family}/{name}.py is there, conf/{group}/{name}.yaml is not; write it"
    for words in (name, f"[{name}]")[: 1 + (group in mistakes.AXES)]:
        with pytest.raises(ValueError) as caught:
            compose("sweep", [f"{group}={words}"])
        assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


@pytest.mark.parametrize("group", PARTS)
def test_a_yaml_without_its_code_is_told_by_both_names(group, monkeypatch):
    family, _ = PARTS[group]
    real = mistakes.choices
    monkeypatch.setattr(mistakes, "choices", lambda of: (*real(of), "novel") if of == group else real(of))
    with pytest.raises(ValueError, match=f"conf/{group}/novel.yaml is there, stability/{family}/novel.py is not"):
        compose("sweep", [f"{group}=novel"])


def test_a_mistyped_name_is_still_told_its_neighbour():
    with pytest.raises(ValueError, match="mechanism=retnt: no such choice; did you mean 'retnet'?"):
        compose("sweep", ["mechanism=retnt"])
    with pytest.raises(ValueError, match="cross=sa: no such choice"):
        compose("sweep", ["cross=sa"])
