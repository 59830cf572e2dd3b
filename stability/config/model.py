"""Size of the transformer, and the settings of its backbone."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from stability.config.base import Settings, check_heads
from stability.config.identity import Label, Since


class ModelSpec(Settings):
    """Size and backbone settings of the transformer."""

    name: Annotated[str, Label()] = Field(description="the size's name in tables, e.g. nano")
    layers: int = Field(ge=1, le=10_000, description="number of blocks")
    width: int = Field(ge=2, le=2**20, description="model width d")
    heads: int = Field(ge=1, description="number of heads H")
    head_width: Annotated[int | None, Since(None)] = Field(
        default=None,
        ge=2,
        description="width of a head, in place of heads: as many as fit the width, in a sweep over widths, too; null: "
        "by model.heads",
    )
    positions: int = Field(ge=2, le=2**24, description="sequence length N in training")
    ffn_multiple: float = Field(
        default=4.0,
        gt=0,
        le=1024,
        description="hidden width of the MLP as a multiple of d, where ffn.multiple is null",
    )
    dropout: Annotated[float, Since(0.0)] = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of numbers that training drops (`dropout_at`), the rest scaled by 1/(1 − share); 0: none",
    )
    dropout_at: Annotated[Literal["all", "branches", "maps"], Since("all")] = Field(
        default="all",
        description=(
            "all: after the embedding, at attention's weights and at each branch's output (nanoGPT); branches: at the "
            "outputs alone (SEDD); maps: after the embedding, at the outputs and in the feed-forward network's hidden "
            "layer (ViT)"
        ),
    )
    qk_bias: float = Field(
        default=0.0,
        description="initial value of attention's query and key biases; equal ones make the first pattern local (RoPE)",
    )
    logit_softcap: Annotated[float | None, Since(None)] = Field(
        default=None, gt=0, description="c: each output z becomes c·tanh(z/c), in samples, too; Gemma 2: 30; null: none"
    )
    embedding_std: Annotated[float, Since(1.0)] = Field(
        default=1.0, gt=0, description="initial standard deviation of the token embeddings (model.init=ours)"
    )
    init: Annotated[Literal["ours", "torch", "nanogpt", "sedd"], Since("ours")] = Field(
        default="ours",
        description="initialisation of the weights: this project's, torch's own, or that of nanoGPT's or SEDD's code",
    )
    tied: Annotated[bool, Since(False)] = Field(
        default=False, description="whether the head and the embedding share one matrix"
    )
    head_bias: Annotated[bool, Since(True)] = Field(default=True, description="whether the head adds a bias")
    embedding_width: Annotated[int | None, Since(None)] = Field(
        default=None,
        ge=1,
        le=2**20,
        description="width of the token table, followed by a linear map to the model's width; null: the model's width",
    )
    embedding_conv: Annotated[int | None, Since(None)] = Field(
        default=None,
        ge=1,
        le=1024,
        description="positions k of a convolution over the embeddings: the last k in a causal model, else an odd "
        "number around each; null: none",
    )
    embedding_conv_residual: Annotated[bool, Since(False)] = Field(
        default=False, description="whether embedding_conv is added to the embeddings rather than replacing them"
    )
    loops: Annotated[int, Since(1)] = Field(
        default=1, ge=1, le=10_000, description="number of passes through the blocks, with the same weights"
    )
    mixer_bias: Annotated[Literal["all", "out", "none"], Since("all")] = Field(
        default="all",
        description="linear maps of mixers that add a bias: all, the last one of each alone, none",
    )

    def dropout_of(self, place: Literal["embedding", "attention", "hidden"]) -> float:
        """Return the dropout share at a place other than the branches' outputs."""
        places = {"all": ("embedding", "attention"), "branches": (), "maps": ("embedding", "hidden")}
        return self.dropout if place in places[self.dropout_at] else 0.0

    @model_validator(mode="before")
    @classmethod
    def _read_head_width(cls, values: Any) -> Any:
        """Return the values with the number of heads of ``head_width``."""
        if not isinstance(values, dict) or not isinstance(each := values.get("head_width"), int) or each < 2:
            return values
        width = values.get("width")
        if isinstance(width, int) and width % each:
            raise ValueError(f"model.head_width={each} must divide model.width={width}")
        return values | ({"heads": width // each} if isinstance(width, int) else {})

    @model_validator(mode="after")
    def _check_dropout(self) -> ModelSpec:
        if self.dropout_at != "all" and not self.dropout:
            raise ValueError(
                f"model.dropout_at={self.dropout_at} changes nothing where model.dropout=0; give a share, e.g. 0.1"
            )
        return self

    @model_validator(mode="after")
    def _check_convolution(self) -> ModelSpec:
        if self.embedding_conv_residual and self.embedding_conv is None:
            raise ValueError(
                "model.embedding_conv_residual=true changes nothing without a convolution; add model.embedding_conv=3"
            )
        return self

    @model_validator(mode="after")
    def _check_heads(self) -> ModelSpec:
        check_heads(self.heads, self.width, "model.")
        return self

    @model_validator(mode="after")
    def _check_initial_values(self) -> ModelSpec:
        """Refuse initial values that the chosen initialisation or model would ignore."""
        if self.embedding_std != 1 and self.init != "ours":
            raise ValueError(
                f"model.embedding_std={self.embedding_std:g} belongs to model.init=ours; with "
                f"model.init={self.init} leave it out"
            )
        if self.qk_bias and self.mixer_bias != "all":
            raise ValueError(
                f"model.qk_bias={self.qk_bias:g} sets biases that model.mixer_bias={self.mixer_bias} removes; give "
                "model.qk_bias=0"
            )
        if self.tied and self.init == "sedd":
            raise ValueError(
                "model.init=sedd starts the head at zero, and with model.tied=true the embedding, too; choose "
                "one of them"
            )
        return self
