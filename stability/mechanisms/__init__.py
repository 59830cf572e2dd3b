"""Sequence mechanisms, one file each; ``build("sc", width=64, heads=4, window=2)`` makes a layer."""

from __future__ import annotations

from typing import Any

from stability.mechanisms._attention import AbstractSoftmaxAttention
from stability.mechanisms._base import AbstractCrossMechanism, AbstractMechanism, MixerShape, without_padding
from stability.mechanisms._mirrored import gives_mirrored_outputs
from stability.mechanisms._observed import AbstractAttention, AbstractConsensus
from stability.mechanisms._recurrent import AbstractRecurrent
from stability.mechanisms._training_free import AbstractTrainingFree, Variant
from stability.models.auxiliary import WithLoss
from stability.models.precision import at_least_float32

__all__ = [
    "AbstractAttention",
    "AbstractConsensus",
    "AbstractCrossMechanism",
    "AbstractMechanism",
    "AbstractRecurrent",
    "AbstractSoftmaxAttention",
    "AbstractTrainingFree",
    "MixerShape",
    "Variant",
    "WithLoss",
    "at_least_float32",
    "build",
    "gives_mirrored_outputs",
    "without_padding",
]


def build(
    name: str,
    *,
    width: int,
    heads: int,
    direction: str = "bidirectional",
    layer: int = 0,
    num_layers: int = 1,
    **settings: Any,
):
    """Return one mechanism as a module for one layer.

    A self mechanism has ``forward(x_BND, mask_BN=None) -> y_BND``. A cross mechanism (ca, cc) has ``forward(x_BND,
    context_BJD, mask_BN=None, context_mask_BJ=None) -> y_BND``.

    Args:
        name: the mechanism's name, e.g. "sc".
        width: D, features per position.
        heads: H, a divisor of ``width``.
        direction: "bidirectional" or "causal".
        layer: index from 0.
        num_layers: layers in the model.
        settings: fields of the mechanism's Config, e.g. ``window=4``.

    Raises:
        ValueError: unknown name, unknown or ill-typed setting, width not divisible by ``heads``, or unsupported
            direction.
    """
    from stability.config.parts import validate_settings
    from stability.registry import Registry

    mechanism = Registry("mechanisms").load(name)
    config = validate_settings("mechanisms", name, settings)
    return mechanism.build(config, MixerShape(width, heads, direction, layer, num_layers))
