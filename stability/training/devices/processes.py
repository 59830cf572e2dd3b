"""The further processes of a run that takes several devices of a machine: started, told what to do, joined with the
run's own, and ended with it.

They are plain processes beside the run's own, not Ray workers: a trial is where a launcher put it, knows its devices,
and needs no second scheduler inside. Ray Train inside a trial of Ray Tune takes about 26 s to start; these take as long
as importing torch.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stability.config.run import RunSpec

MODULE = "stability.training.devices.helper"
PATIENCE = timedelta(minutes=30)  # within a step
FAREWELL_S = 10.0
LAST_WORDS_S = 5.0  # a lost connection is noticed before the system has cleared the process away


class Helpers:
    """The further processes of one run (`helper`), ranks 1 to ``num_devices`` − 1; the run's own process is rank 0.
    ``shard``: whether each holds a slice of everything, or computes microbatches.

    Errors: ``RuntimeError`` where there are fewer GPUs, or where one dies before all have joined (its last words in the
    message).
    """

    def __init__(self, spec: RunSpec, cache_dir: Path, device: torch.device, num_devices: int, *, shard: bool):
        if device.type == "cuda" and torch.cuda.device_count() < num_devices:
            raise RuntimeError(
                f"devices_per_trial={num_devices}, but this process sees {torch.cuda.device_count()} GPUs"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="stability-helpers-")
        store = Path(self._folder.name) / "store"
        settings = {
            "spec": spec.model_dump(mode="json"),
            "cache_dir": str(cache_dir),
            "device": device.type,
            "size": num_devices,
            "store": str(store),
            "shard": shard,
        }
        self._processes = [self._start(rank, settings) for rank in range(1, num_devices)]
        try:
            self._await(store)
            _join(store, device, 0, num_devices)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, settings: dict[str, Any]) -> subprocess.Popen[str]:
        """Start the process of one rank, its settings in a file and its output in a log."""
        folder = Path(self._folder.name)
        (folder / f"{rank}.json").write_text(json.dumps({**settings, "rank": rank}))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)}
        command = [sys.executable, "-m", MODULE, str(folder / f"{rank}.json")]
        with open(self._log(rank), "w") as log:
            # in a session of its own: Ctrl-C is the run's to answer, and it still needs its helpers to do so
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"{rank}.log"

    def _await(self, store: Path) -> None:
        """Wait until each helper is about to join the group; joining before that would wait in vain for one that has
        failed."""
        while not all(_ready(store, rank).exists() for rank in range(1, len(self._processes) + 1)):
            if any(process.poll() is not None for process in self._processes):
                raise RuntimeError(self.last_words(0))
            time.sleep(0.05)

    def tell(self, *words: Any) -> None:
        """Send one instruction to every helper. Errors: ``BrokenPipeError`` where one is dead."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(words) + "\n")
            process.stdin.flush()

    def last_words(self, wait_s: float = LAST_WORDS_S) -> str | None:
        """Return a line about the helper that died first, as far as can be told; None where all live. Those that lose
        touch with it die after it and are not to blame."""
        deadline = time.monotonic() + wait_s
        while all(process.poll() is None for process in self._processes):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
        dead = [
            (rank, process.returncode)
            for rank, process in enumerate(self._processes, 1)
            if process.returncode is not None
        ]
        # what a signal killed wrote nothing
        rank, code = min(dead, key=lambda each: (each[1] >= 0, self._log(each[0]).stat().st_mtime_ns))
        words = self._log(rank).read_text().strip().splitlines()
        return f"the process of device {rank} died with code {code}: {words[-1] if words else 'no word'}"

    def end(self, error: BaseException | None) -> None:
        """End the processes. Errors: ``RuntimeError`` with the last words of one that died, where that is what
        ``error`` came of."""
        words = self.last_words() if isinstance(error, RuntimeError | BrokenPipeError) else None
        self.close()
        if words is not None:
            raise RuntimeError(words) from error

    def close(self) -> None:
        """Close every helper's input, at whose end it exits, and wait for it; one that does not exit is killed."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it died
                process.stdin.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        for process in self._processes:
            try:
                process.wait(FAREWELL_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()


def device_of(settings: dict[str, Any]) -> torch.device:
    """Return the device of a helper, chosen by its rank; on a GPU it is made the current one."""
    device = torch.device("cuda", settings["rank"]) if settings["device"] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def join(settings: dict[str, Any], device: torch.device) -> None:
    """Make this helper one group with the run's own process and the other helpers."""
    store = Path(settings["store"])
    _ready(store, settings["rank"]).touch()
    _join(store, device, settings["rank"], settings["size"])


def instructions(settings: dict[str, Any]) -> Iterator[list[Any]]:
    """Yield what the run's process tells this one to do. When its input ends, as it does when the run's process dies,
    so does this process, wherever it stands, and takes the run's folder with it: a process that was killed removes
    nothing."""
    told: queue.Queue[list[Any]] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            told.put(json.loads(line))
        # another helper may be at it, or have done it
        shutil.rmtree(Path(settings["store"]).parent, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    return iter(told.get, None)


def _join(store: Path, device: torch.device, rank: int, size: int) -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all on one machine, whose name may not resolve
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=dist.FileStore(str(store), size), rank=rank, world_size=size, timeout=PATIENCE
    )


def _ready(store: Path, rank: int) -> Path:
    return store.with_name(f"{rank}.ready")
