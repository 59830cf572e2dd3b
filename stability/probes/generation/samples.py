"""Store samples with their settings.

``runs/<run_id>/samples/<phase>.jsonl`` (``.fasta`` for nucleotides) and a manifest ``<phase>.json`` (proteins:
`proteins.ProteinKind.write`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from stability.corpora.tokens.corpus import Corpus
from stability.runs.directory import RunDirectory, read_json, read_jsonl, write_atomically, write_json
from stability.runs.records import SamplesFile
from stability.runs.samples import fasta_sequences, meta_file

LINE = 80  # letters a line of FASTA


class HasText(Protocol):
    @property
    def text(self) -> str | None: ...


class Sample(NamedTuple):
    """Tokens in the run's own vocabulary, and their text; None if unknown."""

    tokens: list[int]
    text: str | None


def is_nucleotides(corpus: Corpus) -> bool:
    return corpus.vocabulary is not None and bool(corpus.vocabulary.complement)


def decode_sample(corpus: Corpus, tokens: list[int]) -> Sample:
    return Sample(tokens, corpus.decode(tokens) if has_text(corpus) else None)


def has_text(corpus: Corpus) -> bool:
    """Return whether tokens can be decoded; some data sources have only numbers."""
    try:
        corpus.decode([])
    except ValueError:
        return False
    return True


def write(
    directory: RunDirectory, phase: str, samples: Sequence[Sample], made_by: dict[str, Any], *, fasta: bool
) -> Path:
    """Write the samples, then their manifest; without a manifest there are no samples.

    Args:
        directory: the run.
        phase: the checkpoint's phase.
        samples: the samples.
        made_by: the settings behind them, plain values.
        fasta: write FASTA instead of JSON lines.
    """
    rows = ({"text": sample.text, "tokens": sample.tokens} for sample in samples)
    return vouch(
        directory, phase, ".fasta" if fasta else ".jsonl", fasta_of(samples, made_by) if fasta else jsonl(rows), made_by
    )


def vouch(
    directory: RunDirectory,
    phase: str,
    suffix: str,
    text: str,
    made_by: dict[str, Any],
    beside: Mapping[str, str] | None = None,
) -> Path:
    """Write a phase's sample file, then its manifest.

    Args:
        directory: the run.
        phase: the checkpoint's phase.
        suffix: of the sample file.
        text: its content.
        made_by: the settings behind the samples.
        beside: existing companion files or folders by name, with a description; if one is missing later, the samples
            count as missing, too.
    """
    target, content = meta_file(directory, phase).with_suffix(suffix), text.encode()
    write_atomically(target, content)
    more = {"beside": dict(beside)} if beside else {}
    write_json(
        meta_file(directory, phase),
        {**made_by, "file": target.name, "file_sha256": hashlib.sha256(content).hexdigest(), **more},
    )
    return target


def read(directory: RunDirectory, phase: str, corpus: Corpus) -> list[Sample]:
    """Read the samples written by `write`.

    Args:
        directory: the run.
        phase: the checkpoint's phase.
        corpus: the run's prepared data.

    Raises:
        ValueError: a file is damaged.
    """
    meta = read_json(meta_file(directory, phase), SamplesFile)
    path = meta_file(directory, phase).with_name(meta["file"])
    if path.suffix == ".jsonl":
        return [Sample(row["tokens"], row["text"]) for row in read_jsonl(path, ())]
    assert corpus.vocabulary is not None
    token_of = {piece.decode(): token for token, piece in enumerate(corpus.vocabulary.pieces)}
    return [Sample([token_of[letter] for letter in sequence], sequence) for sequence in fasta_sequences(path)]


def lines_beside(directory: RunDirectory, phase: str) -> list[str]:
    """Return a line for each companion of the sample file: path and description."""
    beside = read_json(meta_file(directory, phase), SamplesFile).get("beside", {})
    return [f"{meta_file(directory, phase).with_name(name)}: {what}" for name, what in beside.items()]


def read_settings(directory: RunDirectory, phase: str) -> dict[str, Any] | None:
    """Return the settings behind the stored samples; None if missing or changed."""
    path = meta_file(directory, phase)
    try:
        meta = read_json(path, SamplesFile)
    except ValueError:
        return None
    file = path.with_name(meta["file"])
    if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != meta.get("file_sha256"):
        return None
    if not all(path.with_name(name).exists() for name in meta.get("beside", {})):
        return None
    return {key: value for key, value in meta.items() if key not in ("file", "file_sha256", "beside")}


def jsonl(rows: Iterable[dict[str, Any]]) -> str:
    """Return a numbered line for each sample."""
    # ASCII: some readers end a line at other characters
    return "".join(json.dumps({"sample": index, **row}) + "\n" for index, row in enumerate(rows))


def fasta_of(samples: Sequence[HasText], made_by: dict[str, Any]) -> str:
    words = " ".join(f"{key}={made_by[key]}" for key in ("sampler", "temperature", "seed", "checkpoint"))
    records = []
    for index, sample in enumerate(samples):
        letters = sample.text or ""
        lines = [letters[start : start + LINE] for start in range(0, len(letters), LINE)]
        records.append("\n".join([f">sample_{index} {words}", *lines]) + "\n")
    return "".join(records)
