"""Which parameters weight decay reaches: the optimizer's rule, and what residual schemes say of their static
coefficients."""

from __future__ import annotations

import pytest
import torch

from stability.build import build_model, build_optimizer
from stability.optimizers import build, lr_factor
from stability.training import checkpoint
from tests.conftest import Lab

STATIC = {
    "hc": ("static_read", "static_post"),
    "mhc": ("bias_pre", "bias_post", "bias_mix"),
    "mhc_lite": ("bias_pre", "bias_post", "bias_mix"),
}
ADAMW = {"name": "adamw", "weight_decay": 0.5}


def shrunk(spec):
    """The parameters that a step without gradient makes smaller: weight decay alone moves them."""
    model = build_model(spec, 40)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    build_optimizer(spec, model).step()
    return {name for name, parameter in model.named_parameters() if bool((parameter < 1).all())}, dict(
        model.named_parameters()
    )


@pytest.mark.parametrize("decay", ["all", "matrices"])
@pytest.mark.parametrize("name", STATIC)
def test_static_coefficients_of_every_scheme_are_decayed_alike_and_only_where_told(lab, name, decay):
    for decay_static in (False, True):
        optimizer = {**ADAMW, "decay": decay}
        reached, parameters = shrunk(
            lab.spec(residual={"name": name, "decay_static": decay_static}, optimizer=optimizer, lr_peak=0.1)
        )
        static = {key for key in parameters if key.endswith(STATIC[name])}
        assert len(static) == 4 * len(STATIC[name])
        assert reached & static == (static if decay_static else set())
        expected = {
            key
            for key, parameter in parameters.items()
            if key not in static and (decay == "all" or parameter.ndim >= 2)
        }
        assert reached - static == expected


def test_matrices_are_what_nanogpt_decays(lab):
    reached, parameters = shrunk(lab.spec(optimizer={**ADAMW, "decay": "matrices"}, lr_peak=0.1))
    assert "embedding.weight" in reached and "head.weight" in reached
    assert not {key for key in reached if key.endswith("bias") or "norm" in key}
    assert "blocks.1.mixer_norm.weight" in parameters


def test_without_exceptions_there_is_one_group_in_the_models_order(lab):
    for residual in ("identity", "hc"):
        spec = lab.spec(residual={"name": residual} | ({} if residual == "identity" else {"decay_static": True}))
        model = build_model(spec, 40)
        (group,) = build_optimizer(spec, model).param_groups
        assert all(one is other for one, other in zip(group["params"], model.parameters(), strict=True))
        assert "name" not in group


@pytest.mark.parametrize(
    "optimizer", [{"name": "adamw", "decay": "matrices"}, {"name": "sgd", "momentum": 0.9, "weight_decay": 0.1}]
)
@pytest.mark.parametrize("name", STATIC)
def test_an_interrupted_run_with_groups_goes_on_bit_for_bit(lab, tmp_path_factory, name, optimizer):
    changes = {"residual": {"name": name}, "optimizer": optimizer, "steps": 6, "microbatch": 2}
    spec, elsewhere = lab.spec(**changes), Lab(tmp_path_factory.mktemp("whole"))
    lab.train(spec, steps=3)
    resumed, whole = lab.train(spec), elsewhere.train(elsewhere.spec(**changes))
    assert resumed.metrics_file.read_bytes() == whole.metrics_file.read_bytes()
    (_, one), (_, other) = (checkpoint.load(directory.checkpoints()[-1]) for directory in (resumed, whole))
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())


def test_every_group_follows_the_schedule(lab):
    spec = lab.spec(residual={"name": "mhc"}, schedule={"name": "linear", "warmup_steps": 4})
    replica = lab.replica(spec)
    replica.train_step(1)
    assert [group["name"] for group in replica.optimizer.param_groups] == ["decayed", "undecayed"]
    assert {group["lr"] for group in replica.optimizer.param_groups} == {
        spec.lr_peak * lr_factor(spec.schedule, 1, spec.steps)
    }


@pytest.mark.parametrize("as_a_list", [False, True])
def test_what_other_code_builds_takes_the_steps_of_a_run_s_optimizer(lab, as_a_list):
    spec = lab.spec(residual={"name": "hc"}, optimizer={**ADAMW, "decay": "matrices"}, lr_peak=0.1)
    run_s, other = build_model(spec, 40), build_model(spec, 40)
    of = other.named_parameters() if as_a_list else other
    theirs = build("adamw", of, lr=0.1, weight_decay=0.5, decay="matrices")
    for model, optimizer in ((run_s, build_optimizer(spec, run_s)), (other, theirs)):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    differing = {
        name
        for (name, first), second in zip(run_s.named_parameters(), other.parameters(), strict=True)
        if not torch.equal(first, second)
    }
    # of a list nobody says that the schemes spare a matrix of theirs, so that it is decayed like any other
    assert differing == ({name for name in differing if name.endswith(STATIC["hc"])} if as_a_list else set())
    assert bool(differing) == as_a_list


def test_what_cannot_be_built_is_refused_in_a_line(lab):
    model = build_model(lab.spec(), 40)
    with pytest.raises(ValueError, match="optimizer.adamw.beta3: unknown key"):
        build("adamw", model, lr=0.1, beta3=0.9)
    with pytest.raises(ValueError, match="no optimizer called 'adamv'"):
        build("adamv", model, lr=0.1)
