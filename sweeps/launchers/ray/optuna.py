"""Ray Tune's `OptunaSearch` for `search=optuna`: it keeps nothing, and is told the ledger's points anew each round."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sweeps.environment import environment, of_driver
from sweeps.launchers.ray.cluster import import_ray
from sweeps.launchers.ray.launcher import SETTINGS


def suggestions(
    kinds: Mapping[str, Any], sampler: Any, told: Sequence[tuple[dict[str, float], float]]
) -> Iterator[dict[str, float]]:
    """Yield points of ``kinds``, Optuna's distributions by field, each suggested with those before it under way.
    ``told``: evaluated points with what is minimised. Errors: ``RuntimeError`` where Ray Tune is missing."""
    with environment(SETTINGS | of_driver()):  # read when Ray is imported
        module = import_ray("ray.tune.search.optuna")
    points, rewards = [values for values, _ in told], [value for _, value in told]
    searcher = module.OptunaSearch(
        dict(kinds), metric="score", mode="min", sampler=sampler, points_to_evaluate=points, evaluated_rewards=rewards
    )
    for number in itertools.count():
        yield searcher.suggest(str(number))
