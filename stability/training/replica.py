"""Each process of a run, be it one or several, has the model, its optimizer, and the methods that the processes go
through together."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stability.build import build_model, build_objective, build_optimizer
from stability.config.run import RunSpec
from stability.corpora.base import AbstractCorpus
from stability.curvature import hutchinson_diagonal
from stability.models.precision import computing_in
from stability.objectives import Examples
from stability.optimizers import Probing, TakingHessian, evaluated, set_lr
from stability.training.devices.base import Devices, Sums, together
from stability.training.devices.one import OneDevice
from stability.training.draws import dropping, generator_for, training_examples
from stability.training.evaluate import Validation
from stability.training.gradients import BlockStatistics
from stability.training.guards import Guard, first_non_finite
from stability.training.keeping import Keeper
from stability.training.machine import compiled, prepare_torch
from stability.training.schedule import lr_factor


class Replica:
    """Model and optimizer of a run, or this process's part of them; it reads no file of the run and writes none.

    ``TOGETHER``: the methods that a helper goes through when the run's own process does, by their names.
    """

    TOGETHER: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init__(self, spec: RunSpec, corpus: AbstractCorpus, device: torch.device, devices: Devices | None = None):
        prepare_torch(spec.threads, device, spec.precision)
        self.spec, self.corpus, self.device = spec, corpus, device
        self.objective = build_objective(spec, corpus.format)
        self.devices = devices or OneDevice(device)
        self.model = self.devices.build(partial(build_model, spec, corpus.format))
        self.forward = compiled(self.model) if spec.compile else self.model  # of training alone
        self.optimizer = build_optimizer(spec, self.model)
        self.parameters = list(self.model.parameters())
        self.validation = Validation(spec, corpus, self.objective, device)
        self.guard, self.keeper = Guard(spec.guards), Keeper(spec)
        self.statistics, self.gradient_rows = BlockStatistics(self.model, spec.log.gradients, self.devices.norm), []
        self._copy: list[Tensor] | None = None
        self.val_nll = math.nan
        self.scores: dict[str, float] = {}  # what else is validated, at the last validation

    @together(TOGETHER)
    def put(self, *, parameters: dict[str, Tensor] | None = None, state: dict[str, Any] | None = None) -> None:
        """Take over parameters and the optimizer's state (None: that of a new one)."""
        self.optimizer = build_optimizer(self.spec, self.model)
        self.devices.put(self.model, self.optimizer, parameters, state)

    @together(TOGETHER)
    def gathered(self) -> tuple[nn.Module, dict[str, Any]]:
        """Return the whole model and the optimizer's whole state."""
        return self.devices.gathered(self.model, self.optimizer)

    @together(TOGETHER)
    def averaged(self) -> nn.Module:
        """Return a copy of the whole model with the weights that an optimizer which averages is evaluated by."""
        with evaluated(self.optimizer):
            model, _ = self.devices.gathered(self.model, self.optimizer)
            return copy.deepcopy(model)

    @together(TOGETHER)
    def is_sound(self) -> bool:
        """Return whether every parameter is finite: what guards do not look at after each step may have got in."""
        return self.devices.every(all(bool(part.isfinite().all()) for part in self.devices.local(self.parameters)))

    @together(TOGETHER)
    def measure(self) -> dict[str, float]:
        """Return the validation numbers as they go into a row, the NLL first."""
        with evaluated(self.optimizer):
            measured = self.validation.measure(self.model, self.devices.spread)
        self.val_nll = measured["val_nll"]
        self.scores = {name: value for name, value in measured.items() if name != "val_nll"}
        return measured

    @together(TOGETHER)
    def update(self, step: int) -> dict[str, Any]:
        """Compute the gradient, clip it and take optimizer step number ``step``; return its log row. No step is taken
        where loss or gradient is not finite."""
        spec = self.spec
        lr = spec.lr_peak * lr_factor(spec.schedule, step, spec.steps)
        set_lr(self.optimizer, lr)
        examples = training_examples(
            spec, self.corpus, self.objective, "train", step, seed=spec.seed, batch=spec.batch
        ).to(self.device)
        self.optimizer.zero_grad(set_to_none=True)
        loss, *auxiliary = self._backward(examples, step)
        self.gradient_rows, is_due = [], self.statistics.is_due(step)
        gradient = self.statistics.gradient(self.parameters) if is_due else {}
        grad_norm = self.devices.clip(self.parameters, spec.clip_norm)
        row = {"step": step, "loss": loss.item(), "grad_norm": grad_norm.item(), "update_norm": 0.0, "lr": lr}
        if auxiliary:
            row["auxiliary_loss"] = auxiliary[0].item()
        if spec.guards.post_clip_norm is not None:
            row["clipped_norm"] = self.devices.norm(
                [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            ).item()
        if isinstance(self.optimizer, Probing) and not is_due:
            row["update_norm"] = self._probed_step(row)
            return row
        own = self.devices.local(self.parameters)
        moved = self._copied(own)
        weights = self.statistics.norms(moved) if is_due else {}
        if self._fault(row) is None:
            if isinstance(self.optimizer, TakingHessian) and self.optimizer.hessian_is_due():
                self.optimizer.take_hessian(self._hessian_diagonal(examples, step))
            self.optimizer.step()
        torch._foreach_sub_(moved, own)  # θ − θ⁺, in the copy's place: of every norm of θ⁺ − θ these are the very bits
        row["update_norm"] = self.devices.norm(moved).item()
        if is_due:
            self.gradient_rows = self.statistics.rows(step, gradient, weights, self.statistics.norms(moved))
        return row

    def _probed_step(self, row: dict[str, Any]) -> float:
        """Take the step unless something is wrong with it; return its norm, which its own pass adds up."""
        assert isinstance(self.optimizer, Probing) and isinstance(self.optimizer, torch.optim.Optimizer)
        if self._fault(row) is not None:
            return 0.0
        self.optimizer.step()
        probe = self.optimizer.probed()
        return 0.0 if probe is None else probe.step_norm()

    def _hessian_diagonal(self, examples: Examples, step: int) -> dict[Tensor, Tensor]:
        """Estimate the diagonal of the Hessian of the batch's mean loss for each parameter, by draws of (the run's
        seed, step). The loss is that of the step's gradient, and drops what that dropped; it goes through the model
        itself, by microbatches, where training goes through a compiled one."""
        rows, seed = self.spec.microbatch or self.spec.batch, self.spec.seed

        def loss(params: Mapping[str, Tensor], part: tuple[int, Examples]) -> tuple[Tensor, Tensor]:
            first_row, microbatch = part
            where = dropping(self.model, self.device, seed, "train", step, first_row)
            with where, computing_in(self.spec.precision, self.device):
                return self.objective.training_loss(self.model, microbatch, params)[:2]

        parts = [(rows * index, microbatch) for index, microbatch in enumerate(examples.split(rows))]
        named = dict(self.model.named_parameters())
        drawn_by = generator_for(seed, "hessian", step)
        # the kernels' second derivatives are held to oracles by their tests
        found = hutchinson_diagonal(loss, named, generator=drawn_by, batches=parts, check=False)
        return {parameter: found[name] for name, parameter in named.items()}

    def _copied(self, parameters: list[Tensor]) -> list[Tensor]:
        """Return a copy of the parameters, in memory that is kept: to allocate as much at every step costs more than
        to copy it."""
        if self._copy is None:
            self._copy = [torch.empty_like(part) for part in parameters]
        torch._foreach_copy_(self._copy, parameters)
        return self._copy

    def _backward(self, examples: Examples, step: int) -> list[Tensor]:
        """Add the gradient of the batch's mean loss to the parameters'; return that loss, and after it what auxiliary
        losses contribute to it, where there are any. Microbatch by microbatch, each of them over the count of the whole
        batch: one of few masked tokens weighs no more than they do."""
        count, seed = self.objective.count(examples, torch.float32), self.spec.seed

        def add(microbatch: Examples, first_row: int) -> Sums:
            where = dropping(self.model, self.device, seed, "train", step, first_row)
            with where, computing_in(self.spec.precision, self.device):
                found = self.objective.training_loss(self.forward, microbatch)
            (found.total / count).backward()
            return found.sums()

        rows = self.spec.microbatch or self.spec.batch
        return [total / count for total in self.devices.backward(add, examples, rows, self.parameters)]

    def _looks_at(self, step: int) -> bool:
        """Return whether this step is looked at for numbers that are not finite: as often as the guards are told to,
        and wherever the run might be kept or judged by it."""
        return step % self.spec.guards.check_every == 0 or self.keeper.validates(step) or self.keeper.may_be_due(step)

    def _fault(self, row: dict[str, Any]) -> str | None:
        """Say what is wrong with a step that is looked at."""
        return (
            (first_non_finite(row, row["step"]) or self.guard.too_large(row)) if self._looks_at(row["step"]) else None
        )
