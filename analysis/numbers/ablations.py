"""Collect the runs of ablated settings (`ablate.sc.window=[…]`), by setting and value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.numbers.windows import median_line, outcomes
from analysis.study.load import Column, Frame, Study
from analysis.study.once import once_per_study
from analysis.study.reference import changes_loss
from analysis.words import value_text

# Column headings of the paper's Table 9; other settings have their own name. In the paper, raising any of the three
# lowers the validation NLL.
PAPER_HEADINGS = {"edge_hidden": "Edge hidden dimension (ξ)", "rank": "Rank (r)", "window": "Window size (w)"}
PAPER_PART = "sc"


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

    @property
    def ends(self) -> tuple[Value, Value]:
        """The columns of a numeric setting's smallest and largest value."""
        return min(self.columns, key=lambda column: column.value), max(self.columns, key=lambda column: column.value)

    @property
    def changes(self) -> Column:
        """The NLL at the largest value less that at the smallest, by seed; ±∞ if one of both diverged.

        Seeds that diverged at both decide nothing and are left out.
        """
        low, high = self.ends
        return (high.by_seed - low.by_seed).dropna()


@dataclass(frozen=True)
class Ablation:
    """The groups around the series ``base``."""

    base: str
    groups: tuple[Group, ...]


@once_per_study
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
