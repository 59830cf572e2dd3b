"""Small files for every data source, and for each of its settings two values of which the second must show."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stability.data import stdlib
from tests.corpora.protein_files import helix, pdb, residue_lines
from tests.corpora.test_tokenizers import MERGES, symbols

Settings = dict[str, Any]
Changes = dict[str, tuple[Settings, Settings]]
WORDS = ["wide", "graph", "smooth", "narrow", "score", "sharp", "window", "step", "stable", "where"]
LETTERS = "ACDEFGHIKLMNPQRSTVWY"


def sentence(index: int) -> str:
    """A text that no other index has."""
    return " ".join(WORDS[(index * 7 + place * place) % len(WORDS)] for place in range(12)) + f" number {index}"


def jsonl(folder: Path, name: str, num: int = 60, first: int = 0) -> Path:
    """A folder with one file of documents in two columns, ``text`` and ``body``, and one of nucleotides."""
    place = folder / name
    place.mkdir()
    rows = [
        {"text": sentence(first + row), "body": sentence(1000 + first + row), "dna": dna(first + row)}
        for row in range(num)
    ]
    (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def dna(index: int) -> str:
    return "".join(np.random.default_rng(index).choice(list("ACGT"), 200))


def ranks(folder: Path, name: str, merges: list[tuple[str, str]]) -> str:
    """An encoding in GPT-2's format: 256 bytes, some merges, end-of-text."""
    place = folder / name
    place.mkdir()
    numbers = {token: index for index, token in enumerate([*symbols(), *map("".join, merges), "<|endoftext|>"])}
    lines = "".join(f"{first} {second}\n" for first, second in merges)
    (place / "vocab.bpe").write_text(f"#version: 0.2\n{lines}", encoding="utf-8")
    (place / "encoder.json").write_text(json.dumps(numbers))
    return str(place)


def tokenizers(folder: Path, base: Settings) -> Changes:
    """Changes of the settings by which text becomes tokens."""
    gpt2 = {**base, "tokenizer": "gpt2", "ranks": ranks(folder, "ranks", MERGES)}
    return {
        "tokenizer": (base, gpt2),
        "ranks": (gpt2, {**gpt2, "ranks": ranks(folder, "other_ranks", [*MERGES, ("s", "t")])}),
        "keep": (gpt2, {**gpt2, "keep": 20}),
    }


def of_stdlib(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Changes:
    for name in ("os", "argparse", *(f"module_{number}" for number in range(40))):
        (folder / f"{name}.py").write_text(f'"""The module {name}: {sentence(len(name) + hash_of(name))}."""\n')
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda _: str(folder))
    return {"": ({}, {})}


def hash_of(name: str) -> int:
    return sum(index * ord(letter) for index, letter in enumerate(name, 1))


def of_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Changes:
    base = {"path": str(jsonl(folder, "a"))}
    return {
        "path": (base, {"path": str(jsonl(folder, "b", first=60))}),
        "field": (base, {**base, "field": "body"}),
        **tokenizers(folder, base),
    }


def of_dna(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Changes:
    for name, first in (("a", 0), ("b", 25)):
        (folder / f"{name}.fa").write_text("".join(f">r{row}\n{dna(first + row)}\n" for row in range(25)))
    base = {"path": str(folder / "a.fa")}
    return {
        "path": (base, {"path": str(folder / "b.fa")}),
        "hold_out": (base, {**base, "hold_out": "region"}),
        "reverse_complement": (base, {**base, "reverse_complement": True}),
    }


def of_images(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Changes:
    for seed, name in enumerate(("a", "b")):
        pixels = np.random.default_rng(seed).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
        np.savez(folder / f"{name}.npz", images=pixels, labels=np.arange(40) % 4)
    base = {"path": str(folder / "a.npz")}
    return {
        "path": (base, {"path": str(folder / "b.npz")}),
        "hold_out": (base, {**base, "hold_out": 0.5}),
    }


def of_protein(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Changes:
    pytest.importorskip("biotite", reason="data=protein parses structures by biotite")
    (folder / "files").mkdir()
    for number in range(4):
        lines = residue_lines(chain(number), helix(10 + number), bfactor=60.0)
        (folder / "files" / f"p{number}.pdb").write_bytes(pdb(*lines))
    (folder / "known.tsv").write_text("accession\tdescriptions\n" + "".join(f"p{n}\tkinase\n" for n in range(8)))
    base, parsed = {"path": shard(folder, "a", range(8))}, {"path": str(folder / "files")}
    return {
        "path": (base, {"path": shard(folder, "b", range(8, 16))}),
        "annotations": (base, {**base, "annotations": str(folder / "known.tsv")}),
        "plddt": (parsed, {**parsed, "plddt": "always"}),
        "min_residues": (base, {**base, "min_residues": 12}),
        "held_out": (base, {**base, "held_out": 0.5}),
    }


def chain(number: int) -> str:
    return "".join(np.random.default_rng(number).choice(list(LETTERS), 10 + number))


def shard(folder: Path, name: str, numbers: range) -> str:
    """An .npz file of backbones, which is read without parsing a structure."""
    letters = [chain(number) for number in numbers]
    offsets = np.cumsum([0, *map(len, letters)])
    seq = np.frombuffer("".join(letters).encode(), np.uint8)
    coords = np.concatenate([helix(len(each)) for each in letters]).astype(np.float32)
    np.savez(folder / f"{name}.npz", ids=[f"p{number}" for number in numbers], offsets=offsets, seq=seq, coords=coords)
    return str(folder / f"{name}.npz")


def of_hf(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Changes:
    datasets = pytest.importorskip("datasets", reason="data=hf reads by the library datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    place = jsonl(folder, "a")
    (place / "test.jsonl").write_text("".join(json.dumps({"text": sentence(500 + row)}) + "\n" for row in range(30)))
    base = {"dataset": str(place)}
    bases = {**base, "field": "dna", "tokenizer": "nucleotides"}
    return {
        "dataset": (base, {"dataset": str(jsonl(folder, "b", first=60))}),
        "subset": (base, {**base, "subset": "x"}),
        "split": (base, {**base, "split": "test"}),
        "field": (base, {**base, "field": "body"}),
        "max_documents": (base, {**base, "max_documents": 7}),
        "reverse_complement": (bases, {**bases, "reverse_complement": True}),
        **tokenizers(folder, base),
    }


def of_mqar(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Changes:
    base = {"vocab_size": 12, "length": 16, "pairs": 3, "num": 60, "held_out": 20}
    return drawn(base, {"vocab_size": 14, "pairs": 2, "fewest_pairs": 1, "queries": 5, "power": 1.0, "filler": "blank"})


def of_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Changes:
    base = {"vocab_size": 12, "length": 16, "copied": 4, "num": 60, "held_out": 20}
    return drawn(base, {"vocab_size": 14, "copied": 3, "selective": False})


def of_pairs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Changes:
    for name, first in (("a", 0), ("b", 100)):
        rows = "".join(f"{sentence(first + row)},{sentence(500 + first + row)},{row % 3}\n" for row in range(40))
        (folder / f"{name}.csv").write_text(f"a,b,score\n{rows}")
    base = {"path": str(folder / "a.csv"), "range": (0.0, 5.0)}
    return {
        "path": (base, {**base, "path": str(folder / "b.csv")}),
        "range": (base, {**base, "range": (0.0, 4.0)}),
        "hold_out": (base, {**base, "hold_out": 0.4}),
    }


def of_synthetic_pairs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Changes:
    base = {"num": 200}
    others = {"num": 210, "form": "pairs", "hold_out": 0.3, "seed": 1}
    return {field: (base, {**base, field: value}) for field, value in others.items()}


def of_stdlib_pairs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Changes:
    for name in ("os", "argparse", *(f"module_{number}" for number in range(40))):
        number = len(name) + hash_of(name)
        (folder / f"{name}.py").write_text(
            f'"""The module {name}: {sentence(number)}.\n\nIt has {sentence(900 + number)}."""\n'
        )
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda _: str(folder))
    return {"first": ({}, {"first": "summary"}), "hold_out": ({}, {"hold_out": 0.3})}


def drawn(base: Settings, others: Settings) -> Changes:
    """Changes of a source that is drawn: its own, and those that each of them has."""
    others = {**others, "length": 18, "num": 61, "held_out": 21, "seed": 1}
    return {field: (base, {**base, field: value}) for field, value in others.items()}


# of each source what makes its files, and the changes of its settings; the first one's base is what the checks read
MADE: dict[str, Callable[[Path, pytest.MonkeyPatch], Changes]] = {
    "copy": of_copy,
    "dna": of_dna,
    "hf": of_hf,
    "images": of_images,
    "mqar": of_mqar,
    "pairs": of_pairs,
    "protein": of_protein,
    "stdlib": of_stdlib,
    "stdlib_pairs": of_stdlib_pairs,
    "synthetic_pairs": of_synthetic_pairs,
    "text": of_text,
}
# settings that no file on this disk can show: the test that shows that they are read
ELSEWHERE = {
    ("hf", "revision"): "test_hf.test_subset_and_revision_reach_the_library",
    # it refuses files, and changes none
    ("images", "dataset"): "test_images.test_a_data_set_that_is_named_is_what_the_path_must_hold",
}
