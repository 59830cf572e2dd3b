"""One loop for every objective: a generator that trains a run step by step, and can be left and resumed after any of
them."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor

from stability.build import build_model, described
from stability.config.run import RunSpec
from stability.corpora.base import AbstractCorpus
from stability.models.backbone import num_parameters
from stability.runs.directory import STOPPED, RunDirectory, read_jsonl, write_json
from stability.runs.log import RunLog
from stability.runs.provenance import provenance
from stability.training.devices.base import Devices
from stability.training.guards import first_non_finite
from stability.training.machine import peak_memory_mb
from stability.training.replica import Replica
from stability.training.store import Store
from stability.training.telemetry import Telemetry
from stability.training.verdict import SpikeWatch, judge


class Trainer(Replica):
    """The run's own process: beside its part of the computing the step that the run stands at, its log, its checkpoints
    and its verdict."""

    def __init__(
        self,
        spec: RunSpec,
        directory: RunDirectory,
        corpus: AbstractCorpus,
        device: torch.device,
        devices: Devices | None = None,
    ):
        super().__init__(spec, corpus, device, devices)
        self.directory = directory
        self.watch, self.telemetry = SpikeWatch(spec.verdict), Telemetry(device)
        self.store = Store(spec, directory, corpus.format, self.keeper)
        self.step = 0
        self.diverged: str | None = None
        self.init_nll = math.nan

    def open(self, wandb: dict[str, Any] | None, command: str) -> None:
        """Claim the directory, resume from the last readable checkpoint, and say that the run is running."""
        self.directory.write_spec(self.spec.model_dump(mode="json"))
        description = {"description": described(self.spec, self.corpus), "fingerprint": self.corpus.fingerprint}
        write_json(
            self.directory.provenance_file,
            {**provenance(command), "data": description, "device": str(self.device), "threads": self.spec.threads},
        )
        self._resume()
        self.log = RunLog(self.directory, resume_after=self.step if self.step else -1, wandb=wandb)
        timings = list(read_jsonl(self.directory.timing_file))
        self._started = time.perf_counter() - (timings[-1]["wall_s"] if timings else 0.0)
        self.directory.set_status("running", step=self.step, num_steps=self.spec.steps, phase="training")
        if self.step == 0:
            measured = self.measure()
            self.init_nll = self.val_nll
            self.log.metrics({"step": 0, **measured})

    def _resume(self) -> None:
        found = self.store.latest()
        if found is None:
            return
        state = self._take(*found)
        self.watch.restore(state["watch"])
        self.step, self.init_nll, self.val_nll = state["step"], state["init_nll"], state["val_nll"]
        self.scores = state.get("scores", {})
        if "guard" in state:  # else the checkpoint is older than guards
            self.guard.resume(state["guard"])
            self.keeper.resume(state["best"])

    def _take(self, parameters: dict[str, Tensor], state: dict[str, Any]) -> dict[str, Any]:
        self.put(parameters=parameters, state=state["optimizer"])
        return state

    def _restore(self) -> int:
        """Take parameters and optimizer state back to the last good checkpoint, or to the initialisation where there is
        none yet; its step. One that an interruption left is never among them, or a resumed run would go on from
        elsewhere than an undisturbed one."""
        found = self.store.first_of(self.guard.candidates())
        step = 0 if found is None else self._take(*found)["step"]
        if found is None:
            self.put(parameters=build_model(self.spec, self.corpus.format).state_dict())
        self.guard.restored(step)
        return step

    def save(self) -> None:
        """A checkpoint of the current step."""
        state = {"step": self.step, "init_nll": self.init_nll, "val_nll": self.val_nll, "watch": self.watch.state()}
        model, optimizer = self.gathered()
        state |= {"guard": self.guard.state(), "best": self.keeper.state(), "optimizer": optimizer}
        state |= {"scores": self.scores} if self.scores else {}
        self.log.sync()
        self.store.write(self.step, model, state)

    def leave(self, state: str = STOPPED) -> dict[str, Any]:
        """End before the last step, without a verdict, so that the run can be gone on with from the step that the
        status names."""
        # else the parameters may hold what diverged; the resumed run finds it again
        if self.diverged is None and self.is_sound():
            self.save()
        step = self.store.newest
        self.directory.set_status(
            state, step=step, reason=f"{state} at step {step} of {self.spec.steps}", num_steps=self.spec.steps
        )
        return {}

    def advance(self) -> None:
        """Take one optimizer step; write its log rows; validate and save a checkpoint where they are due."""
        step, spec = self.step + 1, self.spec
        started = time.perf_counter()
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
        now = time.perf_counter()
        speed = {"wall_s": now - self._started, "tokens_per_s": spec.batch * spec.model.positions / (now - started)}
        self.log.timing(
            {"step": step, **speed, "memory_mb": peak_memory_mb(self.device)}
            | self.devices.described()
            | self.telemetry.sample()
        )
        if self.diverged is None and self.store.is_due(step):
            self.guard.written(step, self.keeper.kept(step))
            self.save()

    def _validate(self, row: dict[str, Any]) -> None:
        """Validation NLL, and what is validated beside it, into the row. After a restore it is that of what was
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
            row["restored_step"] = self._restore()

    def finish(self) -> dict[str, Any]:
        """Write verdict and result, the last thing that training writes; returned as a summary."""
        unigram_nll = self.validation.unigram_nll(frequencies := self.corpus.log_frequencies())
        judged = judge(self.val_nll, self.init_nll, unigram_nll, self.watch, self.objective.baseline)
        verdict, reason = judged if self.diverged is None else ("diverged", self.diverged)
        measured = {"val_nll": self.val_nll, **self.scores}
        result = {
            **(measured if self.diverged is None else dict.fromkeys(measured)),
            "init_nll": self.init_nll,
            "unigram_nll": unigram_nll,
            **self.validation.unigram_scores(frequencies),
            "num_params": num_parameters(self.model),
            "num_tokens": self.step * self.spec.batch * self.spec.model.positions,
            "wall_s": time.perf_counter() - self._started,
            **self.guard.counts(),
        } | ({"best_steps": self.keeper.best_steps} if self.spec.checkpoint.keep_best else {})
        self.store.remove_unplanned(self.step)
        self.directory.set_status(verdict, step=self.step, reason=reason, num_steps=self.spec.steps, result=result)
        return {"verdict": verdict, "reason": reason, **result}
