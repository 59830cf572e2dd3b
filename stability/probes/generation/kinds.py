"""Define the interface of a kind of samples: drawing, storing and scoring.

Each objective names its kind.
"""

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
    """A model, ready for sampling."""

    def draw(self, indices: Sequence[int]) -> Generator[None, None, list[Any]]:
        """Draw the samples with these numbers; yield after every step.

        Sample i has its own random numbers, from (seed, i). Raises `NonFinite`.
        """
        ...


class Kind(Protocol):
    """A kind of samples: drawing, scoring and storing them for an objective.

    ``columns`` are the score table's, `GENERATION_COLUMNS` first.
    """

    columns: Sequence[str]

    def check(self, run: RunSpec, spec: GenerationSpec) -> None:
        """Refuse a setting without effect on such a run (``ValueError``)."""
        ...

    def collect_sample_settings(self, spec: GenerationSpec) -> dict[str, Any]:
        """Return this kind's own settings behind the samples."""
        ...

    def collect_score_settings(self, spec: GenerationSpec) -> dict[str, Any]:
        """Return the settings behind the scores, besides samples and oracle."""
        ...

    def num_steps(self, run: RunSpec, spec: GenerationSpec, sampler: str) -> int:
        """Return an upper bound on the yields for sampling and scoring ``spec.num`` samples.

        Args:
            run: the run's spec.
            spec: the generation settings.
            sampler: the resolved sampler.
        """
        ...

    def equal_samples(self, run: RunSpec, spec: GenerationSpec, sampler: str) -> str:
        """Describe a checkpoint's necessarily identical samples, in words; "" if none.

        Args:
            run: the run's spec.
            spec: the generation settings.
            sampler: the resolved sampler.
        """
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
        """Return the source of a run's samples.

        Args:
            directory: the run.
            run: its spec.
            model: its model, already on ``device``.
            corpus: its prepared data.
            spec: the generation settings.
            sampler: the resolved sampler.
            device: of model and samples.
        """
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
        """Write the samples atomically while the returned iterable is consumed.

        Args:
            directory: the run.
            phase: the checkpoint's phase.
            samples: the samples.
            made_by: the settings behind them.
            run: the run's spec.
            corpus: its prepared data.
            device: for decoders.
        """
        ...

    def read(self, directory: RunDirectory, phase: str, corpus: Any) -> list[Any]:
        """Read the samples written by `write`.

        Args:
            directory: the run.
            phase: the checkpoint's phase.
            corpus: its prepared data.

        Raises:
            ValueError: a file is damaged.
        """
        ...

    def oracle(self, run: RunSpec, spec: GenerationSpec, corpus: Any, device: str) -> Any:
        """Return the oracle ``spec.oracle``, with ``name`` and its weights' ``sha256``.

        The latest one stays in memory for a study's next run.

        Args:
            run: the run's spec.
            spec: the generation settings.
            corpus: the run's prepared data.
            device: "auto", or a torch device.

        Raises:
            ValueError: no such oracle, or unsuitable for these samples; two lines.
        """
        ...

    def forget_oracle(self) -> None:
        """Free the oracle's memory."""
        ...

    def scores(
        self, oracle: Any, samples: Sequence[Any], corpus: Any, spec: GenerationSpec
    ) -> Iterator[list[dict[str, Any]]]:
        """Yield batches of score-table rows, with the oracle's columns, in the samples' order.

        Args:
            oracle: the oracle.
            samples: the samples.
            corpus: the run's prepared data.
            spec: the generation settings.
        """
        ...


def kind_of(run: RunSpec) -> Kind:
    """Return the kind of samples of a run's objective (`AbstractObjective.samples`)."""
    samples = Registry("objectives").load(run.objective.name).samples
    if isinstance(samples, str):
        samples = import_module(f"{__package__}.{samples}").EXPORT
    return samples()
