"""One protein chain with its tracks: what a corpus of proteins is made of."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from stability.corpora.proteins.alphabets import NO_SS, decode, plddt_bins, sasa_bins


def _empty() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class ProteinChain:
    """A protein's chain of ``N`` residues, those without coordinates included. Axes: N residues, A atoms of a residue,
    X the three coordinates.

    - ``id``: entry and chain ("1ABC_A").
    - ``group``: what chains of one protein share (a four-letter code, a UniProt accession, else the entry's name).
    - ``sequence``: int64 (N), tokens of `alphabets.PIECES`.
    - ``atoms14_NAX``: float32 (N, 14, 3) in Å, NaN where an atom is missing; order `ATOM14`.
    - ``ss_N``: uint8, number in `SS_CLASSES`, `NO_SS` where not known.
    - ``sasa_N``: float32 Å², ``plddt_N``: float32 0 … 100, NaN where not known.
    - ``numbers_N``: int32, the residue's number in its database's sequence (where the file names one, else in the
      file), by which domains are placed.
    - ``domains_NK``: int64, the domains that a residue lies in, −1 where fewer than K.
    - ``descriptions``, ``orthologs``: int64 tokens, their own lengths.
    - ``structure_N``: int64 structure tokens of the whole chain, −1 where a residue has none; empty where the chain was
      not tokenised.
    """

    id: str
    group: str
    sequence: np.ndarray
    atoms14_NAX: np.ndarray
    ss_N: np.ndarray
    sasa_N: np.ndarray
    plddt_N: np.ndarray
    numbers_N: np.ndarray
    accession: str = ""
    domains_NK: np.ndarray = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    descriptions: np.ndarray = field(default_factory=_empty)
    orthologs: np.ndarray = field(default_factory=_empty)
    structure_N: np.ndarray = field(default_factory=_empty)

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def coords_NAX(self) -> np.ndarray:
        """N, CA, C of each residue, float32 (N, 3, 3) in Å, NaN where missing."""
        return self.atoms14_NAX[:, :3]

    @property
    def mask_N(self) -> np.ndarray:
        """The mask of residues, (N), True where N, CA and C are all there."""
        return np.asarray(self.atoms14_mask_NA[:, :3].all(axis=1))

    @property
    def atoms14_mask_NA(self) -> np.ndarray:
        """The mask of the 14 heavy atoms, (N, 14), True where one is there."""
        return np.asarray(np.isfinite(self.atoms14_NAX).all(axis=2))

    @property
    def ss_mask_N(self) -> np.ndarray:
        return self.ss_N != NO_SS

    @property
    def sasa_bins_N(self) -> np.ndarray:
        """Bin of `SASA_EDGES`, −1 where not known."""
        return sasa_bins(self.sasa_N)

    @property
    def plddt_bins_N(self) -> np.ndarray:
        """One of 50 bins, −1 where not known."""
        return plddt_bins(self.plddt_N)

    @property
    def letters(self) -> str:
        return decode(self.sequence)

    def crop(self, start: int, length: int) -> ProteinChain:
        """Return the residues ``start`` to ``start + length`` (or the end); descriptions and orthologous groups are the
        whole chain's, and structure tokens remain what they are in the whole chain."""
        stop = slice(start, start + length)
        per_residue = ("sequence", "atoms14_NAX", "ss_N", "sasa_N", "plddt_N", "numbers_N", "structure_N")
        domains_NK = self.domains_NK[stop] if len(self.domains_NK) else self.domains_NK
        return replace(self, domains_NK=domains_NK, **{name: getattr(self, name)[stop] for name in per_residue})
