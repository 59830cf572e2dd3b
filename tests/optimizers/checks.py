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
from stability.optimizers import AbstractOptimizer, TakingHessian, group_parameters, set_lr
from tests.optimizers.oracles.by_tensor import rest
from tests.within import assert_within

LR = 1e-2
Part = type[AbstractOptimizer]
# θ after the steps of one entry, from its first value, its gradients, and the rates: plain numbers in and out
Loop = Callable[[Settings, float, list[float], list[float]], float]
# the same of a tensor
TensorLoop = Callable[[Settings, np.ndarray, list[np.ndarray], list[float]], np.ndarray]
# the same of all tensors of a model, each with its settings
ModelLoop = Callable[[list[Settings], list[np.ndarray], list[list[np.ndarray]], list[float]], list[np.ndarray]]


class Toy(nn.Module):
    """A matrix, a vector, and of each one more of which the module says whether it is decayed."""

    def __init__(self, dtype: torch.dtype = torch.float64):
        super().__init__()
        draws = torch.Generator().manual_seed(0)
        for name, shape in {"matrix": (4, 3), "vector": (5,), "told": (2, 3), "spared": (3, 2)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=draws, dtype=torch.float64)))
        self.to(dtype)

    own_decay = {"told": True, "spared": False}


def rate_of(part: Part) -> float:
    """Return the rate that an optimizer is checked at: of a multiplier the one that multiplies nothing."""
    return part.lr_reference if part.is_multiplier else LR


def built(part: Part, config: Any, model: nn.Module, lr: float | None = None) -> torch.optim.Optimizer:
    return part.build(config, group_parameters(part, config, model), lr or rate_of(part))


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
        give_hessian(optimizer, model)
        optimizer.step()


def give_hessian(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Give an optimizer that asks for it a diagonal of the Hessian, made up from the gradients: of both signs, and of a
    size at which steps are neither all clipped nor all not."""
    if isinstance(optimizer, TakingHessian) and optimizer.hessian_is_due():
        own = ((value, value.grad) for value in model.parameters() if value.grad is not None)
        optimizer.take_hessian({value: 400 * (2 * gradient * gradient - 1) for value, gradient in own})


def after(
    part: Part, config: Any, num: int, dtype: torch.dtype = torch.float64, lr: float | None = None, scale: float = 1.0
) -> list[Tensor]:
    """Return the toy's parameters after ``num`` steps, at rates that change from step to step: ``lr`` (None: `rate_of`)
    and twice and three times it."""
    model = Toy(dtype)
    optimizer = built(part, config, model)
    for step in range(1, num + 1):
        set_lr(optimizer, (lr or rate_of(part)) * (1 + step % 3))
        steps(optimizer, model, step, step, scale)
    return [value.detach() for value in model.parameters()]


def check_one_step_moves_every_parameter(part: Part, config: Any) -> None:
    """The first step moves every entry; where it is said to move nothing (no matrix, where the rest is AdamW's), it does
    so but for weight decay, and the second one moves all."""
    if part.first_step_zero:
        still = config.model_copy(update={"weight_decay": 0.0})
        for before, value in zip(Toy().parameters(), after(part, still, 1), strict=True):
            is_still = value.ndim == 2 or not part.takes_matrices
            assert torch.equal(before, value) == is_still, "the first step moves something, or not the rest"
    num, seen = 2 if part.first_step_zero else 1, rate_of(part) * (100 if part.is_multiplier else 1)  # by a float32
    for dtype in (torch.float32, torch.float64):
        for before, moved in zip(Toy(dtype).parameters(), after(part, config, num, dtype, seen), strict=True):
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
        give_hessian(optimizer, model)
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
        steps(optimizer, model, 1, 20)
        set_lr(optimizer, factor * rate_of(part))
        before = [value.detach().clone() for value in model.parameters()]
        steps(optimizer, model, 21, 21)
        displaced.append(
            torch.cat([(value - old).flatten() for value, old in zip(model.parameters(), before, strict=True)])
            / (factor * rate_of(part))
        )
    for other in displaced[1:]:
        error = float((other - displaced[0]).norm() / displaced[0].norm())
        assert_within(error, 1e-9, f"u changes by {error:.1e} with the learning rate")


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
    model, undecayed = Toy(), Toy()
    optimizer = built(part, config, model)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    # without a gradient a multiplier finds no rate: what it moves otherwise than without decay is told then
    scale = 1.0 if part.is_multiplier else 0.0
    steps(optimizer, model, 1, 1, scale)
    if scale:
        steps(built(part, config.model_copy(update={"weight_decay": 0.0}), undecayed), undecayed, 1, 1, scale)
        before = {name: value.detach() for name, value in undecayed.named_parameters()}
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
            assert_within(abs(found - expected), 1e-12 * max(1.0, abs(expected)), f"{found} and not {expected}")


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
        assert_within(error, within, f"θ differs by {error:.1e} of the way that it went")


def check_follows_the_model_loop(part: Part, config: Any, loop: ModelLoop) -> None:
    """Eight steps in float64, at rates that change and by gradients that agree with each other, are those of the formula
    over all tensors together."""
    model = Toy()
    start = [value.detach().numpy().copy() for value in model.parameters()]
    told = [model.own_decay.get(name, part.decays(config, value)) for name, value in model.named_parameters()]
    configs = [config if each else config.model_copy(update={"weight_decay": 0.0}) for each in told]
    rates = [rate_of(part) * (1 + step % 3) for step in range(1, 9)]
    optimizer = built(part, config, model)
    drawn = [
        [steady + noise / 4 for steady, noise in zip(gradients(model, 0), gradients(model, step), strict=True)]
        for step in range(1, 9)
    ]
    for rate, each in zip(rates, drawn, strict=True):
        set_lr(optimizer, rate)
        for value, gradient in zip(model.parameters(), each, strict=True):
            value.grad = gradient.clone()
        optimizer.step()
    expected = loop(configs, start, [[gradient.numpy() for gradient in each] for each in drawn], rates)
    for value, reached, first in zip(model.parameters(), expected, start, strict=True):
        error = float(abs(value.detach().numpy() - reached).max() / abs(reached - first).max())
        assert_within(error, 1e-6, f"θ differs by {error:.1e} of the way that it went")


def check_setting_changes_the_step(part: Part, base: Any, name: str, value: Any) -> None:
    """Twelve steps at rates that change are others, by gradients of the usual size or by tiny ones."""
    changed = base.model_copy(update={name: value})
    is_same = (
        all(map(torch.equal, *(after(part, config, 12, scale=scale) for config in (base, changed))))
        for scale in (1.0, 1e-11)
    )
    assert not all(is_same), f"{name}={value} changes nothing"
