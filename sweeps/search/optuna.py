"""`search=optuna`: a tree-structured Parzen estimator over numeric fields of the recipe.

Optuna is imported only when points are chosen. With `launcher=ray`, Ray Tune's `OptunaSearch` calls it.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stability.config.identity import run_id
from stability.config.parse import parse_run
from stability.config.run import RunSpec
from stability.config.search import Dimension, SearchSpec, has_field, read_number, replace_numbers
from stability.config.sweep import SweepSpec
from stability.registry import near_misses
from stability.runs.directory import FINISHED

Values = dict[str, float]
DRAWS = 20  # maximum proposals per wanted point, because a proposal can be a duplicate or an invalid recipe


class OptunaSearch:
    """One search per curve of the sweep, in common rounds.

    Requested points are in ``study.json``, results in the run folders; Optuna stores nothing. Each round passes it all
    points again in their original order, with a sampler seeded by the round. An interrupted search therefore continues
    identically.
    """

    stop_at = None
    stopped_by = ""

    def __init__(self, spec: SweepSpec, fingerprint: str, slots: float, history: Mapping[str, Any]):
        assert isinstance(spec.search, SearchSpec)
        self._spec, self._search = spec, spec.search
        bases = [(label, run) for label, run in spec.points(fingerprint) if run.seed == spec.first_seed]
        batch = self._search.batch or max(1, int(slots) // (len(bases) * spec.seeds))
        by_tune = spec.launcher == "ray"
        self._curves = [_Curve(run, self._search, spec.list_seeds(), batch, by_tune) for _, run in bases]
        _require_used(self._search, [run.model_dump(mode="json") for _, run in bases])
        for curve in self._curves:
            curve.remember(history.get(curve.key, []))

    @property
    def most_runs(self) -> int:
        return len(self._curves) * self._search.num * self._spec.seeds

    def plan(self) -> str:
        varied = ", ".join(
            f"{dimension.path} from {dimension.low:g} to {dimension.high:g}" for dimension in self._search.space
        )
        return f"search=optuna: these stand for {self._search.num} points of each kind with {varied}"

    def ask(self) -> list[tuple[str, RunSpec]]:
        return [("", run) for curve in self._curves for run in curve.ask()]

    def tell(self, statuses: Mapping[str, dict[str, Any]]) -> None:
        for curve in self._curves:
            curve.tell(statuses)

    def record(self) -> dict[str, Any]:
        """Return the rows of the report and the points of all rounds.

        ``search`` has one row per run and field. A repeated command continues from ``search_history``.
        """
        rows = [row for curve in self._curves for row in curve.rows()]
        return {"search": rows, "search_history": {curve.key: curve.rounds for curve in self._curves}}


class _Curve:
    """The search of one kind of run: its rounds of points and the finished points' objectives."""

    def __init__(self, base: RunSpec, search: SearchSpec, seeds: range, batch: int, by_tune: bool):
        self._recipe, self._search, self._seeds, self._batch = base.model_dump(mode="json"), search, seeds, batch
        self._by_tune = by_tune
        self._space = tuple(dimension for dimension in search.space if has_field(dimension.path, self._recipe))
        self._whole = {
            dimension.path for dimension in self._space if isinstance(read_number(dimension.path, self._recipe), int)
        }
        _check(self._space, self._whole, self._recipe)
        self.key = run_id(base)  # identifies the recipe, so that points of another recipe are not reused
        self.rounds: list[list[Values]] = []
        self._told: dict[int, float | None] = {}
        self._ids: list[list[str]] = []
        self._next = 0

    @property
    def points(self) -> list[Values]:
        return [values for each in self.rounds for values in each]

    @property
    def ids(self) -> list[list[str]]:
        """The ids of each point's runs, in order of seeds."""
        self._ids += [[run_id(run) for run in self._runs(values)] for values in self.points[len(self._ids) :]]
        return self._ids

    def remember(self, rounds: Sequence[Sequence[Values]]) -> None:
        """Load the rounds of an earlier launch, unless the search space has changed."""
        limits = {dimension.path: dimension for dimension in self._space}
        known = [values for each in rounds for values in each]
        if all(
            values.keys() == limits.keys()
            and all(limits[path].low <= value <= limits[path].high for path, value in values.items())
            for values in known
        ):
            self.rounds = [[dict(values) for values in each] for each in rounds]

    def ask(self) -> list[RunSpec]:
        if self._next == len(self.rounds):
            wanted = min(self._batch, self._search.num - len(self.points))
            if wanted > 0 and (chosen := self._propose(wanted)):
                self.rounds.append(chosen)
        if self._next == len(self.rounds):
            return []
        self._next += 1
        return [run for values in self.rounds[self._next - 1] for run in self._runs(values)]

    def tell(self, statuses: Mapping[str, dict[str, Any]]) -> None:
        for index, ids in enumerate(self.ids):
            if index not in self._told and all(each in statuses for each in ids):
                self._told[index] = _objective([statuses[each] for each in ids])

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per run and varied field: number, round and score of the point, and the field's value."""
        numbers = [number for number, each in enumerate(self.rounds, 1) for _ in each]
        return [
            {
                "run_id": own,
                "number": index + 1,
                "round": numbers[index],
                "score": self._told.get(index),
                "field": path,
                "value": value,
            }
            for index, (ids, values) in enumerate(zip(self.ids, self.points, strict=True))
            for own in ids
            for path, value in values.items()
        ]

    def _runs(self, values: Values) -> list[RunSpec]:
        recipe = replace_numbers(self._recipe, values)
        return [parse_run(recipe | {"seed": seed}) for seed in self._seeds]

    def _propose(self, wanted: int) -> list[Values]:
        """Return up to ``wanted`` new points with valid recipes; fewer if the space is exhausted."""
        known, found = self.points, []
        told = [(self.points[index], value) for index, value in sorted(self._told.items()) if value is not None]
        most, by_tune = wanted * DRAWS, self._by_tune
        for values in propose(self._space, self._whole, told, self._search, len(known), most, by_tune=by_tune):
            if values not in known and values not in found and _is_valid(self._recipe, values):
                found.append(values)
            if len(found) == wanted:
                break
        return found


def propose(
    space: Sequence[Dimension],
    whole: set[str],
    told: Sequence[tuple[Values, float]],
    search: SearchSpec,
    num_asked: int,
    most: int,
    *,
    by_tune: bool = False,
) -> Iterator[Values]:
    """Yield suggested points; each suggestion treats the previous ones as running.

    Floats are rounded to three digits.

    Args:
        space: the varied fields and their ranges.
        whole: fields with integer values.
        told: evaluated points with their objectives.
        search: settings of the search.
        num_asked: number of points requested before; it seeds the sampler.
        most: maximum number of suggestions.
        by_tune: whether to call Tune's `OptunaSearch`, with the same points.

    Raises:
        RuntimeError: Optuna or, if required, Ray Tune is missing.
    """
    optuna = _import_optuna()
    kinds = {dimension.path: _distribution(optuna, dimension, dimension.path in whole) for dimension in space}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler = optuna.samplers.TPESampler(
            seed=_seed(search.seed, num_asked), n_startup_trials=search.startup, constant_liar=True
        )
        if by_tune:
            from sweeps.launchers.ray.optuna import suggestions

            drawn = suggestions(kinds, sampler, told)
        else:
            drawn = _draw(optuna, kinds, sampler, told)
        for values in itertools.islice(drawn, most):
            yield {path: _round(value, kinds[path]) for path, value in values.items()}


def _draw(
    optuna: Any, kinds: Mapping[str, Any], sampler: Any, told: Sequence[tuple[Values, float]]
) -> Iterator[Values]:
    """Yield points of an Optuna study with all evaluated points."""
    study = optuna.create_study(sampler=sampler)
    study.add_trials(
        [optuna.trial.create_trial(params=values, distributions=kinds, value=value) for values, value in told]
    )
    while True:
        yield study.ask(kinds).params


def _seed(seed: int, num_asked: int) -> int:
    """Return a hashed seed, because generators with consecutive seeds have similar first draws."""
    return int.from_bytes(hashlib.sha256(f"{seed} {num_asked}".encode()).digest()[:4], "big")


def _import_optuna() -> Any:
    try:
        optuna = importlib.import_module("optuna")
    except ImportError as error:
        raise RuntimeError(
            f"search=optuna needs Optuna ({error}): pip install optuna, or choose lr=edge or lr=range"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _distribution(optuna: Any, dimension: Dimension, whole: bool) -> Any:
    if whole:
        return optuna.distributions.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return optuna.distributions.FloatDistribution(dimension.low, dimension.high, log=dimension.log)


def _round(value: float, kind: Any) -> float:
    return value if isinstance(value, int) else min(max(float(f"{value:.3g}"), kind.low), kind.high)


def _objective(statuses: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean over seeds of min(validation NLL, NLL at initialisation).

    The second term makes it finite for diverged runs. It is None if a run failed.
    """
    if any(status["state"] not in FINISHED for status in statuses):
        return None
    values = [_finite_nll(status.get("result", {})) for status in statuses]
    return None if math.inf in values else math.fsum(values) / len(values)


def _finite_nll(result: Mapping[str, Any]) -> float:
    known = [result.get(key) for key in ("val_nll", "init_nll")]
    return min((value for value in known if value is not None and math.isfinite(value)), default=math.inf)


def _is_valid(recipe: Mapping[str, Any], values: Values) -> bool:
    try:
        parse_run(replace_numbers(recipe, values))
    except ValueError:
        return False
    return True


def _check(space: Sequence[Dimension], whole: set[str], recipe: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` if a range's end is invalid.

    An integer field has a non-integer end, or an end makes no valid run.
    """
    for dimension in space:
        for end in (dimension.low, dimension.high):
            if dimension.path in whole and end != int(end):
                raise ValueError(f"search.space.{dimension.path}: {end:g} is no integer, but this field's values are")
            value = int(end) if dimension.path in whole else end
            try:
                parse_run(replace_numbers(recipe, {dimension.path: value}))
            except ValueError as error:
                raise ValueError(f"search.space.{dimension.path}: {value:g} makes no run; {error}") from None


def _require_used(search: SearchSpec, recipes: Sequence[Mapping[str, Any]]) -> None:
    for dimension in search.space:
        if not any(has_field(dimension.path, recipe) for recipe in recipes):
            axis = dimension.path.split(".")[0]
            names = tuple(dict.fromkeys(f"{axis}.{recipe[axis]['name']}" for recipe in recipes))
            raise ValueError(
                f"search.space.{dimension.path}: no run of this sweep has it; {near_misses(dimension.path, names)}"
            )
