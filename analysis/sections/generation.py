"""Tabulate the generative NLL of the terminal checkpoints' samples, learning rate × mechanism; every table names the
oracle that scored them."""

from __future__ import annotations

from analysis.drawing.tables import chunks, source
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.spread import INTERVAL_RULES, POSITIVE, Spread
from analysis.sections.nll import NLL_COLUMNS
from analysis.study import wording
from analysis.study.load import Frame, Study
from analysis.words import count_range, lr_text


def generation_tables(study: Study) -> list[Table]:
    """Return one table for each oracle and six series; none where nothing was scored. Runs that different oracles
    scored never share a table."""
    if "generation" not in study.generation:
        return []
    scored = study.with_run(study.generation["generation"].query("phase == 'terminal'").drop(columns="seed"))
    tables = []
    for oracle in sorted(set(scored["oracle"])):
        rows = scored[scored["oracle"] == oracle]
        present = [name for name in study.series if name in set(rows["series"])]
        tables += [_table(study, rows, oracle, part) for part in chunks(present, NLL_COLUMNS)]
    return tables


def _table(study: Study, scored: Frame, oracle: str, series: tuple[str, ...]) -> Table:
    """Return the table of one oracle's scores, learning rate × series, each cell over the runs' means."""
    shown = scored[scored["series"].isin(series)]
    by_run = shown.groupby(["series", "run_lr", "run_id"])[["nll", "nll_per_byte"]].mean()
    lrs = sorted(set(shown["run_lr"]))
    rows = tuple((Cell(lr_text(lr)), *(_cell(by_run, name, lr) for name in series)) for lr in lrs)
    caption = (
        f"Oracle: {oracle} (weights {shown['oracle_sha256'].iloc[0][:12]}). {_unit(study, shown)}; mean over "
        f"{count_range(shown.groupby('run_id').size())} samples of the terminal checkpoint, median over seeds. "
        f"{INTERVAL_RULES[POSITIVE]}{_per_byte(study, shown)}. {_how(shown)} Low is not good by itself: repetition "
        f"scores low. {source(study)}"
    )
    return Table("Generative NLL against learning rate", caption, ("LR", *series), rows)


def _cell(by_run: Frame, series: str, lr: float) -> Cell:
    if (series, lr) not in by_run.index:
        return Cell("--")
    values = by_run.loc[(series, lr)]
    spread, per_byte = Spread.of(values["nll"], POSITIVE), Spread.of(values["nll_per_byte"])
    if spread.n == 0:
        return Cell("--")
    other_unit = [f"{per_byte.median:.3f} per byte"] if per_byte.n and per_byte.median != spread.median else []
    return Cell(f"{spread.median:.3f}", "\n".join([spread.detail(), *other_unit]))


def _unit(study: Study, shown: Frame) -> str:
    return wording.words(study).score.format(draws=count_range(shown["oracle_draws"]))


def _per_byte(study: Study, shown: Frame) -> str:
    """Say in the caption what nats per byte are; of what is no text, nothing."""
    if not wording.words(study).is_text:
        return ""
    if shown["nll_per_byte"].isna().all():
        return (
            "; none per byte, since the samples' tokens (an unknown one among them) do not say how many bytes they "
            "stand for"
        )
    return "; below it, where the oracle's tokens are no bytes, nats per byte"


def _how(shown: Frame) -> str:
    """Say how the samples were drawn, e.g. ``"Sampler: top_prob, temperature 1."``; of several each."""
    kinds = shown[["sampler", "steps", "temperature", "contexts"]].drop_duplicates().itertuples(index=False)
    return f"Sampler: {'; '.join(map(_in_words, kinds))}."


def _in_words(kind) -> str:
    steps = f" in {kind.steps:g} steps" if kind.steps == kind.steps else ""
    return (
        f"{kind.sampler}{steps}, temperature "
        f"{kind.temperature:g}{f', contexts {kind.contexts}' if kind.contexts else ''}"
    )
