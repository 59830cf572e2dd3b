"""weight_decay=false: u is that of the step which the same optimizer would take with λ = 0. Closed forms in float64;
and it disturbs nothing."""

from __future__ import annotations

import copy

import pytest
import torch

from stability.curvature import step_direction, step_without_decay
from stability.probes.curvature.descent import Descent

from .test_descent import PROTOCOL, adam, examples, first_step, gradient, loss

DECAY, LR = 0.3, 1e-2
WITHOUT = PROTOCOL.model_copy(update={"weight_decay": False})


class Proximal(torch.optim.Optimizer):
    """θ⁺ = (θ − lr·g) / (1 + lr·λ), as Adan decays, with no flag that says so."""

    def __init__(self, params, lr, weight_decay):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"]).div_(1 + group["lr"] * group["weight_decay"])


class Scaled(torch.optim.Optimizer):
    """Decays by d·λ as Prodigy does; d is kept in the group, a count in itself, and each step draws random numbers and
    writes into the gradient."""

    decoupled_weight_decay = True

    def __init__(self, params, lr, weight_decay):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "d": 0.5, "decoupled_weight_decay": True})
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.mul_(group["d"] + 1e-3 * torch.rand(()))
                state = self.state.setdefault(param, {"sum": torch.zeros_like(param)})
                state["sum"].add_(param.grad)
                param.mul_(1 - group["lr"] * group["d"] * group["weight_decay"]).sub_(state["sum"], alpha=group["lr"])
            group["d"] *= 1.5


@pytest.mark.parametrize(
    ("build", "options", "coefficient"),
    [
        (torch.optim.AdamW, {}, 1.0),
        (torch.optim.Muon, {}, 1.0),
        (torch.optim.Adafactor, {}, 1.0),
        (torch.optim.SGD, {}, 1.0),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, 1.9),
    ],
)
def test_what_is_left_out_is_the_decay_of_this_step(build, options, coefficient):
    """u(λ = 0) − u = λθ for a decoupled decay of rate lr; Nesterov's momentum takes an L2 penalty of the gradient 1 + μ
    times."""
    w, included, _ = first_step("plain", build, weight_decay=DECAY, **options)
    _, left_out, _ = first_step("plain", build, WITHOUT, weight_decay=DECAY, **options)
    torch.testing.assert_close(
        left_out.direction["w"] - included.direction["w"], coefficient * DECAY * w, rtol=1e-9, atol=1e-9
    )


def test_adams_l2_penalty_leaves_this_steps_gradient_and_stays_in_the_averages():
    w, step, _ = first_step("plain", torch.optim.Adam, WITHOUT, weight_decay=DECAY)
    m = v = torch.zeros_like(w)
    for index in range(4):
        penalised = gradient(w, index) + DECAY * w
        m, v = 0.9 * m + 0.1 * penalised, 0.999 * v + 0.001 * penalised**2
    torch.testing.assert_close(step.direction["w"], adam(m, v, gradient(w, 4), 5, w, decay=0.0), rtol=1e-9, atol=1e-9)


def test_a_proximal_decay_is_left_out_though_no_flag_tells_of_it():
    w, step, _ = first_step("plain", Proximal, WITHOUT, weight_decay=DECAY)
    torch.testing.assert_close(step.direction["w"], -gradient(w, 4), rtol=1e-9, atol=1e-9)
    w, step, _ = first_step("plain", Proximal, weight_decay=DECAY)
    torch.testing.assert_close(
        step.direction["w"], -(gradient(w, 4) + DECAY * w) / (1 + LR * DECAY), rtol=1e-9, atol=1e-9
    )


def test_groups_are_each_relieved_of_their_own_decay():
    params = {
        name: torch.nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64)) for name in ("much", "little", "none")
    }
    groups = [
        {"params": [param], "weight_decay": decay}
        for param, decay in zip(params.values(), (0.5, 0.1, 0.0), strict=True)
    ]
    optimizer = torch.optim.SGD(
        [{**group, "lr": lr} for group, lr in zip(groups, (LR, 2 * LR, LR), strict=True)], lr=LR
    )
    for param in params.values():
        param.grad = torch.tensor([1.0, 3.0], dtype=torch.float64)
    start = {name: param.detach().clone() for name, param in params.items()}
    without, taken = step_without_decay(optimizer, params, LR), step_direction(optimizer, params, LR)
    for name, expected in (("much", 0.5), ("little", 0.2), ("none", 0.0)):
        torch.testing.assert_close(without[name] - taken[name], expected * start[name], rtol=1e-9, atol=1e-9)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.1, 0.0]


def ended(build, protocol, options):
    """θ, the optimizer's state and its own count after four recorded steps, and the next random number."""
    torch.manual_seed(3)
    w = torch.nn.Parameter(torch.tensor([[0.5], [-1.0], [2.0]], dtype=torch.float64))
    optimizer = build([w], lr=LR, weight_decay=DECAY, **options)
    descent = Descent(
        {"w": w}, optimizer, loss, examples, protocol.model_copy(update={"recorded_steps": 4}), lr=LR, clip_norm=1.0
    )
    rows = list(descent.rows("plain"))
    return (
        rows,
        w.detach().clone(),
        copy.deepcopy(optimizer.state_dict()),
        getattr(optimizer, "count", None),
        torch.rand(3),
    )


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True, "fused": True}),
        (torch.optim.Muon, {}),
        (torch.optim.Adafactor, {}),
        (Scaled, {}),
    ],
)
def test_the_second_step_leaves_the_descent_as_it_was_to_the_last_bit(build, options):
    """The trajectory of weight_decay=true, byte for byte: parameters, state, groups, what the optimizer keeps in
    itself, and the random numbers."""
    rows, w, state, count, drawn = ended(build, WITHOUT, options)
    plain_rows, plain_w, plain_state, plain_count, plain_drawn = ended(build, PROTOCOL, options)
    assert torch.equal(w, plain_w) and torch.equal(drawn, plain_drawn) and count == plain_count
    assert state["param_groups"] == plain_state["param_groups"]
    for key, value in plain_state["state"].get(0, {}).items():
        assert (
            torch.equal(state["state"][0][key], value)
            if isinstance(value, torch.Tensor)
            else state["state"][0][key] == value
        ), key
    assert [row["loss_after"] for row in rows] == [row["loss_after"] for row in plain_rows]
    assert all(row["slope"] != plain["slope"] for row, plain in zip(rows, plain_rows, strict=True))


def test_hooks_and_a_schedulers_step_belong_to_the_original_alone():
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer, calls = torch.optim.SGD([param], lr=LR, weight_decay=DECAY), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # puts a `step` of its own in the place of the class's
    param.grad = torch.ones(2, dtype=torch.float64)
    torch.testing.assert_close(
        step_without_decay(optimizer, {"x": param}, LR)["x"],
        torch.full((2,), -1.0, dtype=torch.float64),
        rtol=1e-9,
        atol=0,
    )
    assert torch.equal(param, torch.ones(2, dtype=torch.float64)) and calls == []
    assert torch.equal(param.grad, torch.ones(2, dtype=torch.float64))
