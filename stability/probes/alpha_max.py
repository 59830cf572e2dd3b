"""α_max of a run's checkpoints by the paper's protocol (section 5.2.1), from both optimizer states → ``curvature/<phase>.parquet``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import functional_call

from stability.build import build_objective, build_optimizer, resolve_device
from stability.config import CurvatureSpec, RunSpec
from stability.curvature import GradientWithGraph, paper_state, step_direction
from stability.data._base import Corpus
from stability.data._cache import load, prepare
from stability.objectives._base import Examples
from stability.runs.directory import RunDirectory
from stability.runs.results import CURVATURE_COLUMNS, read_metadata, write_parquet
from stability.training import checkpoint
from stability.training.loop import prepare_torch, training_examples
from stability.training.schedule import lr_factor

PROTOCOL = "protocol"


def phases(directory: RunDirectory, phase: str) -> dict[str, Path]:
    """Checkpoints to measure by the name of their phase: ``earliest`` and ``terminal`` are a run's first and last."""
    found = directory.checkpoints()
    if not found:
        return {}
    both = {"earliest": found[0], "terminal": found[-1]}
    return both if phase == "all" else {phase: both[phase]}


def is_measured(directory: RunDirectory, curvature: CurvatureSpec) -> bool:
    """Whether every phase that was asked for is on disk under the same protocol."""
    wanted = ("earliest", "terminal") if curvature.phase == "all" else (curvature.phase,)
    return all(_stored_protocol(directory.curvature_file(name)) == protocol_of(curvature) for name in wanted)


def protocol_of(curvature: CurvatureSpec) -> str:
    """What the numbers depend on, as canonical JSON; kept in the parquet file's metadata."""
    return json.dumps(curvature.model_dump(mode="json", exclude={"phase"}), sort_keys=True)


def _stored_protocol(path: Path) -> str | None:
    return read_metadata(path).get(PROTOCOL) if path.exists() else None


def measure(directory: RunDirectory, curvature: CurvatureSpec, *, cache_dir: Path, device: str = "auto") -> Iterator[None]:
    """Measure what is missing, yielding after every optimizer step. A run without a checkpoint (diverged before the first) leaves an empty table."""
    for name in ("earliest", "terminal") if curvature.phase == "all" else (curvature.phase,):
        target = directory.curvature_file(name)
        if _stored_protocol(target) != protocol_of(curvature):
            folder = phases(directory, name).get(name)
            rows: list[dict[str, Any]] = []
            if folder is not None:
                yield from _measure_checkpoint(folder, name, curvature, cache_dir, device, rows)
            write_rows(rows, target, curvature)


def measure_checkpoint(folder: Path, phase: str, curvature: CurvatureSpec, *, cache_dir: Path, device: str = "auto") -> Iterator[None]:
    """One checkpoint folder, wherever it stands in its run, under a phase's name of its own."""
    rows: list[dict[str, Any]] = []
    yield from _measure_checkpoint(folder, phase, curvature, cache_dir, device, rows)
    write_rows(rows, RunDirectory.at(folder.parent.parent).curvature_file(phase), curvature)


def write_rows(rows: list[dict[str, Any]], target: Path, curvature: CurvatureSpec) -> None:
    write_parquet(pd.DataFrame(rows, columns=CURVATURE_COLUMNS), target, {PROTOCOL: protocol_of(curvature)})


def _measure_checkpoint(folder: Path, phase: str, curvature: CurvatureSpec, cache_dir: Path, device: str, rows: list[dict[str, Any]]) -> Iterator[None]:
    spec, _ = checkpoint.load(folder)
    corpus = _corpus(spec, cache_dir)
    run_id = folder.parent.parent.name
    for state in curvature.state:
        probe = Probe(folder, spec, corpus, curvature, resolve_device(device))
        if state == "paper" and not isinstance(probe.optimizer, torch.optim.Adam):
            continue  # the paper's warm-up sets Adam's m and v; other optimizers have only the run's own state
        for row in probe.rows(state):
            if row is not None:
                rows.append({"run_id": run_id, "phase": phase, "state": state, **row})
            yield


def _corpus(spec: RunSpec, cache_dir: Path) -> Corpus:
    """The prepared data of a run; prepared anew where the cache has gone. ``ValueError`` where it is no longer the same data."""
    if (cache_dir / spec.data_fingerprint).is_dir():
        return load(cache_dir, spec.data_fingerprint)
    corpus = prepare(spec.data, cache_dir)
    if corpus.fingerprint != spec.data_fingerprint:
        trained_on, now = spec.data_fingerprint[:12], corpus.fingerprint[:12]
        raise ValueError(f"the run was trained on data {trained_on}, which is not under {cache_dir};\ndata={spec.data.name} reads {now} now")
    return corpus


class Probe:
    """A copy of a checkpoint that takes real optimizer steps, measuring each along its own direction."""

    def __init__(self, folder: Path, spec: RunSpec, corpus: Corpus, curvature: CurvatureSpec, device: torch.device):
        prepare_torch(spec.threads, device)
        self.spec, self.corpus, self.curvature, self.device = spec, corpus, curvature, device
        _, model = checkpoint.load(folder)
        self.model: nn.Module = model.to(device)
        self.objective = build_objective(spec, corpus.vocab_size)
        self.optimizer = build_optimizer(spec, self.model)
        self.trainer = checkpoint.load_trainer(folder)
        self.params: dict[str, Tensor] = dict(self.model.named_parameters())
        self.lr = spec.lr_peak * lr_factor(spec.schedule, self.trainer["step"], spec.steps)

    def rows(self, state: str) -> Iterator[dict[str, Any] | None]:
        """A row for each recorded step, None for each warm-up step. A step whose numbers are not finite ends the descent: it and those after
        it are rows of NaN, so that the share of stable steps keeps its denominator."""
        self._start_from(state)
        first = self.curvature.warmup_batches
        for index in range(first, first + self.curvature.warmup_steps):
            self._set_gradient(self._plain_gradient(self._batch(index)))
            self.optimizer.step()
            yield None
        lost = False
        for step in range(self.curvature.recorded_steps):
            row = None if lost else self._recorded_step(self._batch(first + self.curvature.warmup_steps + step), check=step == 0)
            lost = row is None
            yield {"step": step, "lr": self.lr, **(row or {"method": "none"})}

    def _start_from(self, state: str) -> None:
        if state == "checkpoint":
            self.optimizer.load_state_dict(self.trainer["optimizer"])
        else:
            batches = (self._batch(index) for index in range(self.curvature.warmup_batches))
            paper_state(self.optimizer, (self._clipped(self._plain_gradient(batch)) for batch in batches), self.params)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr

    def _recorded_step(self, examples: Examples, *, check: bool) -> dict[str, Any] | None:
        """Gradient, step and the curvature along it; None where the gradient is not finite, so that no step can be taken."""
        loss = self._loss(examples)
        batch = GradientWithGraph(loss, self.params, method=self.curvature.method, check=check or None)
        gradient = batch.gradient()
        if not all(tensor.isfinite().all() for tensor in gradient.values()):
            return None
        self._set_gradient(gradient)
        along = batch.along(step_direction(self.optimizer, self.params, self.lr))
        with torch.no_grad():
            loss_after = loss(self.params).item()
        row = {key: getattr(along, key) for key in ("slope", "curvature", "alpha_max", "method", "rel_error")}
        return {**row, "loss_before": along.loss, "loss_after": loss_after}

    def _batch(self, index: int) -> Examples:
        size = self.curvature.batch or self.spec.batch
        return training_examples(self.spec, self.corpus, self.objective, "curvature", index, seed=self.curvature.seed, batch=size).to(self.device)

    def _loss(self, examples: Examples) -> Callable[[dict[str, Tensor]], Tensor]:
        def loss(params: dict[str, Tensor]) -> Tensor:
            total, count = self.objective.loss_sum(functional_call(self.model, params, (examples.inputs_BN,)), examples)
            return total / count

        return loss

    def _plain_gradient(self, examples: Examples) -> dict[str, Tensor]:
        return dict(zip(self.params, torch.autograd.grad(self._loss(examples)(self.params), tuple(self.params.values())), strict=True))

    def _clipped(self, gradient: dict[str, Tensor]) -> dict[str, Tensor]:
        self._set_gradient(gradient)
        return {name: param.grad for name, param in self.params.items() if param.grad is not None}

    def _set_gradient(self, gradient: dict[str, Tensor]) -> None:
        """The optimizer's gradient, clipped as in training; the formula keeps the true one."""
        for name, tensor in gradient.items():
            self.params[name].grad = tensor
        torch.nn.utils.clip_grad_norm_(list(self.params.values()), self.spec.clip_norm)
