"""Prepared protein chains: memory-mapped tracks of a training and a held-out side, and how batches are drawn from
them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from stability.corpora.base import AbstractCorpus
from stability.corpora.io import disk
from stability.corpora.io.arrays import sha256
from stability.corpora.proteins.alphabets import (
    NUM_ATOMS,
    NUM_PLDDT_BINS,
    NUM_SASA_BINS,
    SPECIALS,
    SS_CLASSES,
    VOCAB_SIZE,
)
from stability.corpora.proteins.batch import ProteinBatch, batch_of
from stability.corpora.proteins.chain import ProteinChain

VERSION = 1  # raised when the same chains, split alike, would be laid out differently; part of every fingerprint
KIND = "proteins"
# one row a residue, chain after chain; floats and signed numbers are kept as the bits of a uint32
BITS = {"atoms14": np.float32, "sasa": np.float32, "plddt": np.float32, "numbers": np.int32}
ARRAYS = ("offsets", "sequence", "atoms14", "ss", "sasa", "plddt", "numbers", "domain_offsets", "domains")
WORDS = ("description_offsets", "descriptions", "ortholog_offsets", "orthologs")
TABLES = "tables.json"
PLAIN = ("fingerprint", "description", "num_train_chains", "tables")
STRUCTURE = "structure"  # tokens of a tokenised corpus, uint32, raised by one: 0 where a residue has none
TOKENISED = ("base", "tokenizer", "num_codes")


@dataclass(frozen=True)
class Tables:
    """The words that belong to chains by their place (``ids``, ``groups``, ``accessions``, ``clusters``), names of the
    annotations' tokens (`SPECIALS` come first), and ``skipped``: (file or chain, reason) of what could not be used."""

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


@dataclass(frozen=True)
class Tokenised:
    """The origin of a corpus's structure tokens: the fingerprint of the chains, the tokenizer's id and the size of its
    codebook."""

    base: str
    tokenizer: str
    num_codes: int


@dataclass(frozen=True, eq=False)
class ProteinCorpus(AbstractCorpus):
    """Chains of two sides, training first. Build it with `split.corpus_of`. ``arrays``: by the names in `ARRAYS` and
    `WORDS`, and `STRUCTURE` where it is ``tokenised``: such a corpus has a fingerprint of its own, and its folder holds
    its tokens beside that of its chains."""

    kind: ClassVar[str] = KIND

    arrays: Mapping[str, np.ndarray]
    tables: Tables
    num_train_chains: int
    fingerprint: str
    description: str
    sums: Mapping[str, str]
    tokenised: Tokenised | None = None

    @classmethod
    def of(
        cls, arrays: Mapping[str, np.ndarray], tables: Tables, num_train_chains: int, description: str
    ) -> ProteinCorpus:
        """Return a corpus of ``arrays`` in their kept form. The fingerprint covers all of them, the names and the
        split; not what was skipped, nor where the files lay."""
        sums = {name: sha256(arrays[name]) for name in (*ARRAYS, *WORDS)}
        return cls(arrays, tables, num_train_chains, _fingerprint(sums, tables, num_train_chains), description, sums)

    @property
    def format(self) -> dict[str, Any]:
        """Sizes of the tracks' vocabularies; those of sequence, words and structure tokens begin with the special
        tokens."""
        words = {name: len(getattr(self.tables, name)) for name in ("domains", "descriptions", "orthologs")}
        classes = {"ss": len(SS_CLASSES), "sasa": NUM_SASA_BINS, "plddt": NUM_PLDDT_BINS}
        structure = {} if self.tokenised is None else {STRUCTURE: len(SPECIALS) + self.tokenised.num_codes}
        return {"sequence": VOCAB_SIZE, **classes, **words, **structure}

    def with_structure(self, tokenizer: str, num_codes: int, tokens: np.ndarray) -> ProteinCorpus:
        """Return the same chains with a structure token for each residue, those of the training side first, −1 where
        there is none."""
        assert self.tokenised is None and tokens.shape == self.arrays["sequence"].shape
        assert tokens.min() >= -1 and tokens.max() < num_codes
        return self._with(Tokenised(self.fingerprint, tokenizer, num_codes), (tokens + 1).astype(np.uint32), None)

    def _with(self, tokenised: Tokenised, structure: np.ndarray, known_sum: str | None) -> ProteinCorpus:
        kept_sum = known_sum or sha256(structure)
        fingerprint = disk.sha256_of_json(
            ["stability structure tokens", VERSION, *tokenised.__dict__.values(), kept_sum]
        )
        arrays, sums = {**self.arrays, STRUCTURE: structure}, {**self.sums, STRUCTURE: kept_sum}
        description = f"{self.description}; structure tokens by {tokenised.tokenizer} ({tokenised.num_codes:,} codes)"
        return replace(
            self, arrays=arrays, sums=sums, fingerprint=fingerprint, description=description, tokenised=tokenised
        )

    @property
    def skipped(self) -> tuple[tuple[str, str], ...]:
        """(file, reason) of each file that could not be used, and of each chain left out of one that could."""
        return self.tables.skipped

    def require(self, positions: int, more: int = 0, remedy: str = "") -> None:
        """Raise a ``ValueError`` below two training chains or one held-out one: any length of chain fits any model,
        longer ones are cropped."""
        num = len(self.tables.ids)
        if self.num_train_chains < 2 or num - self.num_train_chains < 1:
            raise ValueError(
                f"data: {self.num_train_chains} training chains and {num - self.num_train_chains} held out; at least "
                f"2 and 1 are needed. Give more proteins{remedy}.\nRead: {self.description}"
            )

    def described(self, positions: int) -> str:
        """Return the description, with how many chains are longer than the ``positions`` residues that are drawn of
        each."""
        lengths = np.diff(self.arrays["offsets"])
        longer = int((lengths > positions).sum())
        return self.description + (f"; {longer:,} longer than {positions:,} residues, cropped" if longer else "")

    def log_frequencies(self) -> Float64[Tensor, " vocabulary"]:
        """Return the log of the training residues' frequencies, each token's count raised by one; then of the structure
        tokens', where there are any."""
        stop = int(self.arrays["offsets"][self.num_train_chains])
        counts = [np.bincount(self.arrays["sequence"][:stop], minlength=VOCAB_SIZE) + 1]
        if self.tokenised is not None:
            counts.append(np.bincount(self.arrays[STRUCTURE][:stop], minlength=self.tokenised.num_codes + 1)[1:] + 1)
        return torch.from_numpy(np.concatenate([np.log(each / each.sum()) for each in counts]))

    def chains(self, split: str) -> Chains:
        """Return all chains of "train" or "val", whole, read as they are asked for. Errors: ``ValueError`` for another
        split."""
        if split not in ("train", "val"):
            raise ValueError(f"no split '{split}'; choices: train, val")
        numbers = (
            range(self.num_train_chains) if split == "train" else range(self.num_train_chains, len(self.tables.ids))
        )
        return Chains(self, numbers)

    def batch(self, split: str, num: int, positions: int, generator: torch.Generator) -> ProteinBatch:
        """Draw ``num`` chains with replacement, each equally likely; of one longer than ``positions`` a random
        contiguous crop, every start equally likely. Only ``generator`` decides, by two draws whatever the chains
        are."""
        chains = self.chains(split)
        chosen = torch.randint(len(chains), (num,), generator=generator, device=generator.device).tolist()
        shares = torch.rand(num, generator=generator, device=generator.device, dtype=torch.float64).tolist()
        starts = [
            int(share * max(chains.length(at) - positions + 1, 1)) for at, share in zip(chosen, shares, strict=True)
        ]
        return batch_of([chains.part(at, start, positions) for at, start in zip(chosen, starts, strict=True)])

    def windows(self, split: str, num: int, positions: int) -> ProteinBatch:
        """Return at most ``num`` chains, evenly spaced from first to last; of a longer one its first ``positions``
        residues."""
        chains = self.chains(split)
        count = min(num, len(chains))
        return batch_of([chains.part(at * (len(chains) - 1) // max(count - 1, 1), 0, positions) for at in range(count)])

    def _write(self, folder: Path) -> None:
        """Write the chains' arrays and tables, or of a tokenised corpus the structure tokens alone."""
        if self.tokenised is not None:
            disk.write_array(folder / f"{STRUCTURE}.npy", self.arrays[STRUCTURE])
            disk.write_meta(
                folder,
                {
                    "kind": KIND,
                    "fingerprint": self.fingerprint,
                    STRUCTURE: self.sums[STRUCTURE],
                    **self.tokenised.__dict__,
                },
            )
            disk.fsync(folder)
            return
        for name, array in self.arrays.items():
            disk.write_array(folder / f"{name}.npy", array)
        disk.write_text(folder / TABLES, self.tables.to_json())
        disk.write_text(folder / "skipped.tsv", "".join(f"{name}\t{reason}\n" for name, reason in self.skipped))
        meta = {
            "kind": KIND,
            "fingerprint": self.fingerprint,
            "description": self.description,
            "num_train_chains": self.num_train_chains,
        }
        disk.write_meta(folder, {**meta, "tables": _sha256_of_text(self.tables.to_json()), **self.sums})
        disk.fsync(folder)

    @classmethod
    def load(cls, folder: Path) -> ProteinCorpus:
        """Return the corpus in a folder, as `AbstractCorpus.load` has it; a tokenised one reads its chains from the
        folder of their fingerprint beside its own."""
        if "base" in disk.verified_meta(folder):
            return cls._load_tokenised(folder)
        meta = disk.read_meta(folder, {"kind", *PLAIN, *ARRAYS, *WORDS}, set())
        try:
            text = (folder / TABLES).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise disk.damaged(folder / TABLES, str(error)) from None
        if _sha256_of_text(text) != meta["tables"]:
            raise disk.damaged(folder / TABLES, "it was altered")
        tables, sums = Tables.from_json(text), {name: meta[name] for name in (*ARRAYS, *WORDS)}
        if meta["fingerprint"] != _fingerprint(sums, tables, meta["num_train_chains"]):
            raise disk.damaged(folder / disk.META, "its fingerprint is not that of its chains")
        arrays = {name: disk.read_array(folder / f"{name}.npy", sums[name]) for name in (*ARRAYS, *WORDS)}
        return cls(arrays, tables, meta["num_train_chains"], meta["fingerprint"], meta["description"], sums)

    @classmethod
    def _load_tokenised(cls, folder: Path) -> ProteinCorpus:
        meta = disk.read_meta(folder, {"kind", "fingerprint", STRUCTURE, *TOKENISED}, set())
        structure = disk.read_array(folder / f"{STRUCTURE}.npy", meta[STRUCTURE])
        corpus = cls.load(folder.parent / meta["base"])._with(
            Tokenised(*(meta[name] for name in TOKENISED)), structure, meta[STRUCTURE]
        )
        if corpus.fingerprint != meta["fingerprint"]:
            raise disk.damaged(folder / disk.META, "its fingerprint is not that of its tokens")
        return corpus


class Chains(Sequence[ProteinChain]):
    """Chains of one side, each read when it is asked for."""

    def __init__(self, corpus: ProteinCorpus, numbers: range):
        self._corpus, self._numbers = corpus, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        return self.part(range(len(self))[index], 0, self.length(range(len(self))[index]))

    def length(self, index: int) -> int:
        """Return the number of residues of a chain."""
        start, stop = self._corpus.arrays["offsets"][self._numbers[index] : self._numbers[index] + 2]
        return int(stop - start)

    def part(self, index: int, first: int, length: int) -> ProteinChain:
        """Read at most ``length`` residues of a chain from ``first`` on; nothing else of it is read."""
        arrays, tables, number = self._corpus.arrays, self._corpus.tables, self._numbers[index]
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


def _sha256_of_text(text: str) -> str:
    return disk.sha256_of_json(text)


def _fingerprint(sums: Mapping[str, str], tables: Tables, num_train_chains: int) -> str:
    names = {name: value for name, value in tables.__dict__.items() if name != "skipped"}
    return disk.sha256_of_json(["stability proteins", VERSION, len(SPECIALS), num_train_chains, dict(sums), names])
