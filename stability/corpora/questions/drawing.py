"""Draw question sequences from a seed and hold some out, for random data sources."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from pydantic import Field

from stability.config import Settings
from stability.corpora.questions.corpus import QuestionCorpus, Side
from stability.corpora.tokens.synthetic_genome import Draws

ROUNDS = 8  # draws of a whole training side before a source is rejected as too small
LARGEST_VOCABULARY = 2**15


class AbstractDrawn(Settings):
    """Settings of every source with random sequences: number, length and seed."""

    vocab_size: int = Field(default=64, ge=4, le=LARGEST_VOCABULARY, description="tokens of the vocabulary")
    length: int = Field(default=64, ge=2, le=2**20, description="tokens of a sequence; model.positions must be as many")
    num: int = Field(default=50_000, ge=1, le=10**7, description="training sequences")
    held_out: int = Field(default=1000, ge=1, le=10**6, description="held-out sequences, none of which is trained on")
    seed: int = Field(default=0, ge=0, lt=2**20, description="seed that the sequences are drawn from")


def corpus_of(config: AbstractDrawn, draw: Callable[[Draws, int, bool], Side], origin: str) -> QuestionCorpus:
    """Return a source's corpus with disjoint sides.

    Held-out sequences are drawn first, without repetitions. Training sequences are further draws not among them.

    Args:
        config: the settings.
        draw: returns sequences with answers from (random stream, their number, whether they are for training).
        origin: the source, for the description.

    Raises:
        ValueError: the settings allow too few sequences for both sides.
    """
    draws = Draws(config.seed)
    val, held = _remove_known(draw(draws, config.held_out, False), set())
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


def _remove_known(side: Side, known: set[bytes]) -> tuple[Side, set[bytes]]:
    """Return a side without known sequences, and the known ones plus its own."""
    kept = []
    for row, tokens_N in enumerate(side.tokens_MN):
        if (content := tokens_N.tobytes()) not in known:
            known.add(content)
            kept.append(row)
    return Side(*(array[kept] for array in side)), known


def draw_different(draws: Draws, num: int, choices: int, chosen: int) -> np.ndarray:
    """Return different random numbers below ``choices``, every choice equally likely.

    Args:
        draws: the random stream.
        num: number of rows.
        choices: upper bound, exclusive.
        chosen: numbers in a row.

    Returns:
        (num, chosen) int64, in random order.
    """
    return np.argsort(draws.draw_below(2**53, num * choices).reshape(num, choices), axis=1, kind="stable")[:, :chosen]


def draw_different_weighted(draws: Draws, num: int, weights: np.ndarray, chosen: int) -> np.ndarray:
    """Return different random indices, drawn without replacement by weight.

    Each is drawn with a probability proportional to its weight among the remaining ones. The method ranks exponential
    variables divided by the weights (Efraimidis and Spirakis 2006).

    Args:
        draws: the random stream.
        num: number of rows.
        weights: positive weight of each index, 1-D.
        chosen: indices in a row.

    Returns:
        (num, chosen) int64, in drawing order.
    """
    uniform = (draws.draw_below(2**53, num * len(weights)).reshape(num, -1) + 0.5) / 2**53
    return np.argsort(-np.log(uniform) / weights, axis=1, kind="stable")[:, :chosen]
