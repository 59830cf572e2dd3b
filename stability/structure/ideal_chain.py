"""Trivial baseline: one backbone from the mean internal geometry of the training chains.

Internal geometry: bond lengths, bond angles and torsions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stability.corpora.proteins.chain import ProteinChain

LONGEST_BOND = 2.0  # Å: a longer C–N distance is a gap in the chain
PERIOD = 3  # N, CA, C


@dataclass(frozen=True)
class InternalGeometry:
    """Mean internal coordinates, by the kind of atom to place (N, CA, C).

    Attributes:
        lengths_A: distance to the previous atom, Å.
        angles_A: angle at the previous atom, rad.
        torsions_A: torsion about the previous bond, rad.
    """

    lengths_A: np.ndarray
    angles_A: np.ndarray
    torsions_A: np.ndarray


def mean_geometry(chains: Sequence[ProteinChain]) -> InternalGeometry:
    """Compute the mean internal geometry over unbroken quadruples of atoms.

    Lengths and angles have arithmetic means, torsions circular means (C–N–CA–C φ, N–CA–C–N ψ, CA–C–N–CA ω).

    Raises:
        ValueError: no unbroken quadruple exists.
    """
    sums = np.zeros((PERIOD, 5))  # count, length, angle, cos and sin of the torsion
    for chain in chains:
        atoms_MX = chain.coords_NAX.reshape(-1, 3).astype(np.float64)
        four_MKX = np.stack([atoms_MX[k : len(atoms_MX) - 3 + k] for k in range(4)], 1)
        bonds_MK = np.linalg.norm(np.diff(four_MKX, axis=1), axis=-1)
        whole_M = np.isfinite(bonds_MK).all(1) & (np.nan_to_num(bonds_MK, nan=np.inf) < LONGEST_BOND).all(1)
        kind_M = (np.arange(len(four_MKX)) + 3) % PERIOD
        angle_M, torsion_M = _angle(four_MKX[whole_M]), _torsion(four_MKX[whole_M])
        values = np.stack(
            [np.ones(whole_M.sum()), bonds_MK[whole_M, 2], angle_M, np.cos(torsion_M), np.sin(torsion_M)], 1
        )
        np.add.at(sums, kind_M[whole_M], values)
    if not sums[:, 0].all():
        raise ValueError("data: no unbroken piece of backbone among the training chains, so its geometry has no mean")
    means = sums / sums[:, :1]
    return InternalGeometry(means[:, 1], means[:, 2], np.arctan2(means[:, 4], means[:, 3]))


def ideal_backbone(geometry: InternalGeometry, num_residues: int) -> np.ndarray:
    """Return a backbone (num_residues, 3, 3), float64 in Å, built from internal coordinates.

    Atoms are placed one by one (natural extension reference frame, Parsons et al. 2005).
    """
    lengths_A, angles_A, torsions_A = geometry.lengths_A, geometry.angles_A, geometry.torsions_A
    atoms = [np.zeros(3), np.array([lengths_A[1], 0.0, 0.0])]
    turn = np.pi - angles_A[2]
    atoms.append(atoms[1] + lengths_A[2] * np.array([np.cos(turn), np.sin(turn), 0.0]))
    while len(atoms) < PERIOD * num_residues:
        kind = len(atoms) % PERIOD
        along = _unit(atoms[-1] - atoms[-2])
        normal = _unit(np.cross(atoms[-2] - atoms[-3], along))
        frame = np.stack([along, np.cross(normal, along), normal])
        angle, torsion = np.pi - angles_A[kind], torsions_A[kind]
        step = np.array([np.cos(angle), np.sin(angle) * np.cos(torsion), np.sin(angle) * np.sin(torsion)])
        atoms.append(atoms[-1] + lengths_A[kind] * step @ frame)
    return np.array(atoms[: PERIOD * num_residues]).reshape(num_residues, PERIOD, 3)


def _angle(four_MKX: np.ndarray) -> np.ndarray:
    """Return the angle at the third of four atoms, rad."""
    back, forth = _unit(four_MKX[:, 1] - four_MKX[:, 2]), _unit(four_MKX[:, 3] - four_MKX[:, 2])
    return np.arccos(np.clip((back * forth).sum(-1), -1, 1))


def _torsion(four_MKX: np.ndarray) -> np.ndarray:
    """Return the torsion about the bond between atoms 2 and 3, IUPAC sign, rad."""
    first, second, third = (four_MKX[:, k + 1] - four_MKX[:, k] for k in range(3))
    n1, n2 = np.cross(first, second), np.cross(second, third)
    return np.arctan2((np.cross(n1, n2) * _unit(second)).sum(-1), (n1 * n2).sum(-1))


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)
