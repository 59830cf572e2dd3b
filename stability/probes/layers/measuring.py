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
from stability.objectives import Examples
from stability.probes.checkpoints import corpus_of
from stability.probes.layers.attention import discrepancies, qk_singular_values
from stability.probes.layers.consensus import consensus_spectra
from stability.probes.layers.lengths import measure_lengths
from stability.probes.layers.low_pass import low_pass
from stability.probes.layers.mirror import mirror_numbers
from stability.probes.layers.observing import firsts, mixers, stem
from stability.probes.layers.quantization import measure_bits
from stability.probes.layers.streams import stream_statistics
from stability.probes.layers.train_nll import train_numbers
from stability.probes.layers.training_free import measure_mechanisms
from stability.probes.stored import Stored
from stability.runs.directory import RunDirectory
from stability.runs.phases import file_of, list_phases, phases
from stability.runs.schema import PROBE_COLUMNS
from stability.training import checkpoint
from stability.training.draws import generator_for
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
    """Return the settings behind the numbers, as canonical JSON for the files' metadata."""
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
        if probe.what == "qk":
            yield from _qk(model, labels, rows)
        elif probe.what == "mirror":
            rows["mirror"].append({**labels, **mirror_numbers(spec, model, corpus_of(spec, cache_dir), probe)})
            yield
        elif probe.what == "train_nll":
            rows["train_nll"].append({**labels, **train_numbers(spec, model, corpus_of(spec, cache_dir), probe)})
            yield
        elif probe.what == "lengths":
            for row in measure_lengths(spec, model, corpus_of(spec, cache_dir), probe):
                rows["lengths"].append({**labels, **row})
                yield
        elif probe.what == "quantization":
            examples = read_held_out(spec, cache_dir, probe.sequences)
            for of_model, of_layers in measure_bits(spec, model, corpus_of(spec, cache_dir), examples, probe):
                rows["quantization"] += [{**labels, **row} for row in of_model]
                rows["quantization_layers"] += [{**labels, **row} for row in of_layers]
                yield
        else:
            yield from _measure_held_out(spec, model, labels, rows, probe, cache_dir)
    for table, found in rows.items():
        Stored(directory.probe_file(phase, table), protocol_of(probe)).write(found, PROBE_COLUMNS[table])


def _measure_held_out(
    spec: RunSpec, model: Backbone, labels: dict[str, Any], rows: Rows, probe: ProbeSpec, cache_dir: Path
) -> Iterator[None]:
    """Add a checkpoint's rows on held-out sequences, layer by layer, in float64."""
    device = resolve_device(probe.device)
    prepare_torch(spec.threads, device)
    model = model.to(device, torch.float64)
    if probe.what == "streams":
        examples = (example.to(device) for example in read_held_out(spec, cache_dir, probe.sequences).split(1))
        for found in stream_statistics(model, examples, probe.outlier_log_range):
            rows["streams"] += [{**labels, **row} for row in found]
            yield
        return
    if probe.what == "training_free":
        examples = read_held_out(spec, cache_dir, probe.sequences).to(device)
        for of_models, of_layers in measure_mechanisms(spec, model, corpus_of(spec, cache_dir), examples, probe):
            rows["training_free"] += [{**labels, **row} for row in of_models]
            rows["training_free_layers"] += [{**labels, **row} for row in of_layers]
            yield
        return
    for sequence, example in enumerate(read_held_out(spec, cache_dir, probe.sequences).split(1)):
        inputs = layer_inputs(model, example.to(device))
        passed = [block.mixer for block in model.list_passes()]
        for layer, (mixer, x_BND) in enumerate(zip(passed, inputs, strict=True)):
            where = labels | {"layer": layer, "mixer": stem(mixer), "sequence": sequence}
            if probe.what == "pdmm":
                _add_discrepancy(mixer, x_BND, where, rows)
            elif isinstance(mixer, AbstractConsensus):
                _add_consensus(mixer, x_BND, where, rows, probe)
            elif isinstance(mixer, AbstractAttention):
                _add_attention(mixer, x_BND, where, rows)
            yield


def _add_consensus(
    layer: AbstractConsensus,
    x_BND: Tensor,
    where: dict[str, Any],
    rows: Rows,
    probe: ProbeSpec,
) -> None:
    """Add one consensus layer's rows on one sequence: each head's numbers and filter."""
    heads = consensus_spectra(layer, x_BND, probes=probe.probes, products=probe.products, seed=probe.seed)
    for head, found in enumerate(heads):
        rows["spectra"].append({**where, "head": head, **found.numbers})
        nodes = zip(
            found.density.probe.tolist(),
            found.density.nodes.tolist(),
            found.density.weights.tolist(),
            found.response.tolist(),
            strict=True,
        )
        rows["filter"] += [
            {**where, "head": head, "probe": p, "node": node, "weight": weight, "response": r}
            for p, node, weight, r in nodes
        ]


def _add_attention(layer: AbstractAttention, x_BND: Tensor, where: dict[str, Any], rows: Rows) -> None:
    """Add one attention layer's rows on one sequence."""
    for head, found in enumerate(low_pass(layer, x_BND)):
        rows["spectra"].append({**where, "head": head, **found.numbers})
        # the filter's nodes are the singular values, all with equal weight
        weight = 1 / len(found.singular_values)
        nodes = found.singular_values.tolist()
        rows["filter"] += [
            {**where, "head": head, "probe": 0, "node": np.nan, "weight": weight, "response": value} for value in nodes
        ]


def _add_discrepancy(mixer: nn.Module, x_BND: Tensor, where: dict[str, Any], rows: Rows) -> None:
    if isinstance(mixer, AbstractSoftmaxAttention):
        rows["discrepancy"] += [
            {**where, "head": head, **numbers} for head, numbers in enumerate(discrepancies(mixer, x_BND))
        ]


def _qk(model: Backbone, labels: dict[str, Any], rows: Rows) -> Iterator[None]:
    """Add the singular values of W_qᵀW_k of every softmax-attention layer; yield after each layer."""
    for layer, mixer in enumerate(mixers(model)):
        if isinstance(mixer, AbstractSoftmaxAttention) and mixer.is_bilinear:
            where = labels | {"layer": layer, "mixer": stem(mixer)}
            values_HK = qk_singular_values(mixer).tolist()
            cells = [
                (head, index, value) for head, values_K in enumerate(values_HK) for index, value in enumerate(values_K)
            ]
            rows["qk"] += [
                {**where, "head": head, "index": index, "singular_value": value} for head, index, value in cells
            ]
        yield


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
