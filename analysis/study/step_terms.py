"""Explain α_max for unusual optimizers: step not rate times direction, or state frozen while measuring.

The recorded steps' protocols identify these optimizers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from analysis.study.load import Study
from analysis.study.once import once_per_study
from analysis.words import join_words

MOST_IN_A_CAPTION = 2
OPTIMIZER = "optimizer"  # protocol key: unusual flags of `stability.optimizers.AbstractOptimizer`


def step_terms(study: Study) -> str:
    """Return a sentence for each optimizer with an unusual α_max, or "".

    Each has a leading space.
    """
    return "".join(f" {sentence}" for sentence in explain(_protocols(study)))


def terms_in_brief(study: Study) -> str:
    """Return these sentences for a caption if short, else a reference to the report's section."""
    known = _terms(_protocols(study))
    if sum(len(_sentences(name, terms)) for name, terms in known.items()) <= MOST_IN_A_CAPTION:
        return step_terms(study)
    return f" What α_max means of {join_words(sorted(known))} is told in the section on it."


@once_per_study
def _protocols(study: Study) -> frozenset[str]:
    return frozenset(study.curvature["protocol"])


def explain(protocols: Iterable[str]) -> list[str]:
    """Return these sentences from recorded protocols, sorted by optimizer."""
    found = _terms(protocols)
    return [sentence for name in sorted(found) for sentence in _sentences(name, found[name])]


def _terms(protocols: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    known = (json.loads(text).get(OPTIMIZER, {}) for text in set(protocols) if text)
    return {terms["name"]: terms for terms in known if terms}


def _sentences(name: str, terms: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each flag that changes an optimizer's α_max."""
    found = []
    if terms.get("is_multiplier"):
        found.append(
            f"The LR of {name} multiplies a rate that it finds by itself, and so does its α_max; α_max over the LR is "
            "a multiplier of the step that was taken."
        )
    elif not terms.get("linear_in_lr", True):
        found.append(
            f"The step of {name} is not proportional to its LR: its α_max holds at the run's own LR only, where α_max "
            "over the LR is a multiplier of the step that was taken."
        )
    if terms.get("frozen"):
        found.append(f"α_max of {name} holds {terms['frozen']} where the checkpoint has it.")
    if terms.get("first_step_zero"):
        found.append(f"The first step of {name} only sets up its state: no α_max there is its own.")
    return found
