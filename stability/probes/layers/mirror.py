"""Compare a trained model's NLL on held-out examples and their mirror images.

For `stability.probe what=mirror`. A model sensitive to order has another NLL on text read backwards; an insensitive one
has the same.
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
    device = resolve_device(probe.device)
    prepare_torch(spec.threads, device, spec.precision)
    model = model.to(device)
    validation = Validation(spec, corpus, build_objective(spec, corpus.format), device)
    nll, mirrored_nll = (each.measure(model)["val_nll"] for each in (validation, validation.mirrored()))
    return {
        "sequences": validation.num_sequences,
        "nll": nll,
        "mirrored_nll": mirrored_nll,
        "difference": mirrored_nll - nll,
    }
