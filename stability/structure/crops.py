"""Batches of protein chains as padded tensors: random crops and fixed first parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from stability.corpora.proteins.chain import ProteinChain

BACKBONE = 3  # N, CA, C
FEWEST_RESIDUES = 4  # valid residues; a superposition of fewer means nothing


@dataclass(frozen=True)
class PaddedCrops:
    """Crops of protein chains, padded to one length; invalid entries hold 0.

    Attributes:
        coords_BNAX: N, CA, C in Å, (B, N, 3, 3).
        mask_BN: True if the residue is valid.
        atoms_BNAX: heavy atoms in Å, (B, N, 14, 3).
        atoms_mask_BNA: True if the atom is valid.
        sequence_BN: residue tokens.
    """

    coords_BNAX: Tensor
    mask_BN: Tensor
    atoms_BNAX: Tensor
    atoms_mask_BNA: Tensor
    sequence_BN: Tensor

    def to(self, device: torch.device) -> PaddedCrops:
        return PaddedCrops(**{item.name: getattr(self, item.name).to(device) for item in fields(self)})


def first_parts(chains: Sequence[ProteinChain], positions: int) -> list[ProteinChain]:
    """Return the first ``positions`` residues of each chain, if enough are valid."""
    parts = [chain.crop(0, positions) for chain in chains]
    return [part for part in parts if part.mask_N.sum() >= FEWEST_RESIDUES]


def random_crops(chains: Sequence[ProteinChain], num: int, positions: int, generator: torch.Generator) -> PaddedCrops:
    """Draw chains uniformly, and from each a random contiguous crop.

    Args:
        chains: chains to draw from.
        num: number of crops.
        positions: residues per crop; a shorter chain is used whole.
        generator: source of randomness.
    """
    chosen = torch.randint(len(chains), (num,), generator=generator).tolist()
    places = torch.rand(num, generator=generator, dtype=torch.float64).tolist()
    room = [max(0, len(chains[index]) - positions) for index in chosen]
    starts = [int(place * (space + 1)) for place, space in zip(places, room, strict=True)]
    return pad_chains([chains[index].crop(start, positions) for index, start in zip(chosen, starts, strict=True)])


def pad_chains(chains: Sequence[ProteinChain]) -> PaddedCrops:
    """Pad chains of different lengths to one batch."""
    length = max(len(chain) for chain in chains)

    def stack(name: str) -> Tensor:
        rows = [getattr(chain, name) for chain in chains]
        full = np.zeros((len(rows), length, *rows[0].shape[1:]), dtype=rows[0].dtype)
        for row, values in zip(full, rows, strict=True):
            row[: len(values)] = values
        return torch.from_numpy(full)

    mask_BN, atoms_mask_BNA, atoms_BNAX = stack("mask_N"), stack("atoms14_mask_NA"), stack("atoms14_NAX")
    atoms_mask_BNA = atoms_mask_BNA & mask_BN[..., None]
    atoms_BNAX = torch.where(atoms_mask_BNA[..., None], atoms_BNAX, 0.0)
    return PaddedCrops(atoms_BNAX[:, :, :BACKBONE], mask_BN, atoms_BNAX, atoms_mask_BNA, stack("sequence").long())
