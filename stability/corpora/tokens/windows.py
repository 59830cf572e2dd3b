"""The starts of windows in a token array: any place, or any inside the stretches between ``borders``."""

from __future__ import annotations

import numpy as np
import torch

# borders: int64, the first 0, the last the number of tokens; stretch i is borders[i]:borders[i + 1]


def capacity(num_tokens: int, borders: np.ndarray | None, positions: int) -> int:
    """Return how many windows fit side by side."""
    return int((_lengths(num_tokens, borders) // positions).sum())


def longest_pair(num_tokens: int, borders: np.ndarray | None) -> int:
    """Return the most positions of which two windows fit: both in the longest stretch, or one in each of the two
    longest."""
    longest = np.sort(_lengths(num_tokens, borders))[::-1]
    return max(int(longest[0]) // 2, int(longest[1]) if len(longest) > 1 else 0)


def drawn(
    num_tokens: int, borders: np.ndarray | None, positions: int, num: int, generator: torch.Generator
) -> np.ndarray:
    """Draw ``num`` starts of windows, each one that leaves the window inside of its stretch equally likely. At least
    one window must fit."""
    starts_of_stretch = np.maximum(_lengths(num_tokens, borders) - positions + 1, 0)
    ends = np.cumsum(starts_of_stretch)
    numbers = torch.randint(int(ends[-1]), (num,), generator=generator, device=generator.device).cpu().numpy()
    if borders is None:
        return numbers
    stretches = np.searchsorted(ends, numbers, side="right")
    return borders[stretches] + numbers - (ends - starts_of_stretch)[stretches]


def stretches(borders: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the stretch that each start lies in."""
    return np.searchsorted(borders, starts, side="right") - 1


def spread(num_tokens: int, borders: np.ndarray | None, positions: int, at_most: int) -> np.ndarray:
    """Return up to ``at_most`` starts of windows that do not overlap, evenly spaced from the first to the last."""
    count = min(at_most, capacity(num_tokens, borders, positions))
    steps, last = np.arange(count), max(count - 1, 1)
    if borders is None:
        return steps * (num_tokens - positions) // last
    fitting = np.diff(borders) // positions  # side by side in each stretch
    ends = np.cumsum(fitting)
    numbers = steps * (int(ends[-1]) - 1) // last
    stretches = np.searchsorted(ends, numbers, side="right")
    return borders[stretches] + (numbers - (ends - fitting)[stretches]) * positions


def too_short(borders: np.ndarray, positions: int) -> tuple[int, int]:
    """Return (stretches that no window fits in, their tokens)."""
    lengths = np.diff(borders)
    short = lengths < positions
    return int(short.sum()), int(lengths[short].sum())


def _lengths(num_tokens: int, borders: np.ndarray | None) -> np.ndarray:
    return np.array([num_tokens], dtype=np.int64) if borders is None else np.diff(borders)
