"""Judge a coordinate check: slopes of activations and updates against size, on log axes, and their verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.numbers.spread import interval
from analysis.study.load import Frame

FLAT, WITHIN = 0.25, 0.4  # |slope| of a flat quantity, and the bounds of its interval
FIRST_JUDGED = 3  # step: at the first ones the logits of mup still catch up
PARTS = ["mechanism", "residual", "norm", "optimizer", "parametrization"]
LOGITS = "logits"
IN_BLOCK = "blocks."  # beginning of names
VECTORS = ("finite", "vector", "bias", "embedding")  # classes of tensors that move as far at every size
MEASURES = {"size": "at start", "change": "change", "update": "update"}  # of the judged slopes


@dataclass(frozen=True)
class Slope:
    """Growth of one quantity: slope of log2 of it against log2 of the size.

    Attributes:
        quantity: its name.
        measure: "size" before training, "change" or "update" since then; or "gradient".
        mean: over the seeds.
        low: lower end of its 95 % interval (`spread.interval`).
        high: upper end.
    """

    quantity: str
    measure: str
    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Verdict on the quantity: flat, grows, shrinks, or unclear if the seeds leave it open."""
        if abs(self.mean) <= FLAT and self.low >= -WITHIN and self.high <= WITHIN:
            return "flat"
        if self.mean > FLAT and self.low > 0:
            return "grows"
        return "shrinks" if self.mean < -FLAT and self.high < 0 else "unclear"

    @property
    def texts(self) -> tuple[str, str]:
        """Slope and interval as text."""
        mean, low, high = (f"{round(value, 2) + 0.0:+.2f}" for value in (self.mean, self.low, self.high))  # no -0.00
        return mean, f"{low} to {high}"


def slope(frame: Frame, quantity: str, measure: str, steps: Sequence[int]) -> Slope | None:
    """Return the slope of one quantity of one kind of model, the mean over steps.

    Args:
        frame: rows of the kind.
        quantity: its name.
        measure: as in `Slope`.
        steps: the steps.

    Returns:
        None for a quantity that some size lacks, or that is zero or not finite.
    """
    rows = frame[(frame["quantity"] == quantity) & (frame["measure"] == measure) & frame["step"].isin(steps)]
    table = rows.pivot_table(index="size", columns=["seed", "step"], values="value", dropna=False)
    values = table.to_numpy(dtype=float)
    if len(table) < frame["size"].nunique() or not (np.isfinite(values) & (values > 0)).all():
        return None
    slopes = np.polyfit(np.log2(table.index.to_numpy(dtype=float)), np.log2(values), 1)[0]
    of_seeds = slopes.reshape(-1, len(steps)).mean(1)
    return Slope(quantity, measure, float(of_seeds.mean()), *interval(of_seeds))


def judged_steps(frame: Frame, quantity: str = "") -> list[int]:
    """Return the steps at which a quantity's change is judged: from the third on; logits at the last."""
    steps = sorted(int(step) for step in frame["step"].unique() if step >= FIRST_JUDGED)
    return steps[-1:] if quantity == LOGITS else steps


def judged_slopes(frame: Frame) -> list[Slope]:
    """Return the slopes that decide the verdict on one kind of model.

    They are every activation's size before training but for the logits', its change in training, and the updates of
    tensors with at most one axis that grows. Over depths, changes within blocks are left out: what the k-th of L blocks
    reads has changed by the share k/L of the final stream's change. So are blocks that some depth lacks.
    """
    is_of_depth = frame["field"].iloc[0] == "layers"
    names = {measure: list(dict.fromkeys(frame[frame["measure"] == measure]["quantity"])) for measure in MEASURES}
    asked = [(name, "size", [0]) for name in names["size"] if name != LOGITS]
    asked += [(name, "change", judged_steps(frame, name)) for name in names["change"]]
    asked = [each for each in asked if not (is_of_depth and each[0].startswith(IN_BLOCK) and each[1] == "change")]
    asked += [(name, "update", judged_steps(frame)) for name in names["update"] if name in VECTORS]
    return [found for each in asked if (found := slope(frame, *each)) is not None]


def verdict(slopes: Sequence[Slope]) -> tuple[str, list[Slope]]:
    """Return the verdict on a kind of model, and the quantities that decide it.

    "grows" if any quantity does, else "shrinks", else "unclear", else "flat". The steepest one is first; of unclear
    ones that with the furthest end of its interval.
    """
    steepest = sorted(slopes, key=lambda each: -abs(each.mean))
    words = {each.verdict for each in slopes}
    word = next((word for word in ("grows", "shrinks", "unclear") if word in words), "flat")
    if word == "unclear":
        steepest.sort(key=lambda each: -max(-each.low, each.high))
    return word, [each for each in steepest if each.verdict == word]
