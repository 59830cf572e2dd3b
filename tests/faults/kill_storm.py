"""``python -m tests.faults.kill_storm``: a sweep whose driver, or whose workers, are killed again and again, against
  the same sweep left in peace.

Kills (SIGKILL) land at logged points: ``--each`` of them in the middle of each of a checkpoint's write, a metrics row's
append and a status's change, the others at random times. In the end every ``metrics.jsonl`` and every parameter must be
byte for byte those of the undisturbed sweep, nothing that had finished may have been touched again, and no process and
no half-written file may be left. Linux.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from stability.runs.processes import PROC
from stability.runs.study import StudyFolder
from sweeps import launch
from sweeps.trial import Trial
from tests.faults.moments import FOLDER, OPERATIONS, STAGES, Orders, stormed
from tests.sweeps.real import make_sweep

ORPHANS_S = 60.0
MOST_LAUNCHES = 5  # without a kill; one suffices, but for failed runs
# between kills, in shares of the undisturbed sweep, so that some runs finish among those that are killed, go back to a
# checkpoint, or fail
PAUSES = {"driver": 2.5, "worker": 1.5}
STARTUP_SHARE = 0.2  # of the kills at random times: while the driver is starting


@dataclass
class Report:
    """What happened; ``faults`` must stay empty."""

    kills: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    orphans_s: list[float] = field(default_factory=list)
    launches: int = 0
    num_guarded: int = 0  # runs that had finished while kills were still to come

    def hits(self) -> Counter[str]:
        return Counter(kill["operation"] for kill in self.kills)


class Storm:
    def __init__(self, folder: Path, options: argparse.Namespace):
        self.options, self.folder = options, folder
        self.random = random.Random(options.seed)
        self.orders = Orders(folder / "orders")
        self.report = Report()
        self.sessions: set[int] = set()
        self.finished: dict[str, dict[str, Any]] = {}
        self.share_s = 0.0
        rates = ",".join(f"{10 ** (-3 + index / 2):.3g}" for index in range(options.runs // 4))
        steps = [
            f"steps={options.steps}",
            "checkpoint.every_steps=5",
            "evaluation.every_steps=10",
            f"launcher={options.launcher}",
        ]
        self.sweep = [
            *steps,
            f"lr=[{rates}]",
            "seeds=2",
            *(["cpus_per_trial=1"] if options.launcher != "serial" else []),
        ]

    def run(self) -> Report:
        started = time.monotonic()
        calm = self._spec_and_trials("calm")
        self._follow(self._start(*calm))
        calm_s = time.monotonic() - started
        print(f"undisturbed: {len(calm[1])} runs in {calm_s:.1f} s", flush=True)
        spec, trials = self._spec_and_trials("storm")
        plan = self._plan(calm_s)
        while plan:
            driver = self._start(spec, trials)
            while plan and self._kill(driver, plan[0], trials):
                plan.pop(0)
                if self.options.victim == "driver":
                    break
                self._compare_finished(trials)
                self.report.num_guarded = len(self.finished)
            ended = self._follow(driver)
            if self.options.victim == "driver" or not plan:
                self._await_orphans(driver)
            self._compare_finished(trials)
            self.report.num_guarded = len(self.finished) if plan else self.report.num_guarded
            if ended == 0 and plan:
                self._fault(
                    f"the sweep ended with {len(plan)} of {self.options.kills} kills to come; give more --runs or "
                    "--steps"
                )
                break
        for _ in range(MOST_LAUNCHES):
            if self._follow(self._start(spec, trials)) == 0:
                break
            self._compare_finished(trials)
        self._await_orphans(0)
        self._compare(calm[1], trials)
        return self.report

    def _spec_and_trials(self, pool: str) -> tuple[Any, list[Trial]]:
        return make_sweep(self.folder, *self.sweep, pool=pool)

    def _plan(self, calm_s: float) -> list[tuple[str, float]]:
        """(operation, stage) or ("time", seconds), shuffled."""
        targeted = [
            (operation, self.random.randrange(STAGES[operation] + 1))
            for operation in OPERATIONS
            for _ in range(self.options.each)
        ]
        # so that kills land all over the sweep
        self.share_s = PAUSES[self.options.victim] * calm_s / (self.options.kills + 1)
        plan: list[tuple[str, float]] = [*targeted]
        while len(plan) < self.options.kills:
            at_start = self.random.random() < STARTUP_SHARE
            plan.append(
                ("start", self.random.uniform(0, 3.0)) if at_start else ("time", self.random.uniform(0, self.share_s))
            )
        self.random.shuffle(plan)
        return plan

    def _start(self, spec: Any, trials: list[Trial]) -> int:
        """Fork a driver: a sweep as `stability.sweep` launches it, in a session of its own. Its id."""
        sys.stdout.flush()
        self.report.launches += 1
        driver = os.fork()
        if driver:
            self.sessions.add(driver)
            return driver
        code = 3
        try:
            os.setsid()
            os.environ[FOLDER] = str(self.folder / "orders")
            with open(self.folder / "driver.log", "a") as log:
                for descriptor in (1, 2):
                    os.dup2(log.fileno(), descriptor)
                StudyFolder.of(Path(trials[0].pool), "storm").write([trial.run_id for trial in trials])
                for trial in trials:
                    trial.directory.write_spec(trial.spec)
                console = Console(
                    file=io.TextIOWrapper(os.fdopen(os.dup(1), "wb"), write_through=True),
                    force_terminal=False,
                    width=200,
                )
                code = 1 if launch.run(spec, trials, console=console, run=stormed).num_failed else 0
        finally:
            os._exit(code)

    def _kill(self, driver: int, moment: tuple[str, float], trials: list[Trial]) -> bool:
        """Kill at a moment; False where the driver ended before it came."""
        kind, value = moment
        reached = None
        if kind != "start" and not self._wait(driver, lambda: bool(_workers(trials))):
            return False
        until = time.monotonic() + (self.random.uniform(0, self.share_s) if kind in OPERATIONS else value)
        if kind in OPERATIONS:
            if not self._wait(driver, lambda: time.monotonic() > until):
                return False
            self.orders.give(kind, int(value))
        if not self._wait(
            driver,
            (lambda: self.orders.reached() is not None) if kind in OPERATIONS else (lambda: time.monotonic() > until),
        ):
            self.orders.withdraw()
            return False
        victim = driver
        if kind in OPERATIONS:
            reached = self.orders.reached()
            assert reached is not None
        if self.options.victim == "worker":
            victim = reached.pid if reached else self._any_worker(driver, trials)
            if victim is None:
                return False
        os.kill(victim, signal.SIGKILL)
        where = (
            {"stage": reached.stage, "path": str(Path(reached.path).relative_to(trials[0].pool))}
            if reached
            else {"after_s": round(value, 2)}
        )
        self.report.kills.append({"operation": kind, "victim": self.options.victim, **where})
        print(
            f"kill {len(self.report.kills):2} of a {self.options.victim}: {kind} {' '.join(map(str, where.values()))}",
            flush=True,
        )
        return True

    def _any_worker(self, driver: int, trials: list[Trial]) -> int | None:
        """One that works on a run, as soon as there is one; None where the driver ends before."""
        seen: set[int] = set()

        def is_seen() -> bool:
            seen.update(_workers(trials))
            return bool(seen)

        return self.random.choice(sorted(seen)) if self._wait(driver, is_seen) else None

    def _wait(self, driver: int, is_due: Any) -> bool:
        while not is_due():
            if not _lives(driver):
                return False
            time.sleep(0.005)
        return True

    def _follow(self, driver: int) -> int | None:
        """Wait for the driver to end; its exit code, None where it was killed."""
        _, status = os.waitpid(driver, 0)
        code = os.waitstatus_to_exitcode(status)
        if code not in (0, 1, -signal.SIGKILL):
            self._fault(f"a driver ended with {code}: see {self.folder / 'driver.log'}")
        return None if code == -signal.SIGKILL else code

    def _await_orphans(self, driver: int) -> None:
        """Until no process of the storm but this one is left."""
        started = time.monotonic()
        while left := _of_storm(self.folder, self.sessions):
            if time.monotonic() - started > ORPHANS_S:
                self._fault(f"orphans of driver {driver} after {ORPHANS_S:.0f} s: {left}")
                return
            time.sleep(0.05)
        self.report.orphans_s.append(time.monotonic() - started)

    def _compare_finished(self, trials: list[Trial]) -> None:
        """What had finished at an earlier look must not have been touched since."""
        for trial in trials:
            if not trial.directory.finished or trial.lock.owner():
                continue
            now = _contents(trial)
            before = self.finished.setdefault(trial.run_id, now)
            if now != before:
                changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
                self._fault(f"{trial.run_id} had finished and was touched again: {', '.join(changed)}")
                self.finished[trial.run_id] = now

    def _compare(self, calm: list[Trial], trials: list[Trial]) -> None:
        self._compare_finished(trials)
        for one, other in zip(calm, trials, strict=True):
            for name in (
                "metrics.jsonl",
                *(
                    str(path.relative_to(one.directory.path))
                    for path in one.directory.path.glob("checkpoints/*/model.safetensors")
                ),
            ):
                if not _same(one.directory.path / name, other.directory.path / name):
                    self._fault(f"{other.run_id}: {name} is not that of the undisturbed sweep")
            states = [each.directory.status()["state"] for each in (one, other)]
            if states[0] != states[1] or not other.directory.finished:
                self._fault(f"{other.run_id} is {states[1]}, undisturbed {states[0]}")
        pool = Path(trials[0].pool)
        own = [
            path for path in pool.rglob(".*") if "ray" not in path.relative_to(pool).parts
        ]  # Tune's files are its own
        if hidden := [str(path.relative_to(pool)) for path in own]:
            self._fault(f"left behind: {', '.join(hidden[:5])}")
        for operation in OPERATIONS:
            if self.report.hits()[operation] < self.options.each:
                self._fault(f"only {self.report.hits()[operation]} kills hit {operation}")

    def _fault(self, text: str) -> None:
        print(f"FAULT: {text}", flush=True)
        self.report.faults.append(text)


def _workers(trials: list[Trial]) -> set[int]:
    """Who works on the runs at this moment, once it has begun to write."""
    owners = (trial.lock.owner() for trial in trials if not trial.directory.finished)
    return {owner.process.pid for owner in owners if owner}


def _contents(trial: Trial) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file of a run that has a name of its own."""
    files = [
        path
        for path in trial.directory.path.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.parts[-3:])
    ]
    return {
        str(path.relative_to(trial.directory.path)): (path.stat().st_size, path.stat().st_mtime_ns) for path in files
    }


def _same(one: Path, other: Path) -> bool:
    return other.exists() and one.read_bytes() == other.read_bytes()


def _lives(pid: int) -> bool:
    return not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def _of_storm(folder: Path, sessions: set[int]) -> list[str]:
    """Command lines of living processes that are of a driver's session or inherited its environment."""
    found = []
    for path in PROC.glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            ours = int(fields[3]) in sessions or f"{FOLDER}={folder}".encode() in (path / "environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if ours and fields[0] not in "ZX" and int(path.name) != os.getpid():
            found.append(f"{path.name} {(path / 'cmdline').read_bytes()[:80]!r}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", choices=["serial", "ray"], default="ray")
    parser.add_argument(
        "--victim", choices=["driver", "worker"], default="driver", help="worker: not with --launcher serial"
    )
    parser.add_argument("--runs", type=int, default=24, help="a multiple of 4")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--each", type=int, default=3, help="kills inside each operation")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill-storm-") as folder:
        report = Storm(Path(folder), options).run()
    longest = max(report.orphans_s, default=0.0)
    summary = {"kills": len(report.kills), "hits": dict(report.hits()), "launches": report.launches}
    summary |= {"finished_before_the_last_kill": report.num_guarded, "longest_until_no_process_s": round(longest, 2)}
    print(json.dumps({**summary, "faults": report.faults}))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
