"""A sequence mechanism is a module that mixes positions, (B, N, D) in and out; a cross mechanism also reads a context
(B, J, D)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stability.config import Settings
from stability.config.impl import KernelUser, Use
from stability.models.init import OwnInit
from stability.models.position import Rope

BIDIRECTIONAL, CAUSAL = "bidirectional", "causal"


@dataclass(frozen=True)
class MixerShape:
    """The place of a mixer: what the backbone knows of it and its own settings do not.

    ``direction``: "bidirectional" or "causal"; ``layer`` of ``num_layers``, counted from 0 (patterns such as `mix`
    choose by it). ``rope``: the rotation by which the mixer tells positions apart; None: it turns nothing, whatever its
    own settings say, since positions are told elsewhere or not at all. ``dropout``: the share of its weights that an
    attention drops in training mode; a mixer without such weights leaves it alone, and its output is dropped anyway.
    ``num_positions``: how long the sequences are that the model is made for (`model.positions`); None: nobody says.
    """

    width: int
    heads: int
    direction: str = BIDIRECTIONAL
    layer: int = 0
    num_layers: int = 1
    rope: Rope | None = Rope()
    dropout: float = 0.0
    num_positions: int | None = None

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
        """The part of this that matters to kernels."""
        return Use(self.width, self.heads, self.direction, self.dropout)

    def require_pairs(self) -> None:
        """Raise a ``ValueError`` of one line for an odd head width, of which RoPE cannot turn pairs."""
        if self.head_width % 2:
            even = [
                heads for heads in range(1, self.width + 1) if self.width % heads == 0 and self.width // heads % 2 == 0
            ]
            choices = f"heads that leave an even one: {', '.join(map(str, even))}" if even else "choose an even width"
            raise ValueError(
                f"head width {self.width}/{self.heads} = {self.head_width} is odd, and RoPE turns pairs; {choices}"
            )


def without_padding(x_BND: Tensor, mask_BN: Tensor | None, *, name: str = "mask_BN") -> Tensor:
    """Return ``x_BND`` with zeros where the mask is False; unchanged without a mask. A factor of zero would not silence
    a NaN.

    Errors: ``ValueError`` of one line, under the argument's ``name``, for a mask of another shape or of another dtype
    than bool.
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
    return torch.where(mask_BN[..., None], x_BND, 0.0)


def require_context(x_BND: Tensor, context_BJD: Tensor) -> None:
    """Raise a ``ValueError`` of one line for a context of another width or batch than the source's."""
    batch, _, width = x_BND.shape
    if context_BJD.ndim != 3 or context_BJD.shape[0] != batch or context_BJD.shape[2] != width:
        raise ValueError(
            f"the context has shape {tuple(context_BJD.shape)}; expected ({batch}, J, {width}), as the source is "
            f"{tuple(x_BND.shape)}"
        )


def _check_kernels(mechanism: type[KernelUser], config: Any, shape: MixerShape) -> None:
    """Raise a ``ValueError`` of one line where settings that ask for kernels stand beside some that these do not
    compute."""
    for asked in mechanism.kernels(config):
        asked.inside("mechanism").check(shape.use)


class AbstractMechanism(KernelUser, OwnInit):
    """Base of every mechanism. A subclass holds its `Config`, says which `directions` it can do, and implements
    `forward`. What its constructor starts in a way of its own, it names in `own_init`.

    ``trainable``: False for a mechanism that only stands in for another one in a model that is trained, e.g. one that
    skips what hardly counts; runs and tokenizers refuse it, and say what it is ``used_for``.

    ``piecewise_smooth``: True for one that selects by its own scores (the best positions, the best blocks). Between two
    changes of the selection it is smooth, and its second derivative is that of the piece; `margin` says how far away
    the next change is.
    """

    family: ClassVar[str] = "mechanisms"
    cross: ClassVar[bool] = False
    cross_kind: ClassVar[str] = "ca"  # the cross mechanism that cross=auto puts beside this one
    Config: ClassVar[type[Settings]]
    directions: ClassVar[frozenset[str]]
    trainable: ClassVar[bool] = True
    used_for: ClassVar[str] = "looking at trained models"
    piecewise_smooth: ClassVar[bool] = False

    @classmethod
    def build(cls, config: Any, shape: MixerShape) -> AbstractMechanism:
        """Return the module for one layer. Patterns over the layers return another mechanism's module here."""
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
        """Return the classes among those that the settings name, this one too, that are not to be trained; () where
        all are."""
        return () if cls.trainable else (cls,)

    @classmethod
    def fewest_layers(cls, config: Any) -> int:
        """Return the number of layers that the settings need; more than one only for patterns over the layers."""
        return 1

    @classmethod
    def check_positions(cls, config: Any, num_positions: int) -> None:
        """Raise a ``ValueError`` of one line where the settings do not fit sequences of ``num_positions``."""

    @classmethod
    def check_heads(cls, config: Any, heads: int) -> None:
        """Raise a ``ValueError`` of one line where the settings do not fit a model of so many ``heads``."""

    @classmethod
    def needs_edges(cls, config: Any) -> bool:
        """Return whether `forward` cannot do without ``edges=``, which come with each batch (a molecule's bonds); a
        sweep's data have none."""
        return False

    @classmethod
    def blind_to_order(cls, config: Any) -> bool:
        """Return whether a trained layer gives nearly the mirrored output for the mirrored text, as far as its own
        means go (with position=rope)."""
        return False

    @classmethod
    def reading(cls, config: Any) -> str:
        """Return the reading of its paper's formula that a layer computes, and why, for a report's first page; "" if
        the paper leaves no choice."""
        return ""

    @classmethod
    def calls_linears(cls, config: Any) -> bool:
        """Return whether `forward` calls its ``nn.Linear`` modules, so that another kind of linear map may stand for
        them; False where it takes their weights itself."""
        return True

    def start_local(self, bias: float) -> None:
        """Begin with each position looking at its neighbours, the more so the larger ``bias`` is (`model.qk_bias`,
        called where it is not 0). Nothing where the mechanism has no such start."""

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Return the multiply-adds of one forward pass over one sequence of ``num_positions``, projections included."""
        raise NotImplementedError

    @classmethod
    def state_size(cls, config: Any, shape: MixerShape, num_positions: int) -> int | None:
        """Return how many numbers one layer has to keep of a sequence of ``num_positions`` to go on reading: keys and
        values, or a recurrent state. None where it cannot go on position by position, since earlier ones see later
        ones."""
        return None

    def margin(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        """Return the least difference, a scalar, between a score that is selected by and the value at which the
        selection changes; inf where nothing can change. For mechanisms that are `piecewise_smooth`."""
        raise NotImplementedError

    def forward(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        """Mix positions. ``mask_BN``: True where a position is valid; what the others hold changes no valid output. One
        that has a loss of its own returns a `WithLoss`, whose output that is."""
        raise NotImplementedError


class AbstractCrossMechanism(KernelUser, OwnInit):
    """Base of every mechanism that adds to a source what it reads in a context. It stands beside a self mechanism
    (``cross=ca``), never alone.

    The context is given whole, and no source position reads another one here: that is the self mechanism's affair, and
    so is causality.
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
        """Return this class where it is not to be trained, else ()."""
        return () if cls.trainable else (cls,)

    @classmethod
    def for_words(cls, config: Any) -> Any:
        """Return the settings for a context whose entries are not positions of the source, even where there happen to
        be as many."""
        return config

    def start_local(self, bias: float) -> None:
        """Begin with each source position at its own place in the context, as ``model.qk_bias`` has it; for a context
        that stands position by position beside the source. Nothing where the mechanism has no such start."""

    @classmethod
    def check_positions(cls, config: Any, num_positions: int, num_context: int) -> None:
        """Raise a ``ValueError`` of one line where the settings do not fit sources of ``num_positions`` and contexts of
        ``num_context``; it names settings as ``cross.<setting>``, to which ``cross=auto`` adds the mechanism's name."""

    @classmethod
    def reading(cls, config: Any) -> str:
        """Return the reading of its paper's formula that a layer computes, and why, for a report's first page; "" if
        the paper leaves no choice."""
        return ""

    @classmethod
    def calls_linears(cls, config: Any) -> bool:
        """Return whether `forward` calls its ``nn.Linear`` modules, as in `AbstractMechanism`."""
        return True

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int, num_context: int) -> float:
        """Return the multiply-adds of one forward pass over one source of ``num_positions`` and one context of
        ``num_context``, projections included."""
        raise NotImplementedError

    def forward(
        self,
        x_BND: Tensor,
        context_BJD: Tensor,
        *,
        mask_BN: Tensor | None = None,
        context_mask_BJ: Tensor | None = None,
    ) -> Tensor:
        """Return what each source position takes from the context, (B, N, D). Masks: True where an entry is valid.

        What the others hold changes no valid output. A row whose context is wholly padded must come out finite,
        derivatives too; whatever it is, the block adds nothing to such a row.
        """
        raise NotImplementedError
