"""One run with its microbatches shared out over the devices of a machine.

The run's main process has everything: parameters, optimizer, log, checkpoints, guards. At each step it sends its
parameters to one helper process per device; each computes every n-th microbatch and returns its gradients.
Floating-point sums have the same order as on one device. So the numbers are the same bit for bit on devices of one
kind, and a run may resume on another number of them. Every device has the whole model; use `sharded` for one that does
not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stability.build import build_model, build_objective
from stability.config.run import RunSpec
from stability.corpora.base import AbstractCorpus
from stability.models.passes import computing_in, dropping
from stability.objectives import Examples, training_examples
from stability.training.devices import Add, OneDevice, Sums, add_sums
from stability.training.devices.processes import Helpers
from stability.training.machine import compile_model, prepare_torch


class SharedDevices(OneDevice):
    """The run's own device, and helpers that compute some of its microbatches.

    Args:
        spec: the run.
        cache_dir: the pool's prepared data.
        device: the run's own device.
        num_devices: number of devices, its own included.

    Raises:
        RuntimeError: fewer GPUs exist, or a helper died (the message has its last output).
    """

    def __init__(self, spec: RunSpec, cache_dir: Path, device: torch.device, num_devices: int):
        super().__init__(device)
        self._size = num_devices
        self._helpers = Helpers(spec, cache_dir, device, num_devices, shard=False)

    def end(self, error: BaseException | None) -> None:
        self._helpers.end(error)

    def tell(self, method: str, *numbers: int) -> None:
        """Send the helpers a method, if it is one of `Microbatches`."""
        if method in Microbatches.FOLLOWED:
            self._helpers.tell(method, *numbers)

    def backward(self, add: Add, examples: Examples, rows: int, parameters: Sequence[nn.Parameter]) -> Sums:
        """Add the gradient of a batch to the parameters'; return its sums.

        Args:
            add: adds the gradient of a microbatch, given its first row, and returns its sums.
            examples: the batch.
            rows: rows of a microbatch, at most.
            parameters: the model's parameters.
        """
        # The helpers start with the parameters.
        dist.broadcast(_flat([parameter.detach() for parameter in parameters]), src=0)
        parts: list[Sums] = []
        for index, part in enumerate(examples.split(rows)):
            owner = index % self._size
            # the first is the main process's own, with as many sums as the others
            parts.append(self._receive(owner, parameters, len(parts[0])) if owner else add(part, rows * index))
        return add_sums(parts)

    def _receive(self, owner: int, parameters: Sequence[nn.Parameter], num_sums: int) -> Sums:
        """Add a helper's gradient of its next microbatch to the parameters'; return its sums."""
        received = torch.empty(sum(parameter.numel() for parameter in parameters) + num_sums, device=self._device)
        dist.recv(received, src=owner)
        for parameter, part in zip(parameters, _parts(received, parameters), strict=True):
            # the first microbatch, the main process's own, has set the gradient of every used parameter
            if parameter.grad is not None:
                parameter.grad.add_(part)
        return received[-num_sums:].clone().unbind()  # a view would retain the whole buffer


class Microbatches:
    """A helper's part: the gradients of every ``size``-th microbatch, from number ``rank`` on.

    ``FOLLOWED`` is as in `Replica`.
    """

    FOLLOWED: ClassVar[tuple[str, ...]] = ("train_step",)

    def __init__(self, spec: RunSpec, corpus: AbstractCorpus, device: torch.device, rank: int, size: int):
        prepare_torch(spec.threads, device, spec.precision)
        self._spec, self._corpus, self._device, self._rank, self._size = spec, corpus, device, rank, size
        self._objective = build_objective(spec, corpus.format)
        self._model = build_model(spec, corpus.format).to(device)
        self._forward = compile_model(self._model) if spec.compile else self._model
        self._parameters = list(self._model.parameters())

    def train_step(self, step: int) -> None:
        """Compute and send this step's gradients and loss sums, at the run's parameters."""
        received, spec = _flat([parameter.detach() for parameter in self._parameters]), self._spec
        dist.broadcast(received, src=0)
        with torch.no_grad():
            for parameter, part in zip(self._parameters, _parts(received, self._parameters), strict=True):
                parameter.copy_(part)
        examples = training_examples(
            spec, self._corpus, self._objective, "train", step, seed=spec.seed, batch=spec.batch
        ).to(self._device)
        count, rows = self._objective.count(examples, torch.float32), spec.microbatch or spec.batch
        for index, microbatch in list(enumerate(examples.split(rows)))[self._rank :: self._size]:
            self._model.zero_grad(set_to_none=True)
            where = dropping(self._model, self._device, spec.seed, "train", step, rows * index)
            with where, computing_in(spec.precision, self._device):
                found = self._objective.training_loss(self._forward, microbatch)
            (found.total / count).backward()
            gradients = [
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                for parameter in self._parameters
            ]
            dist.send(_flat([*gradients, *found.sums()]), dst=0)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _parts(flat: Tensor, parameters: Sequence[nn.Parameter]) -> Iterator[Tensor]:
    """Yield views of a flat tensor in the parameters' shapes, without its rest."""
    start = 0
    for parameter in parameters:
        yield flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
