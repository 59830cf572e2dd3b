"""Tabulate ablated settings (`ablate.sc.window=[…]`) in the form of the paper's Table 9.

With a verdict on each numeric setting's direction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from analysis.drawing.tables import narrow
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.ablations import Group, Value, ablations
from analysis.numbers.comparison import decide
from analysis.numbers.learning import LITTLE_SHARE
from analysis.numbers.spread import MEDIAN_RULE, Spread, interval
from analysis.sections.nll import nll_cell
from analysis.study import wording
from analysis.study.load import Column, Study
from analysis.study.unlearned import unlearned
from analysis.words import join_words, lr_text, plural, short_count, value_text

MOST_COLUMNS = 12


def ablation_tables(study: Study) -> list[Table]:
    """Return the paper's Table 9 for each base, at most twelve columns a table."""
    return [_table(study, each.base, groups) for each in ablations(study) for groups in _fitting(each.groups)]


def _fitting(groups: Sequence[Group]) -> list[tuple[Group, ...]]:
    """Group the settings so that each table fits a page's width."""
    pages: list[tuple[Group, ...]] = [()]
    for group in groups:
        room = MOST_COLUMNS - sum(len(each.columns) for each in pages[-1])
        pages = (
            [*pages[:-1], (*pages[-1], group)] if len(group.columns) <= room or not pages[-1] else [*pages, (group,)]
        )
    return pages


def _table(study: Study, base: str, groups: tuple[Group, ...]) -> Table:
    """Return one table of settings; the best value in each group is bold.

    Rows: best median NLL, its learning rate, generative NLL, model size.
    """
    columns = [column for group in groups for column in group.columns]
    best = {id(column) for group in groups for column in group.columns if column.median == group.best}
    nlls = [narrow(nll_cell(column.runs, column.lr, id(column) in best)) for column in columns]
    rows = [(Cell("Validation NLL"), *nlls)]
    if study.runs["lr"].nunique() > 1:
        rates = ["--" if math.isnan(column.lr) else lr_text(column.lr) for column in columns]
        rows.append((Cell("at LR"), *map(Cell, rates)))
    if any(np.isfinite(column.runs["gen_nll"]).any() for column in columns):
        rows.append((Cell("Generative NLL"), *(_generative(column) for column in columns)))
    rows.append((Cell("Model size"), *(_size(column) for column in columns)))
    widths = ("auto", *("1fr",) * len(columns))
    heads = (("", 1), *((group.heading, len(group.columns)) for group in groups))
    header = ("", *(column.text for column in columns))
    return Table(f"Ablation of {base}", _caption(study, base, groups), header, tuple(rows), heads, (), widths)


def _caption(study: Study, base: str, groups: tuple[Group, ...]) -> str:
    settings = join_words(f"{group.setting or group.part}={value_text(group.base_value)}" for group in groups)
    chosen = "; each column at its own best learning rate" if study.runs["lr"].nunique() > 1 else ""
    rule = MEDIAN_RULE.replace("Second line", "Below")
    return (
        f"One setting at a time, the others at the base's {settings}: the base's own runs stand under each setting. "
        f"Validation NLL, {wording.words(study).unit}: median over the seeds that finished{chosen}. {rule}. Bold: best "
        f"of its setting. Model size: true parameter counts."
    )


def _generative(column: Value) -> Cell:
    spread = Spread.of(column.runs.loc[column.runs["lr"] == column.lr, "gen_nll"])
    detail = "\n".join(filter(None, (spread.detail() if spread.n else "", column.diverged)))
    return narrow(Cell(f"{spread.median:.3f}" if spread.n else "--", detail))


def _size(column: Value) -> Cell:
    """Return a cell with the short parameter count above the exact count."""
    known = column.runs["num_params"].dropna()
    return Cell(short_count(known.iloc[0]), f"{known.iloc[0]:,.0f}") if len(known) else Cell("--")


def directions(study: Study) -> list[str]:
    """Describe each numeric setting's direction of NLL, from its smallest value to its largest.

    Seeds are paired, including diverged ones.
    """
    return [
        _direction(study, each.base, group)
        for each in ablations(study)
        for group in each.groups
        if group.numeric and len(group.columns) > 1
    ]


def _direction(study: Study, base: str, group: Group) -> str:
    """Describe the direction of one setting's NLL over paired seeds; a diverged run counts as ∞."""
    (low, high), pairs = group.ends, group.changes
    both = pairs[np.isfinite(pairs)]
    what = f"{base}, {group.setting or group.part} from {low.text} to {high.text}"
    lost = " and ".join(f"{column.text} {note}" for column in (low, high) if (note := column.diverged))
    if pairs.empty:
        return f"{what}: no seed has a result that tells the two apart{f' ({lost})' if lost else ''}."
    change = f"{what}: {_change(both, lost, wording.words(study).in_nats)}"
    start = unlearned(study, high.series)
    learned = max(unlearned(study, each.series).nll - each.median for each in (low, high))
    if not learned > 0:
        return f"{change}; neither learned more than {start.name}, nothing is claimed."
    weight = "two seeds indicate that it" if len(pairs) < 3 else "it"
    unit = " nats" if wording.words(study).in_nats else ""
    verdict = {0: "no direction can be claimed", 1: f"{weight} rises", -1: f"{weight} falls"}[_sign(list(pairs))]
    verdict += "; in the paper it falls (Table 9)" if group.in_paper else ""
    little = (
        f" Little was learned: the better of the two lies {learned:.3f}{unit} below the {start.nll_name}."
        if learned < LITTLE_SHARE * start.nll
        else ""
    )
    return f"{change}: {verdict}.{little}"


def _sign(pairs: list[float]) -> int:
    """Return the sign from `decide`, 0 for fewer than two pairs.

    If every seed diverged at the same one of the two values, the sign is theirs: the pairs have no spread to test.
    """
    if len(pairs) < 2:
        return 0
    if all(each == pairs[0] for each in pairs) and math.isinf(pairs[0]):
        return 1 if pairs[0] > 0 else -1
    return decide(pairs, pairs)[0]


def _change(both: Column, lost: str, in_nats: bool) -> str:
    """Describe the NLL's change over seeds that finished at both values, and the diverged."""
    counted = f"; {lost}, which counts as infinitely bad" if lost else ""
    if both.empty:
        return f"no seed finished at both{counted}"
    seeds = plural(len(both), "paired seed") + (" that finished at both" if lost else "")
    if len(both) > 1:
        bounds, rule = interval(both), "range" if len(both) == 2 else "95 % interval"
        seeds = f"mean of {seeds}; {rule} {bounds[0]:+.3f} to {bounds[1]:+.3f}"
    what, unit = ("NLL", " nats") if in_nats else ("loss", "")
    return f"the validation {what} changes by {np.mean(both):+.3f}{unit} ({seeds}{counted})"
