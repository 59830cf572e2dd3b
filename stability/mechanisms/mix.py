"""`mix`: a pattern of mechanisms over the layers, stretched or repeated.

By default the first half is softmax attention, the rest self-consensus (paper E).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from stability.config import Settings
from stability.config.identity import Family, Since
from stability.config.impl import Kernels
from stability.config.parts import Part
from stability.mechanisms._base import BIDIRECTIONAL, CAUSAL, AbstractMechanism, MixerShape
from stability.mechanisms._inner import inner_choices, inner_part, load, prefix_error
from stability.registry import near_misses


class Mix(AbstractMechanism):
    """Layer l of L is ``pattern[l·P // L]`` (stretched) or ``pattern[l mod P]`` (cycled).

    P is the pattern's length; each mechanism has its own settings. Stretched, [sa,sc] is a first half sa and a second
    half sc. Cycled, [sc,sc,sc,sa] has softmax attention in every fourth layer, like hybrids with recurrence and
    attention.
    """

    class Config(Settings):
        """Mechanism for each layer, written ``pattern=[sa,sc] sc.window=4``.

        Stored as ``parts``, in the pattern's order.
        """

        inner_directions: ClassVar[frozenset[str]] = frozenset({BIDIRECTIONAL, CAUSAL})
        inner_without: ClassVar[tuple[str, ...]] = ("mix",)
        pattern: tuple[str, ...] = Field(
            default=("sa", "sc"),
            description="mechanisms from the first layer to the last, laid over the layers in this `order`",
        )
        order: Annotated[Literal["stretched", "cycled"], Since("stretched")] = Field(
            default="stretched",
            description="how the pattern covers the layers: stretched evenly over them, or from its beginning again",
        )
        parts: Annotated[tuple[Part, ...], Family("mechanisms")] = Field(
            description="the pattern's mechanisms with their settings"
        )

        @model_validator(mode="before")
        @classmethod
        def _fold(cls, values: Any) -> Any:
            """Turn direct keys ({"sc": {"window": 4}}) into parts.

            Parts outside the pattern are dropped; missing ones get defaults.
            """
            if not isinstance(values, dict):
                return values
            pattern = _pattern(values.get("pattern", cls.model_fields["pattern"].default))
            given = _collect_parts({key: item for key, item in values.items() if key not in ("pattern", "order")})
            return {
                **{key: item for key, item in values.items() if key == "order"},
                "pattern": pattern,
                "parts": tuple(given.get(name) or _part(name, {}) for name in dict.fromkeys(pattern)),
            }

    directions = frozenset({BIDIRECTIONAL, CAUSAL})
    cross_kind = "cc"

    @classmethod
    def build(cls, config: Any, shape: MixerShape) -> AbstractMechanism:
        """Return the module for layer ``shape.layer``.

        Raises:
            ValueError: pattern longer than the number of layers, or unsupported direction.
        """
        if len(config.pattern) > shape.num_layers:
            raise ValueError(
                f"mechanism.mix.pattern={_format_list(config.pattern)} has {len(config.pattern)} entries for "
                f"{shape.num_layers} layers; give at most {shape.num_layers}"
            )
        # check the whole pattern: this one layer may support the direction
        if shape.direction not in cls.supported_directions(config):
            raise ValueError(
                f"mix of {', '.join(config.pattern)} cannot be {shape.direction}; choose parts that all can"
            )
        mechanism, settings = _choose_mechanism(config, shape)
        return mechanism.build(settings, shape)

    @classmethod
    def supported_directions(cls, config: Any) -> frozenset[str]:
        return cls.directions.intersection(
            *(load(item.name).supported_directions(item.settings) for item in config.parts)
        )

    @classmethod
    def untrained(cls, config: Any) -> tuple[type[AbstractMechanism], ...]:
        return tuple(found for item in config.parts for found in load(item.name).untrained(item.settings))

    @classmethod
    def fewest_layers(cls, config: Any) -> int:
        return len(config.pattern)

    @classmethod
    def check_positions(cls, config: Any, num_positions: int) -> None:
        """Check every part's settings against ``num_positions``.

        Raises:
            ValueError: from a part, under mix's path.
        """
        for item in config.parts:
            try:
                load(item.name).check_positions(item.settings, num_positions)
            except ValueError as error:
                raise ValueError(prefix_error(error, "mix", item.name)) from None

    @classmethod
    def check_heads(cls, config: Any, heads: int) -> None:
        """Check every part's settings against ``heads``.

        Raises:
            ValueError: from a part, under mix's path.
        """
        for item in config.parts:
            try:
                load(item.name).check_heads(item.settings, heads)
            except ValueError as error:
                raise ValueError(prefix_error(error, "mix", item.name)) from None

    @classmethod
    def reads_decays(cls, config: Any) -> bool:
        return all(load(item.name).reads_decays(item.settings) for item in config.parts)

    @classmethod
    def needs_edges(cls, config: Any) -> bool:
        return any(load(item.name).needs_edges(item.settings) for item in config.parts)

    @classmethod
    def blind_to_order(cls, config: Any) -> bool:
        return all(load(item.name).blind_to_order(item.settings) for item in config.parts)

    @classmethod
    def is_piecewise_smooth(cls, config: Any) -> bool:
        return any(load(item.name).is_piecewise_smooth(item.settings) for item in config.parts)

    @classmethod
    def reading(cls, config: Any) -> str:
        parts = {item.name: load(item.name).reading(item.settings) for item in config.parts}
        return "; ".join(f"its {name} {reading}" for name, reading in parts.items() if reading)

    @classmethod
    def calls_linears(cls, config: Any) -> bool:
        return all(load(item.name).calls_linears(item.settings) for item in config.parts)

    @classmethod
    def kernels(cls, config: Any) -> tuple[Kernels, ...]:
        return tuple(found.nest_in("mix") for item in config.parts for found in load(item.name).kernels(item.settings))

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Return the multiply-adds in layer ``shape.layer``.

        Args:
            config: the mechanism's settings.
            shape: width, heads, direction and layer.
            num_positions: N.
        """
        mechanism, settings = _choose_mechanism(config, shape)
        return mechanism.cost(settings, shape, num_positions)

    @classmethod
    def state_size(cls, config: Any, shape: MixerShape, num_positions: int) -> int | None:
        """Return the state size in layer ``shape.layer``.

        Args:
            config: the mechanism's settings.
            shape: width, heads, direction and layer.
            num_positions: positions read so far.
        """
        mechanism, settings = _choose_mechanism(config, shape)
        return mechanism.state_size(settings, shape, num_positions)


def _choose_mechanism(config: Any, shape: MixerShape) -> tuple[type[AbstractMechanism], Settings]:
    length = len(config.pattern)
    place = shape.layer % length if config.order == "cycled" else shape.layer * length // shape.num_layers
    name = config.pattern[place]
    return load(name), next(item.settings for item in config.parts if item.name == name)


def _pattern(value: Any) -> tuple[str, ...]:
    """Return the pattern as names; ``ValueError`` unless it is a list of allowed mechanisms."""
    if not isinstance(value, list | tuple) or not value or not all(isinstance(name, str) for name in value):
        raise ValueError(
            f"mechanism.mix.pattern={value!r}: must be a list of mechanisms, e.g. [sa,sc]; choices: "
            f"{', '.join(inner_choices(Mix.Config))}"
        )
    for name in value:
        if name not in inner_choices(Mix.Config):
            raise ValueError(
                f"mechanism.mix.pattern={_format_list(value)}: '{name}' cannot stand in a pattern; "
                f"{near_misses(name, inner_choices(Mix.Config))}"
            )
    return tuple(value)


def _collect_parts(values: dict[str, Any]) -> dict[str, Part]:
    """Return the explicitly written parts by name: from ``parts`` and direct keys."""
    parts = values.pop("parts", ())
    if not isinstance(parts, list | tuple) or not all(
        isinstance(item, Part) or (isinstance(item, dict) and "name" in item) for item in parts
    ):
        raise ValueError(
            f"mechanism.mix.parts={parts!r}: must be a list of {{name: …, settings}}; rather write "
            "mechanism.mix.sc.window=4"
        )
    named = {item.name: item for item in parts if isinstance(item, Part)}
    written = {
        item["name"]: {key: setting for key, setting in item.items() if key != "name"}
        for item in parts
        if isinstance(item, dict)
    }
    return named | {name: _part(name, settings) for name, settings in {**written, **values}.items()}


def _part(name: str, settings: Any) -> Part:
    return inner_part("mix", name, settings, inner_choices(Mix.Config), ("pattern", "order"))


def _format_list(names: Any) -> str:
    return f"[{','.join(names)}]"


EXPORT = Mix
