"""Measure what a report of very many runs takes: ``python -m benchmarks.report_scale``.

For each of ``--runs`` a study of 20 mechanisms is made under ``--folder`` by the product's own writers
(`benchmarks._runs`; nothing is trained): learning rates over three and a half decades, 300 logged steps a run, α_max of
the earliest and the terminal checkpoint in both optimizer states, 25 recorded steps each; about one run in twelve
diverged. Every command is then timed in a fresh process, the files in the page cache:

* ``python -m stability.report name=STUDY``: collects the runs, prints the tables, draws the PDF;
* the same with ``format=html``, ``format=files`` (each table in four formats, each figure in three), all three at once,
  and ``layout=paper``.

Wall seconds, the processor's seconds (user and system), which a free core would take about and what else runs disturbs
less, and the largest resident memory in MiB.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np

from benchmarks._machine import machine
from benchmarks._runs import INIT_NLL, TEXT, MadeUp, write_run
from stability.cli.compose import read
from stability.cli.words import Invocation
from stability.config.run import RunSpec
from stability.config.sweep import SweepSpec
from stability.corpora.cache import prepare
from stability.runs.directory import write_json
from stability.runs.provenance import provenance
from stability.runs.study import StudyFolder
from sweeps.record import StudyRecord
from sweeps.trial import make_trials

# all causal mechanisms, which fit in one study
MECHANISMS = (
    "sa", "sw", "sigmoid", "gated_softmax", "attentionx", "bigbird", "longformer", "sparse_transformer", "sparsek",
    "nsa", "fox", "gla", "retnet", "hgrn2", "mamba", "mamba2", "deltanet", "gated_deltanet", "kda", "titans",
)  # fmt: skip
STEPS, EARLY, RECORDED = 300, 75, 25
LOW_LR, HIGH_LR = 1e-4, 0.3
LIMIT_S, LIMIT_MIB = 60.0, 2048.0
COMMANDS = {
    "report": (),
    "format=html": ("format=html",),
    "format=files": ("format=files",),
    "format=[pdf,html,files]": ("format=[pdf,html,files]",),
    "layout=paper": ("layout=paper",),
    "layout=paper, all formats": ("layout=paper", "format=[pdf,html,files]"),
}


def words(folder: Path, num_runs: int) -> list[str]:
    """Return a sweep's command line: 20 rates if each has five seeds, else ten.

    Raises:
        ValueError: ``num_runs`` is not a multiple of rates × mechanisms.
    """
    rates = 20 if num_runs >= 5 * 20 * len(MECHANISMS) else 10
    seeds, rest = divmod(num_runs, rates * len(MECHANISMS))
    if rest or not seeds:
        raise ValueError(f"--runs {num_runs}: the number has to be a multiple of {rates * len(MECHANISMS)}")
    return [
        "objective=ar",
        "data=text",
        f"data.path={folder / 'text.txt'}",
        f"mechanism=[{','.join(MECHANISMS)}]",
        f"lr=[{','.join(f'{lr:.4g}' for lr in np.geomspace(LOW_LR, HIGH_LR, rates))}]",
        f"seeds={seeds}",
        f"steps={STEPS}",
        f"checkpoint.every_steps={EARLY}",
        f"curvature.recorded_steps={RECORDED}",
        "curvature.phase=all",
        f"runs_dir={folder / 'runs'}",
        f"reports_dir={folder / 'reports'}",
        f"name=runs{num_runs}",
        "launcher=serial",
        "device=cpu",
    ]


def make_study(folder: Path, num_runs: int) -> StudyFolder:
    """Write a study's record and its runs, except those finished in another study."""
    spec = read(SweepSpec, Invocation.of(words(folder, num_runs)))
    corpus, origin = prepare(spec.data, Path(spec.runs_dir) / "cache"), provenance()
    points = spec.points(corpus.fingerprint)
    trials = make_trials(spec, points)
    with mock.patch.object(os, "fsync", lambda handle: None):  # half of the time, and the runs are made up
        for trial, (_, run) in zip(trials, points, strict=True):
            if trial.directory.finished:
                continue
            write_json(trial.directory.provenance_file, origin)
            write_run(trial.directory, run, made_up(run, corpus.unigram_nats), spec.curvature)
    record = StudyRecord.begin(spec, corpus)
    record.write(trials)
    return record.study


def made_up(run: RunSpec, unigram_nll: float) -> MadeUp:
    """Return a run's numbers: NLL with a minimum at a rate of its mechanism, divergence at high rates.

    Its α_max falls as the rate rises.
    """
    place = MECHANISMS.index(run.mechanism.name)
    draws = np.random.default_rng([place, run.seed, round(1e9 * run.lr_peak)])
    best_lr = 2e-3 * 1.15**place
    distance = math.log10(run.lr_peak / best_lr) + draws.normal(0, 0.03)
    nll = unigram_nll * (0.5 + 0.004 * place) + (0.12 if distance < 0 else 0.25) * abs(distance) ** 1.5
    diverged = distance > 1.9 - 0.035 * place
    num_steps = int(draws.integers(EARLY, STEPS)) if diverged else STEPS
    decay = np.exp(-np.arange(1, num_steps + 1) / (5 + 0.004 / run.lr_peak))
    losses: list[float | None] = (nll + (INIT_NLL - nll) * decay + draws.normal(0, 0.05, num_steps)).tolist()
    phases = {"earliest": EARLY} | ({} if diverged else {"terminal": STEPS})
    alpha_max = {
        phase: {
            state: (_median_alpha(run.lr_peak, place, phase, state) * 10 ** draws.normal(0, 0.3, RECORDED)).tolist()
            for state in ("paper", "checkpoint")
        }
        for phase in phases
    }
    checkpoints = tuple(range(EARLY, num_steps + 1, EARLY))
    known = {"unigram_nll": unigram_nll, "checkpoints": checkpoints, "alpha_max": alpha_max, "phases": phases}
    if diverged:
        return MadeUp("diverged", [*losses[:-1], None], None, reason=f"non-finite loss at step {num_steps}", **known)
    if nll >= unigram_nll:
        limits = f"min(initial {INIT_NLL}, token frequencies {unigram_nll:.3f})"
        reason = f"final validation NLL {nll:.3f} is not below {limits}"
        return MadeUp("plateaued", losses, nll, reason=reason, **known)
    return MadeUp("stable", losses, nll, **known)


def _median_alpha(lr: float, place: int, phase: str, state: str) -> float:
    higher = (5 if state == "paper" else 1) * (2 if phase == "earliest" else 1)
    return 8e-3 * (lr / 1e-3) ** (0.03 * place - 1.1) * higher


# Linux counts a parent's memory as its child's peak: a small process of its own starts the command
STARTER = """
import json, os, sys, time
started, null = time.perf_counter(), os.open(os.devnull, os.O_WRONLY)
child = os.posix_spawn(sys.executable, [sys.executable, *sys.argv[1:]], os.environ,
                       file_actions=[(os.POSIX_SPAWN_DUP2, null, 1)])
_, status, usage = os.wait4(child, 0)
cost = time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
print(json.dumps([os.waitstatus_to_exitcode(status), cost]))
"""


class Spent(NamedTuple):
    """The cost of one command: wall and processor seconds, and largest resident memory in MiB."""

    wall_s: float
    processor_s: float
    peak_mib: float


def spent(argv: Sequence[str]) -> Spent:
    """Return the cost of Python with the words ``argv``.

    Raises:
        RuntimeError: the command failed.
    """
    starter = [sys.executable, "-I", "-S", "-c", STARTER, *argv]
    code, cost = json.loads(subprocess.run(starter, stdout=subprocess.PIPE, check=True).stdout)
    if code:
        raise RuntimeError(f"{' '.join(argv)} ended with {code}")
    return Spent(*cost)


def row(name: str, study: StudyFolder, num_runs: int, more: Sequence[str]) -> str:
    """Time one command on a study, and return its table row.

    Args:
        name: the command's name.
        study: the study.
        num_runs: runs in the study.
        more: further words for the command line.
    """
    where = [f"name={study.path.name}", f"runs_dir={study.pool}", f"reports_dir={study.pool.parent / 'reports'}"]
    taken = spent(["-m", "stability.report", *where, *more])
    met = "met" if taken.processor_s <= LIMIT_S and taken.peak_mib <= LIMIT_MIB else "MISSED"
    return f"{name:28}{num_runs:>6,}{taken.wall_s:>10.1f}{taken.processor_s:>12.1f}{taken.peak_mib:>10,.0f}  {met}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, nargs="+", default=[200, 1000, 2000], help="multiples of 200")
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--folder", type=Path, help="where the studies lie, and stay; default: a temporary folder")
    options = parser.parse_args()
    print(machine())
    print(f"aim: at most {LIMIT_S:g} s of a processor and {LIMIT_MIB:,.0f} MiB, each command by itself")
    print(f"{'':28}{'runs':>6}{'wall s':>10}{'processor s':>12}{'MiB':>10}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "text.txt").write_text(TEXT)
        for num_runs in options.runs:
            kept = StudyFolder.of(folder / "runs", f"runs{num_runs}")
            study = kept if kept.file.exists() else make_study(folder, num_runs)
            for command in options.commands:
                print(row(command, study, num_runs, COMMANDS[command]), flush=True)


if __name__ == "__main__":
    main()
