"""A pool with tiny tokenizers and tiny runs on made-up chains, which the tests of generated proteins share."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stability.build import as_read
from stability.config.base import validate
from stability.config.generation import GenerateSpec
from stability.config.identity import run_id
from stability.config.parts import part
from stability.config.run import RunSpec
from stability.corpora.proteins.split import corpus_of
from stability.probes.generation.generating import generate
from stability.runs.directory import RunDirectory
from stability.training.run import train
from tests.conftest import TINY
from tests.structure.small import chain, spec
from tests.structure.small import train as train_tokenizer

POSITIONS = 20  # 18 residues between BOS and EOS; some of the chains are longer


def known_chain(seed: int):
    """With secondary structure and exposed area, but for some residues."""
    own, rng = chain(seed, 12 + 2 * (seed % 6)), np.random.default_rng(seed)
    ss_N = np.where(rng.random(len(own)) < 0.8, rng.integers(0, 9, len(own)), 255).astype(np.uint8)
    return replace(own, ss_N=ss_N, sasa_N=rng.uniform(0, 150, len(own)).astype(np.float32))


class ProteinLab:
    """``two`` and ``one``: ids of tokenizers with two stages and with one."""

    def __init__(self, folder: Path):
        self.pool = folder / "runs"
        self.cache = self.pool / "cache"
        self.two = train_tokenizer(self.pool, spec(steps=2, atom_steps=2, warmup_steps=0)).run_id
        self.one = train_tokenizer(self.pool, spec(steps=2, atom_steps=0, warmup_steps=0)).run_id
        self.corpus = corpus_of([known_chain(seed) for seed in range(14)], (), None, "made up", 0.3)
        self.corpus.save(self.cache / self.corpus.fingerprint)

    def spec(
        self, sources=("sequence", "structure"), contexts=(), tokenizer: str | None = None, **changes: Any
    ) -> RunSpec:
        named = {"tokenizer": tokenizer or self.two} if "structure" in sources else {}
        objective = part(
            "objectives", {"name": "multitrack", "sources": list(sources), "contexts": list(contexts), **named}
        )
        values = {
            **TINY,
            "model": {**TINY["model"], "positions": POSITIONS},
            "objective": objective,
            "data": {"name": "protein"},
            "steps": 6,
            "evaluation": {"every_steps": 3, "sequences": 8},
            "cross": "auto" if contexts else None,
            "lr_peak": 1e-2,
            "data_fingerprint": as_read(self.corpus, objective, self.pool).fingerprint,
        }
        return validate(RunSpec, values | changes)

    def train(self, run: RunSpec) -> RunDirectory:
        directory = RunDirectory(self.pool, run_id(run))
        for _ in train(run, directory, cache_dir=self.cache, device="cpu"):
            pass
        return directory


def generate_spec(**changes: Any) -> GenerateSpec:
    return validate(GenerateSpec, {"ckpt": "x", "num": 5, "batch": 2, "device": "cpu", **changes})


def sample(lab: ProteinLab, directory: RunDirectory, **changes: Any) -> GenerateSpec:
    given = generate_spec(**changes)
    for _ in generate(directory, given, cache_dir=lab.cache, device="cpu"):
        pass
    return given


def forget(directories: Iterable[RunDirectory]) -> None:
    """Remove samples and scores, so that no test finds another's."""
    for directory in directories:
        for name in ("samples", "generation"):
            shutil.rmtree(directory.path / name, ignore_errors=True)
