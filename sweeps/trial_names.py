"""Name a sweep's trials by their varying choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from stability.config.base import AXES

STANDARD = {"name": "standard"}  # of an axis that runs of before lack


class Named(Protocol):
    """The attributes of a trial relevant for its name."""

    @property
    def spec(self) -> dict[str, Any]: ...

    @property
    def variant(self) -> str: ...


def choice_name(choice: Any) -> str:
    """Return a part's name from ``spec.json``."""
    return choice["name"]


def list_varied_axes(choices: Mapping[str, Sequence[Any]]) -> tuple[str, ...]:
    """Return the axes with several choices in a sweep, without the mechanism."""
    return tuple(axis for axis in list(AXES)[1:] if len(choices.get(axis, ())) > 1)


def variants(trials: Sequence[Named]) -> list[str]:
    """Return each trial's name without learning rate and seed.

    It contains the mechanism, the choices on varying axes, and an ablation's setting.
    """
    names = [[choice_name(trial.spec.get(axis, STANDARD)) for axis in AXES] for trial in trials]
    varied = [index for index in range(1, len(AXES)) if len({row[index] for row in names}) > 1]
    chosen = [
        [row[0], *(row[index] for index in varied), trial.variant] for row, trial in zip(names, trials, strict=True)
    ]
    return [" ".join(filter(None, words)) for words in chosen]
