"""One loop for every objective: a generator that trains a run step by step, and can be left and resumed after any of
them."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stability.build import build_model, build_objective, build_optimizer, described
from stability.config.run import RunSpec
from stability.corpora.base import AbstractCorpus
from stability.models.backbone import num_parameters
from stability.objectives._base import Examples
from stability.runs.directory import STOPPED, RunDirectory, read_jsonl, write_json
from stability.runs.log import RunLog
from stability.runs.provenance import provenance
from stability.training.devices.one import Whole
from stability.training.devices.sharded import Shards
from stability.training.devices.shared import Team
from stability.training.draws import training_examples
from stability.training.evaluate import Validation
from stability.training.gradients import BlockStatistics
from stability.training.guards import Guard, first_non_finite
from stability.training.machine import peak_memory_mb, prepare_torch
from stability.training.schedule import lr_factor
from stability.training.store import Store
from stability.training.telemetry import Telemetry
from stability.training.verdict import SpikeWatch, judge


class Trainer:
    """The state of one run: model, optimizer, spike watch, step; and how one step changes it.

    In a sharded run (``placement``) each helper has one, too, which goes through `put`, `update`, `measure`, `is_sound`
    and `gathered` when the run's own does.
    """

    def __init__(
        self,
        spec: RunSpec,
        directory: RunDirectory,
        corpus: AbstractCorpus,
        device: torch.device,
        placement: Whole | Shards | None = None,
    ):
        prepare_torch(spec.threads, device)
        self.spec, self.directory, self.corpus, self.device = spec, directory, corpus, device
        self.objective = build_objective(spec, corpus.format)
        self.placement = placement or Whole(device)
        self.model = self.placement.build(partial(build_model, spec, corpus.format))
        self.optimizer = build_optimizer(spec, self.model)
        self.parameters = list(self.model.parameters())
        self.validation = Validation(spec, corpus, self.objective, device)
        self.watch = SpikeWatch(spec.verdict)
        self.guard, self.store = Guard(spec.guards), Store(spec, directory, corpus.format)
        self.statistics, self.gradient_rows = BlockStatistics(self.model, spec.log.gradients, self.placement.norm), []
        self.telemetry = Telemetry(device)
        self.team: Team | None = None
        self.step = 0
        self.diverged: str | None = None
        self.val_nll = self.init_nll = math.nan
        self.scores: dict[str, float] = {}  # what else is validated, at the last validation

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
        found = self.store.latest() or self.store.inherited()
        if found is None:
            return
        state = self._take(*found)
        self.watch.restore(state["watch"])
        self.step, self.init_nll, self.val_nll = state["step"], state["init_nll"], state["val_nll"]
        self.scores = state.get("scores", {})
        # else the checkpoint is older than guards, or of the run that this one goes on from, whose guards and best
        # checkpoints are its own
        if "guard" in state and self.store.newest:
            self.guard.resume(state["guard"])
            self.store.keeper.resume(state["best"])

    def _take(self, parameters: dict[str, Tensor], state: dict[str, Any]) -> dict[str, Any]:
        self.put(parameters, state["optimizer"])
        return state

    def put(self, parameters: dict[str, Tensor] | None = None, state: dict[str, Any] | None = None) -> None:
        """Take over parameters and the optimizer's state (None: that of a new one)."""
        self.placement.tell("put")
        self.optimizer = build_optimizer(self.spec, self.model)
        self.placement.put(self.model, self.optimizer, parameters, state)

    def _restore(self) -> int:
        """Take parameters and optimizer state back to the last good checkpoint, or to the initialisation where there is
        none yet; its step. One that an interruption left is never among them, or a resumed run would go on from
        elsewhere than an undisturbed one."""
        found = self.store.first_of(self.guard.candidates())
        step = 0 if found is None else self._take(*found)["step"]
        if found is None:
            self.put(build_model(self.spec, self.corpus.format).state_dict())
        self.guard.restored(step)
        return step

    def save(self) -> None:
        """A checkpoint of the current step."""
        state = {"step": self.step, "init_nll": self.init_nll, "val_nll": self.val_nll, "watch": self.watch.state()}
        model, optimizer = self.gathered()
        state |= {"guard": self.guard.state(), "best": self.store.keeper.state(), "optimizer": optimizer}
        state |= {"scores": self.scores} if self.scores else {}
        self.log.sync()
        self.store.write(self.step, model, state)

    def gathered(self) -> tuple[nn.Module, dict[str, Any]]:
        """The whole model and the optimizer's whole state."""
        self.placement.tell("gathered")
        return self.placement.gathered(self.model, self.optimizer)

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

    def is_sound(self) -> bool:
        """Whether every parameter is finite: what guards do not look at after each step may have got in."""
        self.placement.tell("is_sound")
        return self.placement.every(all(bool(part.isfinite().all()) for part in self.placement.local(self.parameters)))

    def measure(self) -> dict[str, float]:
        """The validation numbers as they go into a row, the NLL first."""
        self.placement.tell("measure")
        measured = self.validation.measure(self.model, self.placement.spread)
        self.val_nll, self.scores = (
            measured["val_nll"],
            {name: value for name, value in measured.items() if name != "val_nll"},
        )
        return measured

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
            if self.store.keeper.validates(step):
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
            | self.placement.described()
            | self.telemetry.sample()
        )
        if self.diverged is None and self.store.keeper.is_due(step):
            self.guard.written(step, self.store.keeper.kept(step))
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
            self.store.keeper.validated(self.step, self.val_nll)

    def _looks_at(self, step: int) -> bool:
        """Whether this step is looked at for numbers that are not finite: as often as the guards are told to, and
        wherever the run might be kept or judged by it."""
        return (
            step % self.spec.guards.check_every == 0
            or self.store.keeper.validates(step)
            or self.store.keeper.may_be_due(step)
        )

    def _fault(self, row: dict[str, Any]) -> str | None:
        """What is wrong with a step that is looked at."""
        return (
            (first_non_finite(row, row["step"]) or self.guard.too_large(row)) if self._looks_at(row["step"]) else None
        )

    def _meet(self, reason: str, row: dict[str, Any], *, has_moved: bool = False) -> None:
        """Let the guards answer a fault: the run diverges, the step stays out, or the last good state comes back."""
        answer = self.guard.answer(has_moved=has_moved or row["update_norm"] != 0.0)
        if answer == "stop":
            self.diverged = self.guard.account(reason)
        elif answer == "restore":
            row["restored_step"] = self._restore()

    def update(self, step: int) -> dict[str, Any]:
        """Gradient, clipping and optimizer step number ``step``; the log row of it. No step is taken where loss or
        gradient is not finite."""
        self.placement.tell("update", step)
        spec = self.spec
        lr = spec.lr_peak * lr_factor(spec.schedule, step, spec.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        examples = training_examples(
            spec, self.corpus, self.objective, "train", step, seed=spec.seed, batch=spec.batch
        ).to(self.device)
        self.optimizer.zero_grad(set_to_none=True)
        if self.team is not None:
            self.team.begin(step, self.parameters)
        loss = self._backward(examples)
        self.gradient_rows, is_due = [], self.statistics.is_due(step)
        gradient = self.statistics.gradient(self.parameters) if is_due else {}
        grad_norm = self.placement.clip(self.parameters, spec.clip_norm)
        row = {"step": step, "loss": loss.item(), "grad_norm": grad_norm.item(), "update_norm": 0.0, "lr": lr}
        if spec.guards.post_clip_norm is not None:
            row["clipped_norm"] = self.placement.norm(
                [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            ).item()
        before = [part.clone() for part in self.placement.local(self.parameters)]
        if self._fault(row) is None:
            self.optimizer.step()
        moved = [after - start for after, start in zip(self.placement.local(self.parameters), before, strict=True)]
        row["update_norm"] = self.placement.norm(moved).item()
        if is_due:
            self.gradient_rows = self.statistics.rows(step, gradient, before, moved)
        return row

    def _backward(self, examples: Examples) -> Tensor:
        """The batch's mean loss, its gradient added to the parameters'. Microbatch by microbatch, each of them over the
        count of the whole batch: one of few masked tokens weighs no more than they do."""
        count = self.objective.count(examples, torch.float32)
        totals = []
        for index, part in enumerate(self.placement.part(examples).split(self.spec.microbatch or self.spec.batch)):
            if self.team is not None and not self.team.is_mine(index):
                totals.append(self.team.take_in(index, self.parameters))
                continue
            total, _ = self.objective.loss(self.model, part)
            (total / count).backward()
            totals.append(total.detach())
        return self.placement.total(torch.stack(totals).sum()) / count

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
        } | ({"best_steps": self.store.keeper.best_steps} if self.spec.checkpoint.keep_best else {})
        self.store.remove_unplanned(self.step)
        self.directory.set_status(verdict, step=self.step, reason=reason, num_steps=self.spec.steps, result=result)
        return {"verdict": verdict, "reason": reason, **result}
