"""Rules say which parts and settings go together.

A rule is a function of a spec that raises a ``ValueError`` of one line: the setting that does not fit, the reason, and
what to write instead. A rule stands once, in the file of its subject; the tables below are all that a spec is checked
by beside the fields and bounds of its own classes. `RunSpec` and `SweepSpec` are checked whenever one is validated, so
that a hand-written ``spec.json`` is refused by the same rules as a command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from stability.config.rules import kernels, launchers, model, search, training

OF_RECIPE = (*training.OF_RECIPE, *model.OF_RECIPE)
OF_RUN = (*model.OF_RUN, *training.OF_RUN, *kernels.OF_RUN)
OF_SWEEP = (*training.OF_SWEEP, *launchers.OF_SWEEP, *search.OF_SWEEP, *kernels.OF_SWEEP)


def check_rules(rules: Iterable[Callable[[Any], None]], spec: Any) -> None:
    """Raise the ``ValueError`` of the first rule that a spec breaks."""
    for rule in rules:
        rule(spec)
