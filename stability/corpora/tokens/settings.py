"""Settings of text data cut into tokens."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from stability.config import Settings
from stability.config.identity import Fingerprinted, Place
from stability.corpora.tokens.vocabulary import AbstractTokenizer, ByteTokenizer


class AbstractTokenized(Settings):
    """Settings of the tokenizer."""

    needs_gpt2: ClassVar[dict[str, Any]] = {
        "ranks": "the folder of its rank files",
        "keep": "the number of its tokens that are kept",
    }

    tokenizer: Annotated[Literal["bytes", "gpt2"], Fingerprinted()] = Field(
        default="bytes", description="bytes: UTF-8, 256 tokens; gpt2: GPT-2's byte-pair encoding, 50,257 tokens"
    )
    ranks: Annotated[str | None, Place(), Fingerprinted()] = Field(
        default=None,
        min_length=1,
        description="folder with GPT-2's vocab.bpe and encoder.json; null: tiktoken's cache or the network",
    )
    keep: Annotated[int | None, Fingerprinted()] = Field(
        default=None,
        ge=2,
        description=(
            "tokens kept, the commonest of the training side and end-of-text; all others become one unknown; null: "
            "all (gpt2)"
        ),
    )

    @model_validator(mode="after")
    def _check_gpt2_only(self) -> AbstractTokenized:
        for key, meaning in self.needs_gpt2.items():
            if self.tokenizer != "gpt2" and getattr(self, key) is not None:
                raise ValueError(
                    f"data.{key}={getattr(self, key)} is {meaning} and belongs to data.tokenizer=gpt2 "
                    f"(data.tokenizer={self.tokenizer} given)"
                )
        return self

    def build_tokenizer(self) -> AbstractTokenizer:
        """Return the tokenizer for the settings.

        Raises:
            ValueError: the rank files are missing or invalid.
            RuntimeError: the rank files cannot be obtained, or tiktoken is not installed.
        """
        if self.tokenizer == "bytes":
            return ByteTokenizer()
        from stability.corpora.tokens.gpt2 import Gpt2Tokenizer

        return Gpt2Tokenizer(self.ranks)

    @property
    def label(self) -> str:
        """The tokens' name in captions, e.g. ``"gpt2, 4,096 kept"``."""
        return f"{self.tokenizer}{f', {self.keep:,} kept' if self.keep else ''}"

    def tokenizer_key(self) -> str:
        """Return the tokenizer's part of a cache key; empty for bytes.

        Raises:
            ValueError: a rank file is missing.
        """
        if self.tokenizer == "bytes":
            return ""
        from stability.corpora.tokens.gpt2 import sha256_of_ranks

        return json.dumps([self.tokenizer, self.keep, sha256_of_ranks(self.ranks)])
