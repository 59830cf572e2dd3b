"""Generate proteins: sample, store and score them.

On disk: ``samples/<phase>.jsonl`` with letters and structure tokens, letters in ``<phase>.fasta``, structures in
``<phase>/sample_<i>.cif``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from stability.config.generation import GenerationSpec
from stability.config.parts import contexts_of
from stability.config.run import RunSpec
from stability.corpora.cache import load
from stability.corpora.proteins.alphabets import NUM_ATOMS, UNK, encode
from stability.corpora.proteins.corpus import ProteinCorpus
from stability.objectives.multitrack import SOURCES
from stability.probes.generation import protein_oracle
from stability.probes.generation import samples as stored_samples
from stability.probes.generation.kinds import Kind
from stability.probes.generation.protein_oracle import ScoresProteins
from stability.probes.generation.protein_source import ProteinSample, ProteinSource
from stability.runs.directory import RunDirectory, read_json, read_jsonl, replace_folder, write_atomically
from stability.runs.records import SamplesFile
from stability.runs.schema import GENERATION_COLUMNS
from stability.structure.mmcif import mmcif
from stability.structure.tokenizer import StructureTokenizer, load_tokenizer

LETTERS = "the letters as FASTA"


class ProteinKind(Kind):
    """Proteins as a kind of samples."""

    columns: Sequence[str] = (*GENERATION_COLUMNS, *(f"nll_{name}" for name in SOURCES), "contexts", "oracle_draws")

    def check(self, run: RunSpec, spec: GenerationSpec) -> None:
        if spec.oracle is None and spec.own.oracle_draws != type(spec.own).model_fields["oracle_draws"].default:
            raise ValueError(
                f"oracle_draws={spec.own.oracle_draws} belongs to an oracle, and none is given; add oracle=ckpt:FOLDER"
            )
        if spec.own.contexts == "given" and not contexts_of(run.objective):
            raise ValueError(
                "contexts=given, and this run reads none (objective.contexts=[]); leave it out, or train with "
                "objective.contexts=[ss,sasa]"
            )

    def collect_sample_settings(self, spec: GenerationSpec) -> dict[str, Any]:
        return {"contexts": spec.own.contexts}

    def collect_score_settings(self, spec: GenerationSpec) -> dict[str, Any]:
        return {"oracle_draws": spec.own.oracle_draws}

    def num_steps(self, run: RunSpec, spec: GenerationSpec, sampler: str) -> int:
        """Return the steps for proteins filling the model's positions; fewer for shorter ones.

        Each structure and each score is a step.

        Args:
            run: the run's spec.
            spec: the generation settings.
            sampler: without effect.
        """
        sources = _sources(run)
        of_each_batch, of_each_sample = (
            len(sources) * (run.model.positions - 2),
            ("structure" in sources) + (spec.oracle is not None),
        )
        return math.ceil(spec.num / spec.batch) * of_each_batch + spec.num * of_each_sample

    def equal_samples(self, run: RunSpec, spec: GenerationSpec, sampler: str) -> str:
        chance = spec.temperature > 0 or sampler != "top_prob"
        return (
            ""
            if spec.num == 1 or chance or spec.own.contexts == "given"
            else "samples of a checkpoint that are equally long"
        )

    def source(
        self,
        directory: RunDirectory,
        run: RunSpec,
        model: nn.Module,
        corpus: ProteinCorpus,
        spec: GenerationSpec,
        sampler: str,
        device: torch.device,
    ) -> ProteinSource:
        """Return the source of a run's proteins.

        Args:
            directory: the run.
            run: its spec.
            model: its model, already on ``device``.
            corpus: its prepared proteins.
            spec: the generation settings.
            sampler: the resolved sampler.
            device: of model and samples.

        Raises:
            ValueError: the structure tokenizer is missing.
        """
        _tokenizer(directory, run)  # fail now if missing, not after an hour of sampling
        return ProteinSource(run, model, corpus, spec, sampler, device)

    def write(
        self,
        directory: RunDirectory,
        phase: str,
        samples: Sequence[ProteinSample],
        made_by: dict[str, Any],
        *,
        run: RunSpec,
        corpus: ProteinCorpus,
        device: torch.device,
    ) -> Iterator[None]:
        """Write FASTA and structures, then the samples with their manifest; yield after every structure.

        Args:
            directory: the run.
            phase: the checkpoint's phase.
            samples: the proteins.
            made_by: the settings behind them.
            run: the run's spec.
            corpus: without effect.
            device: for the structure decoder.
        """
        folder, beside = stored_samples.meta_file(directory, phase).with_suffix(""), {}
        # a phase without its manifest, written last, is made again
        stored_samples.meta_file(directory, phase).unlink(missing_ok=True)
        if "sequence" in _sources(run):
            write_atomically(folder.with_suffix(".fasta"), stored_samples.fasta_of(samples, made_by).encode())
            beside[f"{phase}.fasta"] = LETTERS
        if tokenizer := _tokenizer(directory, run):
            decoding = Decoding.of(tokenizer.to(device), "sequence" in _sources(run), directory.path.parent / "cache")
            yield from write_structures(decoding, samples, f"{directory.run_id}_{phase}", folder)
            beside[phase] = decoding.words
        rows = ({"text": sample.text, "structure": sample.structure, "protein": sample.protein} for sample in samples)
        stored_samples.vouch(directory, phase, ".jsonl", stored_samples.jsonl(rows), made_by, beside)

    def read(self, directory: RunDirectory, phase: str, corpus: ProteinCorpus) -> list[ProteinSample]:
        path = stored_samples.meta_file(directory, phase)
        rows = read_jsonl(path.with_name(read_json(path, SamplesFile)["file"]), ())
        return [ProteinSample(row["text"], row["structure"], row["protein"]) for row in rows]

    def oracle(self, run: RunSpec, spec: GenerationSpec, corpus: ProteinCorpus, device: str) -> ScoresProteins:
        return protein_oracle.load_protein_oracle(run, spec, corpus, device)

    def forget_oracle(self) -> None:
        protein_oracle.forget()

    def scores(
        self, oracle: ScoresProteins, samples: Sequence[ProteinSample], corpus: ProteinCorpus, spec: GenerationSpec
    ) -> Iterator[list[dict[str, Any]]]:
        return ([row] for row in oracle.scores(samples))


def _sources(run: RunSpec) -> tuple[str, ...]:
    settings: Any = run.objective.settings
    return settings.sources


def _tokenizer(directory: RunDirectory, run: RunSpec) -> StructureTokenizer | None:
    """Return the run's structure tokenizer, or None without structure; raises as `load_tokenizer`."""
    settings: Any = run.objective.settings
    identity = settings.tokenizer
    return None if identity is None else load_tokenizer(directory.path.parent, identity)


EXPORT = ProteinKind


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
