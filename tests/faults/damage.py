"""A pool of three finished runs whose files are damaged one byte at a time, and all that reads them in one process:
status, a sweep that trains nothing, the tables.

``python -m tests.faults.damage`` damages every byte of one run's files and of the study's, by a flipped bit and by a cut,
and prints the counts.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from stability.corpora.cache import prepare
from stability.runs.directory import RunDirectory, read_json, read_jsonl
from stability.runs.log import RunLog, find_last_logged_step
from stability.runs.older import OlderFile
from stability.runs.parquet import read_curves
from stability.runs.phases import planned_steps
from stability.runs.records import SpecFile
from stability.runs.results import _run_row, collect, read_steps
from stability.runs.run_files import RunFiles
from stability.runs.schema import CURVES_COLUMNS, SIGNAL_COLUMNS
from stability.runs.sink import read_logged_rows
from stability.runs.study import StudyFolder
from stability.training import checkpoint
from sweeps.launch import run
from sweeps.progress import Progress
from sweeps.record import StudyRecord, alpha_share
from sweeps.trial import Trial, is_done, run_trial, variants
from sweeps.view.study_view import StudyView
from tests.sweeps.real import TINY, make_sweep

WORDS = [
    *(
        "mechanism=[sc]",
        "lr=[1e-3,1e-2,3e-2]",
        "steps=4",
        "name=mine",
        "log.gradients=2",
        "log.activations=2",
        "log.curvature=2",
        "hessian=true",
    ),
    *("evaluation.every_steps=2", "evaluation.sequences=2", "curvature.batch=2", "curvature.microbatch=2"),
    *("curvature.warmup_batches=1", "curvature.warmup_steps=1", "curvature.recorded_steps=2"),
    *("curvature.state=[paper]", "curvature.parity_steps=0"),
]
LOGS = ("metrics.jsonl", "gradients.jsonl", "activations.jsonl", "edge.jsonl", "timing.jsonl", "curvature_timing.jsonl")
MANIFEST = "checkpoints/step_000002/manifest.json"
STUDY = "study.json"
INTERRUPTED = '{"state": "interrupted", "step": 2, "num_steps": 4}'
TABLE = "curvature/terminal.parquet"
FILES = (*LOGS, "status.json", "spec.json", MANIFEST, TABLE)


class Pool:
    """Three finished runs of one study, of which the first is damaged, and put right again by `mended`."""

    def __init__(self, folder: Path):
        self.spec, self.trials = make_sweep(folder, *WORDS)
        self.study = StudyFolder.of(folder / "runs", "mine")
        self.record = StudyRecord.begin(self.spec, prepare(self.spec.data, folder / "runs" / "cache"))
        run(self.spec, self.trials, record=self.record, console=quiet())
        self.victim = self.trials[0].directory
        self.whole = {path: path.read_bytes() for path in self._files()}
        self._stamps = {path: _stamp(path) for path in self.whole}
        self.others = [trial.directory.run_id for trial in self.trials[1:]]
        self.tables = self.rows_of_others()
        self.every, self._count = 1, -1

    def _files(self) -> list[Path]:
        return [path for path in (*self.victim.path.rglob("*"), self.study.file) if path.is_file()]

    def file(self, name: str) -> Path:
        return self.study.file if name == STUDY else self.victim.path / name

    def mend(self) -> None:
        """Write the first run's and the study's files as they were."""
        for path in set(self._files()) - self.whole.keys():
            path.unlink()
        for path, content in self.whole.items():
            if not path.exists() or _stamp(path) != self._stamps[path]:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                self._stamps[path] = _stamp(path)

    def rows_of_others(self) -> dict[str, dict[str, list[Any]]]:
        """The tables of the runs that are not damaged: by table and column the values that there are."""
        found = collect(self.study.path)
        tables: dict[str, dict[str, list[Any]]] = {}
        for name, frame in (("runs", found.runs), ("curves", found.curves), ("curvature", found.curvature)):
            mask = frame["run_id"].isin(self.others).to_numpy()
            columns = {str(key): frame[key].to_numpy(dtype=object)[mask] for key in frame}
            tables[name] = {key: [each for each in values if not pd.isna(each)] for key, values in columns.items()}
        return tables

    def train_nothing(self, trial: Trial) -> Iterator[None]:
        """Read what training reads before its first step, then end as training does."""
        for folder in trial.directory.checkpoints():
            try:
                checkpoint.manifest_of(folder)
            except ValueError:
                continue
        trial.directory.write_spec(trial.spec)
        RunLog(trial.directory, resume_after=find_last_logged_step(trial.directory)[0]).close()
        yield
        table = trial.directory.curvature_file("terminal")
        table.write_bytes(self.whole[self.victim.curvature_file("terminal")])
        trial.directory.set_status("plateaued", step=4, num_steps=4, result={"val_nll": 2.5, "wall_s": 1.0})

    def sweep(self) -> int:
        """The same command: its exit code, as far as the runs decide it."""
        outcome = run(
            self.spec, self.trials, record=self.record, console=quiet(), run=partial(run_trial, work=self.train_nothing)
        )
        return 1 if outcome.num_failed else 0

    def look(self) -> None:
        """All of `stability.status`."""
        view = StudyView.of(self.study)
        view.progress.poll()
        _ = view.heading(), view.details(), view.line()

    def check(self, name: str, *, is_interrupted: bool) -> str:
        """Read the pool as it stands, a run that is to go on by the sweep and a finished one by status and tables, too;
        return what became of it, "" where another run suffered. All but one in ``every`` times only by what reads the
        file."""
        if name == STUDY:
            return self._check_study()
        self._count += 1
        if self._count % self.every:
            return self.read_alone(name, is_interrupted=is_interrupted)
        if not is_interrupted:
            self.look()
            if not self._is_same(self.rows_of_others()):
                return ""
        code = self.sweep()
        if not all(RunDirectory(self.victim.path.parent, each).finished for each in self.others):
            return ""
        return "failed" if code else "goes on"

    def read_alone(self, name: str, *, is_interrupted: bool) -> str:
        """Call what reads one of the damaged run's files, and nothing else; return what became of it, "" where an error
        does not name the file."""
        run, ends = self.victim, []
        readers: list[Callable[[], Any]] = {
            "status.json": [run.status, lambda: is_done(self.trials[0]), Progress(self.trials, from_outside=True).poll],
            "spec.json": [self._read_spec, lambda: run.write_spec(self.trials[0].spec)],
            MANIFEST: [
                lambda: checkpoint.manifest_of(run.checkpoints()[0]),
                lambda: checkpoint.load(run.checkpoints()[0]),
            ],
            TABLE: [
                lambda: is_done(self.trials[0]),
                lambda: RunFiles.of(run).table(self.file(TABLE)),
                lambda: read_steps(run),
            ],
        }.get(name, [self._read_logs])
        for reader in readers:
            try:
                reader()
                ends.append("read")
            except ValueError as error:
                folder = self.file(name).parent if name == MANIFEST else self.file(name)
                if str(folder) not in str(error) and name != MANIFEST:
                    return ""
                ends.append("named")
        return ", ".join(ends)

    def _read_spec(self) -> None:
        files = RunFiles.of(self.victim)
        _run_row("mine", files, [], {})
        read_json(self.victim.spec_file, SpecFile)
        planned_steps(self.victim)
        variants([replace(self.trials[0], spec=files.spec)])

    def _read_logs(self) -> None:
        run, left_out = self.victim, {}
        logs = [(run.signal_files[name], columns) for name, columns in SIGNAL_COLUMNS.items()]
        for path, columns in ((run.metrics_file, CURVES_COLUMNS), *logs):
            read_curves([(run.run_id, path)], columns[1:], left_out)
        assert all(str(path) in line for path, line in left_out.items())
        list(read_logged_rows(run))
        alpha_share([run], 0.0, 1e12, 1)
        Progress(self.trials[:1], from_outside=True).poll()
        until, damage = find_last_logged_step(run)
        assert not damage or str(run.path) in damage
        run.fail("a reason", "an account", 4)
        RunLog(run, resume_after=until).close()
        assert [row["step"] for row in read_jsonl(run.metrics_file)] == list(range(until + 1))

    def _check_study(self) -> str:
        try:
            self.look()
            collect(self.study.path)
            StudyRecord.begin(self.spec, prepare(self.spec.data, self.victim.path.parent / "cache"))
        except (ValueError, OlderFile) as error:  # a word's name that is damaged looks like an older version's lack
            return "named" if str(self.study.file) in str(error) else ""
        return "goes on"

    def _is_same(self, tables: dict[str, dict[str, list[Any]]]) -> bool:
        return all(
            tables[name].get(key) == values for name, whole in self.tables.items() for key, values in whole.items()
        )


def _stamp(path: Path) -> tuple[int, int]:
    return path.stat().st_mtime_ns, path.stat().st_size


def words_of_pool(pool: Pool) -> list[str]:
    """The command line of the sweep, as the user would type it."""
    folder = pool.study.pool.parent
    keys = {word.partition("=")[0] for word in WORDS}
    tiny = [word for word in TINY.split() if word.partition("=")[0] not in keys]
    return [*tiny, f"data.path={folder / 'text.txt'}", f"runs_dir={pool.study.pool}"]


def quiet() -> Console:
    return Console(file=io.StringIO(), width=160)


def flipped(content: bytes, at: int, bit: int) -> bytes:
    return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]


def damages(content: bytes, bits: int, seed: str) -> Iterator[tuple[str, bytes]]:
    """At every byte ``bits`` flips of a bit and a cut before it."""
    draws = random.Random(seed)
    for at in range(len(content)):
        for bit in draws.sample(range(8), bits):
            yield f"byte {at}, bit {bit}", flipped(content, at, bit)
        yield f"cut at {at}", content[:at]


def states(pool: Pool, name: str) -> tuple[bytes | None, ...]:
    """The statuses with which the damaged run is read: finished, and for what is read on the way also interrupted."""
    return (None,) if name in (STUDY, "status.json", TABLE) else (None, INTERRUPTED.encode())


def damaged_in_turn(pool: Pool, name: str, cases: Iterator[tuple[str, bytes]]) -> tuple[Counter[str], list[str]]:
    """Damage a file in every way that is given; return how often each end was met, and what must not be."""
    ends: Counter[str] = Counter()
    faults: list[str] = []
    for what, content in cases:
        for status in states(pool, name):
            if status is not None:
                pool.victim.status_file.write_bytes(status)
            pool.file(name).write_bytes(content)
            try:
                end = pool.check(name, is_interrupted=status is not None)
            except Exception:  # noqa: BLE001 the fault that is looked for
                end = ""
                faults.append(f"{name}, {what}: {traceback.format_exc(limit=-3)}")
            else:
                faults += [] if end else [f"{name}, {what}: another run suffered"]
            ends[end or "fault"] += 1
            pool.mend()
    return ends, faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", type=int, default=1)
    parser.add_argument("--files", nargs="+", default=[*FILES, STUDY])
    parser.add_argument("--whole-every", type=int, default=32, help="every how manieth damage all commands read")
    parser.add_argument("--step", type=int, default=1, help="every how manieth byte")
    options = parser.parse_args()
    os.fsync = lambda descriptor: None
    folder = Path(tempfile.mkdtemp(prefix="damage-"))
    try:
        pool = Pool(folder)
        pool.every = options.whole_every
        for name in options.files:
            whole = pool.file(name).read_bytes()
            cases = list(damages(whole, options.bits, name))[:: options.step]
            ends, faults = damaged_in_turn(pool, name, iter(cases))
            print(f"{name}: {len(whole)} bytes, {len(cases)} damages: {dict(ends)}", flush=True)
            for fault in faults[:5]:
                print(fault, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
