"""Tabulate results as mHC-lite's and AttentionX's Tables 1, and the consensus paper's claims on its own numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis import published
from analysis.claims.pairs import compares_residuals
from analysis.claims.published import claims
from analysis.drawing.tables import list_failures
from analysis.drawing.typeset import Cell, Table
from analysis.measures import best_rate, outcome_of, select_finished
from analysis.numbers.step_shares import TERMINAL
from analysis.numbers.windows import VALIDATION
from analysis.paper.grid import size
from analysis.paper.printed import PAPER, mechanism_of
from analysis.sections import train_nll
from analysis.sections.accuracy import share_words
from analysis.study import wording
from analysis.study.load import COLUMNS, Column, Frame, Study
from analysis.words import lr_text

MOST_PLACES = 2  # groups of columns in a page's width
GAP = "+z.3f"  # format of a difference: no sign before a zero but +
SIZES = {"nanogpt_s": "S", "nanogpt_m": "M", "nanogpt_l": "L"}
VERDICTS = {"holds": "every cell agrees", "contradicted": "not every cell agrees", "undecided": "undecided"}
NOT_PROBED = pd.DataFrame(columns=COLUMNS[train_nll.NAME], dtype=float)
MEAN = "Mean ± standard deviation over the seeds that finished, each at its best learning rate"


class _Place(NamedTuple):
    """A column group: a study's runs with one model, and the paper's names for both."""

    study: Study
    model: str
    dataset: str
    name: str


def loss_tables(studies: Iterable[Study]) -> list[Table]:
    """Return mHC-lite's Table 1: residual connections by data and size, training and validation NLL and their gap."""
    places = [place for study in studies if _is_of_residuals(study) for place in _places(study)]
    return [_loss_table(places[start : start + MOST_PLACES]) for start in range(0, len(places), MOST_PLACES)]


def _is_of_residuals(study: Study) -> bool:
    return not study.is_search and compares_residuals(study) and set(study.runs["objective"]) == {"ar"}


def _places(study: Study) -> Iterator[_Place]:
    dataset = dataset_of(study, ("openwebtext", "fineweb-edu"))
    for model in dict.fromkeys(study.runs["model"]):
        letter = SIZES.get(model.partition(" ")[0], "")
        yield _Place(study, model, dataset, f"{dataset or wording.data(study) or study.name}, {letter or size(model)}")


def dataset_of(study: Study, known: Sequence[str]) -> str:
    """Return the one of the paper's data sets that a study's record names; "" if none."""
    named = str((study.spec.get("data") or {}).get("dataset") or "").lower()
    return next((each for each in known if named.endswith(each)), "")


def _loss_table(places: Sequence[_Place]) -> Table:
    paper = published.numbers(published.LOSSES)
    rows: list[tuple[Cell, ...]] = []
    for series in dict.fromkeys(name for place in places for name in place.study.series):
        runs = [place.study.of(series) for place in places]
        pairs = list(zip(places, runs, strict=True))
        rows.append((Cell(series), *(cell for place, own in pairs for cell in _losses(place, own))))
        theirs = [_printed_losses(paper, place, own) for place, own in pairs]
        if any(text for texts in theirs for text in texts):
            rows.append((Cell(f"{series}, {PAPER}"), *(Cell(text) for texts in theirs for text in texts)))
    caption = (
        f"Nats per token at the end. {MEAN}. Train: the final model on windows of the training side, as many as "
        "validation has and evaluated alike (nanoGPT: 200 random batches). Gap: validation less train of each run. "
        f"Below: seeds, rate and the runs that ended badly. Rows “{PAPER}”: {published.LOSSES.tables} of "
        f"“{published.LOSSES.paper}”, one run each.{_missing_commands(places)}"
    )
    groups = (("", 1), *((place.name, 3) for place in places))
    header = ("residual connection", *("train", "validation", "gap") * len(places))
    return Table("Residual connections: training and validation loss", caption, header, tuple(rows), groups)


def _missing_commands(places: Sequence[_Place]) -> str:
    """Return the commands that measure missing training NLLs; "" without any."""
    finished = [(place.study, _finished(place.study.runs, place.model)) for place in places]
    lacking = dict.fromkeys(study.name for study, runs in finished if len(runs) > len(_probed(study, runs)))
    commands = (f"python -m stability.probe what={train_nll.NAME} ckpt=runs/studies/{name}" for name in lacking)
    return f" Runs without train: {'; '.join(commands)} measures it." if lacking else ""


def _finished(runs: Frame, model: str) -> Frame:
    return select_finished(runs[runs["model"] == model], VALIDATION)


def _losses(place: _Place, runs: Frame) -> tuple[Cell, Cell, Cell]:
    """Return a series' training and validation NLL in one place, and the second less the first."""
    if not (runs["model"] == place.model).any():
        return Cell("--"), Cell("--"), Cell("--")
    here = runs[(runs["model"] == place.model) & (runs["lr"] == best_rate(place.study, str(runs["series"].iloc[0])))]
    known = _finished(here, place.model)
    probed = _probed(place.study, known)
    return (
        _mean_cell(probed["train_nll"], here, ".3f"),
        _mean_cell(known[VALIDATION], here, ".3f"),
        _mean_cell(probed["difference"], here, GAP),
    )


def _probed(study: Study, runs: Frame) -> Frame:
    """Return the rows of the runs' final models in ``what=train_nll``, as far as measured."""
    rows = study.probes.get(train_nll.NAME, NOT_PROBED)
    return rows[rows["run_id"].isin(runs["run_id"]) & (rows["phase"] == TERMINAL) & np.isfinite(rows["train_nll"])]


def _mean_cell(values: Column, runs: Frame, form: str) -> Cell:
    """Return the mean with the standard deviation; below it seeds, rate and failures."""
    troubles = list_failures(runs)
    if not len(values):
        return Cell("--", "\n".join(troubles))
    deviation = f" ± {float(values.std(ddof=1)):{form[-3:]}}" if len(values) > 1 else ""
    below = [f"n={len(values)}, {lr_text(float(runs['lr'].iloc[0]))}", *troubles]
    return Cell(f"{float(values.mean()):{form}}{deviation}", "\n".join(below))


def _printed_losses(paper: Frame, place: _Place, runs: Frame) -> tuple[str, str, str]:
    letter, residuals = SIZES.get(place.model.partition(" ")[0], ""), set(runs["residual"])
    row = paper[(paper["dataset"] == place.dataset) & (paper["size"] == letter) & paper["residual"].isin(residuals)]
    if row.empty:
        return "", "", ""
    train, validation = float(row["train_nll"].iloc[0]), float(row["val_nll"].iloc[0])
    return f"{train:.3f}", f"{validation:.3f}", format(validation - train, GAP)


def accuracy_table(studies: Iterable[Study]) -> Table | None:
    """Return AttentionX's Table 1: a row for each data set, accuracy by mechanism; None without a share."""
    known = [study for study in studies if not study.is_search and share_words(study) is not None]
    if not known:
        return None
    series = tuple(dict.fromkeys(name for study in known for name in study.series))
    paper, rows = published.numbers(published.ACCURACY), []
    for study in known:
        dataset = dataset_of(study, ("cifar10", "cifar100"))
        rows.append((Cell(dataset or study.name), *(_accuracy_cell(study, name) for name in series)))
        theirs = paper[paper["dataset"] == dataset].set_index("mechanism")
        names = [mechanism_of(name) for name in series]
        if len(theirs):
            texts = [
                "{:.2f} ± {:.2f}".format(*theirs.loc[name, ["accuracy", "deviation"]]) if name in theirs.index else ""
                for name in names
            ]
            rows.append((Cell(f"{dataset}, {PAPER}"), *map(Cell, texts)))
    caption = (
        f"Validation accuracy in per cent. {MEAN}. Below: seeds, rate and the runs that ended badly. Rows “{PAPER}”: "
        f"{published.ACCURACY.tables} of “{published.ACCURACY.paper}”, three runs each."
    )
    return Table("Validation accuracy by mechanism", caption, ("data", *series), tuple(rows))


def _accuracy_cell(study: Study, series: str) -> Cell:
    share = share_words(study)
    assert share is not None, "only studies with a share are listed"
    runs, rate = study.of(series), outcome_of(study, share.column).best_rate(study, series)
    if rate is None:
        return Cell("--", "\n".join(list_failures(runs)))
    here = runs[runs["lr"] == rate]
    return _mean_cell(100 * select_finished(here, share.column)[share.column], here, ".2f")


def claims_table() -> Table:
    """Return the consensus paper's claims, judged on the numbers that its own tables print."""
    rows = tuple(
        (Cell(claim.statement), Cell(claim.effect), Cell(VERDICTS[claim.verdict], claim.text)) for claim in claims()
    )
    caption = (
        f"“{published.CONSENSUS}”, sections 5 and D.3, on its own Tables 2 to 9. Each printed number is one run "
        "without an interval: this says whether the tables agree with the text, not whether the mechanisms differ. "
        "Windows: within 5 % of the best printed NLL, at rates that both have."
    )
    header, widths = ("statement", "effect", "its tables"), ("2.2fr", "1fr", "3fr")
    return Table("The consensus paper's claims on its own tables", caption, header, rows, (), ("left",) * 3, widths)
