"""Base classes for sequence mechanisms: modules that mix positions, (B, N, D) → (B, N, D).

A cross mechanism also reads a context (B, J, D).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stability.config import Settings
from stability.config.impl import KernelUser, Use
from stability.models.init import OwnInit
from stability.models.position import Decays, Rope

BIDIRECTIONAL, CAUSAL = "bidirectional", "causal"


@dataclass(frozen=True)
class MixerShape:
    """Place of a mixer in the backbone: all facts outside its own settings.

    Attributes:
        width: D, features per position.
        heads: H, a divisor of ``width``.
        direction: "bidirectional" or "causal".
        layer: index from 0; patterns such as `mix` use it.
        num_layers: layers in the model.
        rope: rotation for positions. If it is None, positions are encoded elsewhere or not at all, and the mixer
            rotates nothing, regardless of its settings.
        dropout: rate for attention weights in training mode. Mixers without such weights ignore it, and their output
            has dropout anyway.
        decays: decays of the logits by distance, which only a mechanism that `reads_decays` honours; None: none.
        num_positions: sequence length of the model (`model.positions`); None if unknown.
    """

    width: int
    heads: int
    direction: str = BIDIRECTIONAL
    layer: int = 0
    num_layers: int = 1
    rope: Rope | None = Rope()
    dropout: float = 0.0
    num_positions: int | None = None
    decays: Decays | None = None

    def __post_init__(self):
        for name, value in (("width", self.width), ("heads", self.heads)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not divisible by heads {self.heads}; choose a divisor of {self.width}"
            )

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def use(self) -> Use:
        """The fields relevant to kernels."""
        return Use(self.width, self.heads, self.direction, self.dropout)

    def require_pairs(self) -> None:
        """Raise a one-line ``ValueError`` for an odd head width.

        RoPE rotates pairs of features.
        """
        if self.head_width % 2:
            even = [
                heads for heads in range(1, self.width + 1) if self.width % heads == 0 and self.width // heads % 2 == 0
            ]
            choices = f"heads that leave an even one: {', '.join(map(str, even))}" if even else "choose an even width"
            raise ValueError(
                f"head width {self.width}/{self.heads} = {self.head_width} is odd, and RoPE turns pairs; {choices}"
            )


def without_padding(x_BND: Tensor, mask_BN: Tensor | None, *, name: str = "mask_BN") -> Tensor:
    """Return ``x_BND`` with zeros at padded positions; unchanged without a mask.

    Args:
        x_BND: (B, N, D).
        mask_BN: True at valid positions; None without padding.
        name: the mask's argument name, for messages.

    Raises:
        ValueError: wrong shape or dtype of the mask.
    """
    if mask_BN is None:
        return x_BND
    expected = tuple(x_BND.shape[:2])
    if tuple(mask_BN.shape) != expected:
        raise ValueError(
            f"{name} has shape {tuple(mask_BN.shape)}; expected {expected}, True where a position is valid"
        )
    if mask_BN.dtype != torch.bool:
        raise ValueError(
            f"{name} has dtype {str(mask_BN.dtype).removeprefix('torch.')}; expected bool, True where a position is "
            "valid"
        )
    # not a product: 0 · NaN is NaN
    return torch.where(mask_BN[..., None], x_BND, 0.0)


def require_context(x_BND: Tensor, context_BJD: Tensor) -> None:
    """Raise a one-line ``ValueError`` if the context's width or batch differs from the source's."""
    batch, _, width = x_BND.shape
    if context_BJD.ndim != 3 or context_BJD.shape[0] != batch or context_BJD.shape[2] != width:
        raise ValueError(
            f"the context has shape {tuple(context_BJD.shape)}; expected ({batch}, J, {width}), as the source is "
            f"{tuple(x_BND.shape)}"
        )


def _check_kernels(mechanism: type[KernelUser], config: Any, shape: MixerShape) -> None:
    """Raise a one-line ``ValueError`` if the chosen kernels do not support other settings."""
    for asked in mechanism.kernels(config):
        asked.nest_in("mechanism").check(shape.use)


class AbstractMechanism(KernelUser, OwnInit):
    """Base class for every self mechanism.

    A subclass has a `Config`, declares its `directions` and implements `forward`. `own_init` lists parameters with an
    initialisation of their own.

    Attributes:
        trainable: False for a mechanism that only replaces another one in a trained model, e.g. to skip small weights.
            Runs and tokenizers refuse it and print ``used_for``.
        used_for: purpose of a mechanism that is not trainable.
        piecewise_smooth: True if the mechanism selects positions or blocks by its own scores. It is smooth between two
            changes in the selection, and its second derivative is the current piece's. `margin` measures the distance
            to the next change.
    """

    family: ClassVar[str] = "mechanisms"
    cross: ClassVar[bool] = False
    cross_kind: ClassVar[str] = "ca"  # cross mechanism chosen by cross=auto
    Config: ClassVar[type[Settings]]
    directions: ClassVar[frozenset[str]]
    trainable: ClassVar[bool] = True
    used_for: ClassVar[str] = "looking at trained models"
    piecewise_smooth: ClassVar[bool] = False

    @classmethod
    def build(cls, config: Any, shape: MixerShape) -> AbstractMechanism:
        """Return the module for one layer; a pattern over layers returns another mechanism's module."""
        if shape.direction not in cls.supported_directions(config):
            possible = ", ".join(sorted(cls.supported_directions(config)))
            raise ValueError(f"{cls.__module__.rsplit('.', 1)[-1]} cannot be {shape.direction}; it can be {possible}")
        cls.check_heads(config, shape.heads)
        _check_kernels(cls, config, shape)
        return cls(config, shape)

    @classmethod
    def supported_directions(cls, config: Any) -> frozenset[str]:
        return cls.directions

    @classmethod
    def untrained(cls, config: Any) -> tuple[type[AbstractMechanism], ...]:
        """Return the non-trainable classes among those in the settings, this class included."""
        return () if cls.trainable else (cls,)

    @classmethod
    def fewest_layers(cls, config: Any) -> int:
        """Return the minimum number of layers; above one only for patterns over layers."""
        return 1

    @classmethod
    def check_positions(cls, config: Any, num_positions: int) -> None:
        """Raise a one-line ``ValueError`` if the settings do not fit ``num_positions``."""

    @classmethod
    def check_heads(cls, config: Any, heads: int) -> None:
        """Raise a one-line ``ValueError`` if the settings do not fit ``heads``."""

    @classmethod
    def reads_decays(cls, config: Any) -> bool:
        """Return whether the logits have the decays of position=hope."""
        return False

    @classmethod
    def needs_edges(cls, config: Any) -> bool:
        """Return whether `forward` requires ``edges=`` with each batch, e.g. a molecule's bonds.

        A sweep's data have no edges.
        """
        return False

    @classmethod
    def blind_to_order(cls, config: Any) -> bool:
        """Return whether a trained layer maps mirrored text to nearly mirrored output.

        Only the mechanism's own means count (with position=rope).
        """
        return False

    @classmethod
    def is_piecewise_smooth(cls, config: Any) -> bool:
        """Return whether the mechanism, or one it is made of, is `piecewise_smooth`."""
        return cls.piecewise_smooth

    @classmethod
    def reading(cls, config: Any) -> str:
        """Return the chosen reading of the paper's formula, and why, for a report's first page.

        Empty if the paper leaves no choice.
        """
        return ""

    @classmethod
    def calls_linears(cls, config: Any) -> bool:
        """Return whether `forward` calls its ``nn.Linear`` modules.

        If so, another kind of linear map can replace them. False if `forward` uses their weights directly.
        """
        return True

    def start_local(self, bias: float) -> None:
        """Start with attention to neighbours, stronger for larger ``bias`` (`model.qk_bias`).

        Called only if the bias is not 0. Default: no effect.
        """

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Return the multiply-adds for one forward pass over one sequence, projections included.

        Args:
            config: the mechanism's settings.
            shape: width, heads, direction and layer.
            num_positions: N.
        """
        raise NotImplementedError

    @classmethod
    def state_size(cls, config: Any, shape: MixerShape, num_positions: int) -> int | None:
        """Return the numbers one layer stores per sequence to continue reading.

        They are keys and values, or a recurrent state.

        Args:
            config: the mechanism's settings.
            shape: width, heads, direction and layer.
            num_positions: positions read so far.

        Returns:
            The count, or None if earlier positions see later ones, so that reading cannot continue by position.
        """
        return None

    def margin(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        """Return the smallest gap between a selecting score and its switching value, a scalar.

        It is inf if nothing can change. Only for `piecewise_smooth` mechanisms.
        """
        raise NotImplementedError

    def forward(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        """Mix positions, (B, N, D) → (B, N, D).

        ``mask_BN``: True at valid positions; values at padding change no valid output. A mechanism with its own loss
        returns a `WithLoss` around the output.
        """
        raise NotImplementedError


class AbstractCrossMechanism(KernelUser, OwnInit):
    """Base class for every mechanism that adds information from a context to a source.

    It accompanies a self mechanism (``cross=ca``), never alone. The whole context is given. Source positions do not
    read one another here: the self mechanism does this, and enforces causality.
    """

    family: ClassVar[str] = "mechanisms"
    cross: ClassVar[bool] = True
    Config: ClassVar[type[Settings]]
    trainable: ClassVar[bool] = True
    used_for: ClassVar[str] = "looking at trained models"

    def __init__(self, config: Any, shape: MixerShape):
        super().__init__()

    @classmethod
    def build(cls, config: Any, shape: MixerShape) -> AbstractCrossMechanism:
        _check_kernels(cls, config, shape)
        return cls(config, shape)

    @classmethod
    def untrained(cls, config: Any) -> tuple[type[AbstractCrossMechanism], ...]:
        """Return this class if it is not trainable, else ()."""
        return () if cls.trainable else (cls,)

    @classmethod
    def for_words(cls, config: Any) -> Any:
        """Return the settings for a context unrelated to source positions.

        The two lengths may still be equal.
        """
        return config

    def start_local(self, bias: float) -> None:
        """Start with attention to the same place in the context, as ``model.qk_bias`` sets.

        Only for a context aligned with the source. Default: no effect.
        """

    @classmethod
    def check_positions(cls, config: Any, num_positions: int, num_context: int) -> None:
        """Raise if the settings do not fit the lengths.

        Messages name settings as ``cross.<setting>``; ``cross=auto`` adds the mechanism's name.

        Args:
            config: the mechanism's settings.
            num_positions: N, source length.
            num_context: J, context length.

        Raises:
            ValueError: one line.
        """

    @classmethod
    def reading(cls, config: Any) -> str:
        """Return the chosen reading of the paper's formula, and why, for a report's first page.

        Empty if the paper leaves no choice.
        """
        return ""

    @classmethod
    def calls_linears(cls, config: Any) -> bool:
        """Return whether `forward` calls its ``nn.Linear`` modules, as in `AbstractMechanism`."""
        return True

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int, num_context: int) -> float:
        """Return the multiply-adds for one forward pass, projections included.

        Args:
            config: the mechanism's settings.
            shape: width, heads, direction and layer.
            num_positions: N, source length.
            num_context: J, context length.
        """
        raise NotImplementedError

    def forward(
        self,
        x_BND: Tensor,
        context_BJD: Tensor,
        *,
        mask_BN: Tensor | None = None,
        context_mask_BJ: Tensor | None = None,
    ) -> Tensor:
        """Return the context's contribution to each source position, (B, N, D).

        Values at padding change no valid output. A row whose context is all padding must be finite, derivatives too;
        the block adds nothing to such a row.

        Args:
            x_BND: source.
            context_BJD: context.
            mask_BN: True at valid source positions; None without padding.
            context_mask_BJ: True at valid context entries; None without padding.
        """
        raise NotImplementedError
