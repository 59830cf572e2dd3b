"""Decode sampled structure tokens and write mmCIF files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from stability.corpora.cache import load
from stability.corpora.proteins.alphabets import NUM_ATOMS, UNK, encode
from stability.probes.generation.protein_source import ProteinSample
from stability.runs.directory import replace_folder
from stability.structure.mmcif import mmcif
from stability.structure.tokenizer import StructureTokenizer

MOST_READ = 200  # training chains searched for atoms


@dataclass(frozen=True, eq=False)
class Decoding:
    """A decoder from structure tokens to atoms.

    ``learned_A`` marks a residue's atom places to write. ``is_stage_2``: all heavy atoms are decoded from tokens and
    letters, else the backbone from tokens alone. ``words`` describes the files to their reader.
    """

    tokenizer: StructureTokenizer
    learned_A: np.ndarray
    is_stage_2: bool
    words: str

    @classmethod
    def of(cls, tokenizer: StructureTokenizer, has_letters: bool, cache_dir: Path) -> Decoding:
        """Choose the stage-2 decoder if it was trained and letters are available.

        Args:
            tokenizer: the run's structure tokenizer.
            has_letters: whether the samples have letters; stage 2 needs them.
            cache_dir: folder with the prepared data.
        """
        everything = np.ones(NUM_ATOMS, dtype=bool)
        if tokenizer.atom_decoder is None:
            return cls(tokenizer, everything, False, "mmCIF, the backbone alone (the tokenizer has no stage 2)")
        if not has_letters:
            return cls(
                tokenizer,
                everything,
                False,
                "mmCIF, the backbone alone (stage 2 reads letters, and the model predicts none)",
            )
        learned_A = atoms_in_training(tokenizer, cache_dir)
        if learned_A is None:
            return cls(
                tokenizer,
                everything,
                True,
                "mmCIF, all heavy atoms by the tokenizer's stage 2 (unchecked: the chains that it learned from are "
                "gone)",
            )
        if learned_A.all():
            return cls(tokenizer, learned_A, True, "mmCIF, all heavy atoms by the tokenizer's stage 2")
        known = f"{int(learned_A.sum())} of {NUM_ATOMS} atom places of a residue"
        return cls(
            tokenizer,
            learned_A,
            True,
            f"mmCIF, {known} by the tokenizer's stage 2 (the chains that it learned from have no atom at the others)",
        )

    def mmcif(self, sample: ProteinSample, name: str) -> str:
        """Return a file's text; residues without a letter are named UNK."""
        assert sample.structure is not None
        device = self.tokenizer.decoder.to_atoms.weight.device
        tokens_BN = torch.tensor([sample.structure], device=device)
        letters = np.full(len(sample.structure), UNK) if sample.text is None else encode(sample.text).astype(np.int64)
        if not self.is_stage_2:
            return mmcif(name, letters, self.tokenizer.decode(tokens_BN)[0].cpu().numpy())
        atoms_NAX = self.tokenizer.decode_atoms(tokens_BN, torch.from_numpy(letters)[None].to(device))[0].cpu().numpy()
        return mmcif(name, letters, np.where(self.learned_A[:, None], atoms_NAX, np.nan))


def atoms_in_training(tokenizer: StructureTokenizer, cache_dir: Path) -> np.ndarray | None:
    """Return the atom places filled in the tokenizer's training chains, (14) bool.

    At most 200 evenly spaced chains are read. None if these chains are no longer under ``cache_dir``.
    """
    if not (cache_dir / tokenizer.spec.data_fingerprint).is_dir():
        return None
    chains = load(cache_dir, tokenizer.spec.data_fingerprint).chains("train")
    numbers = sorted({number * len(chains) // MOST_READ for number in range(MOST_READ)})
    # at other places stage 2 returns no more than its initialisation
    return np.any([chains[number].atoms14_mask_NA.any(0) for number in numbers], axis=0)


def write_structures(decoding: Decoding, samples: Sequence[ProteinSample], name: str, folder: Path) -> Iterator[None]:
    """Write ``folder/sample_<i>.cif``, yielding after each; replace the folder once complete.

    Args:
        decoding: the decoder.
        samples: with structure tokens.
        name: prefix for the files' data blocks.
        folder: the target.
    """
    with replace_folder(folder) as aside:
        for index, sample in enumerate(samples):
            path = aside / f"sample_{index}.cif"
            path.write_text(decoding.mmcif(sample, f"{name}_sample_{index}"), encoding="utf-8")
            yield
