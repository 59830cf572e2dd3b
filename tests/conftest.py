"""Small real runs that the tests share: a model of two layers on a page of text, in a temporary pool."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from stability.config import RunSpec, checked, run_id
from stability.data._cache import prepare
from stability.runs.directory import RunDirectory

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with Ctrl-C ignored, and tests of it would wait for ever

SENTENCE = "the window of a stable step is wide where the graph is smooth and narrow where the scores are sharp"


# What a run of a second consists of beside its data and objective.
TINY: dict[str, Any] = {
    "model": {"name": "tiny", "layers": 2, "width": 16, "heads": 2, "positions": 16},
    "schedule": {"name": "constant"},
    "steps": 12,
    "batch": 4,
    "clip_norm": 1.0,
    "evaluation": {"every_steps": 4, "sequences": 8},
    "mechanism": {"name": "sa"},
    "residual": {"name": "identity"},
    "optimizer": {"name": "adamw"},
    "norm": "layernorm",
    "lr_peak": 1e-3,
    "seed": 0,
}


class Lab:
    """A pool of runs in a temporary folder, with the text that its runs read."""

    def __init__(self, folder: Path):
        self.pool = folder / "runs"
        self.cache = self.pool / "cache"
        self.text = folder / "page.txt"
        words = SENTENCE.split()
        lines = [" ".join(words[(7 * i + j * j) % len(words)] for j in range(12)) for i in range(900)]
        self.text.write_text("\n".join(lines))

    def spec(self, **changes: Any) -> RunSpec:
        values: dict[str, Any] = {
            **TINY,
            "objective": {"name": "mlm"},
            "data": {"name": "text", "path": str(self.text)},
        }
        values |= changes
        fingerprint = prepare(checked(RunSpec, {**values, "data_fingerprint": "unknown"}).data, self.cache).fingerprint
        return checked(RunSpec, {**values, "data_fingerprint": fingerprint})

    def directory(self, spec: RunSpec) -> RunDirectory:
        return RunDirectory(self.pool, run_id(spec))

    def train(self, spec: RunSpec, steps: int | None = None) -> RunDirectory:
        """Run to the end, or leave after ``steps`` steps as an interrupted launcher does."""
        from stability.training.loop import train

        directory = self.directory(spec)
        generator = train(spec, directory, cache_dir=self.cache, device="cpu")
        for number, _ in enumerate(generator, 1):
            if number == steps:
                generator.close()
                break
        return directory


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)
