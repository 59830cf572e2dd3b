"""Multi-query associative recall: key-value pairs, then keys as queries for their values."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from stability.config import Settings
from stability.corpora.base import AbstractCorpus
from stability.corpora.questions.corpus import (
    AbstractDrawn,
    QuestionCorpus,
    Side,
    corpus_of,
    draw_different,
    draw_different_weighted,
)
from stability.corpora.tokens.synthetic_genome import Draws
from stability.data import AbstractDataSource

# Increment if the same settings would give other sequences.
VERSION = 1
BLANK = 0


class MqarConfig(AbstractDrawn):
    """The settings of data=mqar."""

    pairs: int = Field(default=8, ge=1, le=2**14, description="pairs of a key and a value in a sequence")
    fewest_pairs: int | None = Field(
        default=None,
        ge=1,
        le=2**14,
        description="fewest pairs of a training sequence, every number from it to pairs as often; null: pairs in all",
    )
    queries: int | None = Field(
        default=None, ge=1, le=2**19, description="keys asked for in a sequence; null: each key once"
    )
    power: float = Field(
        default=0.01,
        gt=0,
        le=1,
        description="power a of the gaps: place j behind the pairs is asked with weight j^(a−1); 1: all places alike",
    )
    filler: Literal["random", "blank"] = Field(
        default="random", description="what stands where no pair and no query does: any token, or the token 0"
    )

    @property
    def num_queries(self) -> int:
        return self.pairs if self.queries is None else self.queries

    @model_validator(mode="after")
    def _fits(self) -> MqarConfig:
        """Refuse more pairs than keys, and more pairs and queries than fit."""
        keys = self.vocab_size // 2 - 1
        if self.pairs > keys:
            raise ValueError(
                f"data.pairs={self.pairs}: a vocabulary of {self.vocab_size} has {keys} keys, and each stands in one "
                f"pair only; give data.vocab_size={2 * (self.pairs + 1)} or more"
            )
        if self.fewest_pairs is not None and self.fewest_pairs > self.pairs:
            raise ValueError(f"data.fewest_pairs={self.fewest_pairs} must be at most data.pairs={self.pairs}")
        if 2 * (self.pairs + self.num_queries) > self.length:
            needed = 2 * (self.pairs + self.num_queries)
            raise ValueError(
                f"data.length={self.length}: {self.pairs} pairs and {self.num_queries} queries need {needed} tokens, "
                "two each"
            )
        return self


class MultiQueryRecall(AbstractDataSource):
    """Multi-query associative recall (Arora et al. 2023, arXiv:2312.04927, section 4.1 and its synthetic data).

    A sequence begins with ``pairs`` pairs of a key and its value, both without repetition. The rest is cut into places
    of two positions; a query occupies the first one, and the model's output there must be the key's value. Place j
    (from 1) is drawn with probability proportional to j^(a−1), without replacement: most queries come soon after the
    pairs, some late. Answers are not shown. Token 0 is neither key nor value; keys are below half of the vocabulary,
    values above; elsewhere is any token of all. With more queries than pairs, the numbers of queries per key differ by
    at most one. Training sequences may have fewer pairs; these are learned first. The authors, too, train on several
    numbers of pairs at once (Arora et al. 2024, arXiv:2402.18668).
    """

    corpus: ClassVar[type[AbstractCorpus]] = QuestionCorpus
    Config: ClassVar[type[Settings]] = MqarConfig

    @classmethod
    def prepare(cls, config: MqarConfig, scratch: Path | None = None) -> QuestionCorpus:
        fewer = "" if config.fewest_pairs is None else f", of training sequences {config.fewest_pairs} or more"
        origin = (
            f"associative recall, drawn ({config.pairs} pairs{fewer}, {config.num_queries} queries, "
            f"{config.vocab_size} tokens, {config.length} a sequence)"
        )
        return corpus_of(config, partial(_draw_side, config), origin)

    @classmethod
    def cache_key(cls, config: MqarConfig) -> str:
        return f"{VERSION} {config.model_dump_json()}"

    @classmethod
    def tokens_of(cls, config: MqarConfig) -> str:
        return f"{config.vocab_size} keys and values"


def _draw_side(config: MqarConfig, draws: Draws, num: int, is_training: bool) -> Side:
    """Draw ``num`` sequences of one side; held-out ones always have all pairs."""
    if not is_training or config.fewest_pairs is None:
        return sequences(config, draws, num, config.pairs)
    counts = range(config.fewest_pairs, config.pairs + 1)
    shares = np.bincount(np.arange(num) % len(counts), minlength=len(counts)).tolist()
    # batches are drawn at random, so sequences may be sorted by their number of pairs
    sides = [sequences(config, draws, share, pairs) for share, pairs in zip(shares, counts, strict=True) if share]
    return Side(*(np.concatenate(arrays) for arrays in zip(*sides, strict=True)))


def sequences(config: MqarConfig, draws: Draws, num: int, pairs: int) -> Side:
    """Draw sequences with their answers.

    Args:
        config: the settings.
        draws: source of randomness.
        num: number of sequences.
        pairs: pairs per sequence.
    """
    half, places = config.vocab_size // 2, (config.length - 2 * pairs) // 2
    queries = pairs if config.queries is None else config.queries
    keys_MP = 1 + draw_different(draws, num, half - 1, pairs)
    values_MP = half + draw_different(draws, num, config.vocab_size - half, pairs)
    weights = np.arange(1, places + 1) ** (config.power - 1)
    places_MQ = draw_different_weighted(draws, num, weights, queries)
    # keys are in random order, so the first ones are a random choice; further queries repeat them in rounds
    asked_Q = np.arange(queries) % pairs
    tokens_MN = np.full((num, config.length), BLANK, dtype=np.uint16)
    if config.filler == "random":
        tokens_MN[:] = draws.draw_below(config.vocab_size, tokens_MN.size).reshape(tokens_MN.shape)
    answers_MN = np.full_like(tokens_MN, config.vocab_size)
    tokens_MN[:, : 2 * pairs : 2], tokens_MN[:, 1 : 2 * pairs : 2] = keys_MP, values_MP
    np.put_along_axis(tokens_MN, 2 * pairs + 2 * places_MQ, keys_MP[:, asked_Q].astype(np.uint16), axis=1)
    np.put_along_axis(answers_MN, 2 * pairs + 2 * places_MQ, values_MP[:, asked_Q].astype(np.uint16), axis=1)
    return Side(tokens_MN, answers_MN)


EXPORT = MultiQueryRecall
