"""A kind of run, resolved: its spec, and its model without memory for the weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stability.build import build_model
from stability.config.run import RunSpec
from stability.models.backbone import Backbone, num_active_parameters, num_parameters
from stability.models.init import without_memory


@dataclass(frozen=True)
class ResolvedRun:
    """The runs of a sweep that differ only in learning rate and seed.

    Attributes:
        name: ``mechanism/residual/norm/optimizer``, and the ablation's label.
        spec: one of these runs.
        format: the `format` of its data.
    """

    name: str
    spec: RunSpec
    format: Any

    @cached_property
    def model(self) -> Backbone:
        """The model on torch's meta device, without allocated memory."""
        with without_memory():
            return build_model(self.spec, self.format)

    @property
    def num_params(self) -> int:
        return num_parameters(self.model)

    @property
    def num_active_params(self) -> int:
        """Number of parameters that one position meets, fewer with ``ffn=moe``."""
        return num_active_parameters(self.model)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor in the model's state, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}


def name_kind(run: RunSpec, variant: str) -> str:
    """Name a kind of run: ``mechanism/residual/norm/optimizer``, and the ablation's label.

    With a cross mechanism the first name is e.g. ``sa+ca``.
    """
    mechanism = run.mechanism.name + ("" if run.cross is None else f"+{run.cross.name}")
    parts = (mechanism, run.residual.name, run.norm.name, run.optimizer.name, run.parametrization.name)
    kind = "/".join(part for part in parts if part != "standard")
    return " ".join(filter(None, (kind, variant)))
