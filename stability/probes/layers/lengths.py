"""Compare a trained model's NLL on longer held-out texts with that on the same texts in pieces of the trained length.

For `stability.probe what=lengths`. Both NLLs are of the same tokens under the same masks and weights, so their
difference has no noise of drawing: it is the effect of the longer context, and of positions beyond those of training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from stability.build import build_objective, resolve_device
from stability.config.entries import ProbeSpec
from stability.config.run import RunSpec
from stability.corpora.base import AbstractCorpus
from stability.models.backbone import Backbone
from stability.registry import Registry
from stability.training.evaluate import CHUNK, Validation
from stability.training.machine import prepare_torch


def measure_lengths(
    spec: RunSpec, model: Backbone, corpus: AbstractCorpus, probe: ProbeSpec
) -> Iterator[dict[str, Any]]:
    """Yield a row for each length; its columns from ``multiple`` on are those of `schema.PROBE_COLUMNS`.

    Texts are as many held-out windows as the run's validation has tokens for. A length that the position scheme does
    not have (`AbstractPosition.is_bounded`) gets no NLL.

    Args:
        spec: the run's.
        model: the run's model at the checkpoint.
        corpus: the run's prepared data.
        probe: lengths and device.

    Raises:
        ValueError: the held-out text has no window of these lengths.
    """
    device, trained = resolve_device(probe.device), spec.model.positions
    prepare_torch(spec.threads, device, spec.precision)
    model = model.to(device)
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
