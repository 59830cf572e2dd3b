"""An optimizer of matrices and AdamW are one optimizer: its state, rates, copies and groups are those of any other."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from stability.build import build_optimizer
from stability.curvature.alpha_max import step_direction, step_without_decay
from stability.optimizers import build, kinds, set_lr
from stability.registry import Registry
from stability.training import checkpoint
from tests.conftest import Lab
from tests.optimizers.checks import steps
from tests.optimizers.test_roles import by_name, spec_of

NAMES = Registry("optimizers").names(takes_matrices=True)
GROUPS = {"mixer": {"lr_scale": 0.5}, "ffn": {"weight_decay": 0.5}, "head": {"lr_scale": 2.0, "rest_beta1": 0.5}}


def trained(name: str, **settings: Any):
    """Return a small model in float32 with its optimizer at a rate of 0.01."""
    from stability.build import build_model

    spec = spec_of("mlm", {}, optimizer={"name": name, **settings}, lr_peak=1e-2)
    model = build_model(spec, 8)
    return model, build_optimizer(spec, model)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.parameters()]


def through_a_file(content: Any) -> Any:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("groups", [{}, GROUPS], ids=["plain", "roles"])
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_models_steps_are_the_same_bit_for_bit(name, groups):
    model, optimizer = trained(name, weight_decay=0.1, groups=groups)
    steps(optimizer, model, 1, 3)
    state = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    resumed, second = trained(name, weight_decay=0.1, groups=groups)
    resumed.load_state_dict(state["model"])
    second.load_state_dict(state["optimizer"])
    for number in (4, 5):
        for each, other in ((optimizer, model), (second, resumed)):
            steps(each, other, number, number)
        assert all(map(torch.equal, values(model), values(resumed))), f"step {number}"


@pytest.mark.parametrize("name", NAMES)
def test_an_interrupted_run_goes_on_bit_for_bit(lab, tmp_path_factory, name):
    groups = {"mixer": {"lr_scale": 0.5}}
    changes = {"optimizer": {"name": name, "weight_decay": 0.1, "groups": groups}, "steps": 6, "microbatch": 2}
    spec, elsewhere = lab.spec(**changes), Lab(tmp_path_factory.mktemp("whole"))
    lab.train(spec, steps=3)
    resumed, whole = lab.train(spec), elsewhere.train(elsewhere.spec(**changes))
    assert resumed.metrics_file.read_bytes() == whole.metrics_file.read_bytes()
    (_, one), (_, other) = (checkpoint.load(directory.checkpoints()[-1]) for directory in (resumed, whole))
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_copies_go_on_alone_and_leave_the_original_alone(name):
    model, optimizer = trained(name, weight_decay=0.1)
    steps(optimizer, model, 1, 3)
    (other, copied), before = copy.deepcopy((model, optimizer)), values(model)
    steps(copied, other, 4, 5)
    assert all(map(torch.equal, values(model), before))
    steps(optimizer, model, 4, 5)
    assert all(map(torch.equal, values(model), values(other)))


@pytest.mark.parametrize("name", NAMES)
def test_the_step_without_decay_is_the_step_of_an_optimizer_that_has_none(name):
    """Of a twin, in float64; the optimizer's own next step is as if there had been no twin."""
    found = {}
    for weight_decay, asks in ((0.5, True), (0.5, False), (0.0, False)):
        model, optimizer = trained(name, weight_decay=weight_decay)
        model.double()
        set_lr(optimizer, 1e-2)
        steps(optimizer, model, 1, 3)
        for value, gradient in zip(model.parameters(), values(model), strict=True):
            value.grad = gradient.sin()
        params = dict(model.named_parameters())
        if asks:
            before = values(model)
            without = step_without_decay(optimizer, params, 1e-2)
            assert all(map(torch.equal, values(model), before))
        found[weight_decay, asks] = (step_direction(optimizer, params, 1e-2), values(model))
    assert all(map(torch.equal, found[0.5, True][1], found[0.5, False][1]))
    decayed, start = found[0.5, True][0], dict(zip(params, before, strict=True))
    scale = dict.fromkeys(params, 1.0)
    for key, kind in kinds(model).items():
        scale[key] = 1.0 if kind == "matrices" else Registry("optimizers").load(name).Config().rest_lr_scale
    for key, direction in without.items():
        expected = decayed[key] + 0.5 * scale[key] * start[key]
        torch.testing.assert_close(direction, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_rates_are_the_bases_times_the_scales_of_rest_and_role(name):
    model, optimizer = trained(name, rest_lr_scale=0.25, groups=GROUPS)
    set_lr(optimizer, 8.0)
    names = {id(value): key for key, value in model.named_parameters()}
    kind = kinds(model)
    for group in optimizer.param_groups:
        for value in group["params"]:
            key = names.pop(id(value))
            scale = {"mixer": 0.5, "head": 2.0}.get(by_name(key), 1.0) * (1.0 if kind[key] == "matrices" else 0.25)
            assert group["lr"] == 8.0 * scale, key
    assert not names, "each parameter is in a group"


@pytest.mark.parametrize("name", NAMES)
def test_a_roles_scale_scales_its_matrices_and_its_vectors(name):
    """The first steps from one state; SOAP's matrices move from the second on."""
    moved = {}
    for scale in (1.0, 0.5):
        model, optimizer = trained(name, groups={"mixer": {"lr_scale": scale}, "ffn": {"rest_beta1": 0.8}})
        steps(optimizer, model, 1, 1)
        before = values(model)
        steps(optimizer, model, 2, 2)
        moved[scale] = [value - old for value, old in zip(values(model), before, strict=True)]
    for (key, _), whole, scaled in zip(model.named_parameters(), moved[1.0], moved[0.5], strict=True):
        factor = 0.5 if by_name(key) == "mixer" else 1.0
        torch.testing.assert_close(scaled, factor * whole, rtol=1e-3, atol=3e-7, msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_matrix_takes_the_steps_of_torchs_adamw_bit_for_bit(name):
    given = {"rest_lr_scale": 0.5, "rest_beta1": 0.8, "rest_beta2": 0.9, "rest_epsilon": 1e-6, "weight_decay": 0.1}
    model, optimizer = trained(name, **given)
    rest = [key for key, kind in kinds(model).items() if kind == "rest"]
    own = [nn.Parameter(model.get_parameter(key).detach().clone()) for key in rest]
    adamw = torch.optim.AdamW(own, lr=5e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, fused=True)
    for step in (1, 2, 3):
        if step == 3:  # AdamW's fused form keeps its count in float32, also of a state that was loaded
            optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
        steps(optimizer, model, step, step)
        for key, value in zip(rest, own, strict=True):
            gradient = model.get_parameter(key).grad
            assert gradient is not None
            value.grad = gradient.clone()
        adamw.step()
    for key, value in zip(rest, own, strict=True):
        assert torch.equal(model.get_parameter(key), value), key


class Fused(nn.Module):
    """Three matrices in one parameter, and their gradients in one."""

    own_splits = {"qkv": (3, 3, 4)}

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(5, 10, bias=False)


class Apart(nn.Module):
    """The same three, each for itself."""

    def __init__(self, rows: list[torch.Tensor]):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(each.clone()) for each in rows)


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_of_several_matrices_takes_the_steps_of_each(name):
    fused = Fused().double()
    start = fused.qkv.weight.detach().clone()
    apart = Apart(list(start.split((3, 3, 4))))
    pair = [build(name, module, lr=0.1, weight_decay=0.3) for module in (fused, apart)]
    draws = torch.Generator().manual_seed(1)
    for _ in range(4):
        gradient = torch.randn(10, 5, generator=draws, dtype=torch.float64)
        fused.qkv.weight.grad = gradient.clone()
        for value, own in zip(apart.parts, gradient.split((3, 3, 4)), strict=True):
            value.grad = own.clone()
        for optimizer in pair:
            optimizer.step()
        assert torch.equal(fused.qkv.weight.grad, gradient), "a step changes the gradient"
    torch.testing.assert_close(fused.qkv.weight, torch.cat(list(apart.parts)), rtol=1e-12, atol=1e-13)
    assert (fused.qkv.weight != start * (1 - 0.1 * 0.3) ** 4).all(), "nothing moves but by decay"


@pytest.mark.parametrize("name", NAMES)
def test_what_has_no_gradient_stays_where_it_is_and_has_no_state(name):
    model, optimizer = trained(name, weight_decay=0.5)
    before = values(model)
    optimizer.step()
    assert all(map(torch.equal, values(model), before)) and not any(optimizer.state.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_list_of_parameters_is_refused_in_a_line(name):
    model, _ = trained(name)
    with pytest.raises(ValueError, match=f"^{name} takes matrices and leaves embeddings alone; give the model, not"):
        build(name, model.named_parameters(), lr=0.1)
