"""Read the spec of an entry with ``ckpt=FOLDER``; work on its runs, each under its lock, with a bar of progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from stability.cli.compose import add_listed_plugins, read
from stability.cli.words import Invocation
from stability.config.base import AnySettings
from stability.config.run import RunSpec
from stability.plan.runs import RunPlan, resolve_folder
from stability.printable import print_note, print_text
from stability.registry import require_plugins
from stability.runs.directory import RunDirectory, read_json
from stability.runs.lock import RunLock
from stability.runs.records import StudyFile


def read_about(kind: type[AnySettings], invocation: Invocation) -> AnySettings:
    """Return the spec of an entry with ``ckpt=FOLDER``, as `read` does.

    Raises:
        ValueError: the folder's runs need plugins the command does not name.
    """
    ckpt = next((word.value for word in invocation.words if word.key == "ckpt" and word.value), None)
    # Plugins are checked before the words are read: some words may be their settings. `RunPlan.of` refuses a
    # folder without runs.
    if ckpt is not None:
        add_listed_plugins(invocation)
        folder = resolve_folder(ckpt)
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


def select_pending(
    plan: RunPlan, runs: Collection[RunDirectory], is_missing: Callable[[RunDirectory], object], reason: str
) -> dict[RunDirectory, RunSpec]:
    """Return the runs with something missing, and print the number of the others with the reason.

    Args:
        plan: supplies the specs.
        runs: runs of the plan.
        is_missing: whether a run has something missing.
        reason: why the others are skipped.
    """
    pending = {directory: plan.runs[directory] for directory in runs if is_missing(directory)}
    if len(pending) < len(runs):
        print_note(f"skips {len(runs) - len(pending)} of {len(runs)}: {reason}")
    return pending


def take_steps(works: Sequence[Work]) -> None:
    """Run the works in order under one progress bar, each under its run's lock.

    If there are several, one with damaged files is skipped with a line.
    """
    labels = [f"{work.directory.run_id} {work.checkpoint}".rstrip() for work in works]
    steps = (run_locked(work.directory, work.steps if len(works) == 1 else _leave_out_damaged(work)) for work in works)
    follow(steps, labels, [work.num_steps for work in works])


def _leave_out_damaged(work: Work) -> Iterator[None]:
    """Run a work's steps; a damaged file ends them with a printed line."""
    try:
        yield from work.steps
    except ValueError as error:
        print_text(f"leaves out run {work.directory.run_id}: {error}")


def run_locked(directory: RunDirectory, steps: Iterator[None]) -> Iterator[None]:
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
        yield from lock.run_steps(steps)
    finally:
        lock.release()


def follow(tasks: Iterable[Iterator[None]], labels: Sequence[str], lengths: Sequence[int]) -> None:
    """Run the tasks one after another under one progress bar.

    If the output is no terminal, print a line per finished task instead.

    Args:
        tasks: each yields once a step.
        labels: name of each task.
        lengths: planned steps of each task; a task may have fewer (no paper state for SGD, no checkpoint).
    """
    from rich import get_console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    named = (
        (f"{number}/{len(labels)} {label}", steps)
        for number, (steps, label) in enumerate(zip(tasks, labels, strict=True), 1)
    )
    if not get_console().is_terminal:
        _follow_in_lines(named)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} steps"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=sum(lengths), visible=bool(lengths))
        for number, (name, steps) in enumerate(named, 1):
            progress.update(bar, description=name)
            for _ in steps:
                progress.advance(bar)
            progress.update(bar, completed=sum(lengths[:number]))


def _follow_in_lines(named: Iterable[tuple[str, Iterator[None]]]) -> None:
    """Run the tasks and print a line for each: files and CI logs cannot show a bar."""
    start = time.monotonic()
    for name, steps in named:
        for _ in steps:
            pass
        print_text(f"{name}, {time.monotonic() - start:.0f} s", flush=True)
