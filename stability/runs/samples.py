"""Find a run's samples, and make of the first of them as text the table that a report shows. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from stability.runs.directory import RunDirectory, damaged, read_json, read_jsonl
from stability.runs.records import SamplesFile

SHOWN = 200  # characters of a sample that a table keeps


def meta_file(directory: RunDirectory, phase: str) -> Path:
    """Return the file that says what the samples of a phase were made by; where it is missing, there are none."""
    return directory.path / "samples" / f"{phase}.json"


def first_texts(directory: RunDirectory, phase: str, num: int) -> list[str]:
    """Return what the first samples say; their tokens' numbers where what these stand for was not kept, or no letters
    (a protein's structure alone)."""
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
            raise damaged(path, "a row has neither text nor tokens")


def fasta_sequences(path: Path) -> list[str]:
    """Return the letters of each record of a FASTA file. ``ValueError`` names it if it is damaged."""
    try:
        return ["".join(record.splitlines()[1:]) for record in path.read_text(encoding="utf-8").split(">")[1:]]
    except UnicodeDecodeError as error:
        raise damaged(path, str(error)) from None


def sample_rows(directory: RunDirectory, phase: str, scores: pa.Table | None) -> list[dict[str, Any]]:
    """Return the first sample of a phase, its first `SHOWN` characters, with its nats per token of the oracle where
    ``scores`` (a file of `GENERATION_COLUMNS`) hold it; a row without text and with the reason where there was nothing
    to sample from; [] where nobody has sampled."""
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
    # half of a surrogate pair is no text that a table can hold
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
