"""Strands of one chain: bridges joined into ladders across bulges (Kabsch and Sander 1983)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FEWEST_BETWEEN = 3  # smallest distance in residues between a bridge's partners


@dataclass
class _Ladder:
    parallel: bool
    first: list[int]
    second: list[int]


def strands(num: int, bonds: set[tuple[int, int]], piece_N: np.ndarray) -> list[str]:
    """Return one letter a residue: E, B, or else C.

    E marks ladders with two or more bridges, B lone bridges.

    Args:
        num: number of residues.
        bonds: (donor, acceptor) of each hydrogen bond.
        piece_N: number of chain breaks before each residue.
    """
    letters = ["C"] * num
    for ladder in _join_across_bulges(_ladders(_bridges(num, bonds, piece_N)), piece_N):
        letter = "E" if len(ladder.first) > 1 else "B"
        for side in (ladder.first, ladder.second):
            for at in range(side[0], side[-1] + 1):
                if letters[at] != "E":
                    letters[at] = letter
    return letters


def _bridges(num: int, bonds: set[tuple[int, int]], piece_N: np.ndarray) -> list[tuple[int, int, bool]]:
    """Return sorted (i, j, whether parallel), i < j.

    Each bridge is found from one of its hydrogen bonds.
    """
    found: dict[tuple[int, int], bool] = {}
    for donor, acceptor in bonds:
        # (i, j, the other bond, kind): bond i+1 → j with j → i−1; i+1 → j−1 with j+1 → i−1; i → j with j → i
        for i, j, other, parallel in (
            (donor - 1, acceptor, (acceptor, donor - 2), True),
            (donor - 1, acceptor + 1, (acceptor + 2, donor - 2), False),
            (donor, acceptor, (acceptor, donor), False),
        ):
            if other in bonds and _may_bridge(min(i, j), max(i, j), num, piece_N):
                pair = (min(i, j), max(i, j))
                found[pair] = found.get(pair, False) or parallel
    return sorted((i, j, parallel) for (i, j), parallel in found.items())


def _may_bridge(i: int, j: int, num: int, piece_N: np.ndarray) -> bool:
    inside = i >= 1 and i + 4 < num and j + 1 < num and j - i >= FEWEST_BETWEEN
    return bool(inside and piece_N[i - 1] == piece_N[i + 1] and piece_N[j - 1] == piece_N[j + 1])


def _ladders(bridges: list[tuple[int, int, bool]]) -> list[_Ladder]:
    """Join consecutive bridges of one kind to ladders."""
    ladders: list[_Ladder] = []
    for i, j, parallel in bridges:
        for ladder in ladders:
            if (
                ladder.parallel == parallel
                and i == ladder.first[-1] + 1
                and (j == ladder.second[-1] + 1 if parallel else j == ladder.second[0] - 1)
            ):
                ladder.first.append(i)
                ladder.second.insert(len(ladder.second) if parallel else 0, j)
                break
        else:
            ladders.append(_Ladder(parallel, [i], [j]))
    return ladders


def _join_across_bulges(ladders: list[_Ladder], piece_N: np.ndarray) -> list[_Ladder]:
    """Join ladders that continue across a bulge."""
    ladders = sorted(ladders, key=lambda ladder: (ladder.first[0], ladder.second[0]))
    at = 0
    while at < len(ladders):
        ladder, rest = ladders[at], []
        for other in ladders[at + 1 :]:
            if _is_bulge(ladder, other, piece_N):
                ladder.first += other.first
                ladder.second = ladder.second + other.second if ladder.parallel else other.second + ladder.second
            else:
                rest.append(other)
        ladders = ladders[: at + 1] + rest
        at += 1
    return ladders


def _is_bulge(ladder: _Ladder, other: _Ladder, piece_N: np.ndarray) -> bool:
    """Return whether ``other`` continues ``ladder`` across a bulge.

    A bulge has at most one extra residue on one side and four on the other.
    """
    if ladder.parallel != other.parallel or not 0 <= other.first[0] - ladder.first[-1] < 6:
        return False
    if other.first[0] == ladder.first[-1]:  # they overlap
        return False
    joined = [
        piece_N[min(a[0], b[0])] == piece_N[max(a[-1], b[-1])]
        for a, b in ((ladder.first, other.first), (ladder.second, other.second))
    ]
    gap = other.second[0] - ladder.second[-1] if ladder.parallel else ladder.second[0] - other.second[-1]
    return all(joined) and gap >= 0 and (gap < 3 or (gap < 6 and other.first[0] - ladder.first[-1] < 3))
