"""Tabulate ablated settings (`ablate.sc.window=[…]`) in the form of the paper's Table 9.

With a verdict on each numeric setting's direction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.drawing.tables import narrow
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.comparison import decide
from analysis.numbers.learning import LITTLE_SHARE
from analysis.numbers.spread import MEDIAN_RULE, Spread, interval
from analysis.numbers.windows import median_line, outcomes
from analysis.sections.nll import nll_cell
from analysis.study import wording
from analysis.study.load import Column, Frame, Study
from analysis.study.reference import changes_loss
from analysis.study.unlearned import unlearned
from analysis.words import join_words, lr_text, plural, short_count, value_text

# Column headings of the paper's Table 9; other settings have their own name. In the paper, raising any of the three
# lowers the validation NLL.
PAPER_HEADINGS = {"edge_hidden": "Edge hidden dimension (ξ)", "rank": "Rank (r)", "window": "Window size (w)"}
PAPER_PART = "sc"
MOST_COLUMNS = 12


@dataclass(frozen=True)
class Value:
    """One value of a setting and its runs; ``lr`` has the best median NLL, NaN without one."""

    value: Any
    series: str
    runs: Frame
    lr: float
    by_seed: Column

    @property
    def text(self) -> str:
        return value_text(self.value)

    @property
    def median(self) -> float:
        """The median of the seeds' NLLs at ``lr``, a divergence counting as ∞; NaN without any."""
        known = self.by_seed.dropna()
        return float(np.median(known)) if len(known) else math.nan

    @property
    def diverged(self) -> str:
        """The share of seeds diverged at ``lr``, e.g. diverged 2/4; "" for none."""
        number = int(np.isinf(self.by_seed).sum())
        return f"diverged {number}/{len(self.by_seed)}" if number else ""


@dataclass(frozen=True)
class Group:
    """One setting of a part: a column for each value, including the base's."""

    part: str
    setting: str
    columns: tuple[Value, ...]
    base_value: Any

    @property
    def heading(self) -> str:
        return PAPER_HEADINGS[self.setting] if self.in_paper else f"{self.part} {self.setting}".strip()

    @property
    def in_paper(self) -> bool:
        return self.part == PAPER_PART and self.setting in PAPER_HEADINGS

    @property
    def best(self) -> float:
        """The lowest median of its columns; NaN if none is finite."""
        return min((column.median for column in self.columns if math.isfinite(column.median)), default=math.nan)

    @property
    def numeric(self) -> bool:
        return all(
            isinstance(column.value, int | float) and not isinstance(column.value, bool) for column in self.columns
        )


@dataclass(frozen=True)
class Ablation:
    """The groups around the series ``base``."""

    base: str
    groups: tuple[Group, ...]


def ablations(study: Study) -> tuple[Ablation, ...]:
    """Return one ablation for each ablated series; none in a study without `ablate`.

    Settings that change the loss itself are left out: their NLLs have different units.
    """
    described = [item for item in study.study.get("ablations") or [] if not changes_loss(item)]
    found = []
    for base in dict.fromkeys(study.runs["base"]):
        runs = study.runs[study.runs["base"] == base]
        groups = tuple(_group(study, runs, item) for item in described if _is_of(runs, item))
        found += [Ablation(base, groups)] if groups else []
    return tuple(found)


def _is_of(runs: Frame, item: dict[str, Any]) -> bool:
    """Return whether a base and its variants have an ablated part; a group of settings or a field is of all runs."""
    return item["axis"] == item["part"] or set(runs[item["axis"]]) == {item["part"]}


def _group(study: Study, runs: Frame, item: dict[str, Any]) -> Group:
    of_values = [(runs[runs["variant"] == each["variant"]], each["value"]) for each in item["values"]]
    columns = [_column(study, own, value) for own, value in of_values if len(own)]  # without values of lost runs
    base = next(each["value"] for each in item["values"] if not each["variant"])
    return Group(item["part"], item["setting"], tuple(columns), base)


def _column(study: Study, runs: Frame, value: Any) -> Value:
    series = str(runs["series"].iloc[0])
    table = outcomes(study, series)
    line = median_line(table).dropna()
    lr = float(line.idxmin()) if len(line) else math.nan
    return Value(value, series, runs, lr, table.loc[lr] if len(line) else table.iloc[0] * math.nan)


def tells_all(study: Study) -> bool:
    """Return whether the ablation tables contain every series at its only learning rate.

    The tables against learning rate would then repeat them.
    """
    shown = {column.series for each in ablations(study) for group in each.groups for column in group.columns}
    return study.runs["lr"].nunique() == 1 and shown == set(study.series)


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
    low, high = min(group.columns, key=lambda column: column.value), max(group.columns, key=lambda column: column.value)
    pairs = (high.by_seed - low.by_seed).dropna()  # drops ∞ − ∞ too: a seed that diverged at both decides nothing
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
