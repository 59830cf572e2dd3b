"""Keep what is computed from a study for as long as the study lives: the same windows stand behind a report's tables,
its figures and every claim, and are computed once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from analysis.study.load import Study

Computed = TypeVar("Computed", bound=Callable[..., Any])


def once_per_study(compute: Computed) -> Computed:
    """Return a function of a study, and of arguments that can be hashed, that computes each result once and gives every
    caller a shallow copy. A study is not changed after it was read."""
    kept: WeakKeyDictionary[Study, dict[Any, Any]] = WeakKeyDictionary()

    @wraps(compute)
    def result(study: Study, *args: Any, **named: Any) -> Any:
        results = kept.setdefault(study, {})
        key = (args, tuple(sorted(named.items())))
        if key not in results:
            results[key] = compute(study, *args, **named)
        return copy.copy(results[key])

    return cast(Computed, result)
