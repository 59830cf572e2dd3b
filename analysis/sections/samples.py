"""Show generated samples of the terminal checkpoints side by side, learning rate × mechanism: the first of each, as it
begins (consensus paper D.4)."""

from __future__ import annotations

from analysis.drawing.pieces import Pieces, heading, shown
from analysis.drawing.tables import chunks, source
from analysis.drawing.typeset import Cell, Table
from analysis.sections.section import Drawn, Section, is_of_rates
from analysis.study import wording
from analysis.study.load import Frame, Study
from analysis.words import listed, lr_text
from stability.printable import visible

SAMPLE_COLUMNS = 4
ENDS = str.maketrans({"\n": "↵", "\r": "↵", "\t": "→", "\u2028": "↵", "\u2029": "↵"})


def sample_tables(study: Study) -> list[Table]:
    """Return one table for each four series; none where nothing was sampled. A cell holds the sample of its runs'
    lowest seed."""
    if "samples" not in study.generation:
        return []
    rows = study.with_run(study.generation["samples"].query("phase == 'terminal'"))
    present = [name for name in study.series if name in set(rows["series"])]
    return [_table(study, rows, part) for part in chunks(present, SAMPLE_COLUMNS)] if present else []


def _table(study: Study, rows: Frame, series: tuple[str, ...]) -> Table:
    """Return one table of samples, learning rate × series, with the sampler and the oracle in its caption."""
    shown = rows[rows["series"].isin(series)].sort_values("seed").drop_duplicates(["series", "run_lr"])
    lrs = sorted(set(study.runs.loc[study.runs["series"].isin(series), "lr"]))
    body = tuple(
        (Cell(lr_text(lr)), *(_cell(shown[(shown["series"] == name) & (shown["run_lr"] == lr)]) for name in series))
        for lr in lrs
    )
    oracles = sorted(set(shown["oracle"]) - {""})
    scored = (
        f"nll: {wording.words(study).of_sample.format(oracle=listed(oracles))}, of the whole sample. "
        if oracles
        else "No oracle has scored them. "
    )
    how = sorted({f"{row.sampler}, temperature {row.temperature:g}" for row in shown.itertuples() if row.sampler})
    caption = (
        "The first sample of each run's terminal checkpoint as it begins, of each cell's lowest seed "
        f"({_seeds(shown)}); … where it goes on. Nothing was picked. {scored}Sampler: {listed(how)}. ↵ a line's end, "
        f"→ a tab, escapes as \\x1b control characters; --: the run left no sample. {source(study)}"
    )
    align, widths = ("left",) * (1 + len(series)), ("auto", *("1fr",) * len(series))
    return Table("Samples against learning rate", caption, ("LR", *series), body, (), align, widths)


def _seeds(shown: Frame) -> str:
    seeds = sorted({f"{seed:g}" for seed in shown["seed"]})
    return f"seed{'s' * (len(seeds) > 1)} {listed(seeds)}"


def _cell(part: Frame) -> Cell:
    if part.empty:
        return Cell("--")
    row = part.iloc[0]
    if row["num_characters"] != row["num_characters"]:  # NaN: there was nothing to sample from
        return Cell("--", row["reason"])
    score = f"nll {row['nll']:.3f}" if row["nll"] == row["nll"] else "not scored"
    goes_on = "…" if row["num_characters"] > len(row["text"]) else ""
    return Cell(score, visible(row["text"].translate(ENDS)) + goes_on or "(empty)")


def applies(study: Study) -> bool:
    return is_of_rates(study) and bool(sample_tables(study))


def body(study: Study, drawn: Drawn) -> Pieces:
    return heading("What the models write") + shown(sample_tables(study))


SECTION = Section(body, applies)
