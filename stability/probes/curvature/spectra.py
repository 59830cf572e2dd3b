"""Measure a checkpoint's loss along u, sharpness, spectral density and block shares.

Written to ``curvature/<phase>_<table>.parquet``, as requested by `measure=`. Per optimizer state, all tables use the
protocol's first recorded step: its θ, batch and u. Slope and α_max are from the loss's own gradient, even if the
recorded steps use the clipped one. The critical learning rate is a column of ``<phase>.parquet`` instead, for each
recorded step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stability.build import resolve_device
from stability.config.curvature import CurvatureSpec, SpectraSpec
from stability.curvature import directional
from stability.curvature.adam import preconditioned_sharpness
from stability.curvature.alpha_max import has_paper_state
from stability.curvature.critical import CriticalLR, critical_lr, loss_along
from stability.curvature.decompose import block_shares, gauss_newton, gradient_noise_scale
from stability.curvature.spectrum import spectral_density, top_eigenvalue
from stability.curvature.traces import trace
from stability.models.backbone import block_of
from stability.probes.checkpoints import Loaded
from stability.probes.curvature.checkpoint_descent import Probe
from stability.probes.curvature.descent import Step
from stability.probes.curvature.protocol import full_protocol, protocol_of, spec_of
from stability.probes.layers.attention import attention_statistics
from stability.probes.layers.observing import find_layers, name_unobserved
from stability.probes.stored import Stored
from stability.runs.directory import RunDirectory
from stability.runs.phases import file_of, list_phases
from stability.runs.schema import SPECTRA, SPECTRA_COLUMNS

# Each table's settings of `SpectraSpec`.
READS: dict[str, tuple[str, ...]] = {
    "profile": ("critical_resolution", "profile_points"),
    "sharpness": ("eigenvalue_tolerance", "eigenvalue_products", "trace_products", "noise_batches", "noise_parts"),
    "density": ("density_probes", "density_products"),
    "blocks": (),
}


def critical_column(spectra: SpectraSpec) -> Callable[[Step], dict[str, Any]]:
    """Return an ``observe`` for `Descent` with the critical learning rate, searched from α_max."""

    def column(step: Step) -> dict[str, Any]:
        known = step.result.alpha_max
        return {} if math.isnan(known) else {"critical_lr": _critical(step, spectra).value}

    return column


def _critical(step: Step, spectra: SpectraSpec) -> CriticalLR:
    known, resolution = step.result.alpha_max, spectra.critical_resolution
    return critical_lr(
        step.loss, step.params, step.direction, batches=step.batches, alpha_max=known, resolution=resolution
    )


class StoredTable(Stored):
    """One spectral table of a phase."""

    def __init__(self, path: Path, name: str, curvature: CurvatureSpec):
        super().__init__(path, protocol_of(_first_step(curvature), READS[name]), SPECTRA_COLUMNS[name])

    def decisive(self, protocol: str) -> dict[str, Any] | None:
        """Return all settings except the gradient behind the recorded steps' α_max."""
        spec = spec_of(protocol)
        if spec is None:
            return None
        # the tables always use the loss's own gradient
        return {key: value for key, value in json.loads(full_protocol(spec)).items() if key != "gradient"}


def list_missing_tables(directory: RunDirectory, curvature: CurvatureSpec) -> list[tuple[str, tuple[str, ...]]]:
    """Return (phase, tables) for requested tables missing under the same protocol."""

    def list_stale(phase: str) -> tuple[str, ...]:
        asked = (name for name in SPECTRA if name in curvature.measure)
        files = {name: file_of(partial(_file, directory, name), phase) for name in asked}
        return tuple(name for name, path in files.items() if not StoredTable(path, name, curvature).is_current())

    missing = [(phase, list_stale(phase)) for phase in list_phases(directory, curvature.phase)]
    return [(phase, names) for phase, names in missing if names]


def _file(directory: RunDirectory, name: str, phase: str) -> Path:
    return directory.curvature_file(f"{phase}_{name}")


def _first_step(curvature: CurvatureSpec) -> CurvatureSpec:
    return curvature.model_copy(update={"recorded_steps": 1, "parity_steps": 0, "measure": ("alpha_max",)})


def measure(
    directory: RunDirectory,
    loaded: Loaded | None,
    phase: str,
    names: tuple[str, ...],
    curvature: CurvatureSpec,
    device: str,
) -> Iterator[None]:
    """Measure tables of a checkpoint; yield as `Descent` does.

    Args:
        directory: the run.
        loaded: the checkpoint; None writes empty tables.
        phase: the checkpoint's phase.
        names: the tables to measure.
        curvature: the protocol.
        device: "auto", or a torch device.
    """
    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for state in curvature.state if loaded is not None else ():
        assert loaded is not None
        probe = Probe(loaded, _first_step(curvature), resolve_device(device))
        if not probe.defines(state):
            continue  # recorded in the table of steps
        probe.descent.observe = _collector(probe, tables, {"run_id": directory.run_id, "phase": phase, "state": state})
        for _ in probe.rows(state):
            yield
    for name, rows in tables.items():
        StoredTable(_file(directory, name, phase), name, curvature).write(rows, SPECTRA_COLUMNS[name])


def _collector(
    probe: Probe, tables: dict[str, list[dict[str, Any]]], labels: dict[str, Any]
) -> Callable[[Step], dict[str, Any]]:
    """Return an ``observe`` to fill the tables; the step's own row stays unchanged."""
    rows_of = {"profile": _profile, "sharpness": _sharpness, "density": _density, "blocks": _blocks}

    def collect(step: Step) -> dict[str, Any]:
        for name, rows in tables.items():
            rows += [{**labels, "lr": probe.descent.lr, **row} for row in rows_of[name](probe, step)]
        return {}

    return collect


def _profile(probe: Probe, step: Step) -> list[dict[str, Any]]:
    """Return the loss along u at sampled rates, with a quadratic model's terms."""
    result, points = step.result, probe.curvature.spectra.profile_points
    critical = _critical(step, probe.curvature.spectra).value
    marks = [mark for mark in (result.alpha_max, critical) if 0 < mark < math.inf] or [2 * probe.descent.lr]
    # a dense grid to 1.3 × the smaller mark, a coarser one to 1.3 × the larger
    even = [end * (index / points) for end in {1.3 * max(marks), 1.3 * min(marks)} for index in range(points + 1)]
    alphas = sorted({-0.15 * max(marks), *even})
    losses = loss_along(step.loss, step.params, step.direction, alphas, batches=step.batches)
    known = {
        "loss_before": result.loss,
        "slope": result.slope,
        "curvature": result.curvature,
        "alpha_max": result.alpha_max,
        "critical_lr": critical,
    }
    return [{"alpha": alpha, "loss": loss, **known} for alpha, loss in zip(alphas, losses, strict=True)]


def _sharpness(probe: Probe, step: Step) -> list[dict[str, Any]]:
    """Return a row: top eigenvalues, trace, Gauss–Newton share, noise scale in sequences, attention."""
    spectra = probe.curvature.spectra
    options: dict[str, Any] = {"batches": step.batches, "seed": probe.curvature.seed}
    options |= {"tolerance": spectra.eigenvalue_tolerance, "iterations": spectra.eigenvalue_products}
    top = top_eigenvalue(step.loss, step.params, **options)
    row: dict[str, Any] = {"loss": step.result.loss, "sharpness": top.value, "sharpness_residual": top.residual}
    if has_paper_state(probe.optimizer):
        # P as this step used it: v already holds the step's own gradient.
        held, lr = probe.descent.params, probe.descent.lr
        adam = preconditioned_sharpness(step.loss, step.params, probe.optimizer, held=held, lr=lr, **options)
        row |= {
            "adam_sharpness": adam.value,
            "adam_residual": adam.residual,
            "adam_threshold": adam.threshold,
            "adam_ratio": adam.ratio,
        }
    total = trace(
        step.loss, step.params, batches=step.batches, products=spectra.trace_products, seed=probe.curvature.seed
    )
    row |= {
        "trace": total.value,
        "trace_error": total.standard_error,
        "gauss_newton_share": _gauss_newton_share(probe, step),
    }
    return [row | {"noise_scale": _noise_scale(probe, step)} | _attention(probe, step)]


def _gauss_newton_share(probe: Probe, step: Step) -> float:
    """Return Gauss–Newton's share of the curvature along u; NaN without forward-mode support."""
    try:
        found = gauss_newton(
            lambda params, batch: batch.logits(probe.model, params),
            lambda logits, batch: probe.objective.loss_sum(logits, batch),
            step.params,
            step.direction,
            batches=step.batches or [_examples(probe)],
        )
    except NotImplementedError:
        return math.nan
    return found.share


def _examples(probe: Probe):
    """Return the batch of the first recorded step."""
    return probe.descent.examples(probe.curvature.warmup_batches + probe.curvature.warmup_steps)


def _noise_scale(probe: Probe, step: Step) -> float:
    """Return the gradient noise scale in sequences at the step's θ."""
    first, spectra = probe.curvature.warmup_batches + probe.curvature.warmup_steps, probe.curvature.spectra
    # several batches: from one alone, |G|² is too noisy
    batches = [probe.descent.examples(first + number) for number in range(spectra.noise_batches)]
    parts = [part for batch in batches for part in batch.split(max(1, len(batch.targets_BN) // spectra.noise_parts))]

    def per_sequence(params: Any, batch: Any) -> Any:
        total, count = probe.descent.loss(params, batch)
        return total / count * len(batch.targets_BN), len(batch.targets_BN)

    return gradient_noise_scale(per_sequence, step.params, parts).value


def _attention(probe: Probe, step: Step) -> dict[str, float]:
    """Return the largest logit and mean entropy (nats) over all softmax self-attention layers.

    {} without such a layer.
    """
    # with a layer of unknown kind the others' maximum would pass for the model's
    if name_unobserved(find_layers(probe.model, "sharpness"), "sharpness"):
        return {}
    found = attention_statistics(probe.model, lambda: _examples(probe).logits(probe.model, step.params))
    if not found:
        return {}
    layers = found.values()
    return {
        "attention_logit_max": max(layer.logit_max for layer in layers),
        "attention_entropy": sum(layer.entropy for layer in layers) / len(layers),
    }


def _density(probe: Probe, step: Step) -> list[dict[str, Any]]:
    """Return a row for each quadrature node."""
    spectra = probe.curvature.spectra
    options: dict[str, Any] = {
        "probes": spectra.density_probes,
        "iterations": spectra.density_products,
        "seed": probe.curvature.seed,
    }
    found = spectral_density(step.loss, step.params, batches=step.batches, **options)
    triples = zip(found.probe_of.tolist(), found.nodes.tolist(), found.weights.tolist(), strict=True)
    return [
        {"probe": probe_of, "node": node, "weight": weight, "num_params": found.size}
        for probe_of, node, weight in triples
    ]


def _blocks(probe: Probe, step: Step) -> list[dict[str, Any]]:
    """Return a row for each parameter block: share u_b·(Hu)_b and own u_b·H u_b.

    The shares sum to the curvature; ``own`` excludes the coupling to other blocks.
    """
    shares = block_shares(step.loss, step.params, step.direction, batches=step.batches, block=block_of)
    return [
        {"block": name, "share": share, "own": _measure_own(step, name), "curvature": step.result.curvature}
        for name, share in shares.items()
    ]


def _measure_own(step: Step, block: str) -> float:
    """Return the curvature along one block's part of u, by the step's own method."""
    alone = {name: part if block_of(name) == block else torch.zeros_like(part) for name, part in step.direction.items()}
    return directional(step.loss, step.params, alone, step.result.method, batches=step.batches).curvature
