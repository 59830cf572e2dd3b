"""Measure α_max at a run's checkpoints (paper, section 5.2.1), from both optimizer states.

Written to ``curvature/<phase>.parquet``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stability.build import resolve_device
from stability.config.curvature import CurvatureSpec
from stability.config.parse import computed_parts_of
from stability.config.parts import kernels_of_loss
from stability.config.rules.kernels import require_alpha_max
from stability.optimizers import AbstractOptimizer
from stability.probes.checkpoints import Loaded
from stability.probes.curvature import spectra
from stability.probes.curvature.checkpoint_descent import Probe
from stability.probes.curvature.protocol import StoredSteps
from stability.registry import Registry
from stability.runs.directory import RunDirectory, read_json, readable_rows, step_of, write_atomically
from stability.runs.phases import file_of, list_phases, phases
from stability.runs.schema import SPECTRA
from stability.training.checkpoint import manifest_of


def is_measured(directory: RunDirectory, curvature: CurvatureSpec) -> bool:
    """Return whether all requested phases and tables are stored under the same protocol."""
    return not list_missing_phases(directory, curvature) and not spectra.list_missing_tables(directory, curvature)


def list_missing_phases(directory: RunDirectory, curvature: CurvatureSpec) -> list[str]:
    """Return the requested phases without stored steps under the same protocol."""
    return list(_list_missing_states(directory, curvature))


def _list_missing_states(directory: RunDirectory, curvature: CurvatureSpec) -> dict[str, tuple[str, ...]]:
    """Return the missing optimizer states by phase."""
    if not _has_steps(curvature):
        return {}
    missing = {
        phase: StoredSteps(file_of(directory.curvature_file, phase), curvature).list_missing()
        for phase in list_phases(directory, curvature.phase)
    }
    return {phase: states for phase, states in missing.items() if states}


def _has_steps(curvature: CurvatureSpec) -> bool:
    return bool({"alpha_max", "critical_lr"} & set(curvature.measure))


def measure(
    directory: RunDirectory, curvature: CurvatureSpec, *, cache_dir: Path, device: str = "auto"
) -> Iterator[None]:
    """Measure the missing states and tables; yield after every optimizer step.

    A run without a checkpoint in a phase (diverged earlier) gets an empty table.

    Args:
        directory: the run.
        curvature: the protocol, with the requested phases.
        cache_dir: folder with the prepared data.
        device: "auto", or a torch device.

    Raises:
        ValueError: the run has no verdict yet, or its kernels lack second derivatives.
    """
    # an unfinished run's last checkpoint would later pass for its terminal one
    if not directory.finished:
        status = directory.status()
        raise ValueError(
            f"{directory.run_id} is {status['state']} at step {status['step']}; α_max is measured on runs that "
            "reached their verdict"
        )
    states, tables = _list_missing_states(directory, curvature), dict(spectra.list_missing_tables(directory, curvature))
    for phase in list_phases(directory, curvature.phase):
        missing, names = states.get(phase, ()), tables.get(phase, ())
        if missing or names:
            folder = phases(directory, phase).get(phase)
            if folder is not None:
                _require_second_derivatives(read_json(directory.spec_file), curvature, directory.run_id)
            loaded = None if folder is None else Loaded.read(folder, cache_dir)
            yield from _time_steps(
                _measure(directory, loaded, phase, missing, names, curvature, device), directory, phase
            )


def _require_second_derivatives(spec: dict[str, Any], curvature: CurvatureSpec, whose: str) -> None:
    """Raise a one-line ``ValueError`` if the model's kernels lack the derivatives for this measurement.

    ``spec`` is the run's stored spec.
    """
    # without any second derivative no method is left: bfloat16 gradients are too coarse for differences
    asked, remedy = kernels_of_loss(computed_parts_of(spec)), "train a run with impl=reference for it"
    require_alpha_max(asked, curvature, f"{whose} is asked for", remedy)


def _time_steps(steps: Iterator[None], directory: RunDirectory, phase: str) -> Iterator[None]:
    """Pass on a measurement's steps; append its own time to ``curvature_timing.jsonl``.

    The row has the seconds within the steps, and the end in seconds since 1970. Written for an aborted measurement,
    too.
    """
    spent_s, started = 0.0, time.perf_counter()
    try:
        for step in steps:
            spent_s += time.perf_counter() - started
            yield step
            started = time.perf_counter()
        spent_s += time.perf_counter() - started
    finally:
        file = directory.curvature_timing_file
        known = readable_rows(file, ("wall_s", "ended"))
        rows = [*known, {"phase": phase, "wall_s": spent_s, "ended": time.time()}]
        write_atomically(file, "".join(json.dumps(row) + "\n" for row in rows).encode())


def measure_checkpoint(
    folder: Path, phase: str, curvature: CurvatureSpec, *, cache_dir: Path, device: str = "auto"
) -> Iterator[None]:
    """Measure one checkpoint folder under a phase name, even if measured before.

    Args:
        folder: any checkpoint folder of a run.
        phase: name for the rows and the table.
        curvature: the protocol.
        cache_dir: folder with the prepared data.
        device: "auto", or a torch device.

    Raises:
        ValueError: the model's kernels lack second derivatives.
    """
    directory = RunDirectory.at(folder.parent.parent)
    _require_second_derivatives(manifest_of(folder)["spec"], curvature, f"{directory.run_id}, {folder.name}")
    loaded = Loaded.read(folder, cache_dir)
    states = curvature.state if _has_steps(curvature) else ()
    names = tuple(name for name in SPECTRA if name in curvature.measure)
    yield from _measure(directory, loaded, phase, states, names, curvature, device)


def _measure(
    directory: RunDirectory,
    loaded: Loaded | None,
    phase: str,
    states: tuple[str, ...],
    tables: tuple[str, ...],
    curvature: CurvatureSpec,
    device: str,
) -> Iterator[None]:
    """Measure a checkpoint's states, then its tables; empty ones if ``loaded`` is None."""
    if states:
        asked = curvature.model_copy(update={"state": states})
        yield from _measure_steps(directory, loaded, phase, asked, device)
    if tables:
        yield from spectra.measure(directory, loaded, phase, tables, curvature, device)


def _measure_steps(
    directory: RunDirectory, loaded: Loaded | None, phase: str, curvature: CurvatureSpec, device: str
) -> Iterator[None]:
    """Measure a checkpoint in each defined optimizer state and write the rows; yield after every step."""
    observe = spectra.critical_column(curvature.spectra) if "critical_lr" in curvature.measure else None
    rows, undefined, terms = [], [], {} if loaded is None else step_terms(loaded.spec.optimizer.name)
    for state in () if loaded is None else curvature.state:
        assert loaded is not None
        probe = Probe(loaded, curvature, resolve_device(device), observe)
        if not probe.defines(state):
            undefined.append(state)
            continue
        where = {"run_id": directory.run_id, "phase": phase, "state": state, "checkpoint_step": step_of(loaded.folder)}
        for row in probe.rows(state):
            if row is not None:
                rows.append({**where, **row})
            yield
    StoredSteps(directory.curvature_file(phase), curvature).write(rows, undefined=undefined, optimizer=terms)


def step_terms(name: str) -> dict[str, Any]:
    """Return an optimizer's name and its non-default step attributes of `AbstractOptimizer`.

    {} if the step is the rate times a function of gradient and state, and α_max holds no part of the state fixed.
    """
    part = Registry("optimizers").load(name)
    told = {key: getattr(part, key) for key in ("linear_in_lr", "is_multiplier", "first_step_zero", "frozen")}
    unusual = {key: value for key, value in told.items() if value != getattr(AbstractOptimizer, key)}
    return {"name": name, **unusual} if unusual else {}
