"""Say which series of a sweep its primary claim names. Imports no other module of this project.

A sweep is refused by these rules before it trains, and its report finds the claim by the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ORDER = ("sa", "sc", "mix", "sw")  # a report's mechanisms, others after them; the first one is the reference
PLAIN = {"residual": "identity", "norm": "layernorm"}  # the parts of a plain model
QUANTITIES = ("window", "common_window", "best", "accuracy", "stable_steps")


@dataclass(frozen=True)
class NamedSeries:
    """A series of a report, and the words that a primary claim may call it by.

    Attributes:
        name: its words in a report, e.g. "sc width=256".
        parts: names of its parts, also of those that all series share and the report leaves out.
        variant: its ablation, e.g. "qk_norm=rmsnorm"; "" for none. A claim on a variant names the variant.
    """

    name: str
    parts: tuple[str, ...] = ()
    variant: str = ""

    def words(self) -> tuple[str, ...]:
        """Return all words that may name it, its own name's first."""
        return tuple(dict.fromkeys((*self.name.split(), *self.variant.split(), *self.parts)))


def find_named(series: Iterable[NamedSeries], words: Sequence[str]) -> list[str]:
    """Return the names of the series that the words fit: the one they spell exactly, else all that have every word."""
    named = [each for each in series if set(each.variant.split()) <= set(words) <= set(each.words())]
    exact = [each.name for each in named if set(each.name.split()) == set(words)]
    return exact or [each.name for each in named]


def rank_mechanism(name: str) -> tuple[int, str]:
    """Return the key by which mechanisms are sorted."""
    return (ORDER.index(name) if name in ORDER else len(ORDER), name)
