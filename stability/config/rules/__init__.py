"""Rules about valid combinations of parts and settings.

A rule is a function of a spec that raises a one-line ``ValueError``: the invalid setting, the reason, and a remedy.
Each rule is defined once, in the module of its subject. The tables below list all checks of a spec beyond the fields
and bounds of its classes. `RunSpec` and `SweepSpec` run them in every validation, so a hand-written ``spec.json`` and a
command line are checked alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from stability.config.rules import kernels, launchers, model, search, training

OF_RECIPE = (*training.OF_RECIPE, *model.OF_RECIPE)
OF_RUN = (*model.OF_RUN, *training.OF_RUN, *kernels.OF_RUN)
OF_SWEEP = (*training.OF_SWEEP, *launchers.OF_SWEEP, *search.OF_SWEEP, *kernels.OF_SWEEP)


def check_rules(rules: Iterable[Callable[[Any], None]], spec: Any) -> None:
    """Raise the ``ValueError`` of the first broken rule."""
    for rule in rules:
        rule(spec)
