"""Compare a trained model's held-out NLL with that of other texts under the run's own validation.

For `stability.probe`: ``what=mirror``, the examples read backwards (a model insensitive to order has the same NLL);
``what=train_nll``, windows of the training side (as nanoGPT's ``estimate_loss``; the logged training loss is of the
model of each step, with dropout and augmentation, on one batch); ``what=lengths``, texts longer than in training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from stability.build import build_objective
from stability.config.entries import ProbeSpec
from stability.config.run import RunSpec
from stability.corpora.base import AbstractCorpus
from stability.models.backbone import Backbone
from stability.probes.checkpoints import place_model
from stability.registry import Registry
from stability.training.evaluate import CHUNK, Validation


def mirror_numbers(spec: RunSpec, model: Backbone, corpus: AbstractCorpus, probe: ProbeSpec) -> dict[str, Any]:
    """Return a checkpoint's NLL on held-out examples and their mirror images, with the difference.

    Examples, masks, noise and precision are those of the run's own validation; the masks are mirrored with the examples
    (`AbstractObjective.mirrored`).

    Args:
        spec: the run's.
        model: the run's model at the checkpoint.
        corpus: the run's prepared data.
        probe: provides the device.

    Returns:
        ``sequences``, the number of examples; ``nll`` and ``mirrored_nll`` in nats per counted position;
            ``difference``, the second minus the first.
    """
    device = place_model(model, spec, probe.device)
    validation = Validation(spec, corpus, build_objective(spec, corpus.format), device)
    nll, mirrored_nll = (each.measure(model)["val_nll"] for each in (validation, validation.mirrored()))
    return {
        "sequences": validation.num_sequences,
        "nll": nll,
        "mirrored_nll": mirrored_nll,
        "difference": mirrored_nll - nll,
    }


def train_numbers(spec: RunSpec, model: Backbone, corpus: AbstractCorpus, probe: ProbeSpec) -> dict[str, Any]:
    """Return a checkpoint's NLL on windows of the training side and its validation NLL, with their difference.

    The training windows are evenly spaced, as many as validation has, and equal for every run on the same data. Masks,
    noise, evaluation mode and precision are those of the run's own validation.

    Args:
        spec: the run's.
        model: the run's model at the checkpoint.
        corpus: the run's prepared data.
        probe: provides the device.

    Returns:
        ``sequences``, the number of training windows; ``train_nll`` and ``nll`` (validation) in nats per counted
            position; ``difference``, the generalisation gap: the second minus the first.
    """
    device = place_model(model, spec, probe.device)
    objective = build_objective(spec, corpus.format)
    held_out = Validation(spec, corpus, objective, device)
    as_many = spec.evaluation.model_copy(update={"sequences": held_out.num_sequences})
    training = Validation(spec.model_copy(update={"evaluation": as_many}), corpus, objective, device, "train")
    train_nll, nll = (each.measure(model)["val_nll"] for each in (training, held_out))
    return {
        "sequences": training.num_sequences,
        "train_nll": train_nll,
        "nll": nll,
        "difference": nll - train_nll,
    }


def measure_lengths(
    spec: RunSpec, model: Backbone, corpus: AbstractCorpus, probe: ProbeSpec
) -> Iterator[dict[str, Any]]:
    """Yield a row for each length; its columns from ``multiple`` on are those of `schema.PROBE_COLUMNS`.

    Texts are as many held-out windows as the run's validation has tokens for. A length that the position scheme does
    not have (`AbstractPosition.is_bounded`) gets no NLL. Both NLLs are of the same tokens under the same masks and
    weights, so their difference has no noise of drawing.

    Args:
        spec: the run's.
        model: the run's model at the checkpoint.
        corpus: the run's prepared data.
        probe: lengths and device.

    Raises:
        ValueError: the held-out text has no window of these lengths.
    """
    device, trained = place_model(model, spec, probe.device), spec.model.positions
    longest = math.lcm(*probe.lengths)  # every length divides it
    longer = spec.model.model_copy(update={"positions": longest * trained})
    fewer = spec.evaluation.model_copy(update={"sequences": max(1, spec.evaluation.sequences // longest)})
    long_spec = spec.model_copy(update={"model": longer, "evaluation": fewer})
    try:
        texts = Validation(long_spec, corpus, build_objective(spec, corpus.format), device)
    except ValueError as error:
        raise ValueError(f"{error}; lengths={list(probe.lengths)} needs it, take smaller ones") from None
    is_bounded = Registry("positions").load(spec.position.name).is_bounded
    nll = texts.cut(trained, CHUNK).measure(model)["val_nll"]
    for multiple in probe.lengths:
        long_nll = math.nan
        if not is_bounded:
            long_nll = texts.cut(multiple * trained, max(1, CHUNK // multiple)).measure(model)["val_nll"]
        yield {
            "multiple": multiple,
            "limit": trained if is_bounded else math.nan,
            "sequences": texts.num_sequences,
            "nll": nll,
            "long_nll": long_nll,
            "difference": long_nll - nll,
        }
