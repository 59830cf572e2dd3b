from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.autograd.function import BackwardCFunction

from stability.curvature._graph import graph_nodes
from stability.mechanisms import build
from stability.models.passes import differentiated_once
from stability.training import step
from tests.mechanisms.checks import HEADS, WIDTH, build_seeded

# sequences' lengths that leave remainders of vector registers
CASES = [
    ({}, 16, False),
    ({"rank": 1, "window": 5, "edge_hidden": 7}, 37, True),
    ({"window": 1}, 5, False),
    ({"rank": 3, "rope": "absolute", "step": "learned"}, 64, True),
    ({"graph": "complete", "rope": "none"}, 12, True),
    ({"graph": "cycle"}, 70, True),
]
OTHERS = [
    {"rank": 0},
    {"rope": "relative"},
    {"edge_mlp": "separate"},
    {"step": "bounded"},
    {"iterations": 2},
]


def layer_of(settings, dtype=torch.float32):
    return build_seeded(lambda: build("sc", width=WIDTH, heads=HEADS, **settings)).to(dtype)


def signal(num_positions, dtype=torch.float32):
    return torch.randn(3, num_positions, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(1))


def uses_functions(y):
    return any(isinstance(node, BackwardCFunction) for node in graph_nodes(y.sum()))


@pytest.mark.parametrize(("settings", "num_positions", "masked"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_pass_differentiated_once_has_the_same_bits(settings, num_positions, masked, dtype):
    layer, mask_BN = layer_of(settings, dtype), None
    if masked:
        mask_BN = torch.rand(3, num_positions, generator=torch.Generator().manual_seed(2)) < 0.8
    found = []
    for where in (nullcontext(), differentiated_once()):
        x_BND = signal(num_positions, dtype).requires_grad_()
        with where:
            y_BND = layer(x_BND, mask_BN=mask_BN)
        weights = list(layer.parameters())
        found.append([y_BND, *torch.autograd.grad((y_BND**3).sum(), [x_BND, *weights])])
    assert not uses_functions(found[0][0])
    assert uses_functions(found[1][0])
    for usual, once in zip(*found, strict=True):
        assert torch.equal(usual, once)


@pytest.mark.parametrize("settings", OTHERS)
def test_other_settings_take_the_usual_path(settings):
    with differentiated_once():
        assert not uses_functions(layer_of(settings)(signal(9)))


def test_the_usual_path_is_taken_outside_under_autocast_and_without_promise():
    layer, x_BND = layer_of({}), signal(9)
    with differentiated_once(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert not uses_functions(layer(x_BND))
    with differentiated_once(False):
        assert not uses_functions(layer(x_BND))
    with differentiated_once():
        pass
    assert not uses_functions(layer(x_BND))


def test_a_second_derivative_of_such_a_pass_is_refused():
    layer, x_BND = layer_of({}), signal(9).requires_grad_()
    with differentiated_once():
        y_BND = layer(x_BND)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad((y_BND**2).sum(), x_BND, create_graph=True)


def test_a_run_has_the_same_rows(lab, monkeypatch):
    replica, promises = lab.replica(lab.spec(mechanism={"name": "sc"})), []
    once = [replica.train_step(number) for number in (1, 2, 3)]
    monkeypatch.setattr(step, "differentiated_once", lambda promised: promises.append(promised) or nullcontext())
    replica = lab.replica(replica.spec)
    assert [replica.train_step(number) for number in (1, 2, 3)] == once
    assert promises == [True] * 3
