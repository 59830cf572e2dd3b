"""One training step of a run, and all other work that its processes share."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from stability.build import build_model, build_objective, build_optimizer
from stability.config.run import RunSpec
from stability.config.training import lr_factor
from stability.corpora.base import AbstractCorpus
from stability.models.first_order import differentiated_once
from stability.models.precision import computing_in
from stability.objectives import Examples
from stability.optimizers import Probing, TakingHessian, set_lr, use_averages
from stability.training.activations import SHARE_OF_SEQUENCES, ActivationStatistics, Edge, Found
from stability.training.checkpoints import Keeper
from stability.training.devices import Devices, OneDevice, Sums
from stability.training.draws import dropping, generator_for, in_mode, training_examples
from stability.training.evaluate import Validation
from stability.training.gradients import BlockStatistics
from stability.training.guards import Guard, first_non_finite
from stability.training.machine import compile_model, prepare_torch

if TYPE_CHECKING:
    from stability.training.captured import CapturedBackward


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
        self._captured: CapturedBackward | None = None
        if spec.cuda_graphs:
            from stability.training.captured import CapturedBackward, require_graphs

            require_graphs(device)
            self._captured = CapturedBackward(self._captured_pass, self.parameters)
        self.validation = Validation(spec, corpus, self.objective, device)
        self.guard, self.keeper = Guard(spec.guards), Keeper(spec)
        self.statistics = BlockStatistics(self.model, spec.log.gradients, self.devices.norms)
        self.activations = ActivationStatistics(spec, self.model, self.statistics)
        self.edge = Edge(spec.log.curvature)
        self.signals: dict[str, list[dict[str, Any]]] = {}  # of the last step, by log
        self._copy: list[Tensor] | None = None
        self.val_nll = math.nan
        self.scores: dict[str, float] = {}  # further scores of the last validation

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
        seen = self._measure_activations(examples, step) if self.activations.is_due(step) else None

        # Forward, backward, clip
        self.optimizer.zero_grad(set_to_none=True)
        loss, *auxiliary = self._backward(examples, step)
        is_due = self.statistics.is_due(step)
        gradient = self.statistics.gradient(self.parameters) if is_due else {}
        grad_norm = self.devices.clip(self.parameters, spec.clip_limit)
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
        named_before = self._copy_named() if self.edge.is_due(step) and lr > 0 else None
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
            # A graph takes the generators' state from outside: plugins may draw, and dropout is refused.
            with dropping(self.model, self.device, self.spec.seed, "train", step, 0):
                return self._captured(examples)
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
