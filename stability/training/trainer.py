"""A run's own process: what one step of it is, for every objective; `checkpointed` has the loop around it."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from stability.build import build_model, sequence_state_bytes
from stability.config.run import RunSpec
from stability.corpora.base import AbstractCorpus
from stability.models.backbone import num_parameters
from stability.optimizers import Averaging, state_bytes
from stability.runs.directory import RunDirectory, readable_rows
from stability.training.checkpoint import MOVING
from stability.training.checkpointed import Checkpointed
from stability.training.devices.base import Devices
from stability.training.guards import first_non_finite
from stability.training.machine import peak_memory_mb
from stability.training.replica import Replica
from stability.training.store import RunStore
from stability.training.telemetry import Telemetry
from stability.training.verdict import SpikeWatch, judge
from stability.training.weights import Weights


class Trainer(Replica, Checkpointed):
    """The trainer of a run adds to a replica how it is validated, guarded, kept and judged."""

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
        Replica.__init__(self, spec, corpus, device, devices)
        Checkpointed.__init__(self, directory, RunStore(spec, directory, corpus.format, self.keeper), spec.steps)
        self.watch, self.telemetry = SpikeWatch(spec.verdict), Telemetry(device)
        self.init_nll, self._weights = math.nan, weights
        if weights is not None:  # until a checkpoint of the run itself is restored
            self.put(parameters=self._beginning())

    def _beginning(self) -> dict[str, Tensor]:
        """Return the parameters before any step: drawn from the seed, or those of the run's weights."""
        drawn = build_model(self.spec, self.corpus.format).state_dict()
        return drawn if self._weights is None else self._weights.state(drawn)

    def first_row(self) -> dict[str, Any]:
        measured = self.measure()
        self.init_nll = self.val_nll
        return {"step": 0, **measured}

    def restore(self, parameters: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.put(parameters=parameters, state=state["optimizer"])
        self.watch.resume(state["watch"])
        self.step, self.init_nll, self.val_nll = state["step"], state["init_nll"], state["val_nll"]
        self.scores = state.get("scores", {})
        # else the checkpoint is older than guards, or of the run that this one goes on from: its guards are its own
        if "guard" in state and self.store.newest:
            self.guard.resume(state["guard"])
            self.keeper.resume(state["best"])

    def state(self) -> tuple[nn.Module, dict[str, Any]]:
        state = {"step": self.step, "init_nll": self.init_nll, "val_nll": self.val_nll, "watch": self.watch.state()}
        model, optimizer = self.gathered()
        state |= {"guard": self.guard.state(), "best": self.keeper.state(), "optimizer": optimizer}
        state |= {"scores": self.scores} if self.scores else {}
        if isinstance(self.optimizer, Averaging):
            return self.averaged(), state | {MOVING: dict(model.state_dict())}
        return model, state

    def _take_back(self) -> int:
        """Take parameters and optimizer state back to the last good checkpoint, or to the initialisation where there is
        none yet; its step. One that an interruption left is never among them, or a resumed run would go on from
        elsewhere than an undisturbed one."""
        found = self.store.first_of(self.guard.candidates())
        parameters, state = found or (self._beginning(), {})
        self.put(parameters=parameters, state=state.get("optimizer"))
        step = state.get("step", 0)
        self.guard.restored(step)
        return step

    def advance(self) -> None:
        """Take one optimizer step; write its log rows; validate and save a checkpoint where they are due."""
        step, spec = self.step + 1, self.spec
        started = self.wall_s()
        row = self.update(step)
        if reason := self._fault(row):
            self._meet(reason, row)
        elif self._looks_at(step):
            self.guard.sound_step()
        if self.diverged is None:
            self.step = step
            if math.isfinite(row["loss"]):
                self.watch.update(step, row["loss"])
            if self.keeper.validates(step):
                self._validate(row)
        if spec.guards.on_nonfinite != "stop":
            row |= self.guard.counts()
        self.log.metrics(row)
        if self.gradient_rows:
            self.log.gradients(self.gradient_rows)
        now = self.wall_s()
        speed = {"wall_s": now, "tokens_per_s": spec.batch * spec.model.positions / (now - started)}
        self.log.timing(
            {"step": step, **speed, "memory_mb": peak_memory_mb(self.device)}
            | self.devices.described()
            | self.telemetry.sample()
        )
        if self.diverged is None and self.store.is_due(step):
            self.guard.written(step, self.keeper.kept(step))
            self.save()

    def _validate(self, row: dict[str, Any]) -> None:
        """Put the validation NLL, and what is validated beside it, into the row. After a restore it is that of what was
        restored, which the run goes on from, or ends with."""
        row |= self.measure()
        if reason := first_non_finite({"validation NLL": self.val_nll}, self.step):
            self._meet(reason, row, has_moved=True)
            row |= self.measure() if self.diverged is None else {}
            self.diverged = self.diverged or first_non_finite({"restored validation NLL": self.val_nll}, self.step)
        if self.diverged is None:
            self.keeper.validated(self.step, self.val_nll)

    def _meet(self, reason: str, row: dict[str, Any], *, has_moved: bool = False) -> None:
        """Let the guards answer a fault: the run diverges, the step stays out, or the last good state comes back."""
        answer = self.guard.answer(has_moved=has_moved or row["update_norm"] != 0.0)
        if answer == "stop":
            self.diverged = self.guard.account(reason)
        elif answer == "restore":
            row["restored_step"] = self._take_back()

    def judged(self) -> tuple[str, str, dict[str, Any]]:
        """Judge by the validation NLL, and by what the guards found."""
        unigram_nll = self.validation.unigram_nll(frequencies := self.corpus.log_frequencies())
        judged = judge(self.val_nll, self.init_nll, unigram_nll, self.watch, self.objective.words.baseline)
        verdict, reason = judged if self.diverged is None else ("diverged", self.diverged)
        measured = {"val_nll": self.val_nll, **self.scores}
        result = {
            **(measured if self.diverged is None else dict.fromkeys(measured)),
            "init_nll": self.init_nll,
            "unigram_nll": unigram_nll,
            **self.validation.unigram_scores(frequencies),
            "num_params": num_parameters(self.model),
            "num_tokens": self.step * self.spec.batch * self.spec.model.positions,
            "wall_s": self.wall_s(),
            "optimizer_state_bytes": round(state_bytes(self.optimizer) * num_parameters(self.model)),
            "step_s": self._median_step_s(),
            "state_bytes": sequence_state_bytes(self.spec, self.objective.direction),
            **self.guard.counts(),
        } | ({"best_steps": self.keeper.best_steps} if self.spec.checkpoint.keep_best else {})
        return verdict, reason, result

    def _median_step_s(self) -> float | None:
        """Return the median seconds of a step, which validations and other interruptions of a few hardly move; None
        without a logged one."""
        tokens = self.spec.batch * self.spec.model.positions
        timings = readable_rows(self.directory.timing_file, ("step", "tokens_per_s"))
        seconds = [tokens / row["tokens_per_s"] for row in timings if row["tokens_per_s"] > 0]
        return median(seconds) if seconds else None

    def close(self) -> None:
        self.telemetry.close()
        super().close()
