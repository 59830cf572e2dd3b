"""Choice and names of the checkpoints to measure; the run or checkpoint that a folder's name means. No torch.

``terminal``: the run's last planned step. ``earliest``: its first checkpoint. ``last``: the last checkpoint of a
diverged run, if it is not the earliest; it is not terminal, since the run never reached its end. Each checkpoint has
one of these names only. ``before_decay``: the last checkpoint before ``schedule=wsd`` lowers the rate, if any; it may
be the earliest as well, and ``all`` does not select it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from stability.config.training import ScheduleSpec
from stability.runs.directory import RunDirectory, read_json, step_of
from stability.runs.parquet import has_rows
from stability.runs.records import SpecFile
from stability.runs.study import StudyFolder

TERMINAL, EARLIEST, LAST = "terminal", "earliest", "last"
BEFORE_DECAY = "before_decay"


def phases(directory: RunDirectory, phase: str) -> dict[str, Path]:
    """Return a run's checkpoints of a phase by the phase's name; {} if none.

    ``all`` selects every phase.
    """
    found = directory.checkpoints()
    if not found:
        return {}
    if phase == BEFORE_DECAY:
        return _before_decay(directory, found)
    named: dict[str, Path] = {}
    whole = step_of(found[-1]) == planned_steps(directory)
    if len(found) > 1 or not whole:
        named[EARLIEST] = found[0]
    if whole:
        named[TERMINAL] = found[-1]
    elif len(found) > 1 and directory.status()["state"] == "diverged":
        named[LAST] = found[-1]
    return named if phase == "all" else {name: path for name, path in named.items() if name == phase}


def _before_decay(directory: RunDirectory, found: Sequence[Path]) -> dict[str, Path]:
    """Return the last of the checkpoints at the peak rate of a run that decays and reached its end; {} if none."""
    spec = read_json(directory.spec_file, SpecFile)
    schedule = ScheduleSpec.model_validate(spec["schedule"]).settle(spec["steps"])
    if schedule.name != "wsd" or step_of(found[-1]) != spec["steps"]:
        return {}
    last = spec["steps"] - schedule.decay_steps(spec["steps"])
    before = [each for each in found if schedule.warmup_steps < step_of(each) <= last]
    return {BEFORE_DECAY: before[-1]} if before else {}


def list_phases(directory: RunDirectory, phase: str) -> tuple[str, ...]:
    """Return the phases of a measurement's files.

    They are the requested ones, with empty files if a checkpoint is missing; `last` and `before_decay` have a file only
    with a checkpoint.
    """
    if phase == BEFORE_DECAY:
        return tuple(phases(directory, phase))
    if phase not in ("all", LAST):
        return (phase,)
    last = tuple(phases(directory, LAST))
    return (EARLIEST, TERMINAL, *last) if phase == "all" else last


def planned_steps(directory: RunDirectory) -> int | None:
    """Return the planned number of steps; None in a folder without a spec."""
    return read_json(directory.spec_file, SpecFile)["steps"] if directory.spec_file.exists() else None


def file_of(file: Callable[[str], Path], phase: str) -> Path:
    """Return the file of a phase's table: ``file(phase)``, or an older terminal one.

    Code without the phase `last` wrote a diverged run's last checkpoint as terminal.
    """
    own = file(phase)
    if phase != LAST or own.exists():
        return own
    old = file(TERMINAL)
    try:
        return old if old.exists() and has_rows(old) else own
    except ValueError:  # a damaged table counts as missing
        return own


def resolve_run_folder(place: str, word: str, noun: str) -> Path:
    """Return the full path of a run's or checkpoint's folder.

    It is ``place`` itself, or the only run of a study.

    Args:
        place: the folder.
        word: the word on the command line, e.g. ``oracle=ckpt:…`` or ``ckpt=…``, for messages.
        noun: role of the run, e.g. "an oracle is one run", for messages.

    Raises:
        ValueError: a study of several runs, or an invalid file name; two lines.
    """
    folder = Path(place).expanduser().resolve()
    try:
        is_study = (folder / "study.json").exists()
    except OSError as error:
        raise ValueError(f"{word}: {error.strerror}; give a run's or a checkpoint's folder") from None
    if not is_study:
        return folder
    runs = StudyFolder(folder).runs()
    if len(runs) != 1:
        sign = "ckpt=" if word.startswith("ckpt=") else "ckpt:"  # as the word itself is written
        raise ValueError(
            f"{word} is a study of {len(runs)} runs, and {noun};\n"
            f"give one of them: {', '.join(f'{sign}{run.path}' for run in runs[:3])}{', …' if len(runs) > 3 else ''}"
        )
    return runs[0].path
