"""One run over several devices of a machine: its microbatches are shared out, and their gradients added up in the order
that one device would have.

The run's process keeps everything that a run is: parameters, optimizer, log, checkpoints, guards. At each step it hands
its parameters to one helper process a device, which take every n-th microbatch and hand their gradients back.
Floating-point sums are made in the same order as without helpers, so that the numbers are the same bit for bit on
devices of one kind, and a run may be resumed on another number of them. Every device holds the whole model; `sharded`
is for one that does not fit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stability.build import build_model, build_objective
from stability.config.parse import parse_run
from stability.config.run import RunSpec
from stability.corpora.cache import load
from stability.training.devices.processes import Helpers, device_of, instructions, join
from stability.training.draws import training_examples
from stability.training.machine import prepare_torch


class Team:
    """The helpers of a run. ``num_devices``: theirs and the run's own.

    Errors: ``RuntimeError`` where there are fewer GPUs, or a helper died (its last words in the message).
    """

    def __init__(self, spec: RunSpec, cache_dir: Path, device: torch.device, num_devices: int):
        self._size, self._device = num_devices, device
        self._helpers = Helpers("stability.training.devices.shared", spec, cache_dir, device, num_devices)

    def is_mine(self, index: int) -> bool:
        """Return whether microbatch number ``index`` is the run's own to compute."""
        return index % self._size == 0

    def begin(self, step: int, parameters: Sequence[nn.Parameter]) -> None:
        """Hand out the parameters; the helpers begin with their microbatches of this step."""
        try:
            self._helpers.tell(step)
            dist.broadcast(_flat([parameter.detach() for parameter in parameters]), src=0)
        except (RuntimeError, BrokenPipeError) as error:
            raise self._broken(error) from error

    def take_in(self, index: int, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Add a helper's gradient of microbatch ``index`` to the parameters'; its loss sum is returned."""
        received = torch.empty(sum(parameter.numel() for parameter in parameters) + 1, device=self._device)
        try:
            dist.recv(received, src=index % self._size)
        except RuntimeError as error:
            raise self._broken(error) from error
        for parameter, part in zip(parameters, _parts(received, parameters), strict=True):
            # the run's own microbatch, the first one, gave every parameter that is used its gradient
            if parameter.grad is not None:
                parameter.grad.add_(part)
        return received[-1].clone()  # else all of it would stay

    def _broken(self, error: Exception) -> RuntimeError:
        return RuntimeError(
            self._helpers.last_words() or f"the devices lost touch: {(str(error).splitlines() or [''])[0]}"
        )

    def close(self) -> None:
        self._helpers.close()


def help_out(settings: dict[str, Any]) -> None:
    """Compute gradients of every n-th microbatch of each step that is asked for, until this process's input ends."""
    spec, rank, size = parse_run(settings["spec"]), settings["rank"], settings["size"]
    device, steps = device_of(settings), instructions(settings)
    prepare_torch(spec.threads, device)
    corpus = load(Path(settings["cache_dir"]), spec.data_fingerprint)
    objective = build_objective(spec, corpus.format)
    model = build_model(spec, corpus.format).to(device)
    parameters = list(model.parameters())
    join(settings, device)
    for (step,) in steps:
        received = _flat([parameter.detach() for parameter in parameters])
        dist.broadcast(received, src=0)
        with torch.no_grad():
            for parameter, part in zip(parameters, _parts(received, parameters), strict=True):
                parameter.copy_(part)
        examples = training_examples(spec, corpus, objective, "train", step, seed=spec.seed, batch=spec.batch).to(
            device
        )
        count = objective.count(examples, torch.float32)
        for index, microbatch in enumerate(examples.split(spec.microbatch or spec.batch)):
            if index % size == rank:
                model.zero_grad(set_to_none=True)
                total, _ = objective.loss(model, microbatch)
                (total / count).backward()
                gradients = [
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    for parameter in parameters
                ]
                dist.send(_flat([*gradients, total.detach().reshape(1)]), dst=0)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _parts(flat: Tensor, parameters: Sequence[nn.Parameter]) -> Iterator[Tensor]:
    """Views of a flat tensor in the parameters' shapes; what is left over at its end is left out."""
    start = 0
    for parameter in parameters:
        yield flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()


if __name__ == "__main__":
    help_out(json.loads(Path(sys.argv[1]).read_text()))
