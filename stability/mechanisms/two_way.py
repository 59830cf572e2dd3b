"""`two_way`: a causal mechanism applied in both directions, for bidirectional objectives."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int64
from pydantic import Field, model_validator
from torch import Tensor, nn

from stability.config import Settings
from stability.config.identity import Family
from stability.config.impl import Kernels
from stability.config.parts import Part
from stability.mechanisms._base import BIDIRECTIONAL, CAUSAL, AbstractMechanism, MixerShape
from stability.mechanisms._inner import inner_choices, inner_part, load, prefix_error
from stability.models.block import attach_losses, split_loss
from stability.registry import near_misses


class TwoWay(AbstractMechanism):
    """A causal mechanism applied from both ends, y = f(x) + R g(R x); R reverses a sequence.

    f reads from the start, g from the end. The sum is the bidirectional form in Vim (Zhu et al. 2024, arXiv:2401.09417)
    and in Caduceus' BiMamba (Schiff et al. 2024, arXiv:2403.03234). They share one output projection. Here each
    direction has its own, W_f a + W_g b, which is a linear layer on both concatenated. ``weights=shared``: f = g.

    R reverses the span from the first to the last valid position. Padding around it stays in place, and distances
    within it are preserved.
    """

    class Config(Settings):
        """The inner mechanism, written ``of=sw sw.window=4``; stored as one part, ``of``."""

        inner_directions: ClassVar[frozenset[str]] = frozenset({CAUSAL})
        inner_without: ClassVar[tuple[str, ...]] = ("mix", "two_way")
        of: Annotated[Part, Family("mechanisms")] = Field(
            default="sa",
            validate_default=True,
            description="causal mechanism that is read forwards and backwards, with its settings",
        )
        weights: Literal["separate", "shared"] = Field(
            default="separate", description="whether both directions have weights of their own, or the same"
        )

        @model_validator(mode="before")
        @classmethod
        def _fold(cls, values: Any) -> Any:
            """Turn direct keys ({"of": "sw", "sw": {"window": 4}}) into a part; drop other parts."""
            if not isinstance(values, dict):
                return values
            given = {key: item for key, item in values.items() if key not in cls.model_fields}
            parts = {
                name: inner_part("two_way", name, item, inner_choices(TwoWay.Config), tuple(cls.model_fields))
                for name, item in given.items()
            }
            own = {key: item for key, item in values.items() if key in cls.model_fields}
            return {**own, "of": _choose_part(values.get("of", cls.model_fields["of"].default), parts)}

    directions = frozenset({BIDIRECTIONAL})

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__()
        self.shared = config.weights == "shared"
        self.mixers: Any = nn.ModuleList(
            load(config.of.name).build(config.of.settings, _causal(shape)) for _ in range(1 if self.shared else 2)
        )

    @classmethod
    def untrained(cls, config: Any) -> tuple[type[AbstractMechanism], ...]:
        return load(config.of.name).untrained(config.of.settings)

    @classmethod
    def calls_linears(cls, config: Any) -> bool:
        return load(config.of.name).calls_linears(config.of.settings)

    @classmethod
    def check_positions(cls, config: Any, num_positions: int) -> None:
        """Check the part's settings against ``num_positions``.

        Raises:
            ValueError: from the part, under the path of two_way.
        """
        try:
            load(config.of.name).check_positions(config.of.settings, num_positions)
        except ValueError as error:
            raise ValueError(prefix_error(error, "two_way", config.of.name)) from None

    @classmethod
    def check_heads(cls, config: Any, heads: int) -> None:
        """Check the part's settings against ``heads``.

        Raises:
            ValueError: from the part, under the path of two_way.
        """
        try:
            load(config.of.name).check_heads(config.of.settings, heads)
        except ValueError as error:
            raise ValueError(prefix_error(error, "two_way", config.of.name)) from None

    @classmethod
    def blind_to_order(cls, config: Any) -> bool:
        return config.weights == "shared"

    @classmethod
    def is_piecewise_smooth(cls, config: Any) -> bool:
        return load(config.of.name).is_piecewise_smooth(config.of.settings)

    @classmethod
    def needs_edges(cls, config: Any) -> bool:
        return load(config.of.name).needs_edges(config.of.settings)

    @classmethod
    def kernels(cls, config: Any) -> tuple[Kernels, ...]:
        found = load(config.of.name).kernels(config.of.settings)
        return tuple(
            replace(each, lacks=lambda use, lacks=each.lacks: lacks(replace(use, direction=CAUSAL))).nest_in("two_way")
            for each in found
        )

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Return the multiply-adds in both directions.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: N.
        """
        return 2 * load(config.of.name).cost(config.of.settings, _causal(shape), num_positions)

    def start_local(self, bias: float) -> None:
        for mixer in self.mixers:
            mixer.start_local(bias)

    def forward(self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Tensor | None = None) -> Any:
        """Return the sum of both directions, and of their auxiliary losses, if any."""
        ahead, back = self.mixers[0], self.mixers[-1]
        losses: list[Tensor] = []
        if mask_BN is None:
            y_BND = split_loss(ahead(x_BND), losses) + split_loss(back(x_BND.flip(1)), losses).flip(1)
            return attach_losses(y_BND, losses)
        places_BN = reversal(mask_BN)
        index_BND = places_BN[..., None].expand_as(x_BND)
        y_BND = split_loss(back(x_BND.gather(1, index_BND), mask_BN=mask_BN.gather(1, places_BN)), losses)
        return attach_losses(split_loss(ahead(x_BND, mask_BN=mask_BN), losses) + y_BND.gather(1, index_BND), losses)


def reversal(mask_BN: Tensor) -> Int64[Tensor, "B N"]:
    """Return each position's place after reversing the span of valid positions.

    The span is from the first to the last valid position. Applied twice it is the identity; so it is for a row without
    valid positions.
    """
    num = mask_BN.shape[1]
    places_N = torch.arange(num, device=mask_BN.device)
    first_B1 = mask_BN.int().argmax(1, keepdim=True)
    last_B1 = num - 1 - mask_BN.flip(1).int().argmax(1, keepdim=True)
    inside_BN = (places_N >= first_B1) & (places_N <= last_B1) & mask_BN.any(1, keepdim=True)
    return torch.where(inside_BN, first_B1 + last_B1 - places_N, places_N)


def _causal(shape: MixerShape) -> MixerShape:
    return replace(shape, direction=CAUSAL)


def _choose_part(value: Any, parts: dict[str, Part]) -> Part:
    """Return the part named by ``of``, with its written settings."""
    if isinstance(value, Part):
        return value
    if isinstance(value, dict) and "name" in value:  # as a spec's JSON has it
        settings = {key: item for key, item in value.items() if key != "name"}
        if not isinstance(value["name"], str):
            raise ValueError(f"mechanism.two_way.of.name={value['name']}: must be a mechanism's name, e.g. gla")
        return inner_part("two_way", value["name"], settings, inner_choices(TwoWay.Config), ("of", "weights"))
    if value not in inner_choices(TwoWay.Config):
        # suggest trainable mechanisms only: others are refused with another message
        trained = tuple(name for name in inner_choices(TwoWay.Config) if load(name).trainable)
        raise ValueError(f"mechanism.two_way.of={value}: is no causal mechanism; {near_misses(str(value), trained)}")
    return parts.get(value) or inner_part("two_way", value, {}, inner_choices(TwoWay.Config), ("of", "weights"))


EXPORT = TwoWay
