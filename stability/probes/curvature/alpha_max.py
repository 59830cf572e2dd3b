"""α_max of a run's checkpoints by the paper's protocol (section 5.2.1), from both optimizer states →
``curvature/<phase>.parquet``."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from stability.build import as_read, build_objective, build_optimizer, resolve_device
from stability.config.base import checked
from stability.config.curvature import CurvatureSpec, SpectraSpec
from stability.config.run import RunSpec
from stability.corpora.cache import load, prepare
from stability.corpora.tokens.corpus import Corpus
from stability.objectives._base import Examples
from stability.probes.curvature.descent import Descent, LossSum, Step
from stability.runs.directory import RunDirectory, step_of
from stability.runs.parquet import holds_columns, read_metadata, write_parquet
from stability.runs.phases import file_of, phases, wanted
from stability.runs.schema import CURVATURE_COLUMNS
from stability.runs.steps import PROTOCOL, UNDEFINED
from stability.training import checkpoint
from stability.training.draws import training_examples
from stability.training.machine import prepare_torch
from stability.training.schedule import lr_factor

PARITY = "parity_steps"
BEFORE = {"gradient": "true"}  # where a default is not what was done before there was the field


def is_measured(directory: RunDirectory, curvature: CurvatureSpec) -> bool:
    """Whether every phase and table that was asked for is on disk under the same protocol."""
    return not missing_phases(directory, curvature) and not _spectra().missing_tables(directory, curvature)


def missing_phases(directory: RunDirectory, curvature: CurvatureSpec) -> list[str]:
    """The phases asked for whose steps are not on disk under the same protocol (a critical learning rate more than was
    asked for does no harm)."""
    if not {"alpha_max", "critical_lr"} & set(curvature.measure):
        return []
    return [name for name in wanted(directory, curvature.phase) if _missing_states(directory, name, curvature)]


def _missing_states(directory: RunDirectory, phase: str, curvature: CurvatureSpec) -> tuple[str, ...]:
    stored = stored_states(file_of(directory.curvature_file, phase), curvature)
    return tuple(state for state in curvature.state if state not in stored)


def stored_states(path: Path, curvature: CurvatureSpec) -> tuple[str, ...]:
    """The optimizer states that a file holds under this protocol; () where it holds another protocol's numbers.

    A state counts by what was done in it: gradient=auto is gradient=true in state "checkpoint" and gradient=clipped in
    state "paper". More steps by the paper's difference than were asked for do no harm; a file older than `parity_steps`
    counts as measured without them. One without the column ``gradient`` is from when weight_decay=false took out only
    the decay that it knew of.
    """
    stored = stored_spec(path)
    if (
        stored is None
        or json.loads(read_metadata(path)[PROTOCOL]).get(PARITY, curvature.parity_steps) < curvature.parity_steps
    ):
        return ()
    if not curvature.weight_decay and not holds_columns(path, ["gradient"]):
        return ()
    return tuple(state for state in stored.state if _protocol_in(state, stored) in _accepted(state, curvature))


def _protocol_in(state: str, curvature: CurvatureSpec) -> str:
    return protocol_of(curvature.model_copy(update={"state": (state,)}), tuple(SpectraSpec.model_fields))


def _accepted(state: str, curvature: CurvatureSpec) -> set[str]:
    alone = curvature.model_copy(update={"state": (state,)})
    return {protocol_of(alone), protocol_of(alone.model_copy(update={"measure": ("alpha_max", "critical_lr")}))}


def _spectra() -> Any:
    from stability.probes.curvature import spectra as spectra_of_loss  # which stands on this module

    return spectra_of_loss


def protocol_of(curvature: CurvatureSpec, reads: Sequence[str] = ()) -> str:
    """What the numbers of a table depend on, as canonical JSON; ``reads``: the settings of `SpectraSpec` that it takes
    beside the critical rate's."""
    critical = "critical_lr" in curvature.measure
    spectra = curvature.spectra.only((*(("critical_resolution",) if critical else ()), *reads))
    measured = ["alpha_max", "critical_lr"] if critical else ["alpha_max"]
    values = curvature.model_dump(mode="json", exclude={"phase", PARITY, "spectra"})
    gradients = {curvature.gradient_of(state) for state in curvature.state}
    values["gradient"] = gradients.pop() if len(gradients) == 1 else curvature.gradient
    return json.dumps({**values, "measure": measured, "spectra": spectra.model_dump(mode="json")}, sort_keys=True)


def stored_protocol(path: Path) -> str | None:
    """The protocol of a file as `protocol_of` writes it."""
    stored = stored_spec(path)
    return None if stored is None else protocol_of(stored, tuple(SpectraSpec.model_fields))


def stored_spec(path: Path) -> CurvatureSpec | None:
    """What a file was measured by; a field younger than the file reads as what was done before there was the field."""
    stored = read_metadata(path).get(PROTOCOL) if path.exists() else None
    if stored is None:
        return None
    try:
        return checked(CurvatureSpec, BEFORE | json.loads(stored))
    except ValueError:  # a field or value that is no longer: another protocol
        return None


def measure(
    directory: RunDirectory, curvature: CurvatureSpec, *, cache_dir: Path, device: str = "auto"
) -> Iterator[None]:
    """Measure what is missing, yielding after every optimizer step. A run without such a checkpoint (diverged before
    it) leaves an empty table.

    ``ValueError`` for a run that has not reached its verdict: what its last checkpoint gives now would pass for its
    terminal one later.
    """
    if not directory.finished:
        status = directory.status()
        raise ValueError(
            f"{directory.run_id} is {status['state']} at step {status['step']}; α_max is measured on runs that "
            "reached their verdict"
        )
    for name in missing_phases(directory, curvature):
        folder = phases(directory, name).get(name)
        asked = curvature.model_copy(update={"state": _missing_states(directory, name, curvature)})
        if folder is None:
            write_rows([], directory.curvature_file(name), asked)
        else:
            yield from _measure_checkpoint(folder, name, asked, cache_dir, device, directory.curvature_file(name))
    yield from _spectra().measure(directory, curvature, cache_dir=cache_dir, device=device)


def measure_checkpoint(
    folder: Path, phase: str, curvature: CurvatureSpec, *, cache_dir: Path, device: str = "auto"
) -> Iterator[None]:
    """One checkpoint folder, wherever it stands in its run, under a phase's name of its own."""
    if {"alpha_max", "critical_lr"} & set(curvature.measure):
        yield from _measure_checkpoint(
            folder, phase, curvature, cache_dir, device, RunDirectory.at(folder.parent.parent).curvature_file(phase)
        )
    yield from _spectra().measure_checkpoint(folder, phase, curvature, cache_dir=cache_dir, device=device)


def write_rows(
    rows: list[dict[str, Any]], target: Path, curvature: CurvatureSpec, undefined: Sequence[str] = ()
) -> None:
    """Replace the file; rows of other optimizer states that it holds under the same protocol stay. ``undefined``:
    states in which there is no α_max."""
    others = [state for state in stored_states(target, curvature) if state not in curvature.state]
    table = pd.DataFrame(rows, columns=CURVATURE_COLUMNS)
    if others:
        kept = pd.read_parquet(target).query("state in @others").reindex(columns=CURVATURE_COLUMNS)
        # a file may be older than the column
        kept["gradient"] = [curvature.gradient_of(state) for state in kept["state"]]
        table = pd.concat([kept, table], ignore_index=True) if rows else kept
        undefined = [
            *undefined,
            *(state for state in json.loads(read_metadata(target).get(UNDEFINED, "[]")) if state in others),
        ]
    whole = curvature.model_copy(update={"state": (*others, *curvature.state)})
    stored = json.dumps({**json.loads(protocol_of(whole)), PARITY: curvature.parity_steps}, sort_keys=True)
    write_parquet(table, target, {PROTOCOL: stored, UNDEFINED: json.dumps(list(undefined))})


def _measure_checkpoint(
    folder: Path, phase: str, curvature: CurvatureSpec, cache_dir: Path, device: str, target: Path
) -> Iterator[None]:
    spec, _ = checkpoint.load(folder)
    corpus = corpus_of(spec, cache_dir)
    run_id, rows, undefined = folder.parent.parent.name, [], []
    for state in curvature.state:
        observe = _spectra().critical_column(curvature.spectra) if "critical_lr" in curvature.measure else None
        probe = Probe(folder, spec, corpus, curvature, resolve_device(device), observe)
        if not probe.defines(state):
            undefined.append(state)
            continue
        for row in probe.rows(state):
            if row is not None:
                rows.append(
                    {"run_id": run_id, "phase": phase, "state": state, "checkpoint_step": step_of(folder), **row}
                )
            yield
    write_rows(rows, target, curvature, undefined)


def corpus_of(spec: RunSpec, cache_dir: Path) -> Corpus:
    """The prepared data of a run; prepared anew where the cache has gone. ``ValueError`` where it is no longer the same
    data."""
    if (cache_dir / spec.data_fingerprint).is_dir():
        return load(cache_dir, spec.data_fingerprint)
    corpus = as_read(prepare(spec.data, cache_dir), spec.objective, cache_dir.parent)
    if corpus.fingerprint != spec.data_fingerprint:
        trained_on, now = spec.data_fingerprint[:12], corpus.fingerprint[:12]
        raise ValueError(
            f"the run was trained on data {trained_on}, which is not under {cache_dir};\ndata={spec.data.name} reads "
            f"{now} now"
        )
    return corpus


class Probe:
    """A copy of a checkpoint, and the `Descent` that it takes; ``observe`` as there."""

    def __init__(
        self,
        folder: Path,
        spec: RunSpec,
        corpus: Corpus,
        curvature: CurvatureSpec,
        device: torch.device,
        observe: Callable[[Step], dict[str, Any]] | None = None,
    ):
        prepare_torch(spec.threads, device)
        self.spec, self.corpus, self.curvature, self.device = spec, corpus, curvature, device
        _, model = checkpoint.load(folder)
        self.model: nn.Module = model.to(device)
        self.objective = build_objective(spec, corpus.format)
        self.optimizer = build_optimizer(spec, self.model)
        self.trainer = checkpoint.load_trainer(folder)
        params: dict[str, Tensor] = dict(self.model.named_parameters())
        lr = spec.lr_peak * lr_factor(spec.schedule, self.trainer["step"], spec.steps)
        options: dict[str, Any] = {"observe": observe, "loss_in_double": self._loss_in_double}
        self.descent = Descent(
            params, self.optimizer, self._loss_sum, self._batch, curvature, lr=lr, clip_norm=spec.clip_norm, **options
        )

    def defines(self, state: str) -> bool:
        """Whether steps can start from an optimizer state: the paper's warm-up sets Adam's m and v; other optimizers
        have only the run's own state."""
        return state != "paper" or isinstance(self.optimizer, torch.optim.Adam)

    def rows(self, state: str) -> Iterator[dict[str, Any] | None]:
        """As `Descent.rows`, from the paper's optimizer state or the checkpoint's own."""
        return self.descent.rows(state, self.trainer["optimizer"])

    def _batch(self, index: int) -> Examples:
        size = self.curvature.batch or self.spec.batch
        return training_examples(
            self.spec, self.corpus, self.objective, "curvature", index, seed=self.curvature.seed, batch=size
        ).to(self.device)

    def _loss_sum(self, params: Mapping[str, Tensor], examples: Examples) -> tuple[Tensor, Tensor]:
        return self.objective.loss(self.model, examples, params)

    def _loss_in_double(self) -> LossSum:
        """The same on a copy of the model, whose buffers are float64 then, too."""
        model = copy.deepcopy(self.model).double()
        return lambda params, examples: self.objective.loss(model, examples, params)
