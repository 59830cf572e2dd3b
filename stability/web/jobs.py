"""Start, stop and find the commands of the page; their files in the study's folder are the only state."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from stability.runs.directory import read_json, write_json
from stability.runs.processes import Process, machine, read_start_time

CHECK_S = 20.0  # longest time of a check
LOG_BYTES = 16_384  # shown of a log's end
SWEEP, REPORT = "web", "web_report"  # stems of a job's two files
_children: dict[int, subprocess.Popen[bytes]] = {}  # of this server: reaped when looked at
_starting = threading.Lock()


@dataclass(frozen=True)
class Job:
    """A command that the page has started.

    Attributes:
        words: its words.
        process: its process, with its start time: a later one of the same number is not signalled.
        log: the file of its output.
        started_at: seconds since the epoch.
    """

    words: tuple[str, ...]
    process: Process
    log: Path
    started_at: float

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        child = _children.get(self.process.pid)
        if child is not None and child.poll() is not None:
            _children.pop(self.process.pid, None)
        return self.process.lives is True

    def read_log(self) -> str:
        """Return the end of its output."""
        with suppress(OSError), open(self.log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_BYTES))
            return file.read().decode("utf-8", "replace")
        return ""


def find_job(folder: Path, kind: str = SWEEP) -> Job | None:
    """Return the last job of a study; None if the page has started none."""
    try:
        found = read_json(folder / f"{kind}.json")
        words = tuple(map(str, found["argv"]))
        return Job(words, Process(**found["process"]), folder / f"{kind}.log", float(found["started_at"]))
    except (ValueError, KeyError, TypeError):
        return None


def start(folder: Path, command: str, words: Sequence[str], kind: str = SWEEP) -> Job:
    """Start a command in a session of its own, which outlives the page.

    Args:
        folder: the study's folder.
        command: the entry, e.g. ``sweep``.
        words: its words.
        kind: the job's files.

    Raises:
        ValueError: the study's last job of this kind is still running.
    """
    with _starting:
        if (last := find_job(folder, kind)) is not None and last.is_running:
            raise ValueError(f"{folder.name}: its command is still running (process {last.process.pid}); stop it first")
        folder.mkdir(parents=True, exist_ok=True)
        log, started_at = folder / f"{kind}.log", time.time()
        with open(log, "wb") as file:
            argv = [sys.executable, "-m", f"stability.{command}", *words]
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        _children[child.pid] = child
        process = Process(Process.current().host, machine(), child.pid, read_start_time(child.pid) or "")
        value = {"argv": list(words), "pid": child.pid, "process": asdict(process), "started_at": started_at}
        write_json(folder / f"{kind}.json", {**value, "log": log.name})
        return Job(tuple(words), process, log, started_at)


def stop(job: Job) -> bool:
    """Send SIGINT to a job's group, as Ctrl-C does; return whether it was running."""
    if not job.is_running:
        return False
    with suppress(ProcessLookupError):
        os.killpg(job.process.pid, signal.SIGINT)
    return True


class Checker:
    """Runs one check at a time: a later one ends the one before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def check(self, command: str, words: Sequence[str]) -> tuple[bool, str]:
        """Return whether a command is valid, and what its check prints: a sweep's plan, or the mistake."""
        dry = ["-m", "stability.sweep", *words, "dry_run=true"]
        argv = dry if command == "sweep" else ["-m", "stability.web.checking", command, *words]
        with self._lock:
            if self._child is not None and self._child.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._child.pid, signal.SIGKILL)
            command_line, nothing, pipe = [sys.executable, *argv], subprocess.DEVNULL, subprocess.PIPE
            child = subprocess.Popen(
                command_line, stdin=nothing, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
            self._child = child
        try:
            out, _ = child.communicate(timeout=CHECK_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            line = shlex.join([f"stability.{command}", *words, *(["dry_run=true"] if command == "sweep" else [])])
            return False, f"no answer within {CHECK_S:.0f} s; in a terminal: python -m {line}"
        if child.returncode < 0:
            return False, "a later check has taken its place"
        return child.returncode == 0, out.strip()
