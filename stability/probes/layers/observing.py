"""Find a run's measurable layers for each probe, by the layers' base classes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from stability.build import build_model
from stability.config.run import RunSpec
from stability.mechanisms import AbstractAttention, AbstractConsensus, AbstractMechanism, AbstractSoftmaxAttention
from stability.mechanisms.two_way import TwoWay
from stability.models.backbone import Backbone
from stability.printable import print_note
from stability.probes.layers.streams import residuals
from stability.registry import Registry
from stability.residuals import AbstractSingleStream, AbstractStreams

Classes = tuple[type[nn.Module], ...]
# by `what` or hessian's `measure`: classes of measured layers, and of layers with nothing to measure
OBSERVED: dict[str, Classes] = {
    "spectra": (AbstractConsensus, AbstractAttention),
    "qk": (AbstractSoftmaxAttention,),
    "pdmm": (AbstractSoftmaxAttention,),
    "streams": (AbstractStreams,),
    "sharpness": (AbstractSoftmaxAttention,),
}
WITHOUT: dict[str, Classes] = {
    "qk": (AbstractConsensus,),
    "pdmm": (AbstractConsensus,),
    "streams": (AbstractSingleStream,),
    "sharpness": (AbstractConsensus, TwoWay),  # both directions are layers of their own
}
STOOD_IN_FOR = "sa"  # the mechanism replaced by what=training_free; same parameters
LACKING = {
    "qk": "no softmax attention, so no W_q and W_k",
    "pdmm": "no softmax attention, so no attended values",
    "streams": "a single residual stream",
    "training_free": "sparge and fasa stand in for sa alone",
    "mirror": "its examples have no mirror image",
    "lengths": "its examples have one length",
    "quantization": "its linear maps are ternary already",
}


class Observable(NamedTuple):
    """The measurable layers of a run.

    ``part`` is the run's mechanism, residual scheme or objective. ``is_there``: some layer is measurable.
    ``not_observed`` names the layers of unknown content.
    """

    part: str
    is_there: bool
    not_observed: tuple[str, ...]


def list_observable(spec: RunSpec, what: str) -> Observable:
    """Return a run's measurable layers for ``what``, from its spec alone."""
    if what == "training_free":
        return Observable(spec.mechanism.name, spec.mechanism.name == STOOD_IN_FOR, ())
    if what == "quantization":
        return Observable(f"linear={spec.linear.name}", spec.linear.name == "dense", ())
    if what == "mirror":
        objective = spec.objective.name
        return Observable(objective, Registry("objectives").load(objective).without_mirror is None, ())
    if what == "train_nll":
        return Observable(f"objective={spec.objective.name}", True, ())
    if what == "lengths":
        objective = Registry("objectives").load(spec.objective.name)
        is_text = objective.corpus_kind == "tokens" and not objective.num_context(spec.objective.settings)
        return Observable(f"objective={spec.objective.name}", is_text, ())
    layers = layers_of(spec, what)
    part = spec.residual if what == "streams" else spec.mechanism
    is_there = any(isinstance(layer, OBSERVED[what]) and not _is_normed(layer, what) for layer in layers)
    return Observable(part.name, is_there, name_unobserved(layers, what))


def name_unobserved(layers: Iterable[nn.Module], what: str) -> tuple[str, ...]:
    """Name the layers of unknown content, each once."""
    known = (*OBSERVED[what], *WITHOUT.get(what, ()))
    named = (
        f"{stem(layer)} with qk_norm" if _is_normed(layer, what) else stem(layer)
        for layer in layers
        if not isinstance(layer, known) or _is_normed(layer, what)
    )
    return tuple(dict.fromkeys(named))


def _is_normed(layer: nn.Module, what: str) -> bool:
    """Return whether W_qᵀW_k does not describe a layer's logits, since queries and keys are normed."""
    return what == "qk" and isinstance(layer, AbstractSoftmaxAttention) and not layer.is_bilinear


def layers_of(spec: RunSpec, what: str) -> list[nn.Module]:
    """Return the modules relevant to ``what``, in a model on the meta device."""
    with torch.device("meta"):
        model = build_model(spec, Registry("objectives").load(spec.objective.name).any_format(spec.model.positions))
    return find_layers(model, what)


def find_layers(model: Backbone, what: str) -> list[nn.Module]:
    """Return a model's modules relevant to ``what``.

    Residual connections (streams), mixers, or for sharpness mixers and their inner mechanisms.
    """
    if what == "streams":
        return [module for _, module in residuals(model)]
    if what == "sharpness":
        inner = (module for mixer in mixers(model) for module in mixer.modules())
        return [*mixers(model), *(module for module in inner if isinstance(module, AbstractMechanism))]
    return mixers(model)


def mixers(model: Backbone) -> list[nn.Module]:
    """Return the sequence mechanism of each block."""
    return [block.get_submodule("mixer") for block in model.blocks]


def firsts(model: Backbone, seen: list[Any]) -> list[Any]:
    """Return the first of each mixer's consecutive evaluations, in the order of `Backbone.list_passes`.

    ``seen`` has one entry per evaluation in a forward pass; a residual scheme may need several, the same number for all
    mixers (`AbstractResidual.evaluations`).
    """
    return seen[:: len(seen) // len(model.list_passes())]


def stem(layer: nn.Module) -> str:
    """Return the stem of a layer's source file: its mechanism's name, even within a pattern."""
    return type(layer).__module__.rsplit(".", 1)[-1]


def say_what_is_missing(what: str, observables: Iterable[Observable]) -> None:
    """Print the parts left out, and the layers not observed.

    ``ValueError`` (one line) if no run has the requested spectra, streams, mechanism or mirror image.
    """
    found = list(observables)
    unknown = _join_names(name for each in found for name in each.not_observed)
    without = _join_names(each.part for each in found if not each.is_there and not each.not_observed)
    if what == "training_free" and not any(each.is_there for each in found):
        raise ValueError(f"what=training_free replaces mechanism=sa, and these runs have another mechanism: {without}")
    if what == "mirror" and not any(each.is_there for each in found):
        why = Registry("objectives").load(found[0].part).without_mirror
        raise ValueError(f"what=mirror reads a text backwards; objective={found[0].part} has no mirror image: {why}")
    if what == "lengths" and not any(each.is_there for each in found):
        raise ValueError(f"what=lengths reads longer texts, and these runs have none of free length: {without}")
    if what == "quantization" and not any(each.is_there for each in found):
        raise ValueError(f"what=quantization rounds dense linear maps, and these runs have others: {without}")
    named = f"not observed: {unknown}; " if unknown else ""
    if what in ("spectra", "streams") and not any(each.is_there for each in found):
        parts = _join_names(each.part for each in found)
        reason = f"{parts} has neither consensus nor softmax-attention layers; " if what == "spectra" else ""
        reason = f"residual={without} has a single stream; " if without else reason
        raise ValueError(named + reason + _describe_observed(what))
    # not a mistake: consensus has no queries and keys
    if without:
        print_note(f"leaves out {without}: {LACKING[what]}")
    if unknown:
        print_note(named + _describe_observed(what))


def say_whose_logits_are_unknown(specs: Iterable[RunSpec]) -> None:
    """Print the layers not observed by measure=sharpness, if any.

    Their models get no largest logit and no entropy.
    """
    unknown = _join_names(name for spec in specs for name in list_observable(spec, "sharpness").not_observed)
    if unknown:
        lacking = "so their runs get no attention_logit_max and no attention_entropy"
        print_note(f"not observed: {unknown}, {lacking}; {_describe_observed('sharpness', 'measure')}")


def _describe_observed(what: str, key: str = "what") -> str:
    """Name the parts, including plugins, with layers measured by ``what``."""
    registry = Registry("residuals" if what == "streams" else "mechanisms")
    having = {} if what == "streams" else {"trainable": True}  # no run has the others
    names = [name for name in registry.names(**having) if issubclass(registry.load(name), OBSERVED[what])]
    why = " without qk_norm, whose logits are bilinear in W_q and W_k" if what == "qk" else ""
    return f"{key}={what} looks at {_join_names(names)}{why}"


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
