"""Assign secondary structure in DSSP's nine classes from N, CA, C and O.

Kabsch and Sander (Biopolymers 22, 1983) as in DSSP version 4: π-helices before α-helices, bulges joined into ladders,
and stretches of three polyproline-II residues (Mansiaux et al. 2011).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.spatial import KDTree

from stability.corpora.proteins.alphabets import NO_SS, encode_ss

COUPLING = 27.888  # kcal/mol Å: 0.084 · 332
BOND_BELOW, LOWEST_ENERGY, SHORTEST = -0.5, -9.9, 0.5  # kcal/mol, kcal/mol, Å
CA_WITHIN, LONGEST_PEPTIDE_BOND = 9.0, 2.5  # Å
BEND_ABOVE = 70.0  # degrees
POLYPROLINE_PHI, POLYPROLINE_PSI, POLYPROLINE_WITHIN = -75.0, 145.0, 29.0  # degrees
COMPLETE = 4  # N, CA, C, O


def assign(atoms_NAX: np.ndarray, is_proline_N: np.ndarray) -> np.ndarray:
    """Return each residue's number in `SS_CLASSES`, uint8.

    A residue without N, CA, C or O (NaN) has `NO_SS`.

    Args:
        atoms_NAX: Å; a residue's first four atoms are N, CA, C, O.
        is_proline_N: whether a residue is proline, without a hydrogen to donate.
    """
    classes_N = np.full(len(atoms_NAX), NO_SS, dtype=np.uint8)
    there_N = np.isfinite(atoms_NAX[:, :COMPLETE]).all(axis=(1, 2))
    if there_N.any():
        classes_N[there_N] = encode_ss(
            "".join(_letters(atoms_NAX[there_N, :COMPLETE].astype(np.float64), is_proline_N[there_N]))
        )
    return classes_N


def _letters(atoms_NAX: np.ndarray, is_proline_N: np.ndarray) -> list[str]:
    n_NX, ca_NX, c_NX = (atoms_NAX[:, atom] for atom in range(3))
    # number of chain breaks before each residue: two residues are connected if these are equal
    piece_N = np.concatenate([[0], np.cumsum(np.linalg.norm(n_NX[1:] - c_NX[:-1], axis=1) > LONGEST_PEPTIDE_BOND)])
    bonds = hydrogen_bonds(atoms_NAX, is_proline_N, piece_N)
    letters = strands(len(ca_NX), bonds, piece_N)
    starts = {stride: _turn_starts(len(ca_NX), bonds, piece_N, stride) for stride in (3, 4, 5)}
    _helices(letters, starts)
    _turns_and_bends(letters, starts, bends(ca_NX, piece_N))
    _polyproline(letters, *torsions(n_NX, ca_NX, c_NX, piece_N))
    return letters


def hydrogen_bonds(atoms_NAX: np.ndarray, is_proline_N: np.ndarray, piece_N: np.ndarray) -> set[tuple[int, int]]:
    """Return (donor of N–H, acceptor of C=O) for each bond below −0.5 kcal/mol.

    A donor has at most two bonds, the strongest.

    Args:
        atoms_NAX: N, CA, C, O in Å.
        is_proline_N: whether a residue is proline.
        piece_N: number of chain breaks before each residue.
    """
    hydrogen_NX = _hydrogens(atoms_NAX, piece_N)
    gives_N = ~is_proline_N & np.isfinite(hydrogen_NX).all(axis=1)
    pairs = KDTree(atoms_NAX[:, 1]).query_pairs(CA_WITHIN, output_type="ndarray").astype(np.int64)
    donor, acceptor = np.concatenate([pairs, pairs[:, ::-1]]).T
    kept = gives_N[donor] & (donor != acceptor + 1)  # none along the peptide bond itself
    donor, acceptor = donor[kept], acceptor[kept]
    energy = bond_energies(atoms_NAX[donor, 0], hydrogen_NX[donor], atoms_NAX[acceptor, 2], atoms_NAX[acceptor, 3])
    order = np.lexsort((acceptor, energy, donor))
    donor, acceptor, energy = donor[order], acceptor[order], energy[order]
    rank = np.arange(len(donor)) - np.searchsorted(donor, donor, side="left")
    strong = (rank < 2) & (energy < BOND_BELOW)
    return set(zip(donor[strong].tolist(), acceptor[strong].tolist(), strict=True))


def bond_energies(n_PX: np.ndarray, h_PX: np.ndarray, c_PX: np.ndarray, o_PX: np.ndarray) -> np.ndarray:
    """Return each pair's electrostatic energy in kcal/mol, to three decimals as in DSSP.

    Args:
        n_PX: donor's N, Å.
        h_PX: donor's hydrogen, Å.
        c_PX: acceptor's C, Å.
        o_PX: acceptor's O, Å.
    """
    ho, hc, nc, no = (
        np.linalg.norm(first - second, axis=1)
        for first, second in ((h_PX, o_PX), (h_PX, c_PX), (n_PX, c_PX), (n_PX, o_PX))
    )
    too_close = np.minimum(np.minimum(ho, hc), np.minimum(nc, no)) < SHORTEST
    with np.errstate(divide="ignore", invalid="ignore"):
        energy = -COUPLING * (1 / ho - 1 / hc + 1 / nc - 1 / no)
    return np.where(too_close, LOWEST_ENERGY, np.maximum(np.round(energy, 3), LOWEST_ENERGY))


def _hydrogens(atoms_NAX: np.ndarray, piece_N: np.ndarray) -> np.ndarray:
    """Place each residue's hydrogen 1 Å from N, opposite to the previous C=O.

    The first residue of a piece has NaN.
    """
    hydrogen_NX = np.full((len(atoms_NAX), 3), np.nan)
    carbonyl_MX = atoms_NAX[:-1, 2] - atoms_NAX[:-1, 3]
    length_M = np.linalg.norm(carbonyl_MX, axis=1)
    joined = np.flatnonzero((piece_N[1:] == piece_N[:-1]) & (length_M > 0))
    hydrogen_NX[joined + 1] = atoms_NAX[joined + 1, 0] + carbonyl_MX[joined] / length_M[joined, None]
    return hydrogen_NX


def _turn_starts(num: int, bonds: set[tuple[int, int]], piece_N: np.ndarray, stride: int) -> np.ndarray:
    starts_N = np.zeros(num, dtype=bool)
    for donor, acceptor in bonds:
        if donor - acceptor == stride and piece_N[donor] == piece_N[acceptor]:
            starts_N[acceptor] = True
    return starts_N


def _helices(letters: list[str], starts: dict[int, np.ndarray]) -> None:
    """Mark helices, two consecutive turns of one kind.

    α overwrites any class, 3₁₀ is set on free residues only, π on free and α ones.
    """
    for stride, letter, admits in ((4, "H", "CEBH"), (3, "G", "CG"), (5, "I", "CIH")):
        begin = starts[stride]
        for first in np.flatnonzero(begin[1:] & begin[:-1]) + 1:
            covered = range(first, first + stride)
            if covered.stop < len(letters) and all(letters[at] in admits for at in covered):
                letters[first : covered.stop] = letter * stride


def _turns_and_bends(letters: list[str], starts: dict[int, np.ndarray], is_bend_N: np.ndarray) -> None:
    turn_N = np.zeros(len(letters), dtype=bool)
    for stride, begin in starts.items():
        for first in np.flatnonzero(begin):
            turn_N[first + 1 : first + stride] = True
    for at in range(1, len(letters) - 1):
        if letters[at] == "C" and (turn_N[at] or is_bend_N[at]):
            letters[at] = "T" if turn_N[at] else "S"


def bends(ca_NX: np.ndarray, piece_N: np.ndarray) -> np.ndarray:
    """Return whether the chain turns by more than 70° at a residue.

    The angle is between CA(i) − CA(i−2) and CA(i+2) − CA(i).
    """
    is_bend_N = np.zeros(len(ca_NX), dtype=bool)
    if len(ca_NX) < 5:
        return is_bend_N
    before, after = ca_NX[2:-2] - ca_NX[:-4], ca_NX[4:] - ca_NX[2:-2]
    lengths = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
    cosine = (before * after).sum(axis=1) / np.where(lengths > 0, lengths, 1)
    is_bend_N[2:-2] = (cosine < np.cos(np.deg2rad(BEND_ABOVE))) & (lengths > 0) & (piece_N[4:] == piece_N[:-4])
    return is_bend_N


def torsions(
    n_NX: np.ndarray, ca_NX: np.ndarray, c_NX: np.ndarray, piece_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (φ, ψ) in degrees, NaN at a chain's ends and breaks.

    Args:
        n_NX: N, Å.
        ca_NX: CA, Å.
        c_NX: C, Å.
        piece_N: number of chain breaks before each residue.
    """
    phi_N, psi_N = np.full(len(ca_NX), np.nan), np.full(len(ca_NX), np.nan)
    joined = piece_N[1:] == piece_N[:-1]
    phi_N[1:] = np.where(joined, dihedrals(c_NX[:-1], n_NX[1:], ca_NX[1:], c_NX[1:]), np.nan)
    psi_N[:-1] = np.where(joined, dihedrals(n_NX[:-1], ca_NX[:-1], c_NX[:-1], n_NX[1:]), np.nan)
    return phi_N, psi_N


def dihedrals(a_PX: np.ndarray, b_PX: np.ndarray, c_PX: np.ndarray, d_PX: np.ndarray) -> np.ndarray:
    """Return the torsion about b–c in degrees, −180 … 180 (IUPAC: clockwise is positive).

    Args:
        a_PX: first point.
        b_PX: second point.
        c_PX: third point.
        d_PX: fourth point.
    """
    axis = c_PX - b_PX
    first, second = np.cross(b_PX - a_PX, axis), np.cross(axis, d_PX - c_PX)
    sine = (np.cross(first, second) * axis).sum(axis=1) / np.maximum(np.linalg.norm(axis, axis=1), 1e-12)
    return np.rad2deg(np.arctan2(sine, (first * second).sum(axis=1)))


def _polyproline(letters: list[str], phi_N: np.ndarray, psi_N: np.ndarray) -> None:
    """Mark polyproline II on free residues: three in a row near (−75°, 145°)."""
    fits = (np.abs(phi_N - POLYPROLINE_PHI) <= POLYPROLINE_WITHIN) & (
        np.abs(psi_N - POLYPROLINE_PSI) <= POLYPROLINE_WITHIN
    )
    for first in range(1, len(letters) - 3):
        if fits[first : first + 3].all():
            letters[first : first + 3] = ["P" if letter == "C" else letter for letter in letters[first : first + 3]]


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
