"""Protein chains as padded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stability.corpora.proteins.alphabets import NUM_ATOMS, PAD
from stability.corpora.proteins.chain import ProteinChain


class ProteinBatch(NamedTuple):
    """B chains padded to N residues, on the CPU, without BOS and EOS.

    Masked entries are zeros (sequence: `PAD`), never NaN. Masks mark known values: a residue without coordinates is in
    ``residues_BN`` but not in ``atoms_mask_BNA``.
    """

    ids: tuple[str, ...]
    sequence_BN: Tensor  # int64
    residues_BN: Tensor  # bool: not padding
    atoms14_BNAX: Tensor  # float32, Å; the first three atoms are N, CA, C
    atoms_mask_BNA: Tensor  # bool
    ss_BN: Tensor  # int64, number in SS_CLASSES
    ss_mask_BN: Tensor
    sasa_BN: Tensor  # int64, bin of SASA_EDGES
    sasa_mask_BN: Tensor
    plddt_BN: Tensor  # int64, one of 50 bins
    plddt_mask_BN: Tensor
    domains_BNK: Tensor  # int64 tokens, K at least 1
    domains_mask_BNK: Tensor
    descriptions_BJ: Tensor  # int64 tokens, J at least 1
    descriptions_mask_BJ: Tensor
    orthologs_BJ: Tensor
    orthologs_mask_BJ: Tensor
    structure_BN: Tensor  # int64 structure tokens; all masked if the corpus was not tokenised
    structure_mask_BN: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def split(self, rows: int) -> list[ProteinBatch]:
        """Cut the batch into parts of ``rows`` chains, the last one shorter; views."""
        parts = zip(*(tensor.split(rows) for tensor in self[1:]), strict=True)
        return [
            ProteinBatch(self.ids[start : start + rows], *part)
            for start, part in zip(range(0, len(self), rows), parts, strict=True)
        ]

    def repeat_to(self, num: int) -> ProteinBatch:
        """Return the batch with every chain ``num`` residues long, repeated from its start.

        Such a batch has a model's full length even if no chain does. Words belong to no residue and stay.
        """
        rows_B1 = torch.arange(len(self))[:, None]
        index_BN = torch.arange(num) % self.residues_BN.sum(1, keepdim=True)
        parts = {
            name: tensor[rows_B1, index_BN]
            for name, tensor in self._asdict().items()
            if name.rpartition("_")[2].startswith("BN")
        }
        fields: dict[str, Any] = self._asdict() | parts
        return ProteinBatch(**fields)


def batch_of(chains: Sequence[ProteinChain], length: int | None = None) -> ProteinBatch:
    """Return the chains as one batch, padded to ``length`` residues.

    None means the longest chain's length.

    Raises:
        AssertionError: there are no chains, or one is longer.
    """
    num = length or max(map(len, chains))
    assert chains and num >= max(map(len, chains)), "chains are cropped before they are padded"
    residues_BN = np.arange(num) < np.array([len(chain) for chain in chains])[:, None]
    atoms_BNAX = _pad([chain.atoms14_NAX for chain in chains], (num, NUM_ATOMS, 3), np.nan)
    tracks = [(chain.ss_N, chain.ss_mask_N, chain.sasa_bins_N, chain.plddt_bins_N) for chain in chains]
    ss, ss_mask, sasa, plddt = ([column[row] for column in tracks] for row in range(4))
    ss_BN = _pad(
        [np.where(mask, classes.astype(np.int64), -1) for classes, mask in zip(ss, ss_mask, strict=True)], (num,), -1
    )
    widest = max(1, *(chain.domains_NK.shape[1] for chain in chains))
    domains_BNK = _pad([chain.domains_NK for chain in chains], (num, widest), -1)
    arrays = [_pad([chain.sequence for chain in chains], (num,), PAD), residues_BN]
    arrays += [np.nan_to_num(atoms_BNAX).astype(np.float32), np.isfinite(atoms_BNAX).all(axis=-1)]
    words = [_words(chains, name) for name in ("descriptions", "orthologs")]
    structure_BN = _pad([chain.structure_N for chain in chains], (num,), -1)
    for values in (ss_BN, _pad(sasa, (num,), -1), _pad(plddt, (num,), -1), domains_BNK, *words, structure_BN):
        arrays += [np.maximum(values, 0), values >= 0]
    return ProteinBatch(tuple(chain.id for chain in chains), *map(torch.from_numpy, arrays))


def _words(chains: Sequence[ProteinChain], name: str) -> np.ndarray:
    rows = [getattr(chain, name) for chain in chains]
    return _pad(rows, (max(1, *map(len, rows)),), -1)


def _pad(rows: Sequence[np.ndarray], shape: tuple[int, ...], fill: float | int) -> np.ndarray:
    """Return one array from the rows, filled up to ``shape`` in every axis.

    An integer ``fill`` gives int64, else float32.
    """
    padded = np.full((len(rows), *shape), fill, dtype=np.int64 if isinstance(fill, int) else np.float32)
    for target, row in zip(padded, rows, strict=True):
        if row.size:
            target[tuple(map(slice, row.shape))] = row
    return padded
