"""Settings of sampling and scoring, shared by `stability.generate` and a sweep's ``generate.…``.

Settings of only one kind of samples are defined by its objective (`AbstractObjective.Sampling`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, create_model, field_validator, model_serializer, model_validator
from pydantic_core.core_schema import SerializerFunctionWrapHandler

from stability.config.base import Settings
from stability.config.identity import Place
from stability.registry import Registry

KINDS = ("hf", "ckpt", "evo2")
ORACLES = (
    "oracle=hf:gpt2-large (any Hugging Face causal LM by name or folder; proteins: any protein language model), "
    "oracle=ckpt:runs/<run_id> (one of ours, of an objective that gives samples their likelihood, e.g. ar) or "
    "oracle=evo2:evo2_1b_base (DNA)"
)


def own_settings() -> type[Settings]:
    """Return one class with the sampling settings of all objectives.

    The objective of a run selects the ones in use, and is not known before the run is.
    """
    registry = Registry("objectives")
    kinds = dict.fromkeys(registry.load(name).Sampling for name in registry.names())
    return _merge_settings(tuple(kind for kind in kinds if kind is not Settings))


@cache
def _merge_settings(kinds: tuple[type[Settings], ...]) -> type[Settings]:
    return create_model("OwnSettings", __base__=kinds) if kinds else Settings


class GenerationSpec(Settings):
    """The settings of sampling from a checkpoint and of scoring by an oracle."""

    written_flat: ClassVar[str | None] = "own"
    num: int = Field(
        ge=1,
        description=(
            "samples of each checkpoint, each as long as the model's positions, or as a held-out one where these "
            "differ (the paper: 1000)"
        ),
    )
    sampler: str = Field(
        default="auto",
        min_length=1,
        description=(
            "auto, or one of the objective's own: top_prob, random, analytic, euler, ar; auto is its first: top_prob "
            "where tokens are masked, ar for autoregressive models, analytic for a uniform graph"
        ),
    )
    steps: int | None = Field(
        default=None, ge=1, description="steps from all noise to none (euler, analytic); null: as many as positions"
    )
    temperature: float = Field(
        default=1.0,
        ge=0,
        description="divisor of the tokens' log-probabilities; 0: always the likeliest token",
    )
    batch: int = Field(default=32, ge=1, description="sequences per pass of the model, and of the oracle")
    seed: int = Field(default=0, ge=0, description="seed of the samples; sample i is a function of it and of i")
    overwrite: bool = Field(
        default=False,
        description="whether finished samples and scores of other settings or another oracle are replaced",
    )
    oracle: Annotated[str | None, Place()] = Field(
        default=None,
        description="model that scores the samples: hf:NAME_OR_FOLDER, ckpt:FOLDER or evo2:CHECKPOINT; null: none",
    )
    own: Any = Field(
        default_factory=lambda: own_settings()(), description="settings of one kind of samples; written flat"
    )

    @model_validator(mode="before")
    @classmethod
    def _nest_own(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kinds = own_settings()
        own = {key: value for key, value in values.items() if key in kinds.model_fields}
        shared = {key: value for key, value in values.items() if key not in own}
        return {"own": kinds.model_validate(own), **shared}

    @model_serializer(mode="wrap")
    def _flatten_own(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values = handler(self)
        return values | values.pop("own")

    @field_validator("oracle")
    @classmethod
    def _check_kind(cls, value: str | None) -> str | None:
        kind, _, place = (value or "").partition(":")
        if value is not None and (kind not in KINDS or not place):
            raise ValueError(
                f"oracle={value}: neither hf:NAME_OR_FOLDER nor ckpt:FOLDER nor evo2:CHECKPOINT;\ngive {ORACLES}"
            )
        return value

    def resolve_oracle(self) -> GenerationSpec:
        """Return a copy with an absolute path to the oracle's folder: sweep workers run in other folders."""
        kind, _, place = (self.oracle or "").partition(":")
        there = Path(place).expanduser()
        if self.oracle is None or kind == "evo2" or (kind == "hf" and not there.is_dir()):
            return self
        return self.model_copy(update={"oracle": f"{kind}:{there.resolve()}"})


class GenerateSpec(GenerationSpec):
    """The settings of `stability.generate`: samples of existing checkpoints."""

    ckpt: Annotated[str, Place()] = Field(
        min_length=1, description="a checkpoint folder, a run's folder or a study's folder"
    )
    plugins: tuple[str, ...] = Field(default=(), description="modules of your own that the runs were trained with")
    phase: Literal["terminal", "earliest", "last", "all"] = Field(
        default="terminal",
        description=(
            "which checkpoints of a run are sampled from: of its last planned step, the first, the last before a "
            "divergence"
        ),
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda where there is one")


def parse_generation(value: Any) -> Any:
    """Return the composed field, or None for ``generate.num=null``: no generation.

    Raises:
        ValueError: another setting is given without the number of samples.
    """
    if not isinstance(value, dict) or value.get("num") is not None:
        return value
    fields = {**GenerationSpec.model_fields, **own_settings().model_fields}
    others = {key: item for key, item in value.items() if key in fields and key != "num"}
    given = [key for key, item in others.items() if item != fields[key].default]
    if given:
        raise ValueError(
            f"generate.{given[0]}={value[given[0]]} needs the number of samples; add generate.num=32 (the paper: 1000)"
        )
    return None
