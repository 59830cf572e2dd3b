"""One protein chain with its tracks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from stability.corpora.proteins.alphabets import NO_SS, NUM_ATOMS, UNK, decode, plddt_bins, sasa_bins


def _empty() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class ProteinChain:
    """A protein chain with ``N`` residues, including those without coordinates.

    Axes: N residues, A atoms of a residue, X the three coordinates.

    Attributes:
        id: entry and chain ("1ABC_A").
        group: shared by one protein's chains: a four-letter code, a UniProt accession, else the entry's name.
        sequence: int64 (N), tokens of `alphabets.PIECES`.
        atoms14_NAX: float32 (N, 14, 3) in Å, NaN if an atom is missing; order `ATOM14`.
        ss_N: uint8, number in `SS_CLASSES`, `NO_SS` if unknown.
        sasa_N: float32 Å², NaN if unknown.
        plddt_N: float32 0 … 100, NaN if unknown.
        numbers_N: int32, the residue's number in its database's sequence (in the file, if no database is named);
            domains refer to these numbers.
        accession: UniProt accession; "" if unknown.
        domains_NK: int64, each residue's domains, padded with −1.
        descriptions: int64 tokens, any length.
        orthologs: int64 tokens, any length.
        structure_N: int64, structure tokens of the whole chain, −1 if a residue has none; empty if the chain was not
            tokenised.
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
        """N, CA, C, float32 (N, 3, 3) in Å, NaN if missing."""
        return self.atoms14_NAX[:, :3]

    @property
    def mask_N(self) -> np.ndarray:
        """Mask (N), True if a residue has N, CA and C."""
        return np.asarray(self.atoms14_mask_NA[:, :3].all(axis=1))

    @property
    def atoms14_mask_NA(self) -> np.ndarray:
        """Mask (N, 14), True for present heavy atoms."""
        return np.asarray(np.isfinite(self.atoms14_NAX).all(axis=2))

    @property
    def ss_mask_N(self) -> np.ndarray:
        return self.ss_N != NO_SS

    @property
    def sasa_bins_N(self) -> np.ndarray:
        """Bin of `SASA_EDGES`, −1 if unknown."""
        return sasa_bins(self.sasa_N)

    @property
    def plddt_bins_N(self) -> np.ndarray:
        """One of 50 bins, −1 if unknown."""
        return plddt_bins(self.plddt_N)

    @property
    def letters(self) -> str:
        return decode(self.sequence)

    def crop(self, start: int, length: int) -> ProteinChain:
        """Return the residues ``start`` to ``start + length``, or to the end.

        Descriptions and orthologous groups are the whole chain's. Structure tokens are unchanged.
        """
        stop = slice(start, start + length)
        per_residue = ("sequence", "atoms14_NAX", "ss_N", "sasa_N", "plddt_N", "numbers_N", "structure_N")
        domains_NK = self.domains_NK[stop] if len(self.domains_NK) else self.domains_NK
        return replace(self, domains_NK=domains_NK, **{name: getattr(self, name)[stop] for name in per_residue})


def make_chain(num: int) -> ProteinChain:
    """Return a chain of ``num`` unknown residues without coordinates and annotations."""
    unknown_N = np.full(num, np.nan, dtype=np.float32)
    return ProteinChain(
        "unknown",
        "unknown",
        np.full(num, UNK, dtype=np.int64),
        np.full((num, NUM_ATOMS, 3), np.nan, dtype=np.float32),
        np.full(num, NO_SS, dtype=np.uint8),
        unknown_N,
        unknown_N,
        np.full(num, -1, dtype=np.int32),
    )
