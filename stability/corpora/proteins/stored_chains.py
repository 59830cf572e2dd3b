"""Read single chains from a protein corpus's arrays and word tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stability.corpora.proteins.alphabets import NUM_ATOMS
from stability.corpora.proteins.chain import ProteinChain

# one row a residue, chain after chain; floats and signed integers are stored as uint32 bits
BITS = {"atoms14": np.float32, "sasa": np.float32, "plddt": np.float32, "numbers": np.int32}
STRUCTURE = "structure"  # tokens of a tokenised corpus, uint32, plus one; 0: the residue has none


@dataclass(frozen=True)
class Tables:
    """A protein corpus's words.

    Attributes:
        ids: entry and chain, one a chain.
        groups: group, one a chain.
        accessions: UniProt accession, one a chain.
        clusters: cluster number, one a chain.
        domains: names of the domain tokens, `SPECIALS` first.
        descriptions: names of the description tokens, `SPECIALS` first.
        orthologs: names of the ortholog tokens, `SPECIALS` first.
        skipped: (file or chain, reason) of unusable ones.
    """

    ids: tuple[str, ...]
    groups: tuple[str, ...]
    accessions: tuple[str, ...]
    clusters: tuple[int, ...]
    domains: tuple[str, ...]
    descriptions: tuple[str, ...]
    orthologs: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]

    def to_json(self) -> str:
        return json.dumps(self.__dict__, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Tables:
        values: dict[str, Any] = {name: tuple(items) for name, items in json.loads(text).items()}
        return cls(**{**values, "skipped": tuple((name, reason) for name, reason in values["skipped"])})


class Chains(Sequence[ProteinChain]):
    """One side's chains by their ``numbers`` in the arrays, each read on access."""

    def __init__(self, arrays: Mapping[str, np.ndarray], tables: Tables, numbers: range):
        self._arrays, self._tables, self._numbers = arrays, tables, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        return self.part(range(len(self))[index], 0, self.length(range(len(self))[index]))

    def length(self, index: int) -> int:
        """Return a chain's number of residues."""
        start, stop = self._arrays["offsets"][self._numbers[index] : self._numbers[index] + 2]
        return int(stop - start)

    def part(self, index: int, first: int, length: int) -> ProteinChain:
        """Read part of a chain, and nothing else of it.

        Args:
            index: number of the chain.
            first: first residue.
            length: largest number of residues.
        """
        arrays, tables, number = self._arrays, self._tables, self._numbers[index]
        start = int(arrays["offsets"][number]) + first
        stop = min(start + length, int(arrays["offsets"][number + 1]))
        tracks = {
            name: np.array(arrays[name][start:stop].view(BITS.get(name, arrays[name].dtype)))
            for name in ("ss", "sasa", "plddt", "numbers")
        }
        atoms = np.array(arrays["atoms14"][start * NUM_ATOMS * 3 : stop * NUM_ATOMS * 3].view(np.float32))
        return ProteinChain(
            id=tables.ids[number],
            group=tables.groups[number],
            sequence=arrays["sequence"][start:stop].astype(np.int64),
            atoms14_NAX=atoms.reshape(stop - start, NUM_ATOMS, 3),
            **{f"{name}_N": values for name, values in tracks.items()},
            accession=tables.accessions[number],
            domains_NK=_domains(arrays["domain_offsets"][start : stop + 1], arrays["domains"]),
            descriptions=_word_list(arrays, "description", number),
            orthologs=_word_list(arrays, "ortholog", number),
            structure_N=arrays[STRUCTURE][start:stop].astype(np.int64) - 1
            if STRUCTURE in arrays
            else np.empty(0, dtype=np.int64),
        )


def _domains(offsets: np.ndarray, values: np.ndarray) -> np.ndarray:
    counts = np.diff(offsets)
    domains_NK = np.full((len(counts), int(counts.max(initial=0))), -1, dtype=np.int64)
    for row in np.flatnonzero(counts):
        domains_NK[row, : counts[row]] = values[offsets[row] : offsets[row + 1]]
    return domains_NK


def _word_list(arrays: Mapping[str, np.ndarray], name: str, number: int) -> np.ndarray:
    start, stop = arrays[f"{name}_offsets"][number : number + 2]
    return arrays[f"{name}s"][start:stop].astype(np.int64)
