"""``python -m stability.status``: show the progress of studies, or remove studies and runs.

It works from any terminal, at any time.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from stability.cli.compose import read
from stability.cli.entry import run_entry
from stability.cli.words import Invocation
from stability.config.entries import StatusSpec
from stability.runs.study import StudyFolder
from sweeps.view.board import StatusConsole, print_line

if TYPE_CHECKING:
    from stability.runs.cleaning import StoredRun

HELP = """
python -m stability.status [NAME | key=value …]

Print how far a study is: done by verdict, running and where, stalled, failed with reasons and traceback files, time
left, the best validation NLL so far, how many runs have their α_max. It reads files only: from another terminal, while
the sweep runs, or a week later. Without arguments: all studies, a line each.

running: a living process holds the run's lock. stalled: the status says running, but no process works on it (kill -9, a
power failure); the same sweep's command goes on with it. interrupted: left by Ctrl-C and saved at the step that is
shown; the same command goes on from there.

clean and delete list what they would remove, and ask; yes=true does not ask. A study's report stays.
"""
FILE_WIDTH = 160
IDLE_S = 60.0  # while a launcher starts its workers, no run is locked yet


def main(argv: list[str]) -> int:
    """Print the progress of one or all studies of a pool, or clean it."""
    spec = read(StatusSpec, Invocation.of(argv, first="name"))
    pool, console = Path(spec.runs_dir).resolve(), _console()
    if spec.clean:
        return _clean(pool, console, asks=not spec.yes)
    if spec.delete is not None:
        return _delete(pool, spec.delete, console, asks=not spec.yes)
    if spec.upgrade:
        return _upgrade(pool, console)
    if spec.name is None:
        return _print_all(pool, console)
    study = StudyFolder.find(pool, spec.name)
    if spec.watch is not None:
        _watch(study, spec.watch, console)
    _print_study(study, console)
    return 0


def _console() -> Console:
    """Return the console; a wide one without a terminal, since a file has no line limit."""
    console = StatusConsole()
    return console if console.is_terminal else StatusConsole(width=FILE_WIDTH)


def _print_all(pool: Path, console: Console) -> int:
    """Print a line for each study of the pool; ValueError if it has none."""
    from sweeps.view.study_view import StudyView

    studies = StudyFolder.list_studies(pool)
    if not studies:
        raise ValueError(f"no studies in {pool}; give runs_dir=…, or run python -m stability.sweep first")
    for study in studies:
        try:
            view = StudyView.of(study)
            view.progress.poll()
            line = view.line()
        except ValueError as error:  # one damaged record must not hide the others
            line = str(error)
        print_line(console, f"{study.path.name}: {line}")
    return 0


def _print_study(study: StudyFolder, console: Console) -> None:
    """Print the progress of one study."""
    from sweeps.view.study_view import StudyView

    view = StudyView.of(study)
    view.progress.poll()
    for part in (*view.heading(), *view.details()):
        if isinstance(part, str):
            print_line(console, part)
        else:
            console.print(part)


def _watch(study: StudyFolder, interval_s: float, console: Console) -> None:
    """Show a study until its runs have ended, a minute without any worker, or Ctrl-C."""
    from sweeps.view.board import Lines, board
    from sweeps.view.study_view import StudyView

    lines = Lines(lambda line: print_line(console, line), known=True)
    live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
    view, worked_at = StudyView.of(study), time.monotonic()
    try:
        if live:
            live.start()
        while True:
            view = view.renew()
            view.progress.poll()
            worked_at = time.monotonic() if view.is_worked_on else worked_at
            if live:
                heading, size = [(line, "") for line in view.heading()], console.size
                live.update(board(view.progress, heading, size.height - 1, size.width), refresh=True)
            else:
                lines.print_changes(view.progress)
            if view.is_over or time.monotonic() - worked_at > IDLE_S:
                return
            time.sleep(interval_s)
    except KeyboardInterrupt:
        return
    finally:
        if live:
            live.stop()


def _clean(pool: Path, console: Console, *, asks: bool) -> int:
    """Remove unlisted runs and partial files after confirmation; runs with an active process stay."""
    from stability.runs.cleaning import find_debris, remove_debris, remove_run, unlisted_runs

    if not pool.is_dir():
        raise ValueError(
            f"runs_dir: there is no folder {pool}, so nothing to clean; give runs_dir=… as the sweep had it"
        )
    runs, rests = unlisted_runs(pool), find_debris(pool)
    idle = [run for run in runs if not run.owner]
    for run in runs:
        print_line(console, _line(run) + (f"  stays: {run.owner} works on it" if run.owner else ""))
    for path in rests:
        print_line(console, f"{path.relative_to(pool)}  left half-written")
    if not idle and not rests:
        print_line(console, f"nothing to remove in {pool}")
        return 0
    total = (
        f"{_counted(len(idle), 'run')} that no study lists ({_megabytes(sum(run.num_bytes for run in idle))}), "
        f"{_counted(len(rests), 'leftover')}"
    )
    if asks and not _confirmed(f"remove {total}? [y/N] ", f"clean=unlisted yes=true removes these from {pool}"):
        print_line(console, "nothing was removed")
        return 0
    gone = [remove_run(run.directory) for run in idle]
    num_rests = remove_debris(pool)
    print_line(console, f"removed {_counted(sum(gone), 'run')}, {_counted(num_rests, 'leftover')}")
    if kept := len(gone) - sum(gone):
        print_line(console, f"{_counted(kept, 'run')} stayed: somebody works on it or lists it by now")
    return 0


def _delete(pool: Path, name: str, console: Console, *, asks: bool) -> int:
    """Remove a study with its own runs, or one run, after confirmation."""
    from stability.runs.cleaning import Deletion

    found = Deletion.of(pool, name)
    for run in found.runs:
        print_line(console, _line(run))
    for run_id, users in found.shared.items():
        print_line(console, f"{run_id}  stays: {', '.join(users)} lists it, too")
    what = f"the run {name}" if found.study is None else f"the study {name}"
    if found.listed_by is not None:
        what += f" of the study {found.listed_by.path.name}, whose command trains it again,"
    size = _megabytes(sum(run.num_bytes for run in found.runs))
    own = "" if found.study is None else f" and {_counted(len(found.runs), 'run')} that no other study lists"
    if asks and not _confirmed(f"remove {what}{own} ({size})? [y/N] ", f"delete={name} yes=true removes this"):
        print_line(console, "nothing was removed")
        return 0
    gone = found.apply()
    print_line(console, f"removed {f'the study {name}, ' if found.study is not None else ''}{_counted(gone, 'run')}")
    return 0


def _line(run: StoredRun) -> str:
    return f"{run.directory.run_id}  {run.state:15} {_megabytes(run.num_bytes):>10}  {run.label}"


def _upgrade(pool: Path, console: Console) -> int:
    """Write the pool's files of older versions anew."""
    from stability.runs.upgrade import upgrade

    if not pool.is_dir():
        raise ValueError(f"runs_dir: there is no folder {pool}; give runs_dir=… as the sweep had it")
    for line in upgrade(pool):
        print_line(console, line)
    return 0


def _confirmed(question: str, without: str) -> bool:
    """Ask on the terminal; ``without`` is the command that does not ask, for a message where there is none."""
    if not sys.stdin.isatty():
        raise ValueError(f"there is no terminal to ask on; {without} without asking")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


if __name__ == "__main__":
    run_entry(main, "status", HELP)
