"""One training step of a run, and all other work that its processes share; its guards and its plan of checkpoints."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from stability.build import build_model, build_objective, build_optimizer
from stability.config.run import RunSpec
from stability.config.training import GuardSpec
from stability.corpora.base import AbstractCorpus
from stability.models.passes import computing_in, differentiated_once, dropping, drops, generator_for, in_mode
from stability.objectives import Examples, training_examples
from stability.optimizers import Probing, TakingHessian, lr_factor, set_lr, use_averages
from stability.training import captured
from stability.training.devices import Devices, OneDevice, Sums
from stability.training.evaluate import Validation
from stability.training.machine import compile_model, prepare_torch
from stability.training.signals import SHARE_OF_SEQUENCES, ActivationStatistics, BlockStatistics, Edge, Found

RECORDED_FROM = 100  # steps of a run that repay the recording of its operations


class Replica:
    """Model and optimizer of a run, or this process's part of them; no file access.

    ``FOLLOWED`` lists methods that the helper processes call together with the main process (`Devices.tell`). Their
    positional arguments are numbers; only the main process passes keyword arguments. No such method calls another.
    """

    FOLLOWED: ClassVar[tuple[str, ...]] = ("train_step", "measure", "put", "gather", "copy_averaged", "is_sound")

    def __init__(self, spec: RunSpec, corpus: AbstractCorpus, device: torch.device, devices: Devices | None = None):
        prepare_torch(spec.threads, device, spec.precision)
        self.spec, self.corpus, self.device = spec, corpus, device
        self.objective = build_objective(spec, corpus.format)
        self.devices = devices or OneDevice(device)
        self.model = self.devices.build(partial(build_model, spec, corpus.format))
        self.forward = compile_model(self.model) if spec.compile else self.model  # for training only
        self.optimizer = build_optimizer(spec, self.model)
        self.parameters = list(self.model.parameters())
        self._captured: captured.CapturedBackward | None = None
        if spec.cuda_graphs or self._is_recordable():
            if spec.cuda_graphs:
                captured.require_graphs(device)
            capture = captured.capture_on_cuda if spec.cuda_graphs else captured.capture_on_cpu
            self._captured = captured.CapturedBackward(self._captured_pass, self.parameters, capture)
        self.validation = Validation(spec, corpus, self.objective, device)
        self.guard, self.keeper, self.clip_limit = Guard(spec.guards), Keeper(spec), spec.clip_limit
        self.statistics = BlockStatistics(self.model, self.devices.norms)
        self.activations, self.edge = ActivationStatistics(spec, self.model, self.statistics), Edge()
        self.signals: dict[str, list[dict[str, Any]]] = {}  # of the last step, by log
        self._copy: list[Tensor] | None = None
        self.val_nll = math.nan
        self.scores: dict[str, float] = {}  # further scores of the last validation

    def _is_recordable(self) -> bool:
        """Return whether recording the backward pass's operations could pay, and nothing but tensors changes in it."""
        spec = self.spec
        return (
            self.device.type == "cpu"
            and type(self.devices) is OneDevice  # a subclass sends and receives within the pass
            and spec.steps >= RECORDED_FROM
            and not spec.compile
            and not spec.plugins  # their code may count its calls
            and not drops(self.model)
            and all(isinstance(part, nn.Parameter) for part in self.model.state_dict(keep_vars=True).values())
        )

    def put(self, *, parameters: dict[str, Tensor] | None = None, state: dict[str, Any] | None = None) -> None:
        """Set parameters and optimizer state.

        Args:
            parameters: new parameters.
            state: the optimizer's state; None: that of a new optimizer.
        """
        self.devices.tell("put")
        self.optimizer = build_optimizer(self.spec, self.model)
        self.devices.put(self.model, self.optimizer, parameters, state)

    def gather(self) -> tuple[nn.Module, dict[str, Any]]:
        """Return the whole model and the optimizer's whole state."""
        self.devices.tell("gather")
        return self.devices.gather(self.model, self.optimizer)

    def copy_averaged(self) -> nn.Module:
        """Return a copy of the whole model with the averaged weights for evaluation."""
        self.devices.tell("copy_averaged")
        with use_averages(self.optimizer):
            model, _ = self.devices.gather(self.model, self.optimizer)
            return copy.deepcopy(model)

    def is_sound(self) -> bool:
        """Return whether every parameter is finite; guards may not check each step."""
        self.devices.tell("is_sound")
        return self.devices.all_true(all(bool(part.isfinite().all()) for part in self.devices.local(self.parameters)))

    def measure(self) -> dict[str, float]:
        """Return the validation scores of a log row, NLL first."""
        self.devices.tell("measure")
        with use_averages(self.optimizer):
            measured = self.validation.measure(self.model, self.devices.spread)
        self.val_nll = measured["val_nll"]
        self.scores = {name: value for name, value in measured.items() if name != "val_nll"}
        return measured

    def train_step(self, step: int) -> dict[str, Any]:
        """Take one optimizer step unless a value is not finite or a guard objects.

        Returns:
            Its row of metrics.jsonl: ``loss`` in nats, ``grad_norm`` before clipping, ``update_norm`` (0.0: no step was
            taken), ``lr``; with auxiliary losses and guards ``auxiliary_loss`` and ``clipped_norm``.
        """
        self.devices.tell("train_step", step)
        spec = self.spec
        lr = spec.lr_peak * lr_factor(spec.schedule, step, spec.steps)
        set_lr(self.optimizer, lr)
        examples = training_examples(
            spec, self.corpus, self.objective, "train", step, seed=spec.seed, batch=spec.batch
        ).to(self.device)

        self.signals = {}
        seen = self._measure_activations(examples, step) if _is_due(spec.log.activations, step) else None

        # Forward, backward, clip
        self.optimizer.zero_grad(set_to_none=True)
        loss, *auxiliary = self._backward(examples, step)
        is_due = _is_due(spec.log.gradients, step)
        gradient = self.statistics.gradient(self.parameters) if is_due else {}
        grad_norm = self.devices.clip(self.parameters, self.clip_limit)
        row = {"step": step, "loss": loss.item(), "grad_norm": grad_norm.item(), "update_norm": 0.0, "lr": lr}
        if auxiliary:
            row["auxiliary_loss"] = auxiliary[0].item()
        if spec.guards.post_clip_norm is not None:
            row["clipped_norm"] = self.devices.norm(
                [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            ).item()

        # Update, if nothing is wrong. A probing optimizer sums the norm of its step in its own pass. For any other one,
        # or if blocks are logged, the parameters before the step are copied.
        probing = self.optimizer if isinstance(self.optimizer, Probing) and not is_due else None
        own = [] if probing else self.devices.local(self.parameters)
        buffer = [] if probing else self._copy_to_buffer(own)
        weights = self.statistics.norms(buffer) if is_due else {}
        named_before = self._copy_named() if _is_due(spec.log.curvature, step) and lr > 0 else None
        edge: dict[str, Any] | None = None
        if self.reason_to_skip(row) is None:
            if isinstance(self.optimizer, TakingHessian) and self.optimizer.hessian_is_due():
                self.optimizer.take_hessian(self._hessian_diagonal(examples, step))
            self.optimizer.step()
            if seen is not None:
                seen |= self.activations.describe_moments(self.optimizer, self.devices.local)
            if probing and (probe := probing.probed()) is not None:
                row["update_norm"] = probe.step_norm()
            if named_before is not None:
                edge = self._measure_edge(examples, named_before, lr)
        if not probing:
            torch._foreach_sub_(buffer, own)  # now θ − θ⁺: its norms equal those of θ⁺ − θ bit for bit
            row["update_norm"] = self.devices.norm(buffer).item()
        if is_due:
            self.signals["gradients"] = self.statistics.rows(step, gradient, weights, self.statistics.norms(buffer))
        if seen is not None:
            self.signals["activations"] = self.activations.rows(step, row["grad_norm"], seen)
        if edge is not None:
            self.signals["edge"] = [{"step": step, **edge}]
        return row

    def checks_step(self, step: int) -> bool:
        """Return whether this step is checked for non-finite values.

        Every ``guards.check_every`` steps are, and all steps that may be validated or saved.
        """
        return step % self.spec.guards.check_every == 0 or self.keeper.validates(step) or self.keeper.may_be_due(step)

    def reason_to_skip(self, row: dict[str, Any]) -> str | None:
        """Return the reason why a checked step is bad, else None."""
        if not self.checks_step(row["step"]):
            return None
        return first_non_finite(row, row["step"]) or self.guard.explain_large_norm(row)

    def _measure_activations(self, examples: Examples, step: int) -> Found:
        """Return the statistics at the step's parameters, of `SHARE_OF_SEQUENCES` of its first microbatch.

        Every process of a sharded run repeats the main process's.
        """
        found: Found = {}

        def measure(microbatch: Examples) -> tuple[float]:
            where = dropping(self.model, self.device, self.spec.seed, "train", step, 0)
            with where, computing_in(self.spec.precision, self.device):
                found.update(self.activations.measure(microbatch))
            return (0.0,)

        own = self.spec.batch // self.devices.describe().get("shards", 1)
        rows = math.ceil(SHARE_OF_SEQUENCES * min(self.spec.microbatch or own, own))
        list(self.devices.spread(measure, examples.split(rows)[:1]))
        return found

    def _copy_named(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def _measure_edge(self, examples: Examples, before: dict[str, Tensor], lr: float) -> dict[str, Any]:
        """Return the columns of edge.jsonl of the step just taken.

        The loss is that of `stability.hessian`: without dropout, in float32, by the uncompiled model.
        """

        def loss(params: Mapping[str, Tensor], microbatch: Examples) -> tuple[Tensor, Tensor]:
            return self.objective.training_loss(self.model, microbatch, params)[:2]

        batches = examples.split(self.spec.microbatch or self.spec.batch)
        with in_mode(self.model, training=False):
            return self.edge.measure(loss, before, batches, self.optimizer, dict(self.model.named_parameters()), lr)

    def _hessian_diagonal(self, examples: Examples, step: int) -> dict[Tensor, Tensor]:
        """Estimate the Hessian's diagonal of the batch's mean loss, seeded by (seed, step).

        The loss has the same dropout as the step's gradient. It uses the uncompiled model, by microbatches.
        """
        from stability.curvature import hutchinson_diagonal  # most optimizers take no Hessian

        rows, seed = self.spec.microbatch or self.spec.batch, self.spec.seed

        def loss(params: Mapping[str, Tensor], part: tuple[int, Examples]) -> tuple[Tensor, Tensor]:
            first_row, microbatch = part
            where = dropping(self.model, self.device, seed, "train", step, first_row)
            with where, computing_in(self.spec.precision, self.device):
                return self.objective.training_loss(self.model, microbatch, params)[:2]

        parts = [(rows * index, microbatch) for index, microbatch in enumerate(examples.split(rows))]
        named = dict(self.model.named_parameters())
        drawn_by = generator_for(seed, "hessian", step)
        # no check: tests compare the kernels' second derivatives with oracles
        found = hutchinson_diagonal(loss, named, generator=drawn_by, batches=parts, check=False)
        return {parameter: found[name] for name, parameter in named.items()}

    def _copy_to_buffer(self, parameters: list[Tensor]) -> list[Tensor]:
        """Return a copy of the parameters in a reused buffer."""
        # Allocating as much at every step costs more than the copy itself.
        if self._copy is None:
            self._copy = [torch.empty_like(part) for part in parameters]
        torch._foreach_copy_(self._copy, parameters)
        return self._copy

    def _backward(self, examples: Examples, step: int) -> list[Tensor]:
        """Add the gradient of the batch's mean loss; return that loss, then the auxiliary one if any."""
        if self._captured is not None:
            try:
                # A graph takes the generators' state from outside: plugins may draw, and dropout is refused.
                with dropping(self.model, self.device, self.spec.seed, "train", step, 0):
                    return self._captured(examples)
            except captured.Uncaptured:
                if self.spec.cuda_graphs:
                    raise
                self._captured = None
                self.optimizer.zero_grad(set_to_none=True)
        return self._computed(examples, partial(dropping, self.model, self.device, self.spec.seed, "train", step))

    def _captured_pass(self, examples: Examples) -> list[Tensor]:
        # No generator may be seeded within a capture.
        return self._computed(examples, lambda first_row: in_mode(self.model, training=True))

    def _computed(self, examples: Examples, mode: Callable[[int], AbstractContextManager[None]]) -> list[Tensor]:
        """Compute what `_backward` returns; ``mode`` prepares the model for a microbatch, given its first row."""
        count = self.objective.count(examples, torch.float32)

        def add(microbatch: Examples, first_row: int) -> Sums:
            once = differentiated_once(not self.spec.compile)  # no compiler takes such functions
            with mode(first_row), computing_in(self.spec.precision, self.device), once:
                found = self.objective.training_loss(self.forward, microbatch)
            # Over the whole batch's count: a microbatch of few masked tokens has no more weight per token.
            (found.total / count).backward()
            return found.sums()

        rows = self.spec.microbatch or self.spec.batch
        return [total / count for total in self.devices.backward(add, examples, rows, self.parameters)]


def _is_due(every: int | None, step: int) -> bool:
    """Return whether an optional log has rows of this step; an interval of None or 0 means never."""
    return bool(every) and step % every == 0


def first_non_finite(values: dict[str, Any], step: int) -> str | None:
    """Return ``"loss is nan at step 37"`` for the first non-finite value, else None."""
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            return f"{name.replace('_', ' ')} is {value} at step {step}"
    return None


Answer = Literal["stop", "skip", "restore"]


@dataclass
class Guard:
    """The guards of one run against non-finite steps and large gradients, and their counts so far.

    Source: *Frankenstein Transformer*, Algorithm 1, lines 5 to 12. The loop continues with the next step and batch, as
    in the paper: the failed ones would fail again. Step numbers, data order and learning rates stay equal to those of
    every other run. (In the paper the schedule waits for a skipped step; here the step number gives the rate.) "skip"
    omits the optimizer's step. "restore" returns to the parameters and optimizer state of the last good checkpoint, or
    to the initialisation if none exists; progress since then is lost. The whole run has one budget; once it is spent,
    the run ends as diverged, as without guards.

    A checkpoint is good only after the next step has succeeded: its own step's loss was computed with those before it.
    """

    spec: GuardSpec
    skipped_steps: int = 0
    restores: int = 0
    good: list[int] = field(default_factory=list)  # steps of good checkpoints, rising
    # steps of checkpoints of the current state, before any sound step was taken from it
    untried: list[int] = field(default_factory=list)

    def explain_large_norm(self, row: dict[str, Any]) -> str | None:
        """Return a reason if the gradient after clipping exceeds the threshold, else None."""
        limit, norm = self.spec.post_clip_norm, row.get("clipped_norm")
        if limit is None or norm is None or norm <= limit:
            return None
        return (
            f"gradient norm after clipping is {norm:.4g} at step {row['step']}, above guards.post_clip_norm={limit:g}"
        )

    def answer(self, *, has_moved: bool) -> Answer:
        """Decide how to treat a bad step, and count it against the budget.

        Args:
            has_moved: the step already changed the parameters, so it cannot be skipped.
        """
        mode = self.spec.on_nonfinite
        if (
            mode == "stop"
            or self.skipped_steps + self.restores >= self.spec.retries
            or (mode == "skip_step" and has_moved)
        ):
            return "stop"
        if mode == "skip_step":
            self.skipped_steps += 1
            return "skip"
        self.restores += 1
        return "restore"

    def explain_end(self, reason: str) -> str:
        """Return the reason of a divergence, with the reason why no guard prevented it."""
        if self.spec.on_nonfinite == "stop":
            return reason
        if self.skipped_steps + self.restores < self.spec.retries:
            return (
                f"{reason}; the step was taken and cannot be skipped (guards.on_nonfinite=restore_last_good could "
                "undo it)"
            )
        return (
            f"{reason}; guards.retries={self.spec.retries} {'skipped steps' if self.skipped_steps else 'restores'} "
            "are spent"
        )

    def sound_step(self) -> None:
        if self.untried:
            self.good, self.untried = sorted({*self.good, *self.untried}), []

    def record_checkpoint(self, step: int, kept: Collection[int]) -> None:
        """Record a checkpoint of the current state.

        Args:
            step: its step.
            kept: steps of the checkpoints kept beside it.
        """
        self.good = [each for each in self.good if each in kept]
        self.untried.append(step)

    def candidates(self) -> list[int]:
        """Return the checkpoints to restore from, newest first.

        Untried checkpoints are dropped, even if they were good before: the very next step failed.
        """
        self.good = [step for step in self.good if step not in self.untried]
        return self.good[::-1]

    def record_restore(self, step: int) -> None:
        """Record a restore to the checkpoint of this step, or to the initialisation (0)."""
        self.untried = [step] if step else []

    def counts(self) -> dict[str, int]:
        return {"skipped_steps": self.skipped_steps, "restores": self.restores}

    def state(self) -> dict[str, Any]:
        return self.counts() | {"good": list(self.good), "untried": list(self.untried)}

    def resume(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class Keeper:
    """The plan of a run's checkpoints: when to write one and how long to keep it.

    Always kept: the checkpoints of the first evaluation and of the last step (α_max needs both). Of the extra cadence
    all are kept, or the newest ``keep_last``. The ``keep_best`` best by validation NLL are kept, too; the first two may
    be among them. With ``keep_last`` the first evaluation removes all earlier checkpoints, so it is the run's earliest.

    The plan depends only on the step and the validations so far, never on files that an interruption left.
    """

    def __init__(self, spec: RunSpec):
        self._plan, self._cadence, self._last = spec.checkpoint, spec.evaluation.every_steps, spec.steps
        self._first = min(self._cadence, spec.steps)
        self._best: list[tuple[float, int]] = []

    @property
    def best_steps(self) -> list[int]:
        """Steps of the best validations, best first."""
        return [step for _, step in self._best]

    def validates(self, step: int) -> bool:
        """Return whether the run is validated at this step."""
        return step % self._cadence == 0 or step == self._last

    def record_validation(self, step: int, nll: float) -> None:
        """Record a validation; of two equal ones the earlier ranks higher.

        Args:
            step: step of the validation.
            nll: validation NLL in nats.
        """
        self._best = sorted([*self._best, (nll, step)])[: self._plan.keep_best]

    def is_due(self, step: int) -> bool:
        """Return whether to write a checkpoint at this step, after its validation."""
        return step in (self._first, self._last) or self._is_extra(step) or step in self.best_steps

    def may_be_due(self, step: int) -> bool:
        """Return whether a checkpoint is due whatever this step's validation gives.

        Such a step must be checked for non-finite values first.
        """
        return step in (self._first, self._last) or self._is_extra(step)

    def choose_kept(self, step: int) -> set[int]:
        """Return the steps of the checkpoints to keep after this step."""
        return {each for each in (self._first, self._last, *self._extra(step), *self.best_steps) if each <= step}

    def state(self) -> list[tuple[float, int]]:
        return list(self._best)

    def resume(self, state: list[tuple[float, int]]) -> None:
        self._best = [(nll, step) for nll, step in state]

    def _is_extra(self, step: int) -> bool:
        return bool(self._plan.every_steps) and step % self._plan.every_steps == 0

    def _extra(self, step: int) -> list[int]:
        if not self._plan.every_steps:
            return []
        extra = list(range(self._plan.every_steps, step + 1, self._plan.every_steps))
        if self._plan.keep_last is None:
            return extra
        return [each for each in extra[-self._plan.keep_last :] if each >= self._first or step < self._first]
