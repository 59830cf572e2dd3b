"""Score sampled proteins by a multitrack checkpoint or a protein language model.

The checkpoint predicts the same tracks and scores by its own objective. A protein language model scores letters only
(`protein_letters_oracle`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from stability.build import build_objective, resolve_device
from stability.config.generation import GenerationSpec
from stability.config.parts import contexts_of
from stability.config.run import RunSpec
from stability.corpora.proteins.alphabets import encode
from stability.corpora.proteins.batch import ProteinBatch
from stability.corpora.proteins.corpus import ProteinCorpus
from stability.models import PAD
from stability.models.passes import generator_for
from stability.probes.checkpoints import corpus_of
from stability.probes.generation.protein_letters_oracle import forget as forget_letters
from stability.probes.generation.protein_letters_oracle import load_letters_oracle
from stability.probes.generation.protein_source import ProteinSample, read_held_out
from stability.probes.generation.text_oracle import forget as forget_text
from stability.probes.generation.text_oracle import oracle_checkpoint, weights_sha256
from stability.training import checkpoint

SEED = 0  # for the masks, as in validation
WORDS = ("domains", "descriptions", "orthologs")  # contexts with token numbers from the data's own lists


@dataclass(frozen=True, eq=False)
class ProteinOracle:
    """A multitrack checkpoint as an oracle: its objective's masked NLL of a sample.

    A sample is masked ``spec.own.oracle_draws`` times by the oracle's training schedules, independently per track. Each
    draw gives, per track, the mean cross entropy over masked positions, given everything unmasked (including the other
    track). The track's NLL is the mean over draws. The total is the sum over tracks: nats of one residue's hidden
    letter and hidden structure token, the unit of the validation NLL. This is no NLL of the whole protein. The rates of
    a sample's draws are evenly spaced over the schedule. Rates and masks depend only on the sample's number, its length
    and the number of draws: the same for all compared runs. The oracle receives the sample's contexts (none if sampled
    without), partly hidden by its own schedule, as in validation.
    """

    name: str
    sha256: str
    model: nn.Module
    objective: Any
    run: RunSpec  # of the samples
    spec: GenerationSpec
    corpus: ProteinCorpus
    device: torch.device

    def scores(self, samples: Sequence[ProteinSample]) -> Iterator[dict[str, Any]]:
        """Yield a row for each sample."""
        for index, sample in enumerate(samples):
            nats = dict(zip(self.objective.components, self._nats(index, sample), strict=True))
            parts = {f"nll_{name}": nats.get(name, math.nan) for name in ("sequence", "structure")}
            yield {
                "nll": sum(nats.values()),
                "nll_per_byte": math.nan,
                "num_tokens": sample.num_tokens,
                "num_bytes": 0,
                **parts,
            }

    @torch.no_grad()
    def _nats(self, index: int, sample: ProteinSample) -> list[float]:
        """Return each source track's nats, in the objective's order."""
        batch = _repeat(
            with_tracks(read_held_out(self.run, self.spec, self.corpus, [index]), sample), self.spec.own.oracle_draws
        )
        examples = self.objective.examples(batch, generator_for(SEED, "oracle", index)).to(self.device)
        sums = [
            self.objective.component_sums(part.logits(self.model), part).double()
            for part in examples.split(self.spec.batch)
        ]
        return (torch.stack(sums).sum(0) / self.spec.own.oracle_draws).tolist()


def with_tracks(batch: ProteinBatch, sample: ProteinSample) -> ProteinBatch:
    """Return a one-protein batch with the sample's letters and structure tokens.

    A track missing in the sample is marked unknown.
    """
    num = batch.residues_BN.shape[1]
    letters = (
        torch.full((1, num), PAD)
        if sample.text is None
        else torch.from_numpy(encode(sample.text).astype("int64"))[None]
    )
    structure = torch.zeros(1, num, dtype=torch.int64) if sample.structure is None else torch.tensor([sample.structure])
    assert letters.shape == structure.shape == batch.residues_BN.shape, (
        "a sample of another length than its held-out protein"
    )
    known = torch.full((1, num), sample.structure is not None)
    fields: dict[str, Any] = batch._asdict() | {
        "sequence_BN": letters,
        "structure_BN": structure,
        "structure_mask_BN": known,
    }
    return ProteinBatch(**fields)


def _repeat(batch: ProteinBatch, num: int) -> ProteinBatch:
    """Return ``num`` copies of a one-protein batch."""
    return ProteinBatch(batch.ids * num, *(tensor.repeat_interleave(num, 0) for tensor in batch[1:]))


class ScoresProteins(Protocol):
    """An oracle for sampled proteins: display name, sha256 of the weights, and scores."""

    @property
    def name(self) -> str: ...

    @property
    def sha256(self) -> str: ...

    def scores(self, samples: Sequence[ProteinSample]) -> Iterator[dict[str, Any]]:
        """Yield a score-table row for each sample.

        Columns: ``nll``, the total; ``nll_sequence`` and ``nll_structure``, its parts (NaN: not scored);
        ``num_tokens``; ``nll_per_byte`` NaN and ``num_bytes`` 0.
        """
        ...


def load_protein_oracle(run: RunSpec, spec: GenerationSpec, corpus: ProteinCorpus, device: str) -> ScoresProteins:
    """Load the oracle ``ckpt:…`` or ``hf:…`` for a run's samples.

    Args:
        run: the run's spec.
        spec: the generation settings.
        corpus: the run's prepared data.
        device: "auto", or a torch device.

    Raises:
        ValueError: no such oracle; other tracks, shorter proteins or other context words than the samples'; one or two
            lines.
    """
    assert spec.oracle is not None
    kind, _, place = spec.oracle.partition(":")
    if kind == "hf":
        return load_letters_oracle(run, spec, place, device)
    if kind != "ckpt":
        raise ValueError(
            f"oracle={spec.oracle} reads nucleotides, and these samples are proteins;\ngive oracle=ckpt:FOLDER, a run "
            f"with objective={run.objective.name}, or oracle=hf:NAME_OR_FOLDER, a protein language model"
        )
    folder, where = oracle_checkpoint(place), resolve_device(device)
    own, data_format, model = _load(str(folder), str(where))
    name = f"ckpt:{folder.parent.parent.name}/{folder.name}"
    _check_tracks(name, own, run)
    _check_length(name, own, run, spec, corpus)
    words = sorted(set(WORDS) & set(contexts_of(own.objective)) & set(contexts_of(run.objective)))
    if words and spec.own.contexts == "given" and own.data_fingerprint != run.data_fingerprint:
        its_corpus: Any = corpus_of(own, folder.parent.parent.parent / "cache")
        _check_words(name, words, its_corpus, corpus)
    return ProteinOracle(
        name, weights_sha256(folder), model, build_objective(own, data_format), run, spec, corpus, where
    )


def forget() -> None:
    """Free the cached oracle's memory."""
    _load.cache_clear()
    forget_letters()
    forget_text()


@lru_cache(maxsize=1)
def _load(place: str, device: str) -> tuple[RunSpec, Any, nn.Module]:
    """Return an oracle's spec, its data's format, and its model."""
    try:
        spec, model = checkpoint.load(Path(place))
        manifest = checkpoint.verify_manifest(Path(place))
    except ValueError as error:
        raise ValueError(f"oracle: {error}") from None
    return spec, manifest.get("format"), model.to(device)


def _check_tracks(name: str, own: RunSpec, run: RunSpec) -> None:
    """Refuse an oracle trained on other tracks or tokens (``ValueError``, two lines)."""
    wanted, given = run.objective, own.objective
    if given.name != wanted.name:
        raise ValueError(
            f"oracle={name} was trained with objective={given.name}, which scores no proteins;\ngive a run with "
            f"objective={wanted.name}"
        )
    for field in ("sources", "tokenizer"):
        asked, found = getattr(wanted.settings, field), getattr(given.settings, field)
        if asked != found:
            raise ValueError(
                f"oracle={name} was trained with objective.{field}={_format_value(found)}, and these samples are of "
                f"objective.{field}={_format_value(asked)};\ngive a run with objective.{field}={_format_value(asked)}"
            )


def _format_value(value: Any) -> str:
    """Return a value in command-line syntax."""
    return f"[{','.join(value)}]" if isinstance(value, tuple) else "null" if value is None else str(value)


def _check_length(name: str, own: RunSpec, run: RunSpec, spec: GenerationSpec, corpus: ProteinCorpus) -> None:
    chains = corpus.chains("val")
    longest = min(max(chains.length(index) for index in range(min(spec.num, len(chains)))), run.model.positions - 2)
    if longest > own.model.positions - 2:
        raise ValueError(
            f"oracle={name} reads {own.model.positions - 2} residues, and the longest of these samples has {longest};\n"
            f"give one with model.positions={longest + 2} or more"
        )


def _check_words(name: str, contexts: Sequence[str], its_corpus: ProteinCorpus, corpus: ProteinCorpus) -> None:
    for context in contexts:
        if getattr(its_corpus.tables, context) != getattr(corpus.tables, context):
            raise ValueError(
                f"oracle={name} numbers its {context} otherwise than these samples' data, and contexts=given shows "
                "it theirs;\ntrain one on the same data, or sample with contexts=empty"
            )
