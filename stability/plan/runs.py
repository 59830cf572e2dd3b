"""Trained runs to measure, resolved once from ``ckpt=FOLDER``.

The folder may contain a study, a run or one checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from stability.config.parse import parse_run
from stability.config.run import RunSpec
from stability.registry import near_misses
from stability.runs.directory import RunDirectory, read_json
from stability.runs.records import SpecFile
from stability.runs.study import StudyFolder

MOST_NEAR = 3  # most run ids in a message


@dataclass(frozen=True)
class RunPlan:
    """The runs of ``ckpt=FOLDER`` with a verdict: of a study, one run, or the run of a checkpoint.

    Attributes:
        runs: their folders, each with its spec.
        pool: folder of all runs.
        study: the study, or None.
        checkpoint: the checkpoint's folder, or None.
        phase: the checkpoint's phase: earliest, terminal or last, else the folder's name.
        notes: notes for the user on runs left out.
    """

    runs: Mapping[RunDirectory, RunSpec]
    pool: Path
    study: StudyFolder | None = None
    checkpoint: Path | None = None
    phase: str = ""
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, ckpt: str, *, kept: str, without_checkpoint: str | None = None) -> RunPlan:
        """Find the runs of a study's, a run's or a checkpoint's folder.

        A checkpoint's files are verified later, by their reader.

        Args:
            ckpt: the folder.
            kept: name of the data written into a run's folder, e.g. "rows".
            without_checkpoint: consequence of a missing checkpoint, for the message; None: it is no error.

        Raises:
            ValueError: the folder contains no study, no run and no checkpoint of a run; or the only run is damaged,
                unfinished, or has no checkpoint despite ``without_checkpoint``.
        """
        folder = resolve_folder(ckpt)
        if (folder / "study.json").exists():
            study = StudyFolder(folder)
            runs, notes = _select_finished(study.runs(), without_checkpoint)
            return cls(runs, study.pool, study, notes=notes)
        if (folder / "spec.json").exists():
            return cls(_select_finished([RunDirectory.at(folder)], without_checkpoint)[0], folder.parent)
        if not folder.is_dir():
            raise _make_missing_error(folder)
        from stability.runs.phases import phases  # here: a wrong word is refused before torch is imported
        from stability.training.checkpoint import manifest_of

        manifest_of(folder)
        directory = RunDirectory.at(folder.parent.parent)
        if not directory.spec_file.exists():
            raise ValueError(
                f"{folder} is not inside a run's folder (runs/<run_id>/checkpoints/…), where its {kept} would be "
                "kept; copy the whole run"
            )
        named = {path: name for name, path in phases(directory, "all").items()}
        runs = {directory: read_spec(directory)}
        return cls(runs, directory.path.parent, checkpoint=folder, phase=named.get(folder, folder.name))

    @property
    def directory(self) -> RunDirectory:
        """The run, if the subject is one run or a checkpoint."""
        (directory,) = self.runs
        return directory

    @property
    def cache_dir(self) -> Path:
        """Folder of the runs' prepared data."""
        return self.pool / "cache"


def read_spec(directory: RunDirectory) -> RunSpec:
    """Return the spec of a trained run."""
    return parse_run(read_json(directory.spec_file, SpecFile), directory.path)


def _select_finished(
    asked: Sequence[RunDirectory], without_checkpoint: str | None
) -> tuple[dict[RunDirectory, RunSpec], tuple[str, ...]]:
    """Return the finished runs with their specs, and notes on the others; raises as `RunPlan.of`."""
    runs, notes, unfinished, bare = {}, [], [], []
    for directory in asked:
        try:
            spec = read_spec(directory)
        except ValueError as error:
            if len(asked) == 1:  # nothing would be left to do
                raise
            notes.append(f"leaves out run {directory.run_id}: {error}")
            continue
        if not directory.finished:
            unfinished.append(directory)
        elif len(asked) > 1 and has_lost_checkpoints(directory):
            bare.append(directory)
        else:
            runs[directory] = spec
    if unfinished and len(asked) == 1:
        status = unfinished[0].status()
        why = f" ({status['reason']})" if status["state"] == "failed" and status.get("reason") else ""
        raise ValueError(f"{unfinished[0].run_id} is {status['state']}{why}; run its sweep to the end first")
    if unfinished:
        notes.append(f"leaves out {len(unfinished)} of {len(asked)} runs, which have not reached their verdict")
    if bare:
        notes.append(
            f"leaves out {len(bare)} of {len(asked)} runs, whose checkpoints are gone; what was measured of them stays"
        )
    if without_checkpoint is not None and len(asked) == 1 and not asked[0].checkpoints():
        state = asked[0].status()["state"]
        raise ValueError(f"{asked[0].run_id} is {state} and left no checkpoint: {without_checkpoint}")
    return runs, tuple(notes)


def has_lost_checkpoints(directory: RunDirectory) -> bool:
    """Return whether a run that left checkpoints has none any more, e.g. unpacked without them."""
    return not directory.checkpoints() and directory.status()["state"] != "diverged"


def resolve_folder(ckpt: str) -> Path:
    """Return the absolute path of a folder; ValueError if its name is too long."""
    folder = Path(ckpt).resolve()
    try:
        (folder / "study.json").exists()
    except OSError as error:
        wanted = "give a study's, a run's or a checkpoint's folder"
        raise ValueError(f"ckpt={ckpt}: {error.strerror}; {wanted}") from None
    return folder


def _make_missing_error(folder: Path) -> ValueError:
    """Return the error for a missing folder, with near names of studies and runs."""
    wrong = f"no checkpoint at {folder}, and no run or study"
    near = _near_runs(folder)
    # siblings of the folder, then the pools it was probably meant to be in
    for place in (folder.parent, folder.parent / "studies", folder.parent / "runs" / "studies"):
        if names := tuple(sorted(path.parent.name for path in place.glob("*/study.json"))):
            studies = near_misses(folder.name, names, f"studies in {place}")
            return ValueError(f"{wrong}; " + (f"{near} {studies[0].upper()}{studies[1:]}" if near else studies))
    remedy = "give a folder like runs/studies/<name>, runs/<run_id> or runs/<run_id>/checkpoints/step_000200"
    return ValueError("; ".join([wrong, near or remedy]))


def _near_runs(folder: Path) -> str:
    """Name the runs with an id close to a missing folder's name; "" if there is none."""
    for place in (folder.parent, folder.parent / "runs"):
        run_ids = tuple(sorted(path.parent.name for path in place.glob("*/spec.json")))
        if close := [each for each in run_ids if each.startswith(folder.name)] or get_close_matches(
            folder.name, run_ids, n=MOST_NEAR
        ):
            return f"did you mean the run {' or '.join(close[:MOST_NEAR])} in {place}?"
    return ""
