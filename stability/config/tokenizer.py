"""Spec of `stability.train_tokenizer`, and the part of it that forms a structure tokenizer's id."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from stability.config.base import Settings, check_heads, validate
from stability.config.identity import Bare, Family, Fingerprinted, Place, Since
from stability.config.parts import (
    CrossOfEach,
    Part,
    add_name,
    check_cross_lengths,
    list_axis_parts,
    one_part,
    parse_cross,
    part,
)
from stability.config.rules.model import require_trainable
from stability.registry import Registry

# Increase it if the same recipe would train a different tokenizer.
TOKENIZER_VERSION = 1
MOST_LEVELS = 512  # from 1,002 on, the quantizer's margin would exceed the outermost level
MOST_CODES = 2**20


def _validate_one_part(family: str) -> Any:
    """Return the validator for a field with one part; also parses an axis, ``{"sa": {…}}``."""

    def read(value: Any) -> Part:
        """Return the part; ValueError unless an axis lists exactly one."""
        if not isinstance(value, dict) or "name" in value:
            return part(family, value)
        value = list_axis_parts(family, value)
        if len(value) != 1:
            noun = Registry(family).noun
            raise ValueError(
                f"{noun}=[{','.join(value)}]: a tokenizer has one {noun}"
                + "; patterns over layers are mechanism=mix" * (noun == "mechanism")
            )
        return part(family, *(add_name(family, name, settings) for name, settings in value.items()))

    return BeforeValidator(read)


class StackSize(Settings):
    """Size of one transformer."""

    layers: int = Field(ge=1, le=10_000, description="number of blocks")
    width: int = Field(ge=2, le=2**20, description="model width d")
    heads: int = Field(ge=1, description="number of heads H")


class AbstractTokenizerRecipe(Settings):
    """Settings that determine the trained tokenizer, except for the data's content."""

    data: Annotated[Part, one_part("data"), Fingerprinted()] = Field(description="protein chains")
    mechanism: Annotated[Part, _validate_one_part("mechanisms"), Family("mechanisms")] = Field(
        description="sequence mechanism of encoder and decoders"
    )
    cross: Annotated[Part | CrossOfEach | None, BeforeValidator(parse_cross)] = Field(
        description=(
            "cross mechanism by which the stage-2 decoder reads the sequence; auto: ca beside attention, cc beside "
            "consensus"
        )
    )
    optimizer: Annotated[Part, _validate_one_part("optimizers"), Family("optimizers")] = Field(
        description="optimizer and its settings but for the learning rate"
    )
    norm: Annotated[Part, _validate_one_part("norms"), Family("norms"), Bare()] = Field(
        default="layernorm", validate_default=True, description="normalisation before each branch"
    )
    ffn: Annotated[Part, one_part("ffns"), Bare(), Since("mlp")] = Field(
        default="mlp", validate_default=True, description="feed-forward network of each block"
    )
    frame: Literal["principal", "raw"] = Field(
        description="frame in which a chain is read: along its principal axes, or as it lies (the paper's)"
    )
    levels: tuple[Annotated[int, Field(ge=2, le=MOST_LEVELS)], ...] = Field(
        min_length=1, max_length=16, description="FSQ levels of each dimension"
    )
    encoder: StackSize = Field(description="stage 1: the encoder's transformer")
    decoder: StackSize = Field(description="stage 1: the light decoder's, to N, CA and C")
    atom_decoder: StackSize = Field(description="stage 2: the decoder's to all heavy atoms")
    kernel: int = Field(ge=1, le=10_001, description="residues that a convolution reads at once, an odd number")
    ffn_multiple: float = Field(
        default=4.0,
        gt=0,
        le=1024,
        description="hidden width of the MLPs over the width, where ffn.multiple is null",
    )
    positions: int = Field(
        ge=4, le=2**24, description="residues of a training crop, and of the part of a held-out chain that is measured"
    )
    steps: int = Field(ge=1, description="optimizer steps of stage 1")
    atom_steps: int = Field(ge=0, description="optimizer steps of stage 2; 0: no stage 2")
    batch: int = Field(ge=1, le=2**24, description="crops per step")
    lr_peak: float = Field(
        gt=0,
        description=(
            "learning rate after warm-up, from which it decays along a cosine to a tenth; the same in both stages"
        ),
    )
    warmup_steps: int = Field(ge=0, description="steps of linear warm-up of each stage")
    clip_norm: float = Field(gt=0, description="largest global gradient norm that reaches the optimizer")
    every_steps: int = Field(ge=1, description="steps between validations, each of which writes a checkpoint")
    chains: int = Field(
        ge=1, description="held-out chains of a validation during training, the first; the end measures all of them"
    )
    seed: int = Field(ge=0, description="seed of initialisation, crops and rotations")
    threads: int = Field(
        default=1, ge=1, le=4096, description="CPU threads; part of the identity, since sums depend on it"
    )

    @model_validator(mode="after")
    def _check_mechanism(self) -> AbstractTokenizerRecipe:
        """Refuse a mechanism that is untrainable or unfit for direction, edges, depth, length or heads."""
        require_trainable("mechanism", self.mechanism)
        mechanism, settings = Registry("mechanisms").load(self.mechanism.name), self.mechanism.settings
        if "bidirectional" not in mechanism.supported_directions(settings) or mechanism.needs_edges(settings):
            raise ValueError(
                f"mechanism={self.mechanism.name} does not fit a tokenizer, which reads chains in both directions and "
                "without edges="
            )
        for name in ("encoder", "decoder", "atom_decoder"):
            if mechanism.fewest_layers(settings) > getattr(self, name).layers:
                needed = mechanism.fewest_layers(settings)
                raise ValueError(
                    f"{name}.layers={getattr(self, name).layers}: mechanism={self.mechanism.name} has a pattern of "
                    f"{needed} layers; give more"
                )
        mechanism.check_positions(settings, self.positions)
        for name in ("encoder", "decoder", "atom_decoder"):
            mechanism.check_heads(settings, getattr(self, name).heads)
        if Registry("ffns").load(self.ffn.name).has_loss:
            raise ValueError(
                f"ffn={self.ffn.name} has a loss of its own, which a tokenizer does not add; use ffn=mlp or glu"
            )
        return self

    @field_validator("optimizer")
    @classmethod
    def _check_groups(cls, value: Part) -> Part:
        if value.groups:
            raise ValueError(
                f"optimizer.groups.{value.groups[0].role}: a tokenizer's optimizer takes all parameters alike; leave "
                "optimizer.groups out"
            )
        return value

    @field_validator("optimizer")
    @classmethod
    def _check_optimizer(cls, value: Part) -> Part:
        optimizer = Registry("optimizers").load(value.name)
        if optimizer.averages or optimizer.takes_hessian:
            what = "keeps an average of its weights" if optimizer.averages else "takes Hessian-vector products"
            raise ValueError(
                f"optimizer={value.name}: {what}, which the training of a tokenizer does not support; choose adamw"
            )
        return value

    @field_validator("levels")
    @classmethod
    def _check_codes(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if (num := math.prod(value)) > MOST_CODES:
            raise ValueError(
                f"levels=[{','.join(map(str, value))}] makes {num:,} codes, each a row of an embedding; at most "
                f"{MOST_CODES:,}, e.g. [7,5,5,5,5]"
            )
        return value

    @model_validator(mode="after")
    def _check_numbers(self) -> AbstractTokenizerRecipe:
        """Refuse heads, kernel, warm-up and cross mechanism that do not fit the other settings."""
        for name in ("encoder", "decoder", "atom_decoder"):
            check_heads(getattr(self, name).heads, getattr(self, name).width, f"{name}.")
        if self.kernel % 2 == 0:
            raise ValueError(
                f"kernel={self.kernel} must be odd, so that a convolution has a middle; e.g. kernel={self.kernel + 1}"
            )
        if self.warmup_steps >= self.steps or (self.atom_steps and self.warmup_steps >= self.atom_steps):
            stages = f"steps={self.steps}" + (f" and atom_steps={self.atom_steps}" if self.atom_steps else "")
            most = min(self.steps, self.atom_steps or self.steps) - 1
            raise ValueError(
                f"warmup_steps={self.warmup_steps} must be below {stages}; give warmup_steps={most}"
                f"{' or less' if most else ''}, or more steps"
            )
        if self.atom_steps and self.cross is None:
            raise ValueError(
                "cross=none: the stage-2 decoder reads the sequence by a cross mechanism; add cross=auto, or "
                "atom_steps=0"
            )
        cross = self.cross.choose_for(self.mechanism) if isinstance(self.cross, CrossOfEach) else self.cross
        if cross is not None:
            require_trainable("cross", cross)
            check_cross_lengths(cross, self.positions, self.positions, "cross.")
        return self


class TokenizerRunSpec(AbstractTokenizerRecipe):
    """All settings of one tokenizer: equal specs train equal tokenizers."""

    cross: Annotated[Part | None, Family("mechanisms")] = Field(
        description="cross mechanism by which the stage-2 decoder reads the sequence"
    )
    data_fingerprint: str = Field(
        min_length=1, description="sha256 of the prepared chains; it replaces their path in the id"
    )
    behaviour: int = Field(default=TOKENIZER_VERSION, description="version of the training code's behaviour")

    @field_validator("cross", mode="before")
    @classmethod
    def _resolve_cross(cls, value: Any, info: ValidationInfo) -> Any:
        """Return the cross mechanism in place of ``auto``: a later version might resolve it differently."""
        choice = parse_cross(value)
        return (
            choice.choose_for(info.data["mechanism"])
            if isinstance(choice, CrossOfEach) and "mechanism" in info.data
            else choice
        )


class TokenizerSpec(AbstractTokenizerRecipe):
    """A tokenizer to train, its folders and its device."""

    runs_dir: Annotated[str, Place()] = Field(
        default="runs", min_length=1, description="folder of the pool of runs; tokenizers lie in its folder tokenizers"
    )
    reports_dir: Annotated[str, Place()] = Field(default="reports", min_length=1, description="folder of the figure")
    rotations: int = Field(
        default=4,
        ge=1,
        description="random rotations and shifts of each held-out chain, under which its tokens are compared",
    )
    structures: int = Field(
        default=4, ge=0, description="held-out chains that are written as mmCIF, original and reconstructed"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda where there is one")
    dry_run: bool = Field(default=False, description="print what it would cost and train nothing")
    plan_gpu: Literal["a40", "a100", "h100", "h200"] = Field(
        default="h100", description="the GPU that a dry run estimates hours and memory for"
    )

    def run(self, data_fingerprint: str) -> TokenizerRunSpec:
        """Return the part of the spec that determines the trained tokenizer."""
        values = {name: getattr(self, name) for name in AbstractTokenizerRecipe.model_fields}
        return validate(TokenizerRunSpec, {**values, "data_fingerprint": data_fingerprint})
