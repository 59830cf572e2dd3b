"""Small chains and a small tokenizer that the tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from stability.config.base import validate
from stability.config.identity import tokenizer_id
from stability.config.tokenizer import TokenizerRunSpec
from stability.corpora.proteins.alphabets import NO_SS, NUM_ATOMS, decode, encode
from stability.corpora.proteins.chain import ProteinChain
from stability.runs.directory import RunDirectory
from stability.structure.mmcif import atom_names
from stability.structure.tokenizer import directory_of
from stability.structure.training import train_tokenizer


def chain(seed: int, num: int) -> ProteinChain:
    """Helices of random pitch with some bend, side chains as short random walks, one residue missing."""
    rng = np.random.default_rng(seed)
    sequence = encode("".join(rng.choice(list("ACDEFGHIKLMNPQRSTVWY"), num))).astype(np.int64)
    angle = np.arange(3 * num) * rng.uniform(0.3, 0.8)
    line = np.stack(
        [
            2.3 * np.cos(angle),
            2.3 * np.sin(angle) + 0.003 * np.arange(3 * num) ** 2 * rng.uniform(0, 1),
            0.5 * np.arange(3 * num),
        ],
        1,
    )
    atoms_NAX = np.full((num, NUM_ATOMS, 3), np.nan, dtype=np.float32)
    atoms_NAX[:, :3] = line.reshape(num, 3, 3)
    for row, letter in zip(atoms_NAX, decode(sequence), strict=True):
        rest = len(atom_names(letter)) - 3
        row[3 : 3 + rest] = row[1] + np.cumsum(rng.normal(0, 0.8, (rest, 3)), 0)
    atoms_NAX[num // 2] = np.nan
    unknown = np.full(num, np.nan, dtype=np.float32)
    return ProteinChain(
        f"T{seed:03d}_A",
        f"T{seed:03d}",
        sequence,
        atoms_NAX,
        np.full(num, NO_SS, np.uint8),
        unknown,
        unknown,
        np.arange(num, dtype=np.int32),
    )


def chains(num: int = 6, first: int = 0) -> list[ProteinChain]:
    return [chain(first + index, 10 + 3 * index) for index in range(num)]


def spec(**changes: Any) -> TokenizerRunSpec:
    size = {"layers": 1, "width": 16, "heads": 2}
    values: dict[str, Any] = {
        "data": {"name": "stdlib"},
        "mechanism": "sa",
        "cross": "auto",
        "optimizer": "adamw",
        "frame": "principal",
        "levels": [7, 5, 5],
        "encoder": size,
        "decoder": size,
        "atom_decoder": size,
        "kernel": 3,
        "positions": 16,
        "steps": 6,
        "atom_steps": 4,
        "batch": 3,
        "lr_peak": 2e-3,
        "warmup_steps": 1,
        "clip_norm": 1.0,
        "every_steps": 3,
        "chains": 4,
        "seed": 0,
        "data_fingerprint": "made up",
    }
    return validate(TokenizerRunSpec, values | changes)


def train(pool: Path, recipe: TokenizerRunSpec, leave_after: int | None = None) -> RunDirectory:
    """To the end, or left after so many steps as Ctrl-C leaves it."""
    directory = directory_of(pool, tokenizer_id(recipe))
    steps = train_tokenizer(recipe, directory, chains(), chains(4, 50), device="cpu")
    for number, _ in enumerate(steps, 1):
        if number == leave_after:
            steps.close()
            break
    return directory
