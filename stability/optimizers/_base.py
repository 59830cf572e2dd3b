"""The base of optimizer parts: settings, and a builder for ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from stability.config import Settings
from stability.config.impl import KernelUser

# torch's two forms: tensors, or groups with their own settings
Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


class AbstractOptimizer(KernelUser):
    """Base of optimizer parts.

    ``build`` returns the ``torch.optim.Optimizer``. Its learning rate is set from outside at each step, through the
    parameter groups. Its state consists of tensors and plain numbers, so a checkpoint can store it.

    Attributes:
        stepper: the optimizer's class, called with parameters, rate and settings; unused if ``build`` is overridden.
        lr_reference: rate multiplied by ``lr=scaled``, roughly the usual rate.
        elementwise: each entry's step depends only on the entry's own gradients and state, so a slice of a tensor makes
            the same steps as the whole.
        takes_matrices: steps the model's matrices; AdamW steps the rest (`stability.optimizers._divided`).
        linear_in_lr: u = (θ⁺ − θ)/lr does not depend on lr. If False, α_max is a multiplier of the actual step, valid
            only at the run's own rate.
        first_step_zero: the first step moves nothing (no matrix, if ``takes_matrices``), apart from weight decay.
        is_multiplier: the learning rate multiplies a rate found by the optimizer.
        frozen: state that α_max leaves at the checkpoint's value, in words; "" if every step renews all state that it
            uses.
        averages: averaged weights are validated and saved (`_hooks.Averaging`).
        takes_hessian: some steps need an estimate of the Hessian's diagonal (`_hooks.TakingHessian`).
        schedules: names of suitable schedules; None: all.
        update_family: how a step's size depends on the gradient, for a parametrization's learning rates: "adam" (its
            entries are about as large as the learning rate), "sign", "sgd" (as the gradient's) or "orthogonal"
            (singular values); None: unknown.
    """

    family: ClassVar[str] = "optimizers"
    Config: ClassVar[type[Settings]]
    stepper: ClassVar[Callable[..., torch.optim.Optimizer]]
    lr_reference: ClassVar[float] = 1e-3
    elementwise: ClassVar[bool] = False
    takes_matrices: ClassVar[bool] = False
    linear_in_lr: ClassVar[bool] = True
    first_step_zero: ClassVar[bool] = False
    is_multiplier: ClassVar[bool] = False
    frozen: ClassVar[str] = ""
    averages: ClassVar[bool] = False
    takes_hessian: ClassVar[bool] = False
    schedules: ClassVar[tuple[str, ...] | None] = None
    update_family: ClassVar[Literal["adam", "sign", "sgd", "orthogonal"] | None] = None

    @classmethod
    def build(cls, config: Any, parameters: Parameters, lr: float) -> torch.optim.Optimizer:
        """Return the optimizer over the given parameters.

        Args:
            config: the part's settings.
            parameters: tensors, or groups with their own settings.
            lr: learning rate.
        """
        return cls.stepper(parameters, lr, config)

    @classmethod
    def built_in_scale(cls, config: Any, rows: int, columns: int) -> float:
        """Return the optimizer's own factor on the step of a matrix of some shape.

        Args:
            config: the part's settings.
            rows: of the matrix.
            columns: of the matrix.
        """
        return 1.0

    @classmethod
    def decays(cls, config: Any, parameter: nn.Parameter) -> bool:
        """Return whether weight decay applies to a parameter without its module's ``own_decay``."""
        return True

    @classmethod
    def by_group(cls, config: Any) -> str:
        """Describe the settings' effect on a matrix and a vector.

        Two settings give equal texts if they differ only in fields that cannot be set for one parameter group.
        """
        found = []
        for toy in (nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))):
            groups = cls.build(config, [toy], 1.0).param_groups
            held = [{key: value for key, value in group.items() if key != "params"} for group in groups]
            found.append((cls.decays(config, toy), held))
        return repr(found)


def library_class(name: str) -> Any:
    """Return a class of pytorch_optimizer by name; the import takes over a second.

    Raises:
        ImportError: the library is missing; one line.
    """
    try:
        import pytorch_optimizer
    except ImportError:
        missing = f"{name} comes from pytorch_optimizer, which is missing"
        raise ImportError(f"{missing}: pip install 'pytorch_optimizer>=4.1,<4.2'") from None
    return getattr(pytorch_optimizer, name)
