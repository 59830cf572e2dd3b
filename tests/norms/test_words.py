"""A norm is chosen, set, varied and searched on the command line as a mechanism is, and its ids are those of the time
when it was a name alone."""

from __future__ import annotations

import json

import pytest

from stability.config.identity import essence, run_id
from stability.config.parse import parse_run
from stability.registry import Registry
from tests.identity.golden_ids import BASE
from tests.reading import read_spec

SHORT = ["mechanism=sa", "lr=1e-3", "seeds=1"]


def test_norms_are_an_axis_with_settings_of_their_own():
    points = read_spec("sweep", ["norm=[layernorm,dyt]", "norm.dyt.alpha=0.3", *SHORT]).points("data")
    assert [(run.norm.name, run.norm.settings.model_dump()) for _, run in points] == [
        ("layernorm", {"epsilon": 1e-5, "bias": True}),
        ("dyt", {"alpha": 0.3}),
    ]
    assert read_spec("sweep", ["norm=rmsnorm", *SHORT]).norm[0].name == "rmsnorm"


def test_a_norms_setting_varies_around_its_base():
    points = read_spec("sweep", ["norm=dyt", "ablate.dyt.alpha=[0.3,0.5,1.0]", *SHORT]).points("data")
    assert [(run.norm.settings.alpha, label) for label, run in points] == [
        (0.5, ""),
        (0.3, "dyt.alpha=0.3"),
        (1.0, "dyt.alpha=1"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["norm=dyt", "norm.dyt.alpha=0"], "norm.dyt.alpha=0: input should be greater than 0"),
        (["norm=dyt", "norm.dyt.alfa=1"], "norm.dyt.alfa: unknown key; did you mean 'norm.dyt.alpha'?"),
        (["norm.dyt.alpha=1"], "norm.dyt.alpha: this command does not select norm.dyt; add norm=[…,dyt]"),
        (
            ["norm=dit"],
            f"norm=dit: no such choice; did you mean 'dyt'? (choices: {', '.join(Registry('norms').names())})",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words, message):
    with pytest.raises(ValueError) as caught:
        read_spec("sweep", [*words, *SHORT])
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_a_norm_with_the_settings_of_old_is_written_into_the_id_as_its_name(name):
    run = parse_run(BASE | {"norm": name})
    assert json.loads(essence(run))["norm"] == name
    assert run_id(parse_run(json.loads(json.dumps(run.model_dump(mode="json"))))) == run_id(run)
    other = parse_run(BASE | {"norm": {"name": name, "epsilon": 1e-6}})
    assert json.loads(essence(other))["norm"] == {"name": name, "epsilon": 1e-6}


def test_an_old_file_s_norm_is_what_it_was_whatever_the_defaults_are_today(monkeypatch):
    config = Registry("norms").load("layernorm").Config
    monkeypatch.setattr(config.model_fields["epsilon"], "default", 1e-3)
    config.model_rebuild(force=True)
    try:
        assert config().epsilon == 1e-3
        assert parse_run(BASE | {"norm": "layernorm"}).norm.settings.epsilon == 1e-5
        assert parse_run(BASE | {"norm": {"name": "layernorm"}}).norm.settings.epsilon == 1e-5
    finally:
        monkeypatch.undo()
        config.model_rebuild(force=True)


def test_a_tokenizer_takes_a_norm_with_settings_too():
    run = read_spec("train_tokenizer", ["norm=dyt", "norm.dyt.alpha=0.3"]).run("data")
    assert (run.norm.name, run.norm.settings.alpha) == ("dyt", 0.3)
    usual = read_spec("train_tokenizer", []).run("data")
    assert json.loads(essence(usual))["norm"] == "layernorm"
