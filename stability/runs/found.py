"""Find the run or checkpoint that a command-line word names by a folder. No torch."""

from __future__ import annotations

from pathlib import Path

from stability.runs.study import StudyFolder


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
