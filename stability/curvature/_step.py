"""Record one optimizer step of a training loop while it runs.

The replay's slope is compared with the slope of the gradient used by the step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from stability.curvature._autocast import Autocast, find_loop_autocast, listen, stop
from stability.curvature._inputs import RandomState, Tensors, dot, norm
from stability.curvature._replay import Item
from stability.curvature.alpha_max import exact_difference


class StepUnderWay:
    """A running step: θ before it, and each batch with its random state and buffers.

    Args:
        model: the model in training.
        optimizer: its optimizer.
        alone: whether this is the only rank. If not, ``gradient`` is None: ranks average gradients after the backward
            pass.

    Attributes:
        start: θ before the step, by name.
        items: the batches, with random state and buffers before the forward pass.
        lrs: learning rate at each call of `optimizer.step`.
        first_is_zero: whether the first group's rate was 0, so ``lrs`` contains the largest group's.
        gradient: reading of the step's own gradient, or None.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, alone: bool):
        held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        params: Tensors = {
            name: param for name, param in model.named_parameters() if param.requires_grad and id(param) in held
        }
        self.model = model
        self.start: Tensors = {name: param.detach().clone() for name, param in params.items()}
        self.items: list[Item] = []
        self.lrs: list[float] = []
        self.first_is_zero = False
        self._autocasts = listen()
        self.gradient = StepGradient(self.start, params) if alone else None
        self._handles: list[Any] = [optimizer.register_step_pre_hook(self._record_rates)]
        if self.gradient is not None:
            self._handles.append(optimizer.register_step_post_hook(self.gradient.read_step))

    def add(self, batch: Any) -> None:
        """Add a batch just before its forward pass."""
        buffers = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        self.items.append(Item(batch, RandomState(self.start), buffers))

    @property
    def autocast(self) -> Autocast | None:
        """Outermost autocast entered by the step, for the parameters' device."""
        return find_loop_autocast(self._autocasts.entries, next(iter(self.start.values())).device.type)

    def close(self) -> None:
        stop(self._autocasts)
        for handle in self._handles:
            handle.remove()
        if self.gradient is not None:
            self.gradient.close()

    def _record_rates(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.first_is_zero = rates[0] == 0 and max(rates) > 0
        self.lrs.append(max(rates) if self.first_is_zero else rates[0])


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer has parameters of the model, and no other tensors.

    Raises:
        ValueError: the optimizer has no trainable parameter of the model, or other tensors; or the model is sharded.
    """
    held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"] if tensor.requires_grad}
    own = {id(param): param for param in model.parameters()}
    if any(hasattr(param, "full_tensor") or hasattr(param, "_is_flat_param") for param in own.values()):
        raise ValueError(
            "the model's parameters are sharded (FSDP or DTensor); curvature needs them whole on each rank, as "
            "DistributedDataParallel keeps them"
        )
    if not held & own.keys():
        raise ValueError(
            f"this {type(optimizer).__name__} holds no trainable parameter of the model; its steps would all read as "
            "zero"
        )
    if held - own.keys():
        raise ValueError(
            f"this {type(optimizer).__name__} holds {len(held - own.keys())} tensors that are not the model's; pass "
            "a module that has them all"
        )


_AGREEMENT = 2e-2  # relative difference of two slopes allowed for other kernels and TF32
_ROUNDING = 1e-3  # share of Σ|g_i u_i| allowed for rounding of products cancelling in the slope
_LOW_ROUNDING = 2e-2  # the same for parameters of 16 bits
_SAME_FACTOR = 1e-2  # relative difference allowed between two parameters' clipping factors
_SMALL = 1e-4  # share of the whole gradient's norm below which a parameter's factor is mostly rounding


class StepGradient:
    """The slope ⟨g, θ⁺ − θ⟩ of one step's ``.grad`` g.

    It is read by hooks, which copy no gradient. Clipping and a gradient scaler multiply g after the backward pass by
    one factor, found from the norms before and after.

    Nothing is compared (`disagreement` is None) if g is not this loss's gradient at θ for a known reason:

    - a parameter's g was scaled by a factor of its own, or set by hand;
    - parameters moved before the backward pass (SAM, LBFGS);
    - the optimizer stepped more than once;
    - θ moved otherwise in the block.
    """

    def __init__(self, start: Tensors, params: Tensors):
        self.start, self.params = start, params
        self._versions = {name: param._version for name, param in params.items()}
        self._before: dict[str, float] = {}  # norm of each gradient at the end of the last backward pass
        self._after: dict[str, float] = {}  # norm of each gradient used by the optimizer
        self._change = self._magnitude = self._length = 0.0
        self._steps = 0
        self._moved_early = False
        self._handles = [
            param.register_post_accumulate_grad_hook(self._make_hook(name)) for name, param in params.items()
        ]

    def _make_hook(self, name: str) -> Any:
        def hook(param: Tensor) -> None:
            if param.grad is not None:
                self._before[name] = norm({name: _dense(param.grad)})
            self._moved_early |= param._version != self._versions[name]

        return hook

    def read_step(self, *_: Any) -> None:
        """Read the gradient and the displacement; a hook after `optimizer.step`."""
        self._steps += 1
        if self._steps > 1:
            return
        squares = []
        for name, param in self.params.items():
            moved = exact_difference(param.detach(), self.start[name])
            squares.append(norm({name: moved}))
            if param.grad is None:
                continue
            gradient = _dense(param.grad)
            self._after[name] = norm({name: gradient})
            self._change += dot(gradient, moved)
            self._magnitude += dot(gradient.abs(), moved.abs())
        self._length = math.hypot(*squares)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def disagreement(self, slope: float, lr: float, direction: Tensors, batches: int, divisor: int) -> str | None:
        """Return a note if the replayed slope is not the step's, else None.

        None also if they cannot be compared.

        Args:
            slope: ⟨∇L, u⟩ by the replay.
            lr: α, with θ⁺ = θ + α·u.
            direction: u by name.
            batches: number of accumulated batches; a loop may average or add up their losses.
            divisor: divisor of each batch's loss in the loop, if it averages.
        """
        factor = self._factor()
        if self._steps != 1 or self._moved_early or factor is None or not math.isfinite(slope + self._change):
            return None
        if not math.isclose(lr * norm(direction), self._length, rel_tol=1e-3):
            return None
        own, magnitude = self._change / lr, self._magnitude / lr
        low = any(param.element_size() < 4 for param in self.params.values())
        rounding = magnitude * (_LOW_ROUNDING if low else _ROUNDING)
        for scale in self._scales(factor, own / slope if slope else 0.0, batches, divisor):
            if abs(own / scale - slope) <= _AGREEMENT * max(abs(own / scale), abs(slope)) + rounding / scale:
                return None
        return (
            f"the gradient that the optimizer stepped by has the slope {own / factor:.4g} along u, the replay "
            f"{slope:.4g}: loss_fn is not the loss of this step, or does not repeat its forward pass"
        )

    def _factor(self) -> float | None:
        """Return the common factor of all gradients between backward pass and step, or None."""
        whole = math.hypot(*self._after.values())
        if not (math.isfinite(whole) and whole > 0) or self._after.keys() - self._before.keys():
            return None
        total = math.hypot(*self._before.values())
        factors = [
            self._after[name] / self._before[name]
            for name in self._after
            if self._after[name] > _SMALL * whole and self._before[name] > 0
        ]
        factor = whole / total if total else math.inf
        same = all(math.isclose(each, factor, rel_tol=_SAME_FACTOR) for each in factors)
        return factor if same and math.isfinite(factor) else None

    @staticmethod
    def _scales(factor: float, ratio: float, batches: int, divisor: int) -> list[float]:
        """Return the possible ratios of the step's gradient to the loss's."""
        scales = [factor, factor * batches, factor * batches / divisor, 1.0]
        if math.isclose(factor, 1.0, rel_tol=1e-6) or ratio <= 0:
            return scales
        exponent = round(math.log2(ratio / factor))  # a gradient scaler's scale is a power of 2
        return [*scales, factor * 2.0**exponent] if exponent >= 3 else scales


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.layout != torch.strided else gradient
