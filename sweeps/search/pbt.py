"""`search=pbt`: population based training of the learning rate, in synchronous rounds.

A population consists of the sweep's learning rates, for one kind of run and one seed. In each round every member trains
one segment, as a run of its own that starts from the previous run's checkpoint (`RunSpec.init`). Then the worst members
copy a checkpoint of the best and change its rate. Each round waits for all its runs: the next segment depends only
on the runs and the seed of the draws, with any launcher, and a repeated command finds the same runs.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stability.config.base import validate
from stability.config.identity import run_id
from stability.config.rates import round_lr
from stability.config.run import RunSpec
from stability.config.search import PbtSpec
from stability.config.sweep import SweepSpec
from stability.runs.directory import FINISHED

DRAWS = 20  # maximum draws until a (parent, rate) pair is new


@dataclass(frozen=True)
class _Member:
    """A member at the start of its next segment.

    Attributes:
        lr: learning rate.
        parent: id of the run to start from, or None in the first segment.
        took_over: whether the parent was another member's run.
    """

    lr: float
    parent: str | None = None
    took_over: bool = False


class PbtSearch:
    """Populations in the order of `SweepSpec.points`.

    A population with a failed run requests no more runs; a repeated command retries the failed run.
    """

    stopped_by = ""

    def __init__(self, spec: SweepSpec, fingerprint: str):
        assert isinstance(spec.search, PbtSpec)
        self._ends = spec.search.ends(spec.steps)
        points = spec.points(fingerprint)
        width = len(spec.lr.rates()) * spec.seeds
        self._populations = [
            _Population(label, run, rates, spec.search, self._ends)
            for number, rates in enumerate(spec.rates())
            for label, run in points[number * width : number * width + spec.seeds]
        ]
        self._segment = 0
        self.most_runs = len(points) * len(self._ends)

    @property
    def stop_at(self) -> int | None:
        """The last step of the current segment; None in the final one, with measurements."""
        return self._ends[self._segment - 1] if 0 < self._segment < len(self._ends) else None

    def plan(self) -> str:
        return (
            f"search=pbt: these stand for a population of each kind and seed, in {len(self._ends)} segments of "
            f"{self._ends[0]} steps"
        )

    def ask(self) -> list[tuple[str, RunSpec]]:
        if self._segment == len(self._ends):
            return []
        self._segment += 1
        return [(population.label, run) for population in self._populations for run in population.ask()]

    def tell(self, statuses: Mapping[str, dict[str, Any]]) -> None:
        for population in self._populations:
            population.tell(statuses)

    def record(self) -> dict[str, Any]:
        """Return ``lineage``: one row per member and segment."""
        rows = [row for number, population in enumerate(self._populations) for row in population.rows(number)]
        return {"lineage": rows}


class _Population:
    """The members of one kind of run and one seed; ``base`` is any run of the kind."""

    def __init__(self, label: str, base: RunSpec, rates: tuple[float, ...], settings: PbtSpec, ends: tuple[int, ...]):
        self.label, self._recipe, self._rates = label, base.model_dump(mode="json"), rates
        self._settings, self._ends = settings, ends
        self._key = run_id(base)
        self._members = [_Member(lr) for lr in rates]
        self._rows: list[list[dict[str, Any]]] = []
        self._is_stuck = False

    def ask(self) -> list[RunSpec]:
        """Return the next segment's runs, one per member, and record their rows.

        The list is empty if a run failed or all diverged.
        """
        if self._is_stuck:
            return []
        runs = [self._run(member) for member in self._members]
        first = 0 if not self._rows else self._ends[len(self._rows) - 1]
        self._rows.append(
            [
                {
                    "run_id": run_id(run),
                    "member": index,
                    "first_step": first,
                    "last_step": run.steps,
                    "lr": member.lr,
                    "parent": member.parent,
                    "took_over": member.took_over,
                    "score": None,
                }
                for index, (member, run) in enumerate(zip(self._members, runs, strict=True))
            ]
        )
        return runs

    def tell(self, statuses: Mapping[str, dict[str, Any]]) -> None:
        """Record the results of the last segment and choose the next segment's members."""
        if self._is_stuck:
            return
        ends = [statuses[row["run_id"]] for row in self._rows[-1]]
        if any(end["state"] not in FINISHED for end in ends):
            self._is_stuck = True
            return
        scores = [_score(end) for end in ends]
        for row, score in zip(self._rows[-1], scores, strict=True):
            row["score"] = score if math.isfinite(score) else None
        if not any(map(math.isfinite, scores)):
            self._is_stuck = True  # all diverged: nothing to go on from
            return
        self._members = self._choose_next(scores)

    def rows(self, number: int) -> list[dict[str, Any]]:
        return [{**row, "population": number, "segment": at} for at, rows in enumerate(self._rows, 1) for row in rows]

    def _run(self, member: _Member) -> RunSpec:
        """Return the run of a member's next segment."""
        done = len(self._rows)
        init = None if member.parent is None else {"run": member.parent, "step": self._ends[done - 1]}
        return validate(RunSpec, self._recipe | {"lr_peak": member.lr, "steps": self._ends[done], "init": init})

    def _choose_next(self, scores: list[float]) -> list[_Member]:
        """Return the next segment's members.

        The worst and all diverged members copy one of the best; the others continue.
        """
        order = sorted(range(len(scores)), key=lambda index: (scores[index], index))
        most = max(1, int(self._settings.quantile * len(scores)))
        best = [index for index in order[:most] if math.isfinite(scores[index])]
        worst = {index for index in order[-most:] if scores[index] > scores[best[-1]]}
        leaving = sorted(worst | {index for index, score in enumerate(scores) if not math.isfinite(score)})
        ids = [row["run_id"] for row in self._rows[-1]]
        found = {index: _Member(member.lr, ids[index]) for index, member in enumerate(self._members)}
        for index in leaving:
            del found[index]
        for index in leaving:
            found[index] = self._take_over(index, best, ids, {(member.parent, member.lr) for member in found.values()})
        return [found[index] for index in range(len(scores))]

    def _take_over(self, index: int, best: list[int], ids: list[str], taken: set[tuple[str | None, float]]) -> _Member:
        """Return a member that copies a checkpoint of the best, at a new rate.

        No other member copies it at this rate, unless `DRAWS` draws all repeat one.
        """
        draws = _make_generator(self._settings.seed, self._key, len(self._rows), index)
        low, high = math.log(self._rates[0]), math.log(self._rates[-1])
        source, lr = best[0], self._members[best[0]].lr
        for _ in range(DRAWS):
            source = draws.choice(best)
            change = draws.choice((self._settings.factor, 1 / self._settings.factor))
            is_fresh, fresh = draws.random() < self._settings.resample, math.exp(draws.uniform(low, high))
            lr = round_lr(fresh if is_fresh else self._members[source].lr * change)
            if (ids[source], lr) not in taken:
                break
        return _Member(lr, ids[source], took_over=True)


def _score(status: Mapping[str, Any]) -> float:
    """Return the validation NLL at a segment's end, or infinity after divergence."""
    nll = status.get("result", {}).get("val_nll")
    return nll if nll is not None and math.isfinite(nll) and status["state"] != "diverged" else math.inf


def _make_generator(*what: Any) -> random.Random:
    """Return a member's random generator in one segment, independent of all others."""
    return random.Random(hashlib.sha256(" ".join(map(str, what)).encode()).digest())
