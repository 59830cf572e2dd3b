"""Sequence mechanisms, one file each; ``build("sc", width=64, heads=4, window=2)`` makes a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stability.mechanisms._base import AbstractCrossMechanism, AbstractMechanism, MixerShape, without_padding
from stability.models.block import WithLoss, split_loss
from stability.models.passes import at_least_float32
from stability.registry import Registry, import_on_use

if TYPE_CHECKING:
    from stability.mechanisms._attention import AbstractSoftmaxAttention
    from stability.mechanisms._observed import AbstractAttention, AbstractConsensus
    from stability.mechanisms._recurrent import AbstractRecurrent
    from stability.mechanisms._training_free import AbstractTrainingFree, Variant

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

# bases of some mechanisms
__getattr__ = import_on_use(
    __name__,
    {
        "AbstractAttention": "_observed",
        "AbstractConsensus": "_observed",
        "AbstractRecurrent": "_recurrent",
        "AbstractSoftmaxAttention": "_attention",
        "AbstractTrainingFree": "_training_free",
        "Variant": "_training_free",
    },
)


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

    mechanism = Registry("mechanisms").load(name)
    config = validate_settings("mechanisms", name, settings)
    return mechanism.build(config, MixerShape(width, heads, direction, layer, num_layers))


NUM_POSITIONS = 24  # more than a default window on both sides
CLOSE = 1e-8  # over the output's norm, in float64


def gives_mirrored_outputs(build: Callable[[], nn.Module], width: int) -> bool:
    """Return whether a mixer with random parameters is indifferent to the direction of its input.

    The global random state is unchanged.

    Args:
        build: makes the mixer.
        width: D.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        mixer = build().double().eval()
        for parameter in mixer.parameters():  # none stays at zero, where some begin
            parameter.add_(0.1 * torch.randn_like(parameter))
        x_BND = torch.randn(2, NUM_POSITIONS, width, dtype=torch.float64)
        there, back = (split_loss(mixer(each), []) for each in (x_BND, x_BND.flip(1)))
    return bool((there.flip(1) - back).norm() <= CLOSE * there.norm())
