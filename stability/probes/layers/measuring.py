"""Measure layers at a run's checkpoints for `stability.probe`.

Written to ``probes/<phase>_<table>.parquet``: graphs and softmaxes on held-out text, σ(W_qᵀW_k), attention's
discrepancy, text read backwards or in longer pieces, and training windows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stability.build import build_objective, resolve_device
from stability.config.entries import ProbeSpec
from stability.config.run import RunSpec
from stability.mechanisms import AbstractAttention, AbstractConsensus, AbstractSoftmaxAttention
from stability.models.backbone import Backbone
from stability.models.passes import generator_for
from stability.objectives import Examples
from stability.probes.checkpoints import corpus_of
from stability.probes.layers.attention import discrepancies, qk_singular_values
from stability.probes.layers.consensus import consensus_spectra, low_pass
from stability.probes.layers.nll import measure_lengths, mirror_numbers, train_numbers
from stability.probes.layers.observing import firsts, mixers, stem
from stability.probes.layers.quantization import measure_bits
from stability.probes.layers.streams import stream_statistics
from stability.probes.layers.training_free import measure_mechanisms
from stability.probes.stored import Stored
from stability.runs.directory import RunDirectory
from stability.runs.phases import file_of, list_phases, phases
from stability.runs.schema import PROBE_COLUMNS
from stability.training import checkpoint
from stability.training.machine import prepare_torch

# by `what`; columns: `PROBE_COLUMNS`
TABLES = {
    "spectra": ("spectra", "filter"),
    "qk": ("qk",),
    "pdmm": ("discrepancy",),
    "streams": ("streams",),
    "training_free": ("training_free", "training_free_layers"),
    "mirror": ("mirror",),
    "train_nll": ("train_nll",),
    "lengths": ("lengths",),
    "quantization": ("quantization", "quantization_layers"),
}
Rows = dict[str, list[dict[str, Any]]]


def protocol_of(probe: ProbeSpec) -> str:
    """Return the settings behind the numbers, as canonical JSON for the files' metadata.

    Numbers are not measured again if only a setting outside it differs.
    """
    fields = {
        "spectra": ("sequences", "probes", "products", "seed"),
        "pdmm": ("sequences",),
        "streams": ("sequences", "outlier_log_range"),
        "training_free": ("sequences", "mechanism", "budgets", "calibration"),
        "lengths": ("lengths",),
        "quantization": ("sequences", "bits", "groups"),
    }.get(probe.what, ())
    return json.dumps(probe.model_dump(mode="json", include={"what", *fields}), sort_keys=True)


def list_missing_phases(directory: RunDirectory, probe: ProbeSpec) -> list[str]:
    """Return the requested phases without stored tables under the same protocol."""
    return [phase for phase in list_phases(directory, probe.phase) if not _is_measured(directory, phase, probe)]


def _is_measured(directory: RunDirectory, phase: str, probe: ProbeSpec) -> bool:
    files = [file_of(partial(_file, directory, table), phase) for table in TABLES[probe.what]]
    return all(Stored(file, protocol_of(probe)).is_current() for file in files)


def _file(directory: RunDirectory, table: str, phase: str) -> Path:
    return directory.probe_file(phase, table)


def measure(directory: RunDirectory, probe: ProbeSpec, *, cache_dir: Path) -> Iterator[None]:
    """Measure the missing phases; yield after each layer of each sequence.

    A run without a checkpoint in a phase gets empty tables.

    Args:
        directory: the run.
        probe: the protocol, with the requested phases.
        cache_dir: folder with the prepared data.
    """
    for phase in list_missing_phases(directory, probe):
        folder = phases(directory, phase).get(phase)
        yield from measure_checkpoint(directory, folder, phase, probe, cache_dir=cache_dir)


def measure_checkpoint(
    directory: RunDirectory, folder: Path | None, phase: str, probe: ProbeSpec, *, cache_dir: Path
) -> Iterator[None]:
    """Measure one checkpoint under a phase name; its tables are written together at the end.

    Args:
        directory: the run.
        folder: the checkpoint; None writes empty tables.
        phase: name for the rows and tables.
        probe: the protocol.
        cache_dir: folder with the prepared data.
    """
    rows: Rows = {table: [] for table in TABLES[probe.what]}
    if folder is not None:
        spec, model = checkpoint.load(folder)
        labels = {"run_id": directory.run_id, "phase": phase, "lr": spec.lr_peak}
        for found in _measure(spec, model, probe, cache_dir):
            for table, own in found.items():
                rows[table] += [{**labels, **row} for row in own]
            yield
    for table, found in rows.items():
        Stored(directory.probe_file(phase, table), protocol_of(probe)).write(found, PROBE_COLUMNS[table])


def _measure(spec: RunSpec, model: Backbone, probe: ProbeSpec, cache_dir: Path) -> Iterator[Rows]:
    """Yield a checkpoint's rows by table, as they come."""
    if probe.what == "qk":
        yield from _qk(model)
        return
    corpus = corpus_of(spec, cache_dir)
    if probe.what == "mirror":
        yield {"mirror": [mirror_numbers(spec, model, corpus, probe)]}
    elif probe.what == "train_nll":
        yield {"train_nll": [train_numbers(spec, model, corpus, probe)]}
    elif probe.what == "lengths":
        for row in measure_lengths(spec, model, corpus, probe):
            yield {"lengths": [row]}
    elif probe.what == "quantization":
        examples = read_held_out(spec, cache_dir, probe.sequences)
        for of_model, of_layers in measure_bits(spec, model, corpus, examples, probe):
            yield {"quantization": of_model, "quantization_layers": of_layers}
    else:
        yield from _measure_in_float64(spec, model, probe, cache_dir)


def _measure_in_float64(spec: RunSpec, model: Backbone, probe: ProbeSpec, cache_dir: Path) -> Iterator[Rows]:
    """Yield a checkpoint's rows on held-out sequences, layer by layer."""
    device = resolve_device(probe.device)
    prepare_torch(spec.threads, device)
    model = model.to(device, torch.float64)
    examples = read_held_out(spec, cache_dir, probe.sequences)
    if probe.what == "streams":
        for found in stream_statistics(model, (each.to(device) for each in examples.split(1)), probe.outlier_log_range):
            yield {"streams": found}
    elif probe.what == "training_free":
        corpus = corpus_of(spec, cache_dir)
        for of_models, of_layers in measure_mechanisms(spec, model, corpus, examples.to(device), probe):
            yield {"training_free": of_models, "training_free_layers": of_layers}
    else:
        for sequence, example in enumerate(examples.split(1)):
            inputs = layer_inputs(model, example.to(device))
            passed = [block.mixer for block in model.list_passes()]
            for layer, (mixer, x_BND) in enumerate(zip(passed, inputs, strict=True)):
                where = {"layer": layer, "mixer": stem(mixer), "sequence": sequence}
                found = _measure_layer(mixer, x_BND, probe)
                yield {table: [{**where, **row} for row in own] for table, own in found.items()}


def _measure_layer(mixer: nn.Module, x_BND: Tensor, probe: ProbeSpec) -> Rows:
    """Return one layer's rows on one sequence, by table."""
    if probe.what == "pdmm":
        found = discrepancies(mixer, x_BND) if isinstance(mixer, AbstractSoftmaxAttention) else ()
        return {"discrepancy": [{"head": head, **numbers} for head, numbers in enumerate(found)]}
    rows: Rows = {"spectra": [], "filter": []}
    if isinstance(mixer, AbstractConsensus):
        heads = consensus_spectra(mixer, x_BND, probes=probe.probes, products=probe.products, seed=probe.seed)
        for head, found in enumerate(heads):
            rows["spectra"].append({"head": head, **found.numbers})
            density = found.density
            columns = (density.probe, density.nodes, density.weights, found.response)
            rows["filter"] += [
                {"head": head, "probe": p, "node": node, "weight": weight, "response": r}
                for p, node, weight, r in zip(*(column.tolist() for column in columns), strict=True)
            ]
    elif isinstance(mixer, AbstractAttention):
        for head, found in enumerate(low_pass(mixer, x_BND)):
            rows["spectra"].append({"head": head, **found.numbers})
            # the filter's nodes are the singular values, all with equal weight
            weight = 1 / len(found.singular_values)
            rows["filter"] += [
                {"head": head, "probe": 0, "node": np.nan, "weight": weight, "response": value}
                for value in found.singular_values.tolist()
            ]
    return rows


def _qk(model: Backbone) -> Iterator[Rows]:
    """Yield the singular values of W_qᵀW_k of each layer, none of other layers than softmax attention."""
    for layer, mixer in enumerate(mixers(model)):
        rows = []
        if isinstance(mixer, AbstractSoftmaxAttention) and mixer.is_bilinear:
            where = {"layer": layer, "mixer": stem(mixer)}
            rows = [
                {**where, "head": head, "index": index, "singular_value": value}
                for head, values_K in enumerate(qk_singular_values(mixer).tolist())
                for index, value in enumerate(values_K)
            ]
        yield {"qk": rows}


def layer_inputs(model: Backbone, examples: Examples) -> list[Tensor]:
    """Return each mixer's input (B, N, D) from one forward pass.

    In the order of `Backbone.list_passes`: a block passed several times (`model.loops`) counts as a layer each time. If
    a residual connection evaluates a mixer several times in a row, the first input: the normed state.
    """
    seen: list[Tensor] = []

    def keep(mixer: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0].detach())

    handles = [mixer.register_forward_pre_hook(keep) for mixer in mixers(model)]
    try:
        with torch.no_grad():
            examples.logits(model)
    finally:
        for handle in handles:
            handle.remove()
    return firsts(model, seen)


def read_held_out(spec: RunSpec, cache_dir: Path, sequences: int) -> Examples:
    """Return at most ``sequences`` validation windows.

    The windows are the same for every run on the same data.

    Args:
        spec: the run's.
        cache_dir: folder with the prepared data.
        sequences: largest number of windows.
    """
    corpus = corpus_of(spec, cache_dir)
    objective = build_objective(spec, corpus.format)
    tokens_BN = corpus.windows("val", sequences, objective.tokens_needed(spec.model.positions))
    return objective.examples(tokens_BN, generator_for(0, "probe"))
