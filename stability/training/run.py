"""A run from its spec to its verdict: a replica plus validation, guards, checkpoints and judgement."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stability.build import build_model, described, resolve_device, sequence_state_bytes, shapes
from stability.config.identity import run_id
from stability.config.run import RunSpec
from stability.corpora.base import AbstractCorpus
from stability.corpora.cache import load
from stability.models.backbone import num_parameters
from stability.optimizers import Averaging, state_bytes
from stability.runs.directory import RunDirectory, checkpoint_name, readable_rows
from stability.runs.log import Sinks
from stability.runs.verdict import SpikeWatch, judge
from stability.training import checkpoint, loop
from stability.training.checkpoint import MOVING, Checkpoints, Held
from stability.training.devices import Devices, OneDevice, Telemetry, peak_memory_mb
from stability.training.step import Keeper, Replica, first_non_finite

if TYPE_CHECKING:
    from stability.training.weights import Weights


def train(
    spec: RunSpec,
    directory: RunDirectory,
    *,
    cache_dir: Path,
    device: str = "auto",
    sinks: Sinks | None = None,
    command: str = "",
    devices: int = 1,
    shard: bool = False,
    stop_at: int | None = None,
) -> Iterator[None]:
    """Train a run to its verdict, yielding after every optimizer step (`loop.train`).

    A finished run is left alone.

    Args:
        spec: the run.
        directory: its folder in the pool.
        cache_dir: the pool's prepared data.
        device: "auto", "cpu" or "cuda".
        sinks: receive each row of metrics.jsonl; they are not closed.
        command: command line of the launch, for provenance.json.
        devices: number of devices that share the microbatches; it changes no bit.
        shard: share parameters and batch instead; rounding differs (`devices.sharded`).
        stop_at: step after which the run is left as ``stopped``, if it is not the last.
    """
    prepared = _prepare(spec, directory, cache_dir, device, devices, shard)
    return loop.train(directory, prepared, command=command, sinks=sinks, stop_at=stop_at)


@contextmanager
def _prepare(
    spec: RunSpec, directory: RunDirectory, cache_dir: Path, device: str, num: int, shard: bool
) -> Iterator[Trainer]:
    """Start all other devices' processes until exit, and write the run's spec."""
    corpus, first = load(cache_dir, spec.data_fingerprint), resolve_device(device)
    weights = None
    if spec.weights is not None:
        from stability.training.weights import Weights

        weights = Weights.load_cached(spec.weights, cache_dir)
    devices: Devices
    if shard:
        from stability.training.devices.sharded import ShardedDevices

        devices = ShardedDevices.start(spec, cache_dir, first, num)
    elif num > 1:
        from stability.training.devices.shared import SharedDevices

        devices = SharedDevices(spec, cache_dir, first, num)
    else:
        devices = OneDevice(first)
    with devices:
        trainer = Trainer(spec, directory, corpus, first, devices, weights)
        directory.write_spec(spec.model_dump(mode="json"))
        with closing(trainer.telemetry):
            yield trainer


class Trainer(Replica, loop.Training):
    """A run in training, in its main process."""

    spec: RunSpec
    running = {"phase": "training"}

    def __init__(
        self,
        spec: RunSpec,
        directory: RunDirectory,
        corpus: AbstractCorpus,
        device: torch.device,
        devices: Devices | None = None,
        weights: Weights | None = None,
    ):
        super().__init__(spec, corpus, device, devices)
        self.directory, self.num_steps = directory, spec.steps
        self.checkpoints = RunCheckpoints(spec, directory, corpus.format, self.keeper)
        self.watch, self.telemetry = SpikeWatch(spec.verdict), Telemetry(device)
        self.init_nll, self._weights = math.nan, weights
        if weights is not None:  # until a checkpoint of the run itself is restored
            self.put(parameters=self._choose_start())

    def _choose_start(self) -> dict[str, Tensor]:
        """Return the parameters before any step: drawn from the seed, or the run's weights."""
        drawn = build_model(self.spec, self.corpus.format).state_dict()
        return drawn if self._weights is None else self._weights.state(drawn)

    def provenance(self) -> dict[str, Any]:
        data = {"description": described(self.spec, self.corpus), "fingerprint": self.corpus.fingerprint}
        if self._weights is None:
            return {"data": data}
        return {"data": data, "weights": self._weights.account(shapes(self.spec, self.corpus.format))}

    def first_row(self) -> dict[str, Any]:
        measured = self.measure()
        self.init_nll = self.val_nll
        return {"step": 0, **measured}

    def record_step(self, row: dict[str, Any]) -> None:
        """Pass the step to the guards, validate if due, and record a due checkpoint."""
        step = row["step"]
        if reason := self.reason_to_skip(row):
            self._answer(reason, row)
        elif self.checks_step(step):
            self.guard.sound_step()
        if self.diverged is None:
            self.step = step
            if math.isfinite(row["loss"]):
                self.watch.update(step, row["loss"])
            if self.keeper.validates(step):
                self._validate(row)
        if self.spec.guards.on_nonfinite != "stop":
            row |= self.guard.counts()
        self.saves = self.keeper.is_due(step)
        if self.saves and self.diverged is None:
            self.guard.record_checkpoint(step, self.keeper.choose_kept(step))

    def _validate(self, row: dict[str, Any]) -> None:
        """Add the validation scores to the row; after a restore, those of the restored state."""
        row |= self.measure()
        if reason := first_non_finite({"validation NLL": self.val_nll}, self.step):
            self._answer(reason, row, has_moved=True)
            row |= self.measure() if self.diverged is None else {}
            self.diverged = self.diverged or first_non_finite({"restored validation NLL": self.val_nll}, self.step)
        if self.diverged is None:
            self.keeper.record_validation(self.step, self.val_nll)

    def _answer(self, reason: str, row: dict[str, Any], *, has_moved: bool = False) -> None:
        """Pass a bad step to the guards: diverge, skip or restore."""
        answer = self.guard.answer(has_moved=has_moved or row["update_norm"] != 0.0)
        if answer == "stop":
            self.diverged = self.guard.explain_end(reason)
        elif answer == "restore":
            row["restored_step"] = self._take_back()

    def _take_back(self) -> int:
        """Load the last good checkpoint, else the initialisation; return its step."""
        # Checkpoints of an interruption are never candidates: a resumed run would else restore another state than an
        # undisturbed one.
        found = self.checkpoints.first_of(self.guard.candidates())
        parameters, state = found or (self._choose_start(), {})
        self.put(parameters=parameters, state=state.get("optimizer"))
        step = state.get("step", 0)
        self.guard.record_restore(step)
        return step

    def timing(self, seconds: float) -> dict[str, Any]:
        speed = {"tokens_per_s": self._tokens / seconds, "memory_mb": peak_memory_mb(self.device)}
        return speed | self.devices.describe() | self.telemetry.sample()

    @property
    def _tokens(self) -> int:
        """Tokens of a step."""
        return self.spec.batch * self.spec.model.positions

    def state(self) -> tuple[nn.Module, dict[str, Any]]:
        state = {"step": self.step, "init_nll": self.init_nll, "val_nll": self.val_nll, "watch": self.watch.state()}
        model, optimizer = self.gather()
        state |= {"guard": self.guard.state(), "best": self.keeper.state(), "optimizer": optimizer}
        state |= {"scores": self.scores} if self.scores else {}
        state |= {} if self.edge.start is None else {"edge": self.edge.start}
        if isinstance(self.optimizer, Averaging):
            return self.copy_averaged(), state | {MOVING: dict(model.state_dict())}
        return model, state

    def restore(self, parameters: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.put(parameters=parameters, state=state["optimizer"])
        self.watch.resume(state["watch"])
        self.step, self.init_nll, self.val_nll = state["step"], state["init_nll"], state["val_nll"]
        self.scores, self.edge.start = state.get("scores", {}), state.get("edge")
        # A checkpoint may be older than guards, or belong to the run named by init; guards are not inherited.
        if "guard" in state and self.checkpoints.newest:
            self.guard.resume(state["guard"])
            self.keeper.resume(state["best"])

    def judge(self, wall_s: float) -> tuple[str, str, dict[str, Any]]:
        """Judge the run by its validation NLL and its guards.

        Args:
            wall_s: training time in seconds.
        """
        unigram_nll = self.validation.unigram_nll(frequencies := self.corpus.log_frequencies())
        judged = judge(self.val_nll, self.init_nll, unigram_nll, self.watch, self.objective.words.baseline)
        verdict, reason = judged if self.diverged is None else ("diverged", self.diverged)
        measured = {"val_nll": self.val_nll, **self.scores}
        # The median: validations and other interruptions of a few steps hardly change it.
        timings = readable_rows(self.directory.timing_file, ("step", "tokens_per_s"))
        seconds = [self._tokens / row["tokens_per_s"] for row in timings if row["tokens_per_s"] > 0]
        result = {
            **(measured if self.diverged is None else dict.fromkeys(measured)),
            "init_nll": self.init_nll,
            "unigram_nll": unigram_nll,
            **self.validation.unigram_scores(frequencies),
            "num_params": num_parameters(self.model),
            "num_tokens": self.step * self._tokens,
            "wall_s": wall_s,
            "optimizer_state_bytes": round(state_bytes(self.optimizer) * num_parameters(self.model)),
            "step_s": median(seconds) if seconds else None,
            "state_bytes": sequence_state_bytes(self.spec, self.objective.direction),
            **self.guard.counts(),
        } | ({"best_steps": self.keeper.best_steps} if self.spec.checkpoint.keep_best else {})
        return verdict, reason, result


class RunCheckpoints(Checkpoints):
    """The checkpoints of a run, planned by its ``keeper``."""

    def __init__(self, spec: RunSpec, directory: RunDirectory, data_format: Any, keeper: Keeper):
        super().__init__(spec, directory, data_format)
        self._keeper, self._init = keeper, spec.init

    def choose_kept(self, step: int) -> set[int]:
        return self._keeper.choose_kept(step)

    def latest(self, until: float = math.inf, damage: str = "") -> Held | None:
        """Return the newest readable checkpoint, else the one named by ``init``, else None.

        The latter belongs to another run of the same pool, so it does not count as this run's own.
        """
        return super().latest(until, damage) or self._read_inherited()

    def _read_inherited(self) -> Held | None:
        init = self._init
        if init is None:
            return None
        folder = self._directory.path.parent / init.run / "checkpoints" / checkpoint_name(init.step)
        return _read_held(folder, init.run)

    def read(self, folder: Path) -> Held:
        return _read_held(folder, self._directory.run_id)


def _read_held(folder: Path, run: str) -> Held:
    """Return the trained parameters and the trainer's state of a run's checkpoint."""
    spec, model, state = checkpoint.read(folder)
    if run_id(spec) != run:
        raise ValueError(f"{folder} belongs to run {run_id(spec)}")
    return state.pop(MOVING, None) or model.state_dict(), state
