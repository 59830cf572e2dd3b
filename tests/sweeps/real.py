"""A sweep small enough for a test that is real all the same: composed from conf/, on a text file, trained by the real
loop."""

from __future__ import annotations

from pathlib import Path

from stability.config.identity import run_id
from stability.config.sweep import SweepSpec
from stability.corpora.cache import prepare
from sweeps.trial import Trial
from tests.reading import read_spec, replaced

TINY = """
    data=text objective=mlm model.layers=2 model.width=16 model.heads=2 model.positions=16 batch=2 steps=12 evaluation.every_steps=6 evaluation.sequences=4
    seeds=1 lr=[1e-3,1e-2] mechanism=[sa,sc] mechanism.sc.edge_hidden=4 hessian=false report=false launcher=serial device=cpu
"""


def make_sweep(folder: Path, *overrides: str, pool: str = "runs") -> tuple[SweepSpec, list[Trial]]:
    """A parsed sweep and its trials over ``folder/pool``."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(
            "".join(
                f"Line {number} of a text that says little, {number * number % 97} times.\n" for number in range(4000)
            )
        )
    words = [*TINY.split(), f"data.path={text}", f"runs_dir={folder / pool}"]
    spec = read_spec("sweep", replaced(words, *overrides))
    corpus = prepare(spec.data, folder / pool / "cache")
    curvature = spec.curvature.model_dump(mode="json") if spec.hessian else None
    generation = spec.generate.model_dump(mode="json") if spec.generate else None
    runs = spec.expand(corpus.fingerprint)
    return spec, [
        Trial(
            run_id(run),
            run.model_dump(mode="json"),
            str(folder / pool),
            curvature,
            spec.device,
            None,
            generate=generation,
        )
        for run in runs
    ]
