"""α_max where roles have settings of their own: along the step that training takes, a multiple of the base rate."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from stability.config.groups import parse_groups
from stability.config.parts import part
from stability.curvature.adam import preconditioned_sharpness
from stability.optimizers import optimizer_of
from stability.probes.curvature.descent import Descent
from stability.registry import Registry

from .test_alpha_max import SHORT, ByHand, measured
from .test_descent import PROTOCOL, examples

LR = 1e-2
GROUPS = {
    "mixer": {"lr_scale": 0.5, "beta1": 0.5},
    "head": {"lr_scale": 3.0, "weight_decay": 0.3},
    "norm": {"lr_scale": 0.0},
}


class Net(nn.Module):
    """Three inputs, tanh, a gain, one output: a parameter of each of four roles."""

    own_roles = {"inner": "mixer", "gain": "norm", "outer": "head", "shift": "embedding"}

    def __init__(self):
        super().__init__()
        draws = torch.Generator().manual_seed(1)
        for name, shape in {"shift": (3,), "inner": (3, 4), "gain": (4,), "outer": (4, 1)}.items():
            drawn = torch.randn(shape, generator=draws, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(drawn))


def loss(params, batch):
    hidden = torch.tanh((batch.inputs_BN + params["shift"]) @ params["inner"]) * params["gain"]
    return ((hidden @ params["outer"] - batch.targets_BN) ** 2).sum(), torch.tensor(float(len(batch.inputs_BN)))


def dense(at: dict[str, torch.Tensor], index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradient and Hessian over all parameters flattened, by torch.autograd.functional."""
    shapes = {name: value.shape for name, value in at.items()}

    def flat(theta):
        parts = dict(zip(shapes, theta.split([shape.numel() for shape in shapes.values()]), strict=True))
        total, count = loss({name: parts[name].view(shape) for name, shape in shapes.items()}, examples(index))
        return total / count

    theta = torch.cat([value.detach().flatten() for value in at.values()])
    return torch.autograd.functional.jacobian(flat, theta), torch.autograd.functional.hessian(flat, theta)


def built(name: str, **settings):
    """Return the net and its optimizer, with the groups as far as the optimizer has their settings."""
    model, optimizer = Net(), Registry("optimizers").load(name)
    config = part("optimizers", {"name": name, **settings}).settings
    own = (*type(config).model_fields, "lr_scale")
    groups = {role: {key: value for key, value in each.items() if key in own} for role, each in GROUPS.items()}
    return model, optimizer_of(optimizer, config, parse_groups(optimizer, name, config, groups), model, LR)


@pytest.mark.parametrize("name", ["adamw", "sgd", *Registry("optimizers").names(takes_matrices=True)])
def test_alpha_max_is_that_of_the_dense_hessian_along_the_step_of_all_roles(name):
    model, optimizer = built(name, weight_decay=0.1)
    params, seen, starts = dict(model.named_parameters()), [], []

    def observe(step):
        seen.append({key: value.clone() for key, value in step.direction.items()})
        starts.append({key: value.detach().clone() for key, value in step.params.items()})
        return {}

    protocol = PROTOCOL.model_copy(update={"recorded_steps": 3})
    descent = Descent(params, optimizer, loss, examples, protocol, lr=LR, clip_norm=1.0, observe=observe)
    rows = list(descent.rows("plain"))[-3:]
    for number, (row, u, theta) in enumerate(zip(rows, seen, starts, strict=True)):
        assert not u["gain"].any(), "a frozen role is no part of the step"
        # the step that was really taken is the base rate times u
        after = starts[number + 1] if number < 2 else {key: value.detach() for key, value in params.items()}
        for key, value in theta.items():
            torch.testing.assert_close(after[key], value + LR * u[key], rtol=1e-12, atol=1e-14)
        gradient, hessian = dense(theta, 4 + number)
        flat = torch.cat([u[key].flatten() for key in theta])
        slope, curvature = float(gradient @ flat), float(flat @ hessian @ flat)
        assert row["slope"] == pytest.approx(slope, rel=1e-8)
        assert row["curvature"] == pytest.approx(curvature, rel=1e-7)
        expected = 0.0 if slope >= 0 else math.inf if curvature <= 0 else -2 * slope / curvature
        assert row["alpha_max"] == pytest.approx(expected, rel=1e-7) and row["lr"] == LR
    assert any(0 < row["alpha_max"] < math.inf for row in rows)


def test_the_direction_of_each_role_is_its_own_formula_times_its_scale():
    """The first recorded step of SGD, whose u is −s·(g + λθ) at the θ that it starts from."""
    model, optimizer = built("sgd", weight_decay=0.1)
    params, seen = dict(model.named_parameters()), []
    start = {key: value.detach().clone() for key, value in params.items()}
    descent = Descent(
        params, optimizer, loss, examples, PROTOCOL, lr=LR, clip_norm=1.0, observe=lambda step: seen.append(step) or {}
    )
    list(descent.rows("plain"))
    gradient, _ = dense(start, 4)
    gradient = gradient * min(1.0, 1.0 / float(gradient.norm()))
    parts = dict(zip(start, gradient.split([value.numel() for value in start.values()]), strict=True))
    for key, (scale, decay) in {
        "shift": (1.0, 0.1),
        "inner": (0.5, 0.1),
        "outer": (3.0, 0.3),
        "gain": (0.0, 0.1),
    }.items():
        expected = -scale * (parts[key].view_as(start[key]) + decay * start[key])
        torch.testing.assert_close(seen[0].direction[key], expected, rtol=1e-5, atol=1e-10)


class ByHandByRole(ByHand):
    """As there; AdamW with a scale and a decay of each entry's own."""

    def __init__(self, lab, directory, spec, scales, decays):
        super().__init__(lab, directory, spec)
        names = [key for key, _ in self.model.named_parameters()]
        own = [next(part for part in scales if part in key) for key in names]
        self.scale, self.decays = (
            torch.cat(
                [
                    torch.full((value.numel(),), each[part], dtype=torch.float64)
                    for part, value in zip(own, self.model.parameters(), strict=True)
                ]
            )
            for each in (scales, decays)
        )
        # the optimizer's numbers follow its groups: the rest, then each role, in the order of the model
        groups = ["", *(part for part in scales if part)]
        order = [key for group in groups for key, part in zip(names, own, strict=True) if part == group]
        self.numbers = [order.index(key) for key in names]

    def start(self, state):
        super().start(state)
        if state == "checkpoint":
            states = self.trainer["optimizer"]["state"]
            self.m = torch.cat([states[number]["exp_avg"].flatten() for number in self.numbers]).double()
            self.v = torch.cat([states[number]["exp_avg_sq"].flatten() for number in self.numbers]).double()

    def direction(self, theta, index):
        self.decay = 0.0  # of all
        return self.scale * (super().direction(theta, index) - self.decays * theta)


@pytest.mark.parametrize("state", ["paper", "checkpoint"])
def test_a_runs_rows_are_those_of_the_protocol_written_out_by_hand(lab, state):
    groups = {"mixer": {"lr_scale": 0.25}, "head": {"lr_scale": 4.0, "weight_decay": 0.3}}
    spec = lab.spec(
        lr_peak=3e-3, evaluation={"every_steps": 12, "sequences": 8}, optimizer={"name": "adamw", "groups": groups}
    )
    directory, table = measured(lab, spec)
    # by what a parameter's name holds; "" fits all others
    scales, decays = {"mixer.": 0.25, "head.": 4.0, "": 1.0}, {"mixer.": 0.01, "head.": 0.3, "": 0.01}
    by_hand = ByHandByRole(lab, directory, spec, scales, decays)
    by_hand.clipped_slope = state == "paper"
    rows = table[table.state == state]
    assert len(rows) == SHORT.recorded_steps and set(rows.lr) == {3e-3}
    for row, (slope, curvature, value) in zip(rows.itertuples(), by_hand.rows(state), strict=True):
        assert row.loss_before == pytest.approx(value, rel=1e-4)
        assert row.slope == pytest.approx(slope, rel=5e-3)
        assert row.curvature == pytest.approx(curvature, rel=2e-2)
        expected = 0.0 if slope >= 0 else math.inf if curvature <= 0 else -2 * slope / curvature
        assert row.alpha_max == pytest.approx(expected, rel=3e-2)


def test_the_sharpness_that_adam_feels_counts_each_roles_rate():
    """λ_max of S^½P^-½ H P^-½S^½, S the scales of the rates, all in dense float64."""
    model, optimizer = built("adamw")
    params = dict(model.named_parameters())
    for index in range(2):
        gradient, _ = dense(params, index)
        for value, part_of in zip(params.values(), gradient.split([p.numel() for p in params.values()]), strict=True):
            value.grad = part_of.view_as(value)
        optimizer.step()
    scales, divisors = [], []
    for name, value in params.items():
        (group,) = (each for each in optimizer.param_groups if any(value is other for other in each["params"]))
        scales.append(torch.full((value.numel(),), group["lr"] / LR, dtype=torch.float64))
        second = optimizer.state[value]["exp_avg_sq"] / (1 - 0.999**2)
        divisors.append((second.sqrt() + 1e-8).flatten())
        assert group["lr"] == pytest.approx(LR * {"inner": 0.5, "outer": 3.0, "gain": 0.0, "shift": 1.0}[name])
    factor = (torch.cat(scales) / torch.cat(divisors)).sqrt()
    _, hessian = dense(params, 5)
    found = preconditioned_sharpness(mean_of(5), params, optimizer, tolerance=1e-9, iterations=200, lr=LR)
    expected = float(torch.linalg.eigvalsh(factor[:, None] * hessian * factor)[-1])
    assert found.value == pytest.approx(expected, rel=1e-7)
    assert math.isnan(found.threshold) and math.isnan(found.ratio), "the groups differ in β₁"
    for group in optimizer.param_groups:
        group["betas"] = (0.9, 0.999)
    found = preconditioned_sharpness(mean_of(5), params, optimizer, tolerance=1e-9, iterations=200, lr=LR)
    assert found.threshold == pytest.approx(38 / LR) and found.ratio == pytest.approx(expected * LR / 38)


def mean_of(index: int):
    def mean(params):
        total, count = loss(params, examples(index))
        return total / count

    return mean
