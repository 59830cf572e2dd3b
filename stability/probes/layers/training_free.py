"""Measure the loss from replacing `sa` by an untrained mechanism in a trained model.

The mechanism skips more pairs with each budget.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stability.build import build_model, build_objective
from stability.config.entries import ProbeSpec
from stability.config.parts import Part
from stability.config.run import RunSpec
from stability.corpora.base import AbstractCorpus
from stability.mechanisms import AbstractTrainingFree, MixerShape, Variant
from stability.models.backbone import Backbone
from stability.models.passes import generator_for
from stability.objectives import AbstractObjective, Examples
from stability.probes.layers.observing import firsts
from stability.registry import Registry

Rows = list[dict[str, Any]]


class Passed(NamedTuple):
    """One layer's input, mask and output in a forward pass."""

    x_BND: Tensor
    mask_BN: Tensor | None
    y_BND: Tensor


def variants_of(spec: RunSpec, part: Part, budgets: tuple[float, ...]) -> list[Variant]:
    """Return a mechanism's variants as a stand-in for a run's `sa`, with its settings.

    Args:
        spec: the run's.
        part: the mechanism.
        budgets: requested budgets.

    Raises:
        ValueError: the mechanism cannot stand in for `sa`; one line.
    """
    mechanism = Registry("mechanisms").load(part.name)
    if not issubclass(mechanism, AbstractTrainingFree):
        raise ValueError(f"mechanism={part.name} cannot replace sa: it is for {mechanism.used_for}")
    config = mechanism.with_settings_of(part.settings, spec.mechanism.settings)
    shape = MixerShape(spec.model.width, spec.model.heads)
    return mechanism.variants(config, budgets, shape, spec.model.positions)


def measure_mechanisms(
    spec: RunSpec, model: Backbone, corpus: AbstractCorpus, examples: Examples, probe: ProbeSpec
) -> Iterator[tuple[Rows, Rows]]:
    """Yield the rows for each mechanism and budget, for models and for layers.

    Columns as in `schema.PROBE_COLUMNS`, ``training_free`` from ``mixer`` on and ``training_free_layers`` from
    ``layer`` on; a row per sequence (and layer). ``nll`` and ``sa_nll`` are nats per counted position, for the model
    with the stand-in in all layers and the trained model, on the same ``counted`` positions. ``error`` is ‖y − y_sa‖ /
    ‖y_sa‖ of a layer's output at valid positions, for the trained model's inputs. ``skipped`` is the share of the
    layer's products left out, averaged over layers for the model. All in the model's dtype.

    Args:
        spec: the run's.
        model: the trained model.
        corpus: the run's prepared data.
        examples: held-out examples.
        probe: mechanisms, budgets and calibration.
    """
    objective = build_objective(spec, corpus.format)
    sequences = examples.split(1)
    trained = [(_nll(objective, model, each), record_passes(model, each)) for each in sequences]
    for part in probe.mechanism:
        found: list[Tensor] | None = None
        for variant in variants_of(spec, part, probe.budgets):
            stand_in = _stand_in(spec, model, Part(name=part.name, settings=variant.config), corpus.format)
            if found is None:
                found = _agreements(spec, model, stand_in, corpus, objective, probe.calibration)
            if found:
                for layer, agreement in zip(_layers(stand_in), found, strict=True):
                    layer.calibrate(agreement)
            yield _rows(part.name, variant, objective, stand_in, sequences, trained)


def _rows(
    name: str,
    variant: Variant,
    objective: AbstractObjective,
    stand_in: Backbone,
    sequences: list[Examples],
    trained: list[tuple[tuple[float, float], list[Passed]]],
) -> tuple[Rows, Rows]:
    """Return one variant's rows, for the model and for its layers."""
    of_models: Rows = []
    of_layers: Rows = []
    for sequence, (example, ((sa_nll, counted), seen)) in enumerate(zip(sequences, trained, strict=True)):
        where = {"mixer": name, "label": variant.label, "budget": variant.budget, "sequence": sequence}
        layers = [block.get_submodule("mixer") for block in stand_in.list_passes()]
        rows = [
            {"layer": number, **where, **_measure_layer(layer, each)}
            for number, (layer, each) in enumerate(zip(layers, seen, strict=True))
        ]
        of_layers += rows
        nll, _ = _nll(objective, stand_in, example)
        skipped = sum(row["skipped"] for row in rows) / len(rows)
        of_models.append({**where, "counted": counted, "nll": nll, "sa_nll": sa_nll, "skipped": skipped})
    return of_models, of_layers


@torch.no_grad()
def _measure_layer(layer: nn.Module, seen: Passed) -> dict[str, float]:
    """Return error and skipped share of a layer, given the trained layer's input."""
    assert isinstance(layer, AbstractTrainingFree)
    difference_BND = layer(seen.x_BND, mask_BN=seen.mask_BN) - seen.y_BND
    valid = slice(None) if seen.mask_BN is None else seen.mask_BN
    return {
        # a zero output (zero initialisation) is reproduced exactly: 0 of 0 is 0, not NaN
        "error": float(difference_BND[valid].norm()) / max(float(seen.y_BND[valid].norm()), sys.float_info.min),
        "skipped": layer.skipped(seen.x_BND, mask_BN=seen.mask_BN),
    }


@torch.no_grad()
def _nll(objective: AbstractObjective, model: Backbone, examples: Examples) -> tuple[float, float]:
    """Return nats per counted position (NaN without any), and the number of these positions."""
    total, count, _ = objective.validate(model, examples)
    return (float(total) / float(count) if count else math.nan), float(count)


def _stand_in(spec: RunSpec, model: Backbone, part: Part, data_format: Any) -> Backbone:
    """Return the trained model with the mechanism in all layers."""
    # built without the run's checks: no run is made of it
    made = build_model(spec.model_copy(update={"mechanism": part}), data_format)
    made.load_state_dict(model.state_dict(), strict=True)
    example = next(model.parameters())
    return made.to(example.device, example.dtype).eval()


def _agreements(
    spec: RunSpec,
    model: Backbone,
    stand_in: Backbone,
    corpus: AbstractCorpus,
    objective: AbstractObjective,
    num_sequences: int,
) -> list[Tensor]:
    """Return each layer's calibration counts, averaged over training sequences and passes.

    [] without calibration.
    """
    layers = _layers(stand_in)
    sums: dict[int, list[Tensor]] = {}
    tokens_BN = corpus.windows("train", num_sequences, objective.tokens_needed(spec.model.positions))
    device = next(model.parameters()).device
    passes = len(stand_in.list_passes()) // len(layers)
    for example in objective.examples(tokens_BN, generator_for(0, "calibration")).split(1):
        for number, (layer, seen) in enumerate(
            zip(layers * passes, record_passes(model, example.to(device)), strict=True)
        ):
            agreement = layer.agreement(seen.x_BND, mask_BN=seen.mask_BN)
            if agreement is None:
                return []
            sums.setdefault(number % len(layers), []).append(agreement)
    return [torch.stack(sums[number]).mean(0) for number in range(len(layers))]


def _layers(model: Backbone) -> list[AbstractTrainingFree]:
    """Return the mechanism of each block, once."""
    found = [block.get_submodule("mixer") for block in model.blocks]
    return [mixer for mixer in found if isinstance(mixer, AbstractTrainingFree)]


def record_passes(model: Backbone, examples: Examples) -> list[Passed]:
    """Return each layer's input and output, in the order of `Backbone.passed`.

    The first evaluation if a layer is evaluated several times in a row.
    """
    seen: list[Passed] = []
    with torch.no_grad(), _watch(model, seen):
        examples.logits(model)
    return firsts(model, seen)


@contextmanager
def _watch(model: Backbone, seen: list[Passed]) -> Iterator[None]:
    """Record each mixer's input and output in ``seen`` while open."""

    def keep(mixer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        seen.append(Passed(args[0].detach(), kwargs.get("mask_BN"), output.detach()))

    mixers = [block.get_submodule("mixer") for block in model.blocks]
    handles = [mixer.register_forward_hook(keep, with_kwargs=True) for mixer in mixers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
