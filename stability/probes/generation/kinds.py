"""Define what generation asks of a kind of samples: how they are drawn, kept and scored. An objective names its own."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import nn

from stability.config.generation import GenerationSpec
from stability.config.run import RunSpec
from stability.registry import Registry
from stability.runs.directory import RunDirectory


class Source(Protocol):
    """A model as a sampler sees it."""

    def draw(self, indices: Sequence[int]) -> Generator[None, None, list[Any]]:
        """Draw the samples of these numbers, yielding after every step. Sample i comes from its own random numbers:
        seed, i. Errors: `NonFinite`."""
        ...


class Kind(Protocol):
    """A kind of samples: how an objective's model draws them, scores them and shows them. ``columns``: of the table of
    scores, those of `GENERATION_COLUMNS` first."""

    columns: Sequence[str]

    def check(self, run: RunSpec, spec: GenerationSpec) -> None:
        """Raise a ``ValueError`` for a setting that nothing reads for such a run."""
        ...

    def made_by(self, spec: GenerationSpec) -> dict[str, Any]:
        """Return the settings that samples depend on beside those of every kind."""
        ...

    def scored_by(self, spec: GenerationSpec) -> dict[str, Any]:
        """Return the settings that scores depend on beside the samples and the oracle."""
        ...

    def num_steps(self, run: RunSpec, spec: GenerationSpec, sampler: str) -> int:
        """Return how often sampling and scoring ``spec.num`` samples yield, or more."""
        ...

    def equal_samples(self, run: RunSpec, spec: GenerationSpec, sampler: str) -> str:
        """Say which samples of a checkpoint nothing tells apart, in words; "" where chance does."""
        ...

    def source(
        self,
        directory: RunDirectory,
        run: RunSpec,
        model: nn.Module,
        corpus: Any,
        spec: GenerationSpec,
        sampler: str,
        device: torch.device,
    ) -> Source:
        """Return what draws a run's samples. ``model`` lies on ``device`` already."""
        ...

    def write(
        self,
        directory: RunDirectory,
        phase: str,
        samples: Sequence[Any],
        made_by: dict[str, Any],
        *,
        run: RunSpec,
        corpus: Any,
        device: torch.device,
    ) -> Iterable[None]:
        """Keep the samples, whole or not at all, by the time that what it returns is exhausted."""
        ...

    def read(self, directory: RunDirectory, phase: str, corpus: Any) -> list[Any]:
        """Return what `write` wrote. Errors: ``ValueError`` where a file is damaged."""
        ...

    def oracle(self, run: RunSpec, spec: GenerationSpec, corpus: Any, device: str) -> Any:
        """Return what ``spec.oracle`` names, with a ``name`` and the ``sha256`` of its weights; the last one is kept
        for a study's next run.

        Errors: ``ValueError`` of two lines where there is none, or it cannot score such samples.
        """
        ...

    def forget_oracle(self) -> None:
        """Give its memory back."""
        ...

    def scores(
        self, oracle: Any, samples: Sequence[Any], corpus: Any, spec: GenerationSpec
    ) -> Iterator[list[dict[str, Any]]]:
        """Yield rows of the table of scores as far as they are the oracle's, in the samples' order, some at a time."""
        ...


def kind_of(run: RunSpec) -> Kind:
    """Return the kind of what a run's objective generates (`AbstractObjective.samples`)."""
    samples = Registry("objectives").load(run.objective.name).samples
    if isinstance(samples, str):
        samples = import_module(f"{__package__}.{samples}").EXPORT
    return samples()
