"""Settings of single optimizers that hang together: what is refused, and what a role may have to itself."""

from __future__ import annotations

import pytest

from stability.build import build_model, build_optimizer
from stability.config.identity import run_id
from stability.config.parse import parse_run
from stability.config.parts import part
from tests.config.test_run_id import BASE

REFUSED = [
    ({"name": "sgd", "nesterov": True}, "nesterov=true changes nothing where momentum=0; give a momentum, e.g. 0.9"),
    ({"name": "ademamix", "warmup_steps": 9, "beta1": 0.0}, "warmup_steps=9 lets beta3 grow from beta1"),
    ({"name": "ademamix", "warmup_steps": 9, "beta3": 0.5}, "is above 0 and at most beta3; beta1=0.9, beta3=0.5"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_does_not_go_together_is_refused_in_one_line(settings, words):
    with pytest.raises(ValueError) as refused:
        part("optimizers", settings)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_the_command_line_says_so_too(entered):
    said = entered("stability.sweep", "optimizer=sgd", "optimizer.sgd.nesterov=true", "lr=[0.1]")
    assert said.returncode == 2 and "give a momentum, e.g. 0.9" in said.stderr
    assert len(said.stderr.strip().splitlines()) <= 2


def test_runs_from_before_nesterov_keep_their_ids():
    """The field at its neutral value is in no id, whoever wrote it."""
    plain = parse_run(BASE | {"optimizer": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.0}})
    written = parse_run(BASE | {"optimizer": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.0, "nesterov": False}})
    other = parse_run(BASE | {"optimizer": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.0, "nesterov": True}})
    assert run_id(plain) == run_id(written) == "29837c5c99b8" != run_id(other)  # taken before the field


def test_one_role_alone_may_look_ahead(lab):
    """Its momentum and its Nesterov come together, where those of all others are 0 and false."""
    groups = {"mixer": {"momentum": 0.9, "nesterov": True}}
    spec = lab.spec(optimizer={"name": "sgd", "groups": groups})
    made = build_optimizer(spec, build_model(spec, 256)).param_groups
    assert [(group.get("name"), group["momentum"], group["nesterov"]) for group in made] == [
        (None, 0.0, False),
        ("mixer", 0.9, True),
    ]
