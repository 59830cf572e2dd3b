"""AdamW (Loshchilov & Hutter 2017), from torch or with a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from stability.config import Settings
from stability.config.identity import Since
from stability.config.impl import Impl
from stability.optimizers._base import AbstractOptimizer, Parameters

if TYPE_CHECKING:
    from kernels.adamw_probe import Probe


class ProbingAdamW(torch.optim.AdamW):
    """AdamW with one kernel launch for a group's parameters and the step's sums.

    Group and state entries are those of ``torch.optim.AdamW``, so each loads the other's checkpoints. Implements
    `Probing`.
    """

    def __init__(self, parameters: Any, **settings: Any):
        super().__init__(parameters, **settings)
        self._step_supports_amp_scaling = False  # so a gradient scaler unscales the gradients itself
        self._probe: Probe | None = None
        for param in (param for group in self.param_groups for param in group["params"]):
            if hasattr(param, "to_local"):
                raise ValueError(
                    "optimizer.adamw.impl=triton steps whole tensors, and these are sharded over devices; use "
                    "impl=reference"
                )

    def probed(self) -> Probe | None:
        """Return the sums of the last step over all parameters; None before the first."""
        return self._probe

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Perform the step of every parameter with a gradient.

        Its sums are stored for `probed`.
        """
        assert closure is None, "gradients are in the parameters"
        from kernels.adamw_probe import adamw_probe

        probes = []
        for group in self.param_groups:
            if group["amsgrad"] or group["maximize"]:
                raise ValueError("optimizer.adamw.impl=triton has no amsgrad and no maximize; use impl=reference")
            for params in self._group_by_device(group):
                state = [self._state_of(param) for param in params]
                torch._foreach_add_([each["step"] for each in state], 1)
                probes.append(
                    adamw_probe(
                        params,
                        [param.grad for param in params if param.grad is not None],
                        [each["exp_avg"] for each in state],
                        [each["exp_avg_sq"] for each in state],
                        [each["step"] for each in state],
                        lr=float(group["lr"]),
                        betas=group["betas"],
                        epsilon=group["eps"],
                        weight_decay=group["weight_decay"],
                    )
                )
        self._probe = None if not probes else sum(probes[1:], probes[0])

    @staticmethod
    def _group_by_device(group: dict[str, Any]) -> list[list[Tensor]]:
        """Return a group's nonempty parameters with gradients, grouped by device and dtype."""
        kinds: dict[Any, list[Tensor]] = {}
        for param in group["params"]:
            if param.grad is not None and param.numel():
                kinds.setdefault((param.device, param.dtype), []).append(param)
        return list(kinds.values())

    def _state_of(self, param: Tensor) -> dict[str, Tensor]:
        """Return a parameter's state, initialised as in torch's fused AdamW."""
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state


class AdamW(AbstractOptimizer):
    """Adam with decoupled weight decay, ``torch.optim.AdamW`` in its fused form.

    Every parameter is decayed, our reading of the consensus paper's "default weight decay", or only matrices as in
    nanoGPT. With ``impl=triton`` a kernel computes the same step, its norm and its slope. Either implementation resumes
    from the other's checkpoints.
    """

    update_family = "adam"
    elementwise = True

    class Config(Settings):
        weight_decay: float = Field(default=1e-2, ge=0, description="decoupled weight decay, times the learning rate")
        beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean gradient")
        beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of the mean squared gradient")
        decay: Annotated[Literal["all", "matrices"], Since("all", of=("adamw",))] = Field(
            default="all", description="what is decayed: all parameters, or those of two axes or more (nanoGPT)"
        )
        epsilon: float = Field(default=1e-8, gt=0, description="added to the root of the mean squared gradient")
        impl: Impl = "reference"

    @classmethod
    def build(cls, config: Config, parameters: Parameters, lr: float) -> torch.optim.Optimizer:
        betas = (config.beta1, config.beta2)
        kind = ProbingAdamW if config.impl == "triton" else torch.optim.AdamW
        return kind(parameters, lr=lr, betas=betas, eps=config.epsilon, weight_decay=config.weight_decay, fused=True)

    @classmethod
    def decays(cls, config: Config, parameter: nn.Parameter) -> bool:
        return config.decay == "all" or parameter.ndim >= 2


EXPORT = AdamW
