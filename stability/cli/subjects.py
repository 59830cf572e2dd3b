"""Find the runs of ``ckpt=FOLDER`` and measure each under its lock.

The folder may contain a study, a run or one checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from stability.cli.compose import add_named_plugins, read
from stability.cli.progress import follow
from stability.cli.words import Invocation
from stability.config.base import AnySettings
from stability.config.parse import parse_run
from stability.config.run import RunSpec
from stability.printable import print_note, print_text
from stability.registry import near_misses, require_plugins
from stability.runs.directory import RunDirectory, read_json
from stability.runs.lock import RunLock
from stability.runs.records import SpecFile, StudyFile
from stability.runs.study import StudyFolder

MOST_NEAR = 3  # most run ids in a message


@dataclass(frozen=True)
class Subject:
    """The runs of ``ckpt=FOLDER``: all runs of a study, one run, or the run of a checkpoint.

    Attributes:
        directories: the runs' folders.
        pool: folder of all runs.
        study: the study, or None.
        checkpoint: the checkpoint's folder, or None.
        phase: the checkpoint's phase: earliest, terminal or last, else the folder's name.
    """

    directories: tuple[RunDirectory, ...]
    pool: Path
    study: StudyFolder | None = None
    checkpoint: Path | None = None
    phase: str = ""

    @classmethod
    def of(cls, ckpt: str, *, kept: str) -> Subject:
        """Find the runs of a study's, a run's or a checkpoint's folder.

        A checkpoint's files are verified later, by their reader. ``kept`` names the data written into a run's folder,
        e.g. "rows".

        Raises:
            ValueError: the folder contains no study, no run and no checkpoint of a run.
        """
        folder = _folder(ckpt)
        if (folder / "study.json").exists():
            study = StudyFolder(folder)
            return cls(tuple(study.runs()), study.pool, study=study)
        if (folder / "spec.json").exists():
            return cls((RunDirectory.at(folder),), folder.parent)
        if not folder.is_dir():
            raise _nothing_at(folder)
        from stability.runs.phases import phases
        from stability.training.checkpoint import manifest_of

        manifest_of(folder)
        directory = RunDirectory.at(folder.parent.parent)
        if not directory.spec_file.exists():
            raise ValueError(
                f"{folder} is not inside a run's folder (runs/<run_id>/checkpoints/…), where its {kept} would be "
                "kept; copy the whole run"
            )
        named = {path: name for name, path in phases(directory, "all").items()}
        return cls((directory,), directory.path.parent, checkpoint=folder, phase=named.get(folder, folder.name))

    @property
    def directory(self) -> RunDirectory:
        """The run, if the subject is one run or a checkpoint."""
        (directory,) = self.directories
        return directory

    @property
    def cache_dir(self) -> Path:
        """Folder of the runs' prepared data."""
        return self.pool / "cache"

    def measurable(self, *, without_checkpoint: str | None = None) -> list[RunDirectory]:
        """Return the finished runs, or the run of a checkpoint; print the number of unfinished ones.

        ``without_checkpoint`` is the consequence of a missing checkpoint for the message; None: it is no error.

        Raises:
            ValueError: the only run is unfinished, or has no checkpoint despite ``without_checkpoint``.
        """
        if self.checkpoint is not None:
            return [self.directory]
        asked = self._with_spec()
        unfinished = [directory for directory in asked if not directory.finished]
        if unfinished and len(self.directories) == 1:
            status = unfinished[0].status()
            why = f" ({status['reason']})" if status["state"] == "failed" and status.get("reason") else ""
            raise ValueError(f"{unfinished[0].run_id} is {status['state']}{why}; run its sweep to the end first")
        if unfinished:
            print_note(
                f"leaves out {len(unfinished)} of {len(self.directories)} runs, which have not reached their verdict"
            )
        if without_checkpoint is not None and len(self.directories) == 1 and not self.directory.checkpoints():
            state = self.directory.status()["state"]
            raise ValueError(f"{self.directory.run_id} is {state} and left no checkpoint: {without_checkpoint}")
        return [directory for directory in asked if directory.finished]

    def _with_spec(self) -> list[RunDirectory]:
        """Return the runs with a readable spec; print a line for each other run."""
        found = []
        for directory in self.directories:
            try:
                read_json(directory.spec_file, SpecFile)
            except ValueError as error:
                if len(self.directories) == 1:  # nothing would be left to do
                    raise
                print_text(f"leaves out run {directory.run_id}: {error}")
            else:
                found.append(directory)
        return found


def _folder(ckpt: str) -> Path:
    """Return the absolute path of a folder; ValueError if its name is too long."""
    folder = Path(ckpt).resolve()
    try:
        (folder / "study.json").exists()
    except OSError as error:
        wanted = "give a study's, a run's or a checkpoint's folder"
        raise ValueError(f"ckpt={ckpt}: {error.strerror}; {wanted}") from None
    return folder


def _nothing_at(folder: Path) -> ValueError:
    """Return the error for a missing folder, with near names of studies and runs."""
    wrong = f"no checkpoint at {folder}, and no run or study"
    near = _near_runs(folder)
    # siblings of the folder, then the pools it was probably meant to be in
    for place in (folder.parent, folder.parent / "studies", folder.parent / "runs" / "studies"):
        if names := tuple(sorted(path.parent.name for path in place.glob("*/study.json"))):
            studies = f"studies in {place}: {near_misses(folder.name, names)}"
            return ValueError("; ".join(filter(None, [wrong, near, studies])))
    remedy = "give a folder like runs/studies/<name>, runs/<run_id> or runs/<run_id>/checkpoints/step_000200"
    return ValueError("; ".join([wrong, near or remedy]))


def _near_runs(folder: Path) -> str:
    """Name the runs with an id close to a missing folder's name; "" if there is none."""
    for place in (folder.parent, folder.parent / "runs"):
        run_ids = tuple(sorted(path.parent.name for path in place.glob("*/spec.json")))
        if close := [each for each in run_ids if each.startswith(folder.name)] or get_close_matches(
            folder.name, run_ids, n=MOST_NEAR
        ):
            return f"runs in {place}: did you mean {' or '.join(close[:MOST_NEAR])}?"
    return ""


def read_about(kind: type[AnySettings], invocation: Invocation) -> AnySettings:
    """Return the spec of an entry with ``ckpt=FOLDER``, as `read` does.

    Raises:
        ValueError: the folder's runs need plugins the command does not name.
    """
    ckpt = next((word.value for word in invocation.words if word.key == "ckpt" and word.value), None)
    # Plugins are checked before the words are read: some words may be their settings. `Subject.of` refuses a folder
    # without runs.
    if ckpt is not None:
        add_named_plugins(invocation)
        folder = _folder(ckpt)
        for file in (folder / "study.json", folder / "spec.json", folder.parent.parent / "spec.json"):
            if file.is_file():
                record = read_json(file, StudyFile if file.name == "study.json" else None)
                require_plugins(record.get("spec", record).get("plugins"), ckpt)
                break
    return read(kind, invocation)


@dataclass(frozen=True)
class Work:
    """Pending work on one run: a measurement or samples.

    Attributes:
        directory: the run's folder; the steps write into it.
        steps: the steps of the work.
        num_steps: largest number of steps.
        checkpoint: name of the checkpoint's folder, if only one is used.
    """

    directory: RunDirectory
    steps: Iterator[None]
    num_steps: int
    checkpoint: str = ""


def take_steps(works: Sequence[Work]) -> None:
    """Run the works in order under one progress bar, each under its run's lock.

    If there are several, one with damaged files is skipped with a line.
    """
    labels = [f"{work.directory.run_id} {work.checkpoint}".rstrip() for work in works]
    steps = (locked(work.directory, work.steps if len(works) == 1 else _leave_out_damaged(work)) for work in works)
    follow(steps, labels, [work.num_steps for work in works])


def _leave_out_damaged(work: Work) -> Iterator[None]:
    """Run a work's steps; a damaged file ends them with a printed line."""
    try:
        yield from work.steps
    except ValueError as error:
        print_text(f"leaves out run {work.directory.run_id}: {error}")


def tell_skipped(num_pending: int, num_asked: int, reason: str) -> None:
    """Print the number of skipped runs and the reason; nothing if none is skipped.

    Args:
        num_pending: runs with work to do.
        num_asked: all requested runs.
        reason: why the others are skipped.
    """
    if num_pending < num_asked:
        print_note(f"skips {num_asked - num_pending} of {num_asked}: {reason}")


def locked(directory: RunDirectory, steps: Iterator[None]) -> Iterator[None]:
    """Run ``steps`` under the run's lock; skip them with a line if another process has locked it.

    The steps write into the run's folder.
    """
    lock = RunLock(directory.path)
    if not lock.acquire():
        print_note(
            f"leaves out {directory.run_id}: {lock.owner() or 'another process'} works on it; the same command does "
            "the rest later"
        )
        return
    try:
        yield from lock.during(steps)
    finally:
        lock.release()


def spec_of(directory: RunDirectory) -> RunSpec:
    """Return the spec of a trained run."""
    return parse_run(read_json(directory.spec_file), directory.path)
