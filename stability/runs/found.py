"""Find the one run, or the checkpoint, that a word of the command line names by a folder. No torch."""

from __future__ import annotations

from pathlib import Path

from stability.runs.study import StudyFolder


def run_or_checkpoint(place: str, word: str, noun: str) -> Path:
    """Return the whole path of a run's folder, or of what is taken for a checkpoint's: ``place`` itself, or the only
    run of a study.

    ``word``: how the place was written, e.g. ``oracle=ckpt:…``; ``noun``: what one run is for it, e.g. "an oracle is
    one run". Errors: ``ValueError`` of two lines for a study of several runs, and for a name that no file system takes.
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
        raise ValueError(
            f"{word} is a study of {len(runs)} runs, and {noun};\n"
            f"give one of them: {', '.join(f'ckpt:{run.path}' for run in runs[:3])}{', …' if len(runs) > 3 else ''}"
        )
    return runs[0].path
