"""One run over several devices of a machine: its microbatches are shared out, and their gradients added up in the order that one device would have.

The run's process keeps everything that a run is: parameters, optimizer, log, checkpoints, guards. At each step it hands its parameters to one helper
process a device, which take every n-th microbatch and hand their gradients back. Floating-point sums are made in the same order as without helpers, so
that the numbers are the same bit for bit on devices of one kind, and a run may be resumed on another number of them.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stability.config import RunSpec, parse_run
from stability.data._cache import load

PATIENCE = timedelta(minutes=30)  # within a step
FAREWELL_S = 10.0


class Team:
    """The helpers of a run. ``num_devices``: theirs and the run's own.

    Errors: ``RuntimeError`` where there are fewer GPUs, or a helper died (its last words in the message).
    """

    def __init__(self, spec: RunSpec, cache_dir: Path, device: torch.device, num_devices: int):
        if device.type == "cuda" and torch.cuda.device_count() < num_devices:
            raise RuntimeError(f"devices_per_trial={num_devices}, but this process sees {torch.cuda.device_count()} GPUs")
        self._size, self._device = num_devices, device
        self._folder = tempfile.TemporaryDirectory(prefix="stability-team-")
        settings = {"spec": spec.model_dump(mode="json"), "cache_dir": str(cache_dir), "device": device.type, "size": num_devices}
        self._helpers = [self._start(rank, settings) for rank in range(1, num_devices)]
        try:
            self._await_helpers()
            _join(self._store, device, 0, num_devices)
        except BaseException:
            self.close()
            raise

    @property
    def _store(self) -> Path:
        return Path(self._folder.name) / "store"

    def _start(self, rank: int, settings: dict[str, Any]) -> subprocess.Popen[str]:
        folder = Path(self._folder.name)
        (folder / f"{rank}.json").write_text(json.dumps({**settings, "rank": rank, "store": str(self._store)}))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)}
        command = [sys.executable, "-m", "stability.training.parallel", str(folder / f"{rank}.json")]
        with open(folder / f"{rank}.log", "w") as log:
            return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True)

    def _await_helpers(self) -> None:
        """Until each is about to join: one that fails before would be waited for in vain."""
        while not all(_ready(self._store, rank).exists() for rank in range(1, self._size)):
            if any(helper.poll() is not None for helper in self._helpers):
                raise self._broken(RuntimeError())
            time.sleep(0.05)

    def is_mine(self, index: int) -> bool:
        """Whether microbatch number ``index`` is the run's own to compute."""
        return index % self._size == 0

    def begin(self, step: int, parameters: Sequence[nn.Parameter]) -> None:
        """Hand out the parameters; the helpers begin with their microbatches of this step."""
        try:
            for helper in self._helpers:
                assert helper.stdin is not None
                helper.stdin.write(f"{step}\n")
                helper.stdin.flush()
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
            if parameter.grad is not None:  # the run's own microbatch, the first one, gave every parameter that is used its gradient
                parameter.grad.add_(part)
        return received[-1].clone()  # else all of it would stay

    def _broken(self, error: Exception) -> RuntimeError:
        for rank, helper in enumerate(self._helpers, 1):
            if helper.poll() is not None:
                words = (Path(self._folder.name) / f"{rank}.log").read_text().strip().splitlines()
                return RuntimeError(f"the process of device {rank} died with code {helper.returncode}: {words[-1] if words else 'no word'}")
        return RuntimeError(f"the devices lost touch: {(str(error).splitlines() or [''])[0]}")

    def close(self) -> None:
        """The helpers end with their input."""
        for helper in self._helpers:
            assert helper.stdin is not None
            with suppress(BrokenPipeError):  # it died
                helper.stdin.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        for helper in self._helpers:
            try:
                helper.wait(FAREWELL_S)
            except subprocess.TimeoutExpired:
                helper.kill()
                helper.wait()
        self._folder.cleanup()


def help_out(settings: dict[str, Any]) -> None:
    """A helper's life: gradients of every n-th microbatch of each step that is asked for, until its input ends."""
    from stability.build import build_model, build_objective
    from stability.training.loop import prepare_torch, training_examples

    spec, rank, size = parse_run(settings["spec"]), settings["rank"], settings["size"]
    device = torch.device("cuda", rank) if settings["device"] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    steps = _steps_asked_for()
    prepare_torch(spec.threads, device)
    corpus = load(Path(settings["cache_dir"]), spec.data_fingerprint)
    objective = build_objective(spec, corpus.format)
    model = build_model(spec, corpus.format).to(device)
    parameters = list(model.parameters())
    _ready(Path(settings["store"]), rank).touch()
    _join(Path(settings["store"]), device, rank, size)
    for step in steps:
        received = _flat([parameter.detach() for parameter in parameters])
        dist.broadcast(received, src=0)
        with torch.no_grad():
            for parameter, part in zip(parameters, _parts(received, parameters), strict=True):
                parameter.copy_(part)
        examples = training_examples(spec, corpus, objective, "train", step, seed=spec.seed, batch=spec.batch).to(device)
        count = objective.count(examples, torch.float32)
        for index, microbatch in enumerate(examples.split(spec.microbatch or spec.batch)):
            if index % size == rank:
                model.zero_grad(set_to_none=True)
                total, _ = objective.loss(model, microbatch)
                (total / count).backward()
                gradients = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
                dist.send(_flat([*gradients, total.detach().reshape(1)]), dst=0)


def _join(store: Path, device: torch.device, rank: int, size: int) -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all on one machine, whose name may not resolve
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(str(store), size), rank=rank, world_size=size, timeout=PATIENCE)


def _ready(store: Path, rank: int) -> Path:
    return store.with_name(f"{rank}.ready")


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _parts(flat: Tensor, parameters: Sequence[nn.Parameter]) -> Iterator[Tensor]:
    """Views of a flat tensor in the parameters' shapes; what is left over at its end is left out."""
    start = 0
    for parameter in parameters:
        yield flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()


def _steps_asked_for() -> Iterator[int]:
    """Step numbers from the input. When it ends, as it does when the run's process dies, so does this one, wherever it stands."""
    asked: queue.Queue[int] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            asked.put(int(line))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    return iter(asked.get, None)


if __name__ == "__main__":
    help_out(json.loads(Path(sys.argv[1]).read_text()))
