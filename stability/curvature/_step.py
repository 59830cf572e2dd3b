"""Remember one optimizer step of somebody's loop while it is under way."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stability.curvature._autocast import Autocast, listen, of_loop, stop
from stability.curvature._guard import StepGradient
from stability.curvature._inputs import RandomState, Tensors
from stability.curvature._replay import Item


class StepUnderWay:
    """A record of θ before the step and of each batch with the random state and buffers of its forward pass.

    ``lrs``: the rate at each call of `optimizer.step`; ``first_is_zero``: the first parameter group's was 0, and the
    largest group's stands there instead. ``gradient``: None for ranks, whose gradients are averaged after the backward
    pass.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, alone: bool):
        params = moving_params(model, optimizer)
        self.model = model
        self.start: Tensors = {name: param.detach().clone() for name, param in params.items()}
        self.items: list[Item] = []
        self.lrs: list[float] = []
        self.first_is_zero = False
        self._autocasts = listen()
        self.gradient = StepGradient(self.start, params) if alone else None
        self._handles: list[Any] = [optimizer.register_step_pre_hook(self._stepping)]
        if self.gradient is not None:
            self._handles.append(optimizer.register_step_post_hook(self.gradient.stepped))

    def add(self, batch: Any) -> None:
        """Add a batch, as its forward pass is about to begin."""
        buffers = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        self.items.append(Item(batch, RandomState(self.start), buffers))

    @property
    def autocast(self) -> Autocast | None:
        """Return the outermost autocast that the step entered, for the device of the parameters."""
        return of_loop(self._autocasts.entries, next(iter(self.start.values())).device.type)

    def close(self) -> None:
        stop(self._autocasts)
        for handle in self._handles:
            handle.remove()
        if self.gradient is not None:
            self.gradient.close()

    def _stepping(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.first_is_zero = rates[0] == 0 and max(rates) > 0
        self.lrs.append(max(rates) if self.first_is_zero else rates[0])


def moving_params(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Return the model's trainable parameters that the optimizer holds, by name."""
    held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    return {name: param for name, param in model.named_parameters() if param.requires_grad and id(param) in held}


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise a ValueError where the model is sharded, or the optimizer does not hold the model's parameters and nothing
    else."""
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
