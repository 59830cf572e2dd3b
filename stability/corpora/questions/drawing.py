"""Draw sequences with questions from a seed, and hold some of them out: what the data sources that are made of random
numbers share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from pydantic import Field

from stability.config import Settings
from stability.corpora.questions.corpus import QuestionCorpus, Side
from stability.corpora.tokens.synthetic_genome import Draws

ROUNDS = 8  # draws of a whole training side before a source is found too poor in sequences
LARGEST_VOCABULARY = 2**15


class AbstractDrawn(Settings):
    """The settings of every source whose sequences are drawn: how many, of which length, from which seed."""

    vocab_size: int = Field(default=64, ge=4, le=LARGEST_VOCABULARY, description="tokens of the vocabulary")
    length: int = Field(default=64, ge=2, le=2**20, description="tokens of a sequence; model.positions must be as many")
    num: int = Field(default=50_000, ge=1, le=10**7, description="training sequences")
    held_out: int = Field(default=1000, ge=1, le=10**6, description="held-out sequences, none of which is trained on")
    seed: int = Field(default=0, ge=0, lt=2**20, description="seed that the sequences are drawn from")


def corpus_of(config: AbstractDrawn, draw: Callable[[Draws, int, bool], Side], origin: str) -> QuestionCorpus:
    """Return the corpus of a source. Held-out sequences are drawn first, and each is there once; training sequences are
    those of further draws that are not among them.

    ``draw``: returns as many sequences with their answers as it is told, and is told whether they are to train on.
    Errors: ``ValueError`` where the settings allow too few sequences for both sides.
    """
    draws = Draws(config.seed)
    val, held = _without(draw(draws, config.held_out, False), set())
    parts, missing = [], config.num
    for _ in range(ROUNDS):
        drawn = draw(draws, config.num, True)
        known = np.array([row.tobytes() in held for row in drawn.tokens_MN])
        parts.append(Side(*(array[~known][:missing] for array in drawn)))
        missing -= len(parts[-1].tokens_MN)
        if not missing:
            train = Side(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
            return QuestionCorpus.of(train, val, config.vocab_size, origin)
    raise ValueError(
        f"data.held_out={config.held_out}: {origin} are so few that nearly all would be held out; hold out fewer, or "
        "make the vocabulary larger or the sequences longer"
    )


def _without(side: Side, known: set[bytes]) -> tuple[Side, set[bytes]]:
    """Return a side without the sequences that are known, or there before, and the known ones with its own."""
    kept = []
    for row, tokens_N in enumerate(side.tokens_MN):
        if (content := tokens_N.tobytes()) not in known:
            known.add(content)
            kept.append(row)
    return Side(*(array[kept] for array in side)), known


def some_of(draws: Draws, num: int, choices: int, chosen: int) -> np.ndarray:
    """Return ``chosen`` different numbers below ``choices`` in random order, (num, chosen) int64, every choice equally
    likely."""
    return np.argsort(draws.below(2**53, num * choices).reshape(num, choices), axis=1, kind="stable")[:, :chosen]


def weighted_some_of(draws: Draws, num: int, weights: np.ndarray, chosen: int) -> np.ndarray:
    """Return ``chosen`` different indices of ``weights`` in the order in which they are drawn one after the other,
    each with a probability proportional to its weight among those that are left: (num, chosen) int64.

    By the ranks of exponential variables, each divided by its weight (Efraimidis and Spirakis 2006).
    """
    uniform = (draws.below(2**53, num * len(weights)).reshape(num, -1) + 0.5) / 2**53
    return np.argsort(-np.log(uniform) / weights, axis=1, kind="stable")[:, :chosen]
