"""Cache results computed from a study for the study's lifetime.

A report's tables, figures and claims share the same windows, for instance.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from analysis.study.load import Study

Computed = TypeVar("Computed", bound=Callable[..., Any])


def once_per_study(compute: Computed) -> Computed:
    """Wrap a function of a study and hashable arguments, with each result computed once.

    Every caller gets a shallow copy. A study does not change after reading.
    """
    kept: WeakKeyDictionary[Study, dict[Any, Any]] = WeakKeyDictionary()

    @wraps(compute)
    def result(study: Study, *args: Any, **named: Any) -> Any:
        results = kept.setdefault(study, {})
        key = (args, tuple(sorted(named.items())))
        if key not in results:
            results[key] = compute(study, *args, **named)
        return copy.copy(results[key])

    return cast(Computed, result)
