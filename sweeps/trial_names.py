"""Name the trials of a sweep by the choices that it varies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from stability.config.base import AXES


class Named(Protocol):
    """A trial, as far as its name goes."""

    @property
    def spec(self) -> dict[str, Any]: ...

    @property
    def variant(self) -> str: ...


def choice_name(choice: Any) -> str:
    """Return the name of a part as a ``spec.json`` writes it; of a norm in older ones it is all that there is."""
    return choice["name"] if isinstance(choice, dict) else str(choice)


def several_of(choices: Mapping[str, Sequence[Any]]) -> tuple[str, ...]:
    """Return a trial's ``several``, from a sweep's choices on each axis."""
    return tuple(axis for axis in list(AXES)[1:] if len(choices.get(axis, ())) > 1)


def variants(trials: Sequence[Named]) -> list[str]:
    """Return a name for each trial without LR and seed: its mechanism, other axes with several choices, an ablation's
    setting."""
    names = [[choice_name(trial.spec[axis]) for axis in AXES] for trial in trials]
    varied = [index for index in range(1, len(AXES)) if len({row[index] for row in names}) > 1]
    chosen = [
        [row[0], *(row[index] for index in varied), trial.variant] for row, trial in zip(names, trials, strict=True)
    ]
    return [" ".join(filter(None, words)) for words in chosen]
