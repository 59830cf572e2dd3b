"""Wrap Ray Tune's `OptunaSearch` for `search=optuna`, without state between rounds.

Each round passes it all evaluated points again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sweeps.launchers import list_driver_variables, set_environment
from sweeps.launchers.ray.cluster import import_ray
from sweeps.launchers.ray.launcher import SETTINGS


def suggestions(
    kinds: Mapping[str, Any], sampler: Any, told: Sequence[tuple[dict[str, float], float]]
) -> Iterator[dict[str, float]]:
    """Yield suggested points; each suggestion treats the previous ones as running.

    Args:
        kinds: Optuna's distributions by field.
        sampler: Optuna's sampler.
        told: evaluated points with their objectives, to be minimised.

    Raises:
        RuntimeError: Ray Tune is missing.
    """
    with set_environment(SETTINGS | list_driver_variables()):  # read when Ray is imported
        module = import_ray("ray.tune.search.optuna")
    points, rewards = [values for values, _ in told], [value for _, value in told]
    searcher = module.OptunaSearch(
        dict(kinds), metric="score", mode="min", sampler=sampler, points_to_evaluate=points, evaluated_rewards=rewards
    )
    for number in itertools.count():
        yield searcher.suggest(str(number))
