"""Repeat a finished command's text if nothing that it depends on has changed. Imports no large package."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = ("stability", "sweeps", "analysis", "kernels", "conf")
OF_CODE = (".csv", ".py", ".yaml")
PACKAGES = ("site-packages", "dist-packages")
# prefixes of environment variables that may change a command's meaning: devices, kernels, places of data and modules
VARIABLES = ("CUDA", "DATA_GYM", "HF_", "HIP", "HOME", "NVIDIA", "PYTHON", "ROCR", "TIKTOKEN", "TORCH", "TRITON")
ENVIRONMENT = dict(os.environ)  # of the command: packages add variables of their own later
MOST_INPUTS = 50_000  # files of data; with more, their list would take longer to read than the data to recognise


@dataclass(frozen=True)
class Answer:
    """The text of a finished command, and the files that it depends on.

    Attributes:
        study: folder of the study.
        folders: further folders, with all files in them.
        inputs: further files, and folders without their files; changes of both count, and so does their creation.
        notes: sentences, printed first (`stability.printable.print_note`).
        lines: text printed after them.
    """

    study: str
    folders: tuple[str, ...]
    inputs: tuple[str, ...]
    notes: tuple[str, ...]
    lines: tuple[str, ...]

    def state(self) -> str:
        """Return a digest of the files' sizes and times of change, which no program can set back.

        Checkpoints count by their folder alone: no table and no figure reads them.
        """
        # by content: the record is written anew by every command, mostly as it was
        record = Path(self.study, "study.json").read_text(encoding="utf-8")
        states = [record, *map(_state, (f"{self.study}/published.json", *self.inputs))]
        runs = (f"{self.study}/../../{run_id}" for run_id in _run_ids(record))
        for folder in (f"{self.study}/results", *runs, *self.folders):
            states.extend(_states_within(folder))
        return _digest(states)


class AnswerFile:
    """The stored answer to a command, ``<pool>/cache/answers/<digest>.json``.

    Args:
        pool: folder of the runs.
        words: the words of the command line.
    """

    def __init__(self, pool: Path, words: Sequence[str]):
        self._words = list(words)
        self.file = pool / "cache" / "answers" / f"{_digest([str(Path.cwd()), *words])}.json"

    def read(self) -> Answer | None:
        """Return the answer; None if there is none, or if code, machine or a file has changed since."""
        try:
            found = json.loads(self.file.read_bytes())
            stored = found["answer"]
            several = (tuple(stored[key]) for key in ("folders", "inputs", "notes", "lines"))
            answer = Answer(stored["study"], *several)
            is_same = (found["circumstances"], found["state"]) == (self._circumstances(), answer.state())
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ):  # missing or damaged: answer anew
            return None
        return answer if is_same else None

    def write(self, answer: Answer, state: str) -> None:
        """Write an answer that was right in a ``state`` of its files."""
        from stability.runs.directory import write_json

        write_json(self.file, {"answer": asdict(answer), "state": state, "circumstances": self._circumstances()})

    def _circumstances(self) -> str:
        return circumstances([str(Path.cwd()), *self._words])


def pool_of(words: Iterable[str]) -> Path:
    """Return the pool that a command line names, or the usual one."""
    named = [word.removeprefix("runs_dir=") for word in words if word.startswith("runs_dir=")]
    return Path(named[-1].strip("'\"") if named else "runs").resolve()


def circumstances(words: Sequence[str]) -> str:
    """Return a digest of some words, machine, installed packages and code."""
    here = [
        str(Path.cwd()),
        os.uname().nodename,
        sys.executable,
        sys.version,
        *sorted(map(str, Path("/dev").glob("nvidia*"))),
    ]
    variables = sorted(f"{name}={value}" for name, value in ENVIRONMENT.items() if name.startswith(VARIABLES))
    packages = [_state(path) for path in sys.path if path.endswith(PACKAGES)]
    code = (
        _state(f"{folder}/{name}")
        for each in CODE
        for top in (ROOT / each, ROOT / "stability" / each)
        for folder, _, names in os.walk(top)
        for name in sorted(names)
        if name.endswith(OF_CODE)
    )
    return _digest([*words, *here, *variables, *packages, *sorted(code)])


def _run_ids(record: str) -> list[str]:
    """Return the ids of all runs on a study's record, given as JSON."""
    found = json.loads(record)
    return [*found["run_ids"], *(run_id for each in found.get("earlier", []) for run_id in each["run_ids"])]


def _states_within(folder: str) -> Iterator[str]:
    """Yield the states of a folder's files, subfolders included; of a missing folder one."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        yield f"{folder} none"
        return
    yield folder
    for entry in entries:
        if entry.name != "checkpoints" and entry.is_dir():
            yield from _states_within(entry.path)
        else:
            yield _state(entry.path, entry.stat)


def _state(path: str, stat: Callable[[], os.stat_result] | None = None) -> str:
    """Return a path with its size and times; ``stat`` is a faster way to these."""
    try:
        found = Path(path).stat() if stat is None else stat()
    except OSError:
        return f"{path} none"
    return f"{path} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogateescape")).hexdigest()
