"""Show the generative NLL (an oracle's score for the models' samples) at terminal checkpoints.

Figure, tables and windows, as the right halves of the paper's Figures 2 and 3 and Tables 2 and 3, and the samples
(D.4).
"""

from __future__ import annotations

import numpy as np

from analysis.drawing.tables import chunks
from analysis.drawing.typeset import Cell, Table
from analysis.measures import NLL_TITLES, outcome_of
from analysis.numbers.spread import MEDIAN_RULE, Spread
from analysis.numbers.windows import GENERATIVE
from analysis.sections.nll import NLL_COLUMNS, window_table
from analysis.sections.nll_figures import nll_figure
from analysis.sections.section import Captioned, Figures, Section, has_data, make_body, make_printer
from analysis.study import wording
from analysis.study.load import Frame, Study
from analysis.words import count_range, join_words, lr_text
from stability.printable import visible


def generation_tables(study: Study) -> list[Table]:
    """Return one table for each oracle and six series; none without scores.

    Runs scored by different oracles never share a table.
    """
    if "generation" not in study.generation:
        return []
    scored = study.with_run(study.generation["generation"].query("phase == 'terminal'").drop(columns="seed"))
    tables = []
    for oracle in sorted(set(scored["oracle"])):
        rows = scored[scored["oracle"] == oracle]
        tables += [_table(study, rows, oracle, part) for part in chunks(study.present(rows), NLL_COLUMNS)]
    return tables


def _table(study: Study, scored: Frame, oracle: str, series: tuple[str, ...]) -> Table:
    """Return one oracle's scores, learning rate × series, each cell over the runs' means."""
    shown = scored[scored["series"].isin(series)]
    by_run = shown.groupby(["series", "run_lr", "run_id"])[["nll", "nll_per_byte"]].mean()
    lrs = sorted(set(shown["run_lr"]))
    rows = tuple((Cell(lr_text(lr)), *(_cell(by_run, name, lr) for name in series)) for lr in lrs)
    unit = wording.words(study).score.format(draws=count_range(shown["oracle_draws"]))
    kinds = shown[["sampler", "steps", "temperature", "contexts"]].drop_duplicates().itertuples(index=False)
    how = f"Sampler: {'; '.join(map(_settings_text, kinds))}."
    caption = (
        f"Oracle: {oracle} (weights {shown['oracle_sha256'].iloc[0][:12]}). {unit}; mean over "
        f"{count_range(shown.groupby('run_id').size())} samples of the terminal checkpoint, median over seeds. "
        f"{MEDIAN_RULE}{_per_byte(study, shown)}. {how} Low is not good by itself: repetition "
        f"scores low."
    )
    return Table(f"{NLL_TITLES[GENERATIVE]} against learning rate", caption, ("LR", *series), rows)


def _cell(by_run: Frame, series: str, lr: float) -> Cell:
    if (series, lr) not in by_run.index:
        return Cell("--")
    values = by_run.loc[(series, lr)]
    spread, per_byte = Spread.of(values["nll"]), Spread.of(values["nll_per_byte"])
    if spread.n == 0:
        return Cell("--")
    other_unit = [f"{per_byte.median:.3f} per byte"] if per_byte.n and per_byte.median != spread.median else []
    return Cell(f"{spread.median:.3f}", "\n".join([spread.detail(), *other_unit]))


def _per_byte(study: Study, shown: Frame) -> str:
    """Return the caption's words on nats per byte; "" if the samples are not text."""
    if not wording.words(study).is_text:
        return ""
    if shown["nll_per_byte"].isna().all():
        return (
            "; none per byte, since the samples' tokens (an unknown one among them) do not say how many bytes they "
            "stand for"
        )
    return "; below it, where the oracle's tokens are no bytes, nats per byte"


def _settings_text(kind) -> str:
    """Describe the sampling settings, e.g. ``"top_prob, temperature 1"``."""
    steps = f" in {kind.steps:g} steps" if kind.steps == kind.steps else ""
    contexts = f", contexts {kind.contexts}" if kind.contexts else ""
    return f"{kind.sampler}{steps}, temperature {kind.temperature:g}{contexts}"


NAME = "generative-nll"
CAPTION = (
    "Generative NLL in {unit} against learning rate; points, lines, bars and ×: as for the validation NLL. A low "
    "value is no proof of good samples: repetition scores low. {oracle}"
)


def oracle(study: Study) -> str:
    """Name the oracle, ``"Oracle: …."``, if a single one scored the study; else "".

    Numbers from several oracles make no common line.
    """
    scored = study.runs[np.isfinite(study.runs["gen_nll"])]
    names = sorted(set(scored["gen_oracle"]))
    return f"Oracle: {names[0] or 'not recorded'}." if len(names) == 1 else ""


def figures(study: Study) -> Figures:
    """Draw the figure if one oracle scored generations at several learning rates."""
    figure = nll_figure(study, GENERATIVE) if oracle(study) else None
    caption = CAPTION.format(unit=outcome_of(study, GENERATIVE).unit, oracle=oracle(study))
    return {} if figure is None else {NAME: Captioned(figure, caption)}


def generative_windows(study: Study) -> list[Table]:
    is_swept = study.runs["lr"].nunique() > 1
    return [window_table(study, GENERATIVE, oracle(study))] if oracle(study) and is_swept else []


def _all_tables(study: Study) -> list[Table]:
    return [*generation_tables(study), *generative_windows(study)]


applies = has_data(_all_tables)


SAMPLE_COLUMNS = 4
ENDS = str.maketrans({"\n": "↵", "\r": "↵", "\t": "→", "\u2028": "↵", "\u2029": "↵"})


def sample_tables(study: Study) -> list[Table]:
    """Return one table for each four series; none without samples. A cell shows its lowest seed's sample."""
    if "samples" not in study.generation:
        return []
    rows = study.with_run(study.generation["samples"].query("phase == 'terminal'"))
    present = study.present(rows)
    return [_sample_table(study, rows, part) for part in chunks(present, SAMPLE_COLUMNS)] if present else []


def _sample_table(study: Study, rows: Frame, series: tuple[str, ...]) -> Table:
    """Return one table of samples, learning rate × series; the caption names sampler and oracle."""
    shown = rows[rows["series"].isin(series)].sort_values("seed").drop_duplicates(["series", "run_lr"])
    lrs = sorted(set(study.runs.loc[study.runs["series"].isin(series), "lr"]))
    body = tuple(
        (
            Cell(lr_text(lr)),
            *(_sample_cell(shown[(shown["series"] == name) & (shown["run_lr"] == lr)]) for name in series),
        )
        for lr in lrs
    )
    oracles = sorted(set(shown["oracle"]) - {""})
    scored = (
        f"nll: {wording.words(study).of_sample.format(oracle=join_words(oracles))}, of the whole sample. "
        if oracles
        else "No oracle has scored them. "
    )
    seeds = sorted({f"{seed:g}" for seed in shown["seed"]})
    how = sorted({f"{row.sampler}, temperature {row.temperature:g}" for row in shown.itertuples() if row.sampler})
    caption = (
        "The first sample of each run's terminal checkpoint as it begins, of each cell's lowest seed "
        f"(seed{'s' * (len(seeds) > 1)} {join_words(seeds)}); … where it goes on. Nothing was picked. "
        f"{scored}Sampler: {join_words(how)}. ↵ a line's end, → a tab, escapes as "
        f"\\x1b control characters; --: the run left no sample."
    )
    align, widths = ("left",) * (1 + len(series)), ("auto", *("1fr",) * len(series))
    return Table("Samples against learning rate", caption, ("LR", *series), body, (), align, widths)


def _sample_cell(part: Frame) -> Cell:
    if part.empty:
        return Cell("--")
    row = part.iloc[0]
    if row["num_characters"] != row["num_characters"]:  # NaN: no checkpoint to sample from
        return Cell("--", row["reason"])
    score = f"nll {row['nll']:.3f}" if row["nll"] == row["nll"] else "not scored"
    goes_on = "…" if row["num_characters"] > len(row["text"]) else ""
    return Cell(score, visible(row["text"].translate(ENDS)) + goes_on or "(empty)")


has_samples = has_data(sample_tables)


SECTION = Section(make_body(NLL_TITLES[GENERATIVE], _all_tables), applies, figures, make_printer(_all_tables))
SAMPLES = Section(make_body("What the models write", sample_tables), has_samples)
