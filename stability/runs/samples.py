"""Samples of a run, and the report's table of first samples. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from stability.runs.directory import RunDirectory, make_damage_error, read_json, read_jsonl
from stability.runs.records import SamplesFile

SHOWN = 200  # characters of a sample in a table


def meta_file(directory: RunDirectory, phase: str) -> Path:
    """Return the file about the samples of a phase; without it there are no samples."""
    return directory.path / "samples" / f"{phase}.json"


def first_texts(directory: RunDirectory, phase: str, num: int) -> list[str]:
    """Return the first samples as text.

    Token numbers replace the text if the vocabulary was not stored or the sample has no letters (only a protein's
    structure).

    Args:
        directory: the run.
        phase: phase of the checkpoint.
        num: number of samples, at most.
    """
    path = meta_file(directory, phase)
    return list(islice(_texts(path.with_name(read_json(path, SamplesFile)["file"])), num))


def _texts(path: Path) -> Iterator[str]:
    """Yield the text of each sample of a file."""
    if path.suffix == ".fasta":
        yield from (text for text in fasta_sequences(path))
        return
    for row in read_jsonl(path, ()):
        text, numbers = row.get("text"), row.get("tokens", row.get("structure"))
        if isinstance(text, str):
            yield text
        elif text is None and isinstance(numbers, list):
            yield " ".join(map(str, numbers))
        else:
            raise make_damage_error(path, "a row has neither text nor tokens")


def fasta_sequences(path: Path) -> list[str]:
    """Return the letters of each record of a FASTA file.

    Raises:
        ValueError: the file is damaged; the message names it.
    """
    try:
        return ["".join(record.splitlines()[1:]) for record in path.read_text(encoding="utf-8").split(">")[1:]]
    except UnicodeDecodeError as error:
        raise make_damage_error(path, str(error)) from None


def sample_rows(directory: RunDirectory, phase: str, scores: pa.Table | None) -> list[dict[str, Any]]:
    """Return the table row of a phase's first sample, cut to `SHOWN` characters.

    Without samples in the file, the row has a reason and no text. [] if nothing was sampled.

    Args:
        directory: the run.
        phase: phase of the checkpoint.
        scores: a table of `GENERATION_COLUMNS`, for the sample's nats per token of the oracle.
    """
    if not meta_file(directory, phase).exists():
        return []
    meta = read_json(meta_file(directory, phase), SamplesFile)
    if not meta_file(directory, phase).with_name(meta["file"]).is_file():
        return []
    labels = {
        "run_id": directory.run_id,
        "phase": phase,
        **{key: meta.get(key) for key in ("sampler", "temperature", "reason")},
    }
    texts = first_texts(directory, phase, 1)
    if not texts:
        return [labels]
    scored = {} if scores is None else next((row for row in scores.to_pylist() if row["sample"] == 0), {})
    # a lone surrogate has no UTF-8 form
    text = texts[0].encode("utf-8", "replace").decode("utf-8")
    return [
        {
            **labels,
            "sample": 0,
            "text": text[:SHOWN],
            "num_characters": len(text),
            "nll": scored.get("nll"),
            "oracle": scored.get("oracle"),
        }
    ]
