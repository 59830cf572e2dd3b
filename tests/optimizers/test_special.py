"""What the contract's general checks do not reach: averages beside what moves, tiny gradients, several estimates of a
diagonal, one rate for all parameters, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stability.config.base import validate
from stability.config.parts import part
from stability.config.tokenizer import TokenizerRunSpec
from stability.optimizers import use_averages
from stability.optimizers.prodigy import Prodigy
from stability.optimizers.schedulefree_adamw import ScheduleFreeAdamW
from stability.optimizers.sophia import Sophia
from tests.optimizers import checks
from tests.optimizers.oracles import special
from tests.structure.small import spec as tokenizer

RATES = [0.01, 0.03, 0.02, 0.02, 0.05, 0.04, 0.01, 0.02]


def test_averages_are_the_formulas_x_while_y_moves_on():
    config = ScheduleFreeAdamW.Config(beta1=0.7, beta2=0.9, step_power=1.5, lr_power=1.0)
    model = checks.Toy()
    starts = [value.detach().flatten().tolist() for value in model.parameters()]
    optimizer: Any = checks.built(ScheduleFreeAdamW, config, model)
    with use_averages(optimizer):  # before any step x is y
        assert [value.flatten().tolist() for value in model.parameters()] == starts
    for step, rate in enumerate(RATES, 1):
        checks.set_lr(optimizer, rate)
        checks.steps(optimizer, model, step, step)
    drawn = [[item.flatten().tolist() for item in checks.gradients(model, step)] for step in range(1, 9)]
    means = optimizer.averaged()
    for number, value in enumerate(model.parameters()):
        for entry, (y, x) in enumerate(zip(value.flatten().tolist(), means[value].flatten().tolist(), strict=True)):
            own = [each[number][entry] for each in drawn]
            assert (y, x) == pytest.approx(special.schedule_free(config, starts[number][entry], own, RATES), abs=1e-12)
            assert abs(x - y) > 1e-6


@pytest.mark.parametrize("foreach", [True, False])
def test_epsilon_is_all_that_is_added_to_the_root(foreach):
    """Gradients of 1e-9, a tenth of ε: the library's own 1e-15 within the root would divide the step by four."""
    config = ScheduleFreeAdamW.Config()
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = ScheduleFreeAdamW.build(config, [weight], 0.1)
    optimizer.param_groups[0]["foreach"] = foreach
    for _ in range(3):
        weight.grad = torch.full_like(weight, 1e-9)
        optimizer.step()
    assert weight.item() == pytest.approx(special.schedulefree_adamw(config, 0.0, [1e-9] * 3, [0.1] * 3), rel=1e-9)


@pytest.mark.parametrize("every", [1, 3])
def test_sophia_follows_the_formula_through_several_estimates(every):
    config = Sophia.Config(hessian_every=every, gamma=0.2, beta1=0.8, beta2=0.7, epsilon=0.3, weight_decay=0.1)
    checks.check_follows_the_loop(Sophia, config, special.sophia)


def test_sophia_s_rate_is_the_librarys_over_gamma():
    """pytorch_optimizer clips m/max(h, ε) to ρ; at ρ = γ a rate of α/ρ there takes this one's steps at α."""
    library = pytest.importorskip("pytorch_optimizer").SophiaH
    gamma, alpha = 0.05, 1e-2
    ours, theirs = checks.Toy(), checks.Toy()
    config = Sophia.Config(gamma=gamma, epsilon=1e-14, hessian_every=2)
    mine: Any = Sophia.build(config, list(ours.parameters()), alpha)
    other = library(theirs.parameters(), lr=alpha / gamma, betas=(0.96, 0.99), p=gamma, eps=1e-14 / gamma)
    for step in range(1, 7):
        for model in (ours, theirs):
            for value, gradient in zip(model.parameters(), checks.gradients(model, step), strict=True):
                value.grad = gradient
        due = mine.hessian_is_due()
        assert due == (step % 2 == 1)
        diagonals = [400 * (2 * gradient**2 - 1) for gradient in checks.gradients(theirs, step)]
        other.update_period = 1 << 30  # its own estimate needs the gradient's graph
        other.param_groups[0].setdefault("step", 1)
        other.step(hessian=diagonals) if due else other.step()
        checks.give_hessian(mine, ours)
        mine.step()
    for one, value in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, value, rtol=1e-12, atol=1e-14)


def test_prodigy_says_at_what_rate_it_steps():
    model = checks.Toy()
    optimizer: Any = checks.built(Prodigy, Prodigy.Config(d0=1e-4), model, 0.5)
    assert optimizer.rate_found() == pytest.approx(0.5e-4)
    for _ in range(8):  # gradients that agree: the distance grows
        checks.steps(optimizer, model, 1, 1)
    assert optimizer.rate_found() > 1e-3
    checks.set_lr(optimizer, 1.0)
    before = [value.detach().clone() for value in model.parameters()]
    rate = optimizer.rate_found()
    checks.steps(optimizer, model, 1, 1)
    moved = torch.cat([(value - old).flatten() for value, old in zip(model.parameters(), before, strict=True)])
    # Adam's step without bias correction by gradients that stay: (1 − β₁ᵗ)/√(1 − β₂ᵗ) entry by entry, while d stands
    assert 0.5 * rate < float(moved.abs().median()) < 20 * rate


@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [
        ("prodigy", {"lr_scale": 0.5}, "mixer.lr_scale: prodigy finds one rate for all parameters; leave lr_scale out"),
        ("prodigy", {"beta1": 0.5}, "mixer.beta1: prodigy has one beta1 for all parameters"),
        ("sophia", {"hessian_every": 5}, "mixer.hessian_every: sophia has one hessian_every for all parameters"),
    ],
)
def test_what_all_parameters_share_is_refused_by_role(name, setting, message):
    with pytest.raises(ValueError, match=f"^optimizer.groups.{message}"):
        part("optimizers", {"name": name, "groups": {"mixer": setting}})


@pytest.mark.parametrize(("name", "why"), [("schedulefree_adamw", "keeps an average"), ("sophia", "takes Hessian")])
def test_a_tokenizer_refuses_what_its_training_does_not_have(name, why):
    values = tokenizer().model_dump(mode="json")
    with pytest.raises(
        ValueError, match=f"optimizer={name}: {why}.*, which the training of a tokenizer does not support; choose adamw"
    ):
        validate(TokenizerRunSpec, {**values, "optimizer": {"name": name}})
