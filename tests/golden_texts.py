"""Texts that stay word for word while the code behind them moves: ``python -m tests.golden_texts`` writes them anew.

In ``tests/golden``: what a report says of eight made-up studies, ``<study>_end.txt`` as a sweep prints it at its end,
``<study>.txt`` with tables=all and ``<study>_report.txt`` with every table, paragraph and caption of the PDF; and ``messages.jsonl``, command lines that
once were answered badly and drawn ones, each with exit code and message; a line is added there by hand. Nothing here is trained, and every number is
printed with few digits, so that no processor's rounding shows.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from analysis import assembly
from analysis.drawing.pieces import Picture
from analysis.drawing.typeset import Table
from analysis.report import ending, summary
from analysis.study.load import load
from tests.analysis.synthetic import quickstart_alpha, write_study, write_table
from tests.analysis.test_ablation import write_ablation
from tests.analysis.test_edge_and_search import with_edges, with_search
from tests.analysis.test_mixers import write_mixers
from tests.analysis.test_optimizers import write_scaled
from tests.analysis.test_recall_analysis import HIGH, LOST, LOW, write_recall
from tests.analysis.test_residuals import study_of
from tests.faults.fuzz_command_lines import Sandbox, line_of
from tests.mechanisms.names import ALL, listed

FOLDER = Path(__file__).parent / "golden"
MESSAGES = FOLDER / "messages.jsonl"
PHASES = ("terminal", "earliest", "last")
FOUND = 34  # of the messages the first ones are of lines that once were answered badly
# mamba2's are chosen so that no number that is printed lies on the edge between two roundings
RECALLED = {"sa": HIGH, "gla": LOW, "mamba2": (0.957, 0.98, 0.94), "deltanet": LOST}


def write_optimizers(folder: Path) -> Path:
    """Write a study of two optimizers, sgd's α_max 3 % larger: of equal ones rounding would say which is smaller."""
    study = write_scaled(folder)
    table = study / "results" / "curvature.parquet"
    rows = pd.read_parquet(table)
    rows["alpha_max"] *= 1 + 0.03 * (rows["lr"] < 9e-4) * (rows["lr"] > 5e-4)
    write_table(table, "curvature", rows)
    return study


STUDIES: dict[str, Callable[[Path], Path]] = {
    "quickstart": lambda folder: write_study(folder, name="quickstart", alpha=quickstart_alpha),
    "ablation": write_ablation,
    "optimizers": write_optimizers,
    "residuals": study_of,
    "mixers": write_mixers,
    "recall": lambda folder: write_recall(folder, RECALLED),
    "edge": with_edges,
    "search": with_search,
}


class Message(NamedTuple):
    """A command line, its exit code and what it wrote to stderr, with the sandbox's folder replaced."""

    entry: str
    words: list[str]
    code: int | None
    text: str


def ended(study: str, folder: Path) -> str:
    """Return what a sweep prints of a study at its end. The study is written into ``folder``."""
    return ending(STUDIES[study](folder), PHASES)


def printed(study: str, folder: Path) -> str:
    """Return what a sweep prints of a study with tables=all. The study is written into ``folder``."""
    return summary(STUDIES[study](folder), PHASES)


def reported(study: str, folder: Path) -> str:
    """Return a study's report as text. The study is written into ``folder``."""
    return "\n\n".join(_text(piece) for pieces in assembly.pieces(load(STUDIES[study](folder))) for piece in pieces)


def _text(piece: Any) -> str:
    if isinstance(piece, Table):
        return piece.text()
    if isinstance(piece, Picture):
        return f"figure {piece.name}: {piece.caption}"
    fields = [getattr(piece, field.name) for field in dataclasses.fields(piece)]
    return "\n".join(str(value) for field in fields for value in (field if isinstance(field, tuple) else [field]))


def answer(sandbox: Sandbox, entry: str, words: list[str]) -> Message:
    """Run a line in a sandbox that is entered.

    Args:
        sandbox: where no work is done.
        entry: name of the module in ``stability``.
        words: those beside what the entry needs (`tests.faults.fuzz_command_lines.BASES`).

    Returns:
        The line with its code and message, the list of all mechanisms as MECHANISMS.
    """
    outcome = sandbox.run(line_of(entry, tuple(words)))
    message = outcome.err.replace(str(sandbox.root), "FOLDER").replace(listed(*ALL), "MECHANISMS")
    return Message(entry, words, outcome.code, message)


def messages() -> list[Message]:
    """Return the messages that are kept."""
    return [Message(*json.loads(line)) for line in MESSAGES.read_text().splitlines()]


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for study in STUDIES:
        for make, suffix in ((ended, "_end"), (printed, ""), (reported, "_report")):
            with tempfile.TemporaryDirectory() as folder:
                (FOLDER / f"{study}{suffix}.txt").write_text(make(study, Path(folder)))
    with tempfile.TemporaryDirectory() as folder:
        sandbox = Sandbox(Path(folder).resolve())
        with sandbox.entered():
            kept = [answer(sandbox, message.entry, message.words) for message in messages()]
    MESSAGES.write_text("".join(json.dumps(message) + "\n" for message in kept))


if __name__ == "__main__":
    import tests.conftest  # noqa: F401 - reads command lines in a fifth of the time

    main()
