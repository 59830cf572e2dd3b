"""Compare a trained model's NLL on windows of the training side with its validation NLL.

For `stability.probe what=train_nll`. The logged training loss is of the model of each step, with dropout and
augmentation, on one batch; this is of one model, evaluated as in validation (as nanoGPT's ``estimate_loss``).
"""

from __future__ import annotations

from typing import Any

from stability.build import build_objective, resolve_device
from stability.config.entries import ProbeSpec
from stability.config.run import RunSpec
from stability.corpora.base import AbstractCorpus
from stability.models.backbone import Backbone
from stability.training.evaluate import Validation
from stability.training.machine import prepare_torch


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
    device = resolve_device(probe.device)
    prepare_torch(spec.threads, device, spec.precision)
    model = model.to(device)
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
