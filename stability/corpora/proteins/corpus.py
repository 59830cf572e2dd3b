"""Prepared protein chains: memory-mapped tracks of two sides, with random batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from stability.corpora.base import AbstractCorpus
from stability.corpora.io import disk
from stability.corpora.io.disk import sha256
from stability.corpora.proteins.alphabets import (
    NUM_PLDDT_BINS,
    NUM_SASA_BINS,
    SPECIALS,
    SS_CLASSES,
    VOCAB_SIZE,
)
from stability.corpora.proteins.batch import ProteinBatch, batch_of
from stability.corpora.proteins.stored_chains import STRUCTURE, Chains, Tables

VERSION = 1  # increased if equal chains and splits would be laid out differently; part of every fingerprint
KIND = "proteins"
ARRAYS = ("offsets", "sequence", "atoms14", "ss", "sasa", "plddt", "numbers", "domain_offsets", "domains")
WORDS = ("description_offsets", "descriptions", "ortholog_offsets", "orthologs")
TABLES = "tables.json"
PLAIN = ("fingerprint", "description", "num_train_chains", "tables")
TOKENISED = ("base", "tokenizer", "num_codes")


@dataclass(frozen=True)
class Tokenised:
    """The origin of a corpus's structure tokens.

    Attributes:
        base: fingerprint of the chains' corpus.
        tokenizer: the tokenizer's id.
        num_codes: size of its codebook.
    """

    base: str
    tokenizer: str
    num_codes: int


@dataclass(frozen=True, eq=False)
class ProteinCorpus(AbstractCorpus):
    """Chains of two sides, training first; built by `split.corpus_of`.

    Attributes:
        arrays: arrays named in `ARRAYS` and `WORDS`, and `STRUCTURE` if ``tokenised``.
        tables: the chains' words.
        sums: sha256 of each array by name.
        tokenised: origin of structure tokens, or None. Such a corpus has its own fingerprint, and a folder with its
            tokens beside the chains' folder.
    """

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
        """Return a corpus from arrays in their stored form.

        The fingerprint covers all arrays, names and the split, but neither skipped files nor locations.

        Args:
            arrays: arrays named in `ARRAYS` and `WORDS`.
            tables: the chains' words.
            num_train_chains: number of training chains, which are first.
            description: one line on the source.
        """
        sums = {name: sha256(arrays[name]) for name in (*ARRAYS, *WORDS)}
        return cls(arrays, tables, num_train_chains, _fingerprint(sums, tables, num_train_chains), description, sums)

    @property
    def format(self) -> dict[str, Any]:
        """Vocabulary sizes of the tracks.

        Sequence, words and structure tokens begin with the special tokens.
        """
        words = {name: len(getattr(self.tables, name)) for name in ("domains", "descriptions", "orthologs")}
        classes = {"ss": len(SS_CLASSES), "sasa": NUM_SASA_BINS, "plddt": NUM_PLDDT_BINS}
        structure = {} if self.tokenised is None else {STRUCTURE: len(SPECIALS) + self.tokenised.num_codes}
        return {"sequence": VOCAB_SIZE, **classes, **words, **structure}

    def with_structure(self, tokenizer: str, num_codes: int, tokens: np.ndarray) -> ProteinCorpus:
        """Return the same chains with structure tokens.

        Args:
            tokenizer: the tokenizer's id.
            num_codes: size of its codebook.
            tokens: one a residue, training side first, −1 for none.
        """
        assert self.tokenised is None and tokens.shape == self.arrays["sequence"].shape
        assert tokens.min() >= -1 and tokens.max() < num_codes
        return self._attach_structure(
            Tokenised(self.fingerprint, tokenizer, num_codes), (tokens + 1).astype(np.uint32), None
        )

    def _attach_structure(self, tokenised: Tokenised, structure: np.ndarray, known_sum: str | None) -> ProteinCorpus:
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
    def num_residues(self) -> int:
        """The residues of all chains."""
        return len(self.arrays["sequence"])

    @property
    def skipped(self) -> tuple[tuple[str, str], ...]:
        """(file or chain, reason) of unusable ones."""
        return self.tables.skipped

    def require(self, positions: int, more: int = 0, remedy: str = "") -> None:
        """Check the number of chains; their lengths fit any model, longer ones are cropped.

        Args:
            positions: unused.
            more: unused.
            remedy: additional advice for the message.

        Raises:
            ValueError: there are fewer than two training chains or no held-out one.
        """
        num = len(self.tables.ids)
        if self.num_train_chains < 2 or num - self.num_train_chains < 1:
            raise ValueError(
                f"data: {self.num_train_chains} training chains and {num - self.num_train_chains} held out; at least "
                f"2 and 1 are needed. Give more proteins{remedy}.\nRead: {self.description}"
            )

    def describe(self, positions: int) -> str:
        """Return the description with the number of chains longer than ``positions``."""
        lengths = np.diff(self.arrays["offsets"])
        longer = int((lengths > positions).sum())
        return self.description + (f"; {longer:,} longer than {positions:,} residues, cropped" if longer else "")

    def log_frequencies(self) -> Float64[Tensor, " vocabulary"]:
        """Return the training residues' log frequencies, then those of the structure tokens, if any.

        Each count is raised by one.
        """
        stop = int(self.arrays["offsets"][self.num_train_chains])
        counts = [np.bincount(self.arrays["sequence"][:stop], minlength=VOCAB_SIZE) + 1]
        if self.tokenised is not None:
            counts.append(np.bincount(self.arrays[STRUCTURE][:stop], minlength=self.tokenised.num_codes + 1)[1:] + 1)
        return torch.from_numpy(np.concatenate([np.log(each / each.sum()) for each in counts]))

    def chains(self, split: str) -> Chains:
        """Return all chains of "train" or "val", whole, read on access.

        Raises:
            ValueError: the split is unknown.
        """
        if split not in ("train", "val"):
            raise ValueError(f"no split '{split}'; choices: train, val")
        numbers = (
            range(self.num_train_chains) if split == "train" else range(self.num_train_chains, len(self.tables.ids))
        )
        return Chains(self.arrays, self.tables, numbers)

    def batch(self, split: str, num: int, positions: int, generator: torch.Generator) -> ProteinBatch:
        """Draw random chains, equally likely and with replacement.

        From a longer chain, a random crop is drawn, every start equally likely. ``generator`` is always used for two
        draws, whatever the chains.

        Args:
            split: "train" or "val".
            num: number of chains.
            positions: largest number of residues.
            generator: random generator.
        """
        chains = self.chains(split)
        chosen = torch.randint(len(chains), (num,), generator=generator, device=generator.device).tolist()
        shares = torch.rand(num, generator=generator, device=generator.device, dtype=torch.float64).tolist()
        starts = [
            int(share * max(chains.length(at) - positions + 1, 1)) for at, share in zip(chosen, shares, strict=True)
        ]
        return batch_of([chains.part(at, start, positions) for at, start in zip(chosen, starts, strict=True)])

    def longest_batch(self, num: int, positions: int, generator: torch.Generator) -> ProteinBatch:
        return self.batch("train", num, positions, generator).repeat_to(positions)

    def windows(self, split: str, num: int, positions: int) -> ProteinBatch:
        """Return evenly spaced chains from first to last, cropped to their first residues.

        Args:
            split: "train" or "val".
            num: largest number of chains.
            positions: largest number of residues.
        """
        chains = self.chains(split)
        count = min(num, len(chains))
        return batch_of([chains.part(at * (len(chains) - 1) // max(count - 1, 1), 0, positions) for at in range(count)])

    def _write(self, folder: Path) -> None:
        """Write the chains' arrays and tables.

        A tokenised corpus writes its structure tokens only.
        """
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
        """Return a folder's corpus, as `AbstractCorpus.load`.

        A tokenised corpus reads its chains from their own folder beside its own.
        """
        if "base" in disk.read_verified_meta(folder):
            return cls._load_tokenised(folder)
        meta = disk.read_meta(folder, {"kind", *PLAIN, *ARRAYS, *WORDS}, set())
        try:
            text = (folder / TABLES).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise disk.make_damage_error(folder / TABLES, str(error)) from None
        if _sha256_of_text(text) != meta["tables"]:
            raise disk.make_damage_error(folder / TABLES, "it was altered")
        tables, sums = Tables.from_json(text), {name: meta[name] for name in (*ARRAYS, *WORDS)}
        if meta["fingerprint"] != _fingerprint(sums, tables, meta["num_train_chains"]):
            raise disk.make_damage_error(folder / disk.META, "its fingerprint is not that of its chains")
        arrays = {name: disk.read_array(folder / f"{name}.npy", sums[name]) for name in (*ARRAYS, *WORDS)}
        return cls(arrays, tables, meta["num_train_chains"], meta["fingerprint"], meta["description"], sums)

    @classmethod
    def _load_tokenised(cls, folder: Path) -> ProteinCorpus:
        meta = disk.read_meta(folder, {"kind", "fingerprint", STRUCTURE, *TOKENISED}, set())
        structure = disk.read_array(folder / f"{STRUCTURE}.npy", meta[STRUCTURE])
        corpus = cls.load(folder.parent / meta["base"])._attach_structure(
            Tokenised(*(meta[name] for name in TOKENISED)), structure, meta[STRUCTURE]
        )
        if corpus.fingerprint != meta["fingerprint"]:
            raise disk.make_damage_error(folder / disk.META, "its fingerprint is not that of its tokens")
        return corpus


def _sha256_of_text(text: str) -> str:
    return disk.sha256_of_json(text)


def _fingerprint(sums: Mapping[str, str], tables: Tables, num_train_chains: int) -> str:
    names = {name: value for name, value in tables.__dict__.items() if name != "skipped"}
    return disk.sha256_of_json(["stability proteins", VERSION, len(SPECIALS), num_train_chains, dict(sums), names])
