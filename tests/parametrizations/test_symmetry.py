"""`mup` beside the same model in other units, and a linear net whose best rate is known in closed form."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from stability.build import build_model, build_optimizer
from stability.models.scaling import find_sizes
from stability.parametrizations import Growth
from stability.parametrizations.mup import Mup
from stability.parametrizations.standard import Standard
from tests.reading import read_spec

BASE, TOKENS, LR = 32, 8, 3e-3
# Everett et al. 2024 (arXiv:2407.05872), Table 1, µP: exponents of forward multiplier, initial deviation and rate, −a,
# −b and −c, of embedding, hidden matrices and head. Rates by optimizer.
FORWARD, INITIAL = (1 / 2, 0, -1 / 2), (-1 / 2, -1 / 2, -1 / 2)
RATE = {"adamw": (-1 / 2, -1, -1 / 2), "lion": (-1 / 2, -1, -1 / 2), "sgd": (0, 0, 0)}


def run_at(width, optimizer, *words):
    of = ["objective=ar", "mechanism=[sa]", f"optimizer=[{optimizer}]", f"optimizer.{optimizer}.weight_decay=0.1"]
    size = [f"model.width={width}", "model.head_width=16", "model.layers=2", "norm=[rmsnorm]", *words]
    ((_, run),) = read_spec("sweep", ["lr=1e-3", "hessian=false", *size, *of]).kinds()
    return run.model_copy(update={"lr_peak": LR})


def class_of(name, parameter):
    if name.startswith("embedding."):
        return 0
    return 2 if name == "head.weight" else 1 if parameter.ndim == 2 else None


def rewritten(standard, m):
    """The standard model with Everett's multipliers: table and forward pass in other units than ours."""
    model = copy.deepcopy(standard)
    for name, parameter in model.named_parameters():
        place = class_of(name, parameter)
        drawn = 0 if place == 0 else -1 / 2  # a map is drawn with a deviation of 1/√width already
        if place is not None:
            parameter.data.mul_(m ** (INITIAL[place] - drawn))
    model.embedding.register_forward_hook(lambda module, inputs, output: output * m ** FORWARD[0])
    model.head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * m ** FORWARD[2],))
    return model


def groups_of(model, m, optimizer):
    """Everett's rates; a decay over a step as at the base; gains and biases, of which the table is silent, as inputs."""
    for name, parameter in model.named_parameters():
        place = class_of(name, parameter)
        is_fixed = optimizer != "sgd" or name == "head.bias"
        rate = m ** RATE[optimizer][place] if place is not None else 1.0 if is_fixed else m
        yield {"params": [parameter], "lr": LR * rate, "weight_decay": 0.1 / rate}


def train(model, optimizer, steps=5):
    for group in optimizer.param_groups:
        if "eps" in group:
            group["eps"] = 1e-40  # 0, but for the rows of tokens that never occur
    tokens = torch.randint(TOKENS, (4, 13), generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield logits.detach()


@pytest.mark.parametrize("optimizer", RATE)
def test_the_same_model_in_everetts_units_trains_identically(optimizer):
    m = 4
    of = ["parametrization=[mup]", f"parametrization.mup.base_width={BASE}"]
    run = run_at(m * BASE, optimizer, *of)
    ours = build_model(run, TOKENS).double()
    theirs = rewritten(build_model(run_at(m * BASE, optimizer), TOKENS).double(), m)
    other = build_optimizer(run_at(m * BASE, optimizer), theirs)
    other.param_groups = [other.param_groups[0] | own for own in groups_of(theirs, m, optimizer)]
    for own, same in zip(train(ours, build_optimizer(run, ours)), train(theirs, other), strict=True):
        torch.testing.assert_close(own, same, rtol=1e-8, atol=1e-9)


class Net(nn.Module):
    """f(x) = s·v·(w x) of one input and one output, with names of a model's parts."""

    def __init__(self, width):
        super().__init__()
        self.hidden, self.head = nn.Linear(1, width, bias=False), nn.Linear(width, 1, bias=False)
        self.scale = 1.0

    def forward(self, x):
        return self.head(self.scale * self.hidden(x))


@pytest.mark.parametrize("m", [1, 2, 8])
@pytest.mark.parametrize("part", [Mup, Standard])
def test_the_best_rate_of_a_linear_net_is_flat_under_sgd(part, m):
    """From v ⊥ w, thus f = 0, a step of SGD towards y = 1 at rate η gives f = η·r·s²·(|w|² + |v|²), r the rates' factor.

    So 1/(r·s²·(|w|² + |v|²)) is the best rate, which ends the training in one step. Under `mup`, r = m and s = 1/m, it is
    the base's at every width; under the standard one it falls as 1/m, and the base's overshoots to f = m.
    """
    base, net = Net(4), Net(4 * m)
    growth = Growth(m, 1, "torch", lambda name: "sgd")
    factors = {
        name: part.factors(part.Config.model_validate({"base_width": 4} if part is Mup else {}), name, size, growth)
        for name, size in find_sizes(net, {name: tuple(p.shape) for name, p in base.named_parameters()}).items()
    }
    net.scale = part.readout(None, growth)
    for each, signs in ((net.hidden.weight, (1, -1, 1, -1)), (net.head.weight, (1, 1, 1, 1))):
        each.data = torch.tensor(signs).repeat(m).reshape(each.shape) * math.sqrt(0.25)
    own = 1 / 2  # 1/(|w|² + |v|²) at the base, 4 entries of 0.25 each
    groups = [{"params": [p], "lr": own * factors[name].lr} for name, p in net.named_parameters()]
    loss = (net(torch.ones(1, 1)) - 1).square().sum() / 2
    loss.backward()
    torch.optim.SGD(groups, lr=own).step()
    assert float(net(torch.ones(1, 1)).detach()) == pytest.approx(1.0 if part is Mup else m, abs=1e-5)
