"""A mechanism, an optimizer, a norm, a feed-forward network and an objective of one's own, from a package outside of the
repository: by the command lines that a user types, through one sweep and α_max to the report."""

from __future__ import annotations

import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from pypdf import PdfReader

from stability.runs.results import collect
from tests.test_readme import part_of_a_page

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("mean", "signum", "scalenorm", "bilinear", "denoise")  # as the pages of docs/extending show them
# trained far enough for curvature to be positive along each step
TINY = """
    lr=[1e-2,3e-2] seeds=1 steps=16 batch=16 evaluation.every_steps=8 evaluation.sequences=8 model.layers=1
    model.width=16 model.heads=2 model.positions=16 model.embedding_std=0.1 curvature.warmup_batches=1
    curvature.warmup_steps=1 curvature.recorded_steps=2 launcher=serial device=cpu data=text data.path=page.txt
"""


def typed(folder: Path, command: str) -> str:
    """What a command prints that is typed in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-W", "ignore", "-m", *command.split()]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


@pytest.mark.slow  # three processes that each import all; the pages of the documentation train parts one by one
@pytest.mark.usefixtures("lab")  # page.txt
def test_parts_of_all_five_kinds_go_from_a_package_elsewhere_to_the_report(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    for name in PARTS:
        (tmp_path / "elsewhere" / f"{name}.py").write_text(part_of_a_page(name))
    plugins = ",".join(f"elsewhere.{name}" for name in PARTS)
    chosen = "mechanism=mean optimizer=[adamw,signum] norm=[layernorm,scalenorm] ffn=bilinear objective=denoise"
    typed(tmp_path, f"stability.sweep plugins=[{plugins}] {chosen} {TINY} name=own report=false")
    found = collect(tmp_path / "runs" / "studies" / "own")
    assert set(found.runs.mechanism) == {"mean"} and set(found.runs.objective) == {"denoise"}
    assert set(found.runs.optimizer) == {"adamw", "signum"} and set(found.runs.norm) == {"layernorm", "scalenorm"}
    assert set(found.runs.model) == {"nano ffn=bilinear"} and found.runs.val_nll.notna().all()
    # four kinds at two rates, two steps each; state "paper" is Adam's
    counts = found.curvature.merge(found.runs, on="run_id").groupby(["optimizer", "state"]).size().to_dict()
    assert counts == {("adamw", "checkpoint"): 8, ("adamw", "paper"): 8, ("signum", "checkpoint"): 8}
    assert np.isfinite(found.curvature.alpha_max).all() and (found.curvature.rel_error.dropna() < 1e-2).all()

    printed = typed(tmp_path, "stability.report name=own")
    drawn = "".join(page.extract_text() for page in PdfReader(tmp_path / "reports" / "own.pdf").pages)
    # ligatures as letters, and no places where a line may break
    pages = " ".join(unicodedata.normalize("NFKC", drawn).replace("\u200b", "").split())
    for text in (printed, pages):
        assert "mean scalenorm signum" in text, "a curve of its own"
        assert "denoise, 0.3 of the tokens replaced" in text and "Nats per replaced token" in text
    assert "nano ffn=bilinear: 1 layer, width 16" in pages
    assert "The paper's warm-up state is not defined for signum (4 runs)" in pages
