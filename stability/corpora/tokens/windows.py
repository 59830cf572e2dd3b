"""Start positions of windows in a token array: anywhere, or within stretches between ``borders``."""

from __future__ import annotations

import numpy as np
import torch

# borders: int64, from 0 to the number of tokens; stretch i is borders[i]:borders[i + 1]


def capacity(num_tokens: int, borders: np.ndarray | None, positions: int) -> int:
    """Return the number of windows that fit side by side.

    Args:
        num_tokens: tokens in the array.
        borders: int64, from 0 to ``num_tokens``; None: one stretch.
        positions: tokens per window.
    """
    return int((_lengths(num_tokens, borders) // positions).sum())


def longest_pair(num_tokens: int, borders: np.ndarray | None) -> int:
    """Return the largest window length for which two windows fit.

    Both may be in the longest stretch, or one in each of the two longest.
    """
    longest = np.sort(_lengths(num_tokens, borders))[::-1]
    return max(int(longest[0]) // 2, int(longest[1]) if len(longest) > 1 else 0)


def draw_starts(
    num_tokens: int, borders: np.ndarray | None, positions: int, num: int, generator: torch.Generator
) -> np.ndarray:
    """Draw random starts, equally likely among windows inside a stretch.

    At least one window must fit.

    Args:
        num_tokens: tokens in the array.
        borders: int64, from 0 to ``num_tokens``; None: one stretch.
        positions: tokens per window.
        num: number of starts.
        generator: random generator.
    """
    starts_of_stretch = np.maximum(_lengths(num_tokens, borders) - positions + 1, 0)
    ends = np.cumsum(starts_of_stretch)
    numbers = torch.randint(int(ends[-1]), (num,), generator=generator, device=generator.device).cpu().numpy()
    if borders is None:
        return numbers
    stretches = np.searchsorted(ends, numbers, side="right")
    return borders[stretches] + numbers - (ends - starts_of_stretch)[stretches]


def stretches(borders: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the index of each start's stretch."""
    return np.searchsorted(borders, starts, side="right") - 1


def spread(num_tokens: int, borders: np.ndarray | None, positions: int, at_most: int) -> np.ndarray:
    """Return starts of non-overlapping windows, evenly spaced from first to last.

    Args:
        num_tokens: tokens in the array.
        borders: int64, from 0 to ``num_tokens``; None: one stretch.
        positions: tokens per window.
        at_most: largest number of starts.
    """
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
    """Return (number of stretches shorter than a window, their tokens)."""
    lengths = np.diff(borders)
    short = lengths < positions
    return int(short.sum()), int(lengths[short].sum())


def _lengths(num_tokens: int, borders: np.ndarray | None) -> np.ndarray:
    return np.array([num_tokens], dtype=np.int64) if borders is None else np.diff(borders)
