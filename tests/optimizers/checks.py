"""The contract of every optimizer, as plain functions that raise AssertionError: the faults in `faults.py` prove that
each of them bites."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stability.config import Settings
from stability.optimizers import AbstractOptimizer, grouped, set_lr
from tests.optimizers.oracles.by_tensor import rest

LR = 1e-2
Part = type[AbstractOptimizer]
# θ after the steps of one entry, from its first value, its gradients, and the rates: plain numbers in and out
Loop = Callable[[Settings, float, list[float], list[float]], float]
# the same of a tensor
TensorLoop = Callable[[Settings, np.ndarray, list[np.ndarray], list[float]], np.ndarray]


class Toy(nn.Module):
    """A matrix, a vector, and of each one more of which the module says whether it is decayed."""

    def __init__(self, dtype: torch.dtype = torch.float64):
        super().__init__()
        draws = torch.Generator().manual_seed(0)
        for name, shape in {"matrix": (4, 3), "vector": (5,), "told": (2, 3), "spared": (3, 2)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=draws, dtype=torch.float64)))
        self.to(dtype)

    own_decay = {"told": True, "spared": False}


def built(part: Part, config: Any, model: nn.Module, lr: float = LR) -> torch.optim.Optimizer:
    return part.build(config, grouped(part, config, model), lr)


def gradients(model: nn.Module, step: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(100 + step)
    return [
        torch.randn(value.shape, generator=draws, dtype=torch.float64).to(value.dtype) for value in model.parameters()
    ]


def steps(optimizer: torch.optim.Optimizer, model: nn.Module, first: int, last: int, scale: float = 1.0) -> None:
    """Perform the steps ``first`` to ``last``, each with its own gradients, whatever the parameters are."""
    for step in range(first, last + 1):
        for value, gradient in zip(model.parameters(), gradients(model, step), strict=True):
            value.grad = scale * gradient
        optimizer.step()


def after(part: Part, config: Any, num: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return the toy's parameters after ``num`` steps."""
    model = Toy(dtype)
    steps(built(part, config, model), model, 1, num)
    return [value.detach() for value in model.parameters()]


def check_one_step_moves_every_parameter(part: Part, config: Any) -> None:
    """The first step moves every entry; where it is said to move nothing (no matrix, where the rest is AdamW's), it does
    so but for weight decay, and the second one moves all."""
    if part.first_step_zero:
        still = config.model_copy(update={"weight_decay": 0.0})
        for before, value in zip(Toy().parameters(), after(part, still, 1), strict=True):
            is_still = value.ndim == 2 or not part.takes_matrices
            assert torch.equal(before, value) == is_still, "the first step moves something, or not the rest"
    num = 2 if part.first_step_zero else 1
    for dtype in (torch.float32, torch.float64):
        for before, moved in zip(Toy(dtype).parameters(), after(part, config, num, dtype), strict=True):
            assert moved.dtype == dtype, f"{dtype} became {moved.dtype}"
            assert moved.isfinite().all(), "a step is not finite"
            assert (moved != before).all(), "an entry with a gradient stays where it was"


def check_zeros_do_no_harm(part: Part, config: Any) -> None:
    """Parameters that start at zero move, as biases do; and where a tensor has no gradient, or a row of it, as the row
    of a token that no batch holds, every step is finite."""
    model = Toy(torch.float32)
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    optimizer = built(part, config, model)
    steps(optimizer, model, 1, 2 if part.first_step_zero else 1)
    assert all((value != 0).all() for value in model.parameters()), "a tensor of zeros stays where it is"
    model = Toy(torch.float32)
    optimizer = built(part, config, model)
    for step, num_rows in enumerate((1000, 1, 1, 0), 1):  # without a gradient
        for value, gradient in zip(model.parameters(), gradients(model, step), strict=True):
            value.grad = gradient
            value.grad[:num_rows] = 0
        optimizer.step()
        assert all(value.isfinite().all() for value in model.parameters()), "a step without gradient is not finite"


def check_deterministic(part: Part, config: Any) -> None:
    first, second = after(part, config, 4), after(part, config, 4)
    assert all(map(torch.equal, first, second)), "two optimizers with the same gradients differ"


def check_linear_in_lr(part: Part, config: Any) -> None:
    """The displacement over lr is the same at 2, 30 and 300 times the rate, from the same state."""
    displaced = []
    for factor in (1.0, 2.0, 30.0, 300.0):
        model = Toy()
        optimizer = built(part, config, model)
        steps(optimizer, model, 1, 5)
        set_lr(optimizer, factor * LR)
        before = [value.detach().clone() for value in model.parameters()]
        steps(optimizer, model, 6, 6)
        displaced.append(
            torch.cat([(value - old).flatten() for value, old in zip(model.parameters(), before, strict=True)])
            / (factor * LR)
        )
    for other in displaced[1:]:
        error = float((other - displaced[0]).norm() / displaced[0].norm())
        assert error < 1e-9, f"u changes by {error:.1e} with the learning rate"


def check_state_survives_a_file(part: Part, config: Any) -> None:
    """Saved, read by `torch.load` as the checkpoints are (weights only), and loaded into a new optimizer: the next steps
    are the same bit for bit."""
    model, resumed = Toy(torch.float32), Toy(torch.float32)
    optimizer = built(part, config, model)
    steps(optimizer, model, 1, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    try:
        state = torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        raise AssertionError(f"torch.load(weights_only=True) refuses the state: {error}") from None
    resumed.load_state_dict(state["model"])
    second = built(part, config, resumed)
    second.load_state_dict(state["optimizer"])
    for number in (4, 5):
        steps(optimizer, model, number, number)
        steps(second, resumed, number, number)
        assert all(map(torch.equal, model.parameters(), resumed.parameters())), "a resumed step differs"


def check_decay_reaches_what_is_told(part: Part, config: Any) -> None:
    """Without any gradient weight decay alone moves parameters: those of which the module says so, and of the others
    those of which the optimizer does."""
    assert config.weight_decay > 0, "settings that decay are needed"
    model = Toy()
    optimizer = built(part, config, model)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    steps(optimizer, model, 1, 1, scale=0.0)
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    told = {name for name, value in model.named_parameters() if model.own_decay.get(name, part.decays(config, value))}
    assert moved == told, f"weight decay moves {sorted(moved)}, and is to move {sorted(told)}"
    for name in moved:
        assert (model.get_parameter(name).abs() < before[name].abs()).all(), f"weight decay makes {name} larger"


def check_elementwise(part: Part, config: Any) -> None:
    """Halves of each tensor take the steps of the whole, and state has the parameter's shape or is one number."""

    whole = nn.ParameterList(nn.Parameter(Toy().get_parameter(name).detach()) for name in ("matrix", "vector"))
    halves = nn.ParameterList(nn.Parameter(half.clone()) for value in whole for half in value.detach().tensor_split(2))
    optimizers = part.build(config, list(whole.parameters()), LR), part.build(config, list(halves.parameters()), LR)
    for step in range(1, 5):
        for value, gradient in zip(whole.parameters(), gradients(whole, step), strict=True):
            value.grad = gradient
        parts = [half for gradient in gradients(whole, step) for half in gradient.tensor_split(2)]
        for value, gradient in zip(halves.parameters(), parts, strict=True):
            value.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    joined = [half for value in whole.parameters() for half in value.tensor_split(2)]
    for value, expected in zip(halves.parameters(), joined, strict=True):
        assert torch.allclose(value, expected, rtol=1e-12, atol=1e-14), "a half takes other steps than the whole"
    for value, state in optimizers[0].state.items():
        for key, item in state.items():
            shape = getattr(item, "shape", torch.Size())
            assert shape in (value.shape, torch.Size()), f"state {key} has shape {tuple(shape)}"


def check_follows_the_loop(part: Part, config: Any, loop: Loop) -> None:
    """Eight steps in float64, at rates that change, are those of plain arithmetic over single entries."""
    model = Toy()
    start = [value.detach().flatten().tolist() for value in model.parameters()]
    reached = [model.own_decay.get(name, part.decays(config, value)) for name, value in model.named_parameters()]
    rates = [LR * (1 + step % 3) for step in range(1, 9)]
    optimizer = built(part, config, model)
    for step, rate in enumerate(rates, 1):
        set_lr(optimizer, rate)
        steps(optimizer, model, step, step)
    drawn = [[item.flatten().tolist() for item in gradients(model, step)] for step in range(1, 9)]
    for number, value in enumerate(model.parameters()):
        settings = config if reached[number] else config.model_copy(update={"weight_decay": 0.0})
        for entry, found in enumerate(value.flatten().tolist()):
            own = [each[number][entry] for each in drawn]
            expected = loop(settings, start[number][entry], own, rates)
            assert abs(found - expected) <= 1e-12 * max(1.0, abs(expected)), f"{found} and not {expected}"


def check_follows_the_tensor_loop(part: Part, config: Any, loop: TensorLoop, within: float = 1e-6) -> None:
    """Eight steps in float64, at rates that change, are those of the formula over whole tensors, ``within`` a share of
    the way that they go."""
    model = Toy()
    start = [value.detach().numpy().copy() for value in model.parameters()]
    told = [model.own_decay.get(name, part.decays(config, value)) for name, value in model.named_parameters()]
    rates = [LR * (1 + step % 3) for step in range(1, 9)]
    optimizer = built(part, config, model)
    for step, rate in enumerate(rates, 1):
        set_lr(optimizer, rate)
        steps(optimizer, model, step, step)
    for number, value in enumerate(model.parameters()):
        settings = config if told[number] else config.model_copy(update={"weight_decay": 0.0})
        drawn = [gradients(model, step)[number].numpy() for step in range(1, 9)]
        own = loop if value.ndim == 2 or not part.takes_matrices else rest
        expected = own(settings, start[number], drawn, rates)
        error = float(abs(value.detach().numpy() - expected).max() / abs(expected - start[number]).max())
        assert error < within, f"θ differs by {error:.1e} of the way that it went"


def check_setting_changes_the_step(part: Part, base: Any, name: str, value: Any) -> None:
    """Eight steps are others with another value of a setting."""
    changed = base.model_copy(update={name: value})
    assert not all(map(torch.equal, after(part, base, 8), after(part, changed, 8))), f"{name}={value} changes nothing"
