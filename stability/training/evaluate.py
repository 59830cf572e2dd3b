"""Validation: every run uses the same held-out windows (or images) and masks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from stability.config.run import RunSpec
from stability.config.training import Precision
from stability.corpora.base import AbstractCorpus
from stability.models.passes import computing_in, generator_for, in_mode
from stability.objectives import AbstractObjective, Examples

VALIDATION_SEED = 0
CHUNK = 64
TIMED = 16  # examples of a timed validation; a whole chunk may take less time for each
Sums = tuple[float, ...]
Spread = Callable[[Callable[[Examples], Sums], Sequence[Examples]], Iterable[Sums]]
CELLS = 1 << 22  # most unigram logits in memory at once


class Validation:
    """Held-out examples, drawn once.

    They depend on the data, the objective and their number, never on the mechanism or the run's seed.
    """

    def __init__(
        self,
        spec: RunSpec,
        corpus: AbstractCorpus,
        objective: AbstractObjective,
        device: torch.device,
        split: str = "val",
    ):
        """Draw the examples.

        Args:
            spec: the run's.
            corpus: the run's prepared data.
            objective: makes the examples.
            device: device of the model.
            split: "val", or "train" to evaluate training windows alike (`stability.probe what=train_nll`).
        """
        windows = corpus.windows(split, spec.evaluation.sequences, objective.tokens_needed(spec.model.positions))
        chunks = enumerate(windows.split(CHUNK))
        self._chunks: list[Examples] = [
            objective.examples(chunk, generator_for(VALIDATION_SEED, "validation", i)).to(device) for i, chunk in chunks
        ]
        self._objective, self._device = objective, device
        self._precision: Precision = spec.precision

    @property
    def num_sequences(self) -> int:
        return sum(len(examples.targets_BN) for examples in self._chunks)

    def shortened(self) -> Validation:
        """Return the validation on its first examples alone, `TIMED` at most, to time it."""
        other = copy.copy(self)
        other._chunks = self._chunks[0].split(TIMED)[:1]
        return other

    @torch.no_grad()
    def logits(self, model: nn.Module) -> Tensor:
        """Return a model's logits on the first examples, `CHUNK` at most, in evaluation mode."""
        with in_mode(model, training=False), computing_in(self._precision, self._device):
            return self._chunks[0].logits(model)

    def mirrored(self) -> Validation:
        """Return the validation on the mirror image of each example (`AbstractObjective.mirrored`).

        Raises:
            ValueError: the objective has no mirror image.
        """
        other = copy.copy(self)
        other._chunks = [self._objective.mirrored(examples) for examples in self._chunks]
        return other

    def cut(self, positions: int, rows: int) -> Validation:
        """Return the validation on the same examples, cut into shorter ones with the same masks and weights.

        Args:
            positions: length of the pieces, a divisor of the examples' own.
            rows: most pieces in one forward pass.
        """
        other = copy.copy(self)
        other._chunks = [part for examples in self._chunks for part in examples.cut(positions).split(rows)]
        return other

    @torch.no_grad()
    def measure(self, model: nn.Module, spread: Spread = map) -> dict[str, float]:
        """Return ``val_nll`` in nats per counted position, and the objective's other scores by name.

        The model runs in evaluation mode.

        Args:
            model: model to evaluate.
            spread: applies a function to a list of examples and yields the results in order; by default `map`.
        """
        sums = [0.0] * (2 + len(self._objective.score_names))
        with in_mode(model, training=False):
            if self._objective.compares_rows:
                with computing_in(self._precision, self._device):
                    return self._objective.validate_together(model, self._chunks)
            for parts in spread(partial(self._sums, model), self._chunks):
                sums = [total + part for total, part in zip(sums, parts, strict=True)]
        count, *totals = sums
        return {
            name: total / count for name, total in zip(("val_nll", *self._objective.score_names), totals, strict=True)
        }

    def _sums(self, model: nn.Module, examples: Examples) -> Sums:
        """Return the count, then the sums to divide by it."""
        with computing_in(self._precision, self._device):
            total, count, others = self._objective.validate(model, examples)
        return float(count), float(total), *(float(others[name]) for name in self._objective.score_names)

    def unigram_nll(self, log_frequencies_V: Tensor) -> float:
        """Return the NLL of the token frequencies alone, on the same examples.

        This is the baseline to beat. It is measured, not the entropy of the frequencies: the mean loss of a few hundred
        sequences scatters (by a few per cent for score entropy), for this model as for any other.
        """
        if self._objective.compares_rows:
            count = sum(float(self._objective.count(examples, torch.float64)) for examples in self._chunks)
            return sum(float(self._objective.baseline_sum(log_frequencies_V, each)) for each in self._chunks) / count
        return self._average_over_unigram(
            log_frequencies_V, lambda logits, part: [float(self._objective.loss_sum(logits, part)[0])]
        )[0]

    def unigram_scores(self, log_frequencies_V: Tensor) -> dict[str, float]:
        """Return ``unigram_nll_<name>`` of each component of the loss; {} if it has none."""
        names = self._objective.components
        if not names:
            return {}
        values = self._average_over_unigram(
            log_frequencies_V, lambda logits, part: self._objective.component_sums(logits, part).tolist()
        )
        return {f"unigram_nll_{name}": value for name, value in zip(names, values, strict=True)}

    @torch.no_grad()
    def _average_over_unigram(
        self, log_frequencies_V: Tensor, sums_of: Callable[[Tensor, Examples], Sequence[float]]
    ) -> list[float]:
        """Return means per counted position of the sums that ``sums_of`` computes from unigram logits."""
        parts, count = [], 0.0
        for examples in self._chunks:
            count += float(self._objective.count(examples, torch.float64))
            log_frequencies = log_frequencies_V.to(examples.targets_BN.device)
            for part in examples.counted()[0].split(max(1, CELLS // len(log_frequencies))):
                parts.append(sums_of(self._objective.unigram_logits(log_frequencies, part), part))
        return [sum(column) / count for column in zip(*parts, strict=True)]
