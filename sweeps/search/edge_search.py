"""`lr=edge` over a sweep: all curves in common rounds, each with its own `sweeps.search.edge.Curve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stability.config.identity import run_id
from stability.config.run import RunSpec
from stability.config.sweep import SweepSpec
from stability.runs.directory import FINISHED
from sweeps.search.edge import Curve, Edge, Found, Outcome, most_rates


class EdgeSearch:
    """The searches of all curves of a sweep, in the order of `SweepSpec.curves`.

    A curve with a failed run requests no more runs; a repeated command retries the failed run.
    """

    stop_at = None
    stopped_by = ""

    def __init__(self, spec: SweepSpec, fingerprint: str):
        assert spec.lr.edge is not None
        self._spec, self._fingerprint, self._settings = spec, fingerprint, spec.lr.edge
        self._curves = [Curve(rates, spec.lr.edge) for rates in spec.rates()]
        self._asked: list[dict[float, list[str]]] = [{} for _ in self._curves]
        self._rounds = [0] * len(self._curves)
        self._stuck = [False] * len(self._curves)

    @property
    def most_runs(self) -> int:
        return self._spec.seeds * sum(most_rates(rates, self._settings) for rates in self._spec.rates())

    def plan(self) -> str:
        settings = self._settings
        each = max(most_rates(rates, settings) for rates in self._spec.rates())
        return (
            f"lr=edge: these are the first round; best rate and edges to {settings.resolution_decades:g} decades "
            f"take up to {each} rates of each kind"
        )

    def ask(self) -> list[tuple[str, RunSpec]]:
        rates = [() if stuck else curve.ask() for curve, stuck in zip(self._curves, self._stuck, strict=True)]
        points = list(self._spec.points(self._fingerprint, rates))
        ids = iter([run_id(run) for _, run in points])
        for index, own in enumerate(rates):
            self._rounds[index] += bool(own)
            self._asked[index] |= {lr: [next(ids) for _ in range(self._spec.seeds)] for lr in own}
        return points

    def tell(self, statuses: Mapping[str, dict[str, Any]]) -> None:
        for index, (curve, asked) in enumerate(zip(self._curves, self._asked, strict=True)):
            for lr, ids in asked.items():
                if lr in curve.points or ids[0] not in statuses:
                    continue
                ends = [statuses[each] for each in ids]
                if all(end["state"] in FINISHED for end in ends):
                    curve.tell(lr, [Outcome(end["state"], end.get("result", {}).get("val_nll")) for end in ends])
                else:
                    self._stuck[index] = True

    def record(self) -> dict[str, Any]:
        """Return ``edges``: one row per curve, identified by one of its runs."""
        return {"edges": [self._row(index) for index, curve in enumerate(self._curves) if curve.points]}

    def _row(self, index: int) -> dict[str, Any]:
        """Return a curve's row of the record.

        It contains the best rate and edges with their neighbours, the tried range, numbers of rates, runs and rounds,
        the number of runs of an equally fine grid, and the state.
        """
        curve, seeds, settings = self._curves[index], self._spec.seeds, self._settings
        found = curve.summarise()
        return {
            "run_id": next(iter(self._asked[index].values()))[0],
            "num_seeds": seeds,
            **{name: getattr(found, name) for name in ("best_lr", "best_nll", "best_low", "best_high")},
            **_edge_columns("verdict", found.by_verdict),
            **_edge_columns("nll", found.by_nll),
            "lowest_lr": min(curve.points),
            "highest_lr": max(curve.points),
            "resolution_decades": settings.resolution_decades,
            "nll_tolerance": settings.nll_tolerance,
            "num_rates": found.num_rates,
            "num_runs": found.num_rates * seeds,
            "num_grid_runs": found.num_grid_rates * seeds,
            "num_rounds": self._rounds[index],
            "state": self._state(index, found),
        }

    def _state(self, index: int, found: Found) -> str:
        """Return a curve's state.

        - ``found``: the search is complete.
        - ``failed``: a run failed, and the search stopped.
        - ``used up``: the number of rates reached its maximum before the brackets were narrow enough.
        - ``unfinished``: more rates are to be tried.
        """
        if self._stuck[index] or found.resolved:
            return "failed" if self._stuck[index] else "found"
        return "unfinished" if self._curves[index].ask() else "used up"


def _edge_columns(name: str, edge: Edge) -> dict[str, Any]:
    return {
        f"{name}_lr": edge.lr,
        f"{name}_next_lr": edge.next_lr,
        f"{name}_exceptions": " ".join(f"{lr:g}" for lr in edge.exceptions),
    }
