"""Helper processes of a run on several devices: start, instructions, join and end.

They are plain processes beside the run's main process, not Ray workers: a launcher has already placed the trial and
chosen its devices, so no second scheduler is necessary. Ray Train inside a trial of Ray Tune needs about 26 s to start;
these need the time of importing torch.
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
PATIENCE = timedelta(minutes=30)  # timeout of communication within a step
FAREWELL_S = 10.0
LAST_WORDS_S = 5.0  # a lost connection is detected before the system reports the process's end


class Helpers:
    """The helper processes of one run (`helper`), ranks 1 to ``num_devices`` − 1.

    The run's main process is rank 0.

    Args:
        spec: the run.
        cache_dir: the pool's prepared data.
        device: device of the main process.
        num_devices: number of devices, its own included.
        shard: whether each process has a slice of everything, or computes microbatches.

    Raises:
        RuntimeError: fewer GPUs exist, or a helper died before all had joined (the message has its last output).
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
        """Start the process of one rank, with a settings file and a log."""
        folder = Path(self._folder.name)
        (folder / f"{rank}.json").write_text(json.dumps({**settings, "rank": rank}))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)}
        command = [sys.executable, "-m", MODULE, str(folder / f"{rank}.json")]
        with open(self._log(rank), "w") as log:
            # in a session of its own: only the main process handles Ctrl-C, and it still needs its helpers then
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
        """Wait until every helper is ready to join; raise if one has died."""
        # Joining earlier would wait in vain for a failed helper.
        while not all(_ready(store, rank).exists() for rank in range(1, len(self._processes) + 1)):
            if any(process.poll() is not None for process in self._processes):
                raise RuntimeError(self.last_words(0))
            time.sleep(0.05)

    def tell(self, *words: Any) -> None:
        """Send one instruction to every helper.

        Raises:
            BrokenPipeError: a helper is dead.
        """
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(words) + "\n")
            process.stdin.flush()

    def last_words(self, wait_s: float = LAST_WORDS_S) -> str | None:
        """Return a line about the helper that died first, or None if all live.

        The first one is a best guess. Helpers that lose their connection to it die later.

        Args:
            wait_s: seconds to wait for a death.
        """
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
        # a process killed by a signal comes first, by its negative code: it writes nothing to its log
        rank, code = min(dead, key=lambda each: (each[1] >= 0, self._log(each[0]).stat().st_mtime_ns))
        words = self._log(rank).read_text().strip().splitlines()
        return f"the process of device {rank} died with code {code}: {words[-1] if words else 'no word'}"

    def end(self, error: BaseException | None) -> None:
        """End the processes.

        Raises:
            RuntimeError: a helper died and so caused ``error``; the message has its last output.
        """
        words = self.last_words() if isinstance(error, RuntimeError | BrokenPipeError) else None
        self.close()
        if words is not None:
            raise RuntimeError(words) from error

    def close(self) -> None:
        """Close every helper's input, so that it exits; kill one that does not."""
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
    """Return the device of a helper by its rank; a GPU becomes the current one."""
    device = torch.device("cuda", settings["rank"]) if settings["device"] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def join(settings: dict[str, Any], device: torch.device) -> None:
    """Join this helper, the other helpers and the main process in one group."""
    store = Path(settings["store"])
    _ready(store, settings["rank"]).touch()
    _join(store, device, settings["rank"], settings["size"])


def instructions(settings: dict[str, Any]) -> Iterator[list[Any]]:
    """Yield the instructions of the run's main process.

    This process exits at the end of its input, in any state, also if the main process dies. It then removes the
    helpers' temporary folder: a killed main process cannot.
    """
    told: queue.Queue[list[Any]] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            told.put(json.loads(line))
        # another helper may do so at the same time, or have done it
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
