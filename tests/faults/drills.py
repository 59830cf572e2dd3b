"""``python -m tests.faults.drills``: what a sweep does when its driver, its workers, Ray or the disk fail under it, for
each launcher; one table.

Each drill starts the sweep's command on small real runs, strikes once two of them are in the middle, and waits. The
table says after how many seconds the command had ended and with which exit code and last words, how many of its
processes lived on ten seconds later, how many times the same command was needed until every run was done, and whether
every ``metrics.jsonl`` is byte for byte that of ``launcher=serial`` left in peace. ``gcs_joined`` kills the head of a
cluster that the sweep has joined; the command is then repeated without it. To such a cluster ``blind`` adds a node on
which another file system hides the runs' folder: its last words name it where the sweep is still at work half a minute
later (``--steps=3000``). Linux; ``disk`` and ``blind`` mount file systems and need root.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from stability.runs.directory import RunDirectory
from stability.runs.lock import RunLock
from stability.runs.processes import PROC
from tests.sweeps.real import TINY

ROOT = Path(__file__).resolve().parents[2]
MARK = "STABILITY_DRILL"
ORPHANS_S = 10.0
MOST_COMMANDS = 4
DISK_MB = 24
HEADER = ("launcher", "drill", "ended s", "exit", "orphans", "commands", "bytes", "last words")


@dataclass
class Sweep:
    """One command over and over. ``words``: its command line."""

    folder: Path
    words: list[str]
    pool: Path
    process: subprocess.Popen[bytes] | None = None
    of_cluster: list[int] = field(default_factory=list)
    address: str = ""

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: str(self.folder)}

    def start(self, *more: str) -> None:
        self.log = (self.folder / "log.txt").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "stability.sweep", *self.words, *more],
            env=self.environment, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def cluster(self) -> str:
        """Start a Ray cluster of this machine and return the word by which a sweep joins it."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        host, _, port = address.partition(":")
        scratch = Path(tempfile.mkdtemp(prefix="drill-ray-", dir="/tmp"))
        subprocess.run(
            [Path(sys.executable).with_name("ray"), "start", "--head", f"--node-ip-address={host}", f"--port={port}",
             "--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={scratch}"],
            env=self.environment | {"RAY_AUTH_MODE": "disabled"}, check=True, capture_output=True,
        )  # fmt: skip
        self.address, self.of_cluster = address, self.processes()
        return f"ray.address={address}"

    def wait(self, timeout_s: float) -> int | None:
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    @property
    def runs(self) -> list[RunDirectory]:
        return [RunDirectory(self.pool, path.parent.name) for path in sorted(self.pool.glob("*/spec.json"))]

    def working(self, after_step: int) -> list[int]:
        """Ids of the processes whose runs are beyond a step and go on."""
        pids = []
        for run in self.runs:
            rows = run.metrics_file.read_bytes().count(b"\n") if run.metrics_file.exists() else 0
            owner = RunLock(run.path).owner()
            if owner and rows > after_step and not run.finished:
                pids.append(owner.process.pid)
        return pids

    def processes(self, name: str = "") -> list[int]:
        """Ids of the living processes of the command whose command line holds ``name``."""
        found = []
        for path in PROC.glob("[0-9]*"):
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                is_ours = f"{MARK}={self.folder}".encode() in (path / "environ").read_bytes()
                is_alive = (path / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
                if is_ours and is_alive and name.encode() in (path / "cmdline").read_bytes():
                    found.append(int(path.name))
        return found

    def last_words(self) -> str:
        lines = (self.folder / "log.txt").read_text(errors="replace").strip().splitlines()
        told = [line for line in lines if line.startswith(("error", "interrupted", "failed", "stopped", "node"))]
        return (told or lines or [""])[-1][:150]


def ctrl_c(sweep: Sweep) -> None:
    assert sweep.process is not None
    os.killpg(sweep.process.pid, signal.SIGINT)


def ctrl_c_twice(sweep: Sweep) -> None:
    ctrl_c(sweep)
    time.sleep(0.2)
    ctrl_c(sweep)


def driver(sweep: Sweep) -> None:
    assert sweep.process is not None
    sweep.process.kill()


def worker(sweep: Sweep) -> None:
    os.kill(sweep.working(0)[0], signal.SIGKILL)


def workers(sweep: Sweep) -> None:
    """Three of them, one after another."""
    for _ in range(3):
        deadline = time.monotonic() + 60
        while not (found := sweep.working(5)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if found:
            os.kill(found[0], signal.SIGKILL)
        time.sleep(1)


def gcs(sweep: Sweep) -> None:
    _kill(sweep, "gcs_server")


def raylet(sweep: Sweep) -> None:
    _kill(sweep, "raylet/raylet")


def head(sweep: Sweep) -> None:
    _kill(sweep, "launchers/ray/head.py")


def disk(sweep: Sweep) -> None:
    """Fill it to the last byte, for as long as the command runs."""
    with suppress(OSError), (sweep.pool / "filler").open("wb") as file:
        while True:
            file.write(b"0" * 4096)
            file.flush()


def blind(sweep: Sweep) -> None:
    """Have a node join on which the runs' folder is an empty one."""
    ray = f"{Path(sys.executable).with_name('ray')} start --address={sweep.address} --num-cpus=2 --disable-usage-stats"
    before = sweep.processes()
    subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs tmpfs {sweep.pool} && exec {ray}"],
        env=sweep.environment | {"RAY_AUTH_MODE": "disabled"}, check=True, capture_output=True,
    )  # fmt: skip
    sweep.of_cluster += [pid for pid in sweep.processes("raylet") if pid not in before]


DRILLS: dict[str, Callable[[Sweep], None]] = {
    "ctrl_c": ctrl_c, "ctrl_c_twice": ctrl_c_twice, "driver": driver, "worker": worker, "workers": workers,
    "gcs": gcs, "gcs_joined": gcs, "raylet": raylet, "head": head, "disk": disk,
    "blind": blind,
}  # fmt: skip


def _kill(sweep: Sweep, name: str) -> None:
    for pid in sweep.processes(name):
        os.kill(pid, signal.SIGKILL)


def words(folder: Path, pool: Path, launcher: str, runs: int, steps: int) -> list[str]:
    rates = ",".join(f"{10 ** (-3 + index / 4):.3g}" for index in range(runs // 2))
    own = [f"lr=[{rates}]", "mechanism=[sa,sc]", f"steps={steps}", "evaluation.every_steps=20", "name=drill"]
    places = [f"data.path={folder / 'text.txt'}", f"runs_dir={pool}", f"launcher={launcher}"]
    keys = {word.partition("=")[0] for word in [*own, *places]}
    return [*(word for word in TINY.split() if word.partition("=")[0] not in keys), *own, *places]


def run(name: str, launcher: str, options: argparse.Namespace, folder: Path, calm: dict[str, bytes]) -> dict[str, str]:
    """One row of the table."""
    own = folder / f"{launcher}-{name}"
    pool = own / "runs"
    pool.mkdir(parents=True)
    if name == "disk":
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(pool)], check=True)
    sweep = Sweep(own, words(folder, pool, launcher, options.runs, options.steps), pool)
    try:
        more = [sweep.cluster()] if name in ("gcs_joined", "blind") else []
        return {"launcher": launcher, "drill": name, **_struck(sweep, DRILLS[name], options.patience, calm, more)}
    finally:
        for pid in sweep.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if name == "disk":
            subprocess.run(["umount", "-l", str(pool)], check=False)


def _struck(
    sweep: Sweep, strike: Callable[[Sweep], None], patience_s: float, calm: dict[str, bytes], more: Sequence[str]
) -> dict[str, str]:
    sweep.start(*more)
    deadline = time.monotonic() + 120
    while len(sweep.working(10)) < 2 and time.monotonic() < deadline and sweep.wait(0.1) is None:
        pass
    strike(sweep)
    struck_at = time.monotonic()
    code = sweep.wait(patience_s)
    ended_s = time.monotonic() - struck_at
    row = {"ended s": f"{ended_s:.1f}" if code is not None else f"> {patience_s:g}", "exit": str(code)}
    row["last words"] = sweep.last_words()
    if code is None:
        driver(sweep)
        sweep.wait(10)
    for pid in sweep.of_cluster:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + ORPHANS_S
    while sweep.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    row["orphans"] = str(len(sweep.processes()))
    (sweep.pool / "filler").unlink(missing_ok=True)
    commands = 0 if code == 0 else 1
    while commands:
        sweep.start()
        code = sweep.wait(300)
        if code == 0 or commands == MOST_COMMANDS:
            break
        commands += 1
    row["commands"] = str(commands) if code == 0 else f"> {MOST_COMMANDS}"
    row["bytes"] = "same" if metrics(sweep.pool) == calm else "OTHERS"
    return row


def metrics(pool: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in sorted(pool.glob("*/metrics.jsonl"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launchers", nargs="+", default=["ray"])
    parser.add_argument("--drills", nargs="+", choices=DRILLS, default=list(DRILLS))
    parser.add_argument("--runs", type=int, default=6, help="an even number")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--patience", type=float, default=400.0, help="seconds that a command may take to end")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="drills-", dir="/tmp"))
    lines = [f"Line {number} of a text that says little, {number * number % 97} times.\n" for number in range(4000)]
    (folder / "text.txt").write_text("".join(lines))
    try:
        (folder / "calm").mkdir()
        calm = Sweep(
            folder / "calm", words(folder, folder / "calm/runs", "serial", options.runs, options.steps), folder
        )
        calm.start()
        if calm.wait(600) != 0:
            raise RuntimeError(f"the undisturbed sweep failed: {calm.last_words()}")
        expected = metrics(folder / "calm/runs")
        print(" | ".join(HEADER), flush=True)
        for name in options.drills:
            for launcher in options.launchers:
                row = run(name, launcher, options, folder, expected)
                print(" | ".join(row[key] for key in HEADER), flush=True)
                if row["bytes"] != "same":
                    print(json.dumps({"log": (folder / f"{launcher}-{name}/log.txt").read_text()[-2000:]}), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
