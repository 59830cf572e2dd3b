"""Copying: repeat tokens in order after a sequence with blanks.

As many marks as tokens follow the sequence; each mark asks for one token.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field, model_validator

from stability.config import Settings
from stability.corpora.base import AbstractCorpus
from stability.corpora.questions.corpus import AbstractDrawn, QuestionCorpus, Side, corpus_of, draw_different
from stability.corpora.tokens.synthetic_genome import Draws
from stability.data import AbstractDataSource

# Increment if the same settings would give other sequences.
VERSION = 1
BLANK = 0


class CopyConfig(AbstractDrawn):
    """The settings of data=copy."""

    vocab_size: int = Field(
        default=16, ge=4, le=2**15, description="tokens of the vocabulary, the blank and the mark among them"
    )
    copied: int = Field(default=8, ge=1, le=2**19, description="tokens of a sequence that are copied")
    selective: bool = Field(
        default=True,
        description="whether they stand at random places among blanks; false: all of them at the beginning",
    )

    @model_validator(mode="after")
    def _fits(self) -> CopyConfig:
        if 2 * self.copied > self.length:
            raise ValueError(
                f"data.length={self.length}: {self.copied} tokens and their copies need {2 * self.copied} positions"
            )
        return self


class Copying(AbstractDataSource):
    """Selective copying (Gu and Dao 2023, arXiv:2312.00752, sections 3.1 and 4.1.1).

    ``copied`` tokens are at random places among blanks. ``copied`` marks follow; the answer at the i-th mark is the
    i-th token.

    Blanks (token 0) at random places require a memory that depends on its input. With ``selective=false`` the tokens
    are at the beginning (Arjovsky, Shah and Bengio 2016, arXiv:1511.06464, section 4.1), and a fixed delay suffices.
    The copy is not shown: every mark (the last token of the vocabulary) looks the same. Tokens may repeat.
    """

    corpus: ClassVar[type[AbstractCorpus]] = QuestionCorpus
    Config: ClassVar[type[Settings]] = CopyConfig

    @classmethod
    def prepare(cls, config: CopyConfig, scratch: Path | None = None) -> QuestionCorpus:
        where = "selective copying" if config.selective else "copying"
        origin = f"{where}, drawn ({config.copied} of {config.vocab_size - 2} tokens, {config.length} a sequence)"
        return corpus_of(config, lambda draws, num, _: sequences(config, draws, num), origin)

    @classmethod
    def cache_key(cls, config: CopyConfig) -> str:
        return f"{VERSION} {config.model_dump_json()}"

    @classmethod
    def tokens_of(cls, config: CopyConfig) -> str:
        return f"{config.vocab_size - 2} tokens, a blank and a mark"


def sequences(config: CopyConfig, draws: Draws, num: int) -> Side:
    """Draw ``num`` sequences with their answers.

    Args:
        config: the settings.
        draws: source of randomness.
        num: number of sequences.
    """
    copied, mark, before = config.copied, config.vocab_size - 1, config.length - config.copied
    said_MC = 1 + draws.draw_below(config.vocab_size - 2, num * copied).reshape(num, copied).astype(np.uint16)
    places_MC = (
        np.sort(draw_different(draws, num, before, copied), axis=1)
        if config.selective
        else np.tile(np.arange(copied), (num, 1))
    )
    tokens_MN = np.full((num, config.length), BLANK, dtype=np.uint16)
    answers_MN = np.full_like(tokens_MN, config.vocab_size)
    np.put_along_axis(tokens_MN, places_MC, said_MC, axis=1)
    tokens_MN[:, before:], answers_MN[:, before:] = mark, said_MC
    return Side(tokens_MN, answers_MN)


EXPORT = Copying
