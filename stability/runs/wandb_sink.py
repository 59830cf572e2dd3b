"""Send a run's numbers to Weights & Biases beside its files: what goes there, and whether it can be reached."""

from __future__ import annotations

import importlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from stability.runs.directory import RunDirectory, write_atomically


class WandbSink:
    """One W&B run per trial, grouped by study, in ``<run>/wandb``. ``mode`` is decided once by the driver
    (`probe_wandb`), never here.

    Whatever W&B raises is said once and ends the sink, never the run: the numbers are in the run's own files anyway. It
    is kept in `wandb_failure_file`, too, from which the driver tells what a worker's terminal would have shown.
    """

    _offline_from_now = False  # of this process: one timeout says enough, the trials after it don't wait for another

    def __init__(self, directory: RunDirectory, *, group: str, mode: str, config: dict[str, Any], name: str):
        self._failure_file = wandb_failure_file(directory)
        self._failure_file.unlink(missing_ok=True)
        self._arguments = {
            "group": group,
            "name": name,
            "id": directory.run_id,
            "dir": str(directory.path),
            "config": config,
        }
        if mode == "online" and not WandbSink._offline_from_now:
            self._run = self._guarded(lambda: _init_wandb("online", **self._arguments))
            if self._run is not None:
                return
            WandbSink._offline_from_now = True
            self._guarded(_teardown_wandb)
        self._run = self._guarded(lambda: _init_wandb("offline" if mode == "online" else mode, **self._arguments))

    def write(self, row: dict[str, Any]) -> None:
        values = {key: value for key, value in row.items() if key != "step" and value is not None}
        self._with_run(lambda run: run.log(values, step=row["step"]))

    def close(self, summary: dict[str, Any]) -> None:
        self._with_run(lambda run: run.summary.update(summary))
        self._with_run(lambda run: run.finish())
        self._run = None

    def _with_run(self, call: Callable[[Any], Any]) -> None:
        run = self._run
        if run is not None and self._guarded(lambda: (call(run),)) is None:
            self._run = None

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """Return the call's value, or None, with one line printed, where W&B failed."""
        try:
            return call()
        # W&B raises its own errors, OSError when its service died, and classes of private modules
        except Exception as error:  # noqa: BLE001
            message = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            print(f"{self._arguments['id']}: W&B failed, the run goes on ({message})", flush=True)
            write_atomically(self._failure_file, f"{message}\n".encode())
            return None


def wandb_failure_file(directory: RunDirectory) -> Path:
    return directory.path / "wandb_failure.txt"


def _teardown_wandb() -> None:
    """End W&B's service process, which holds on to the id of a run that it could not start."""
    import wandb

    wandb.teardown()


def _init_wandb(mode: Any, **arguments: Any) -> Any:
    import wandb

    settings = wandb.Settings(silent=True, init_timeout=10, finish_timeout=15, console="off", x_disable_stats=True)
    return wandb.init(project="stability", resume="allow", mode=mode, settings=settings, **arguments)


def require_wandb() -> Any:
    """Return the package of W&B. Errors: ``RuntimeError`` where it is not installed."""
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise RuntimeError("logger=wandb needs Weights & Biases: pip install wandb, or choose logger=files") from None


def probe_wandb(timeout_s: float = 3.0) -> tuple[str, str]:
    """Return (mode, what to tell the user): "online" only where there is a key and the server takes a connection within
    ``timeout_s``.

    The driver asks once for all trials, since W&B itself would block each of them for a minute and more. ``WANDB_MODE``
    is respected, but ``online`` gives way where no key or no server is found. Errors: ``RuntimeError`` where wandb is
    not installed.
    """
    wandb = require_wandb()
    os.environ.setdefault("WANDB_SILENT", "true")  # for the workers, too: its own lines would tear the live table
    settings = wandb.setup().settings
    if settings.mode in ("disabled", "offline", "dryrun"):
        mode = "disabled" if settings.mode == "disabled" else "offline"
        return mode, f"W&B: {mode}, as WANDB_MODE says"
    if not _has_wandb_key(settings):
        return (
            "offline",
            "W&B: offline, no API key found; upload later with: wandb login && wandb sync "
            "RUNS_DIR/*/wandb/offline-run-*",
        )
    if not _reachable(settings.base_url, timeout_s):
        return (
            "offline",
            f"W&B: offline, {settings.base_url} does not answer; upload later with: wandb sync "
            "RUNS_DIR/*/wandb/offline-run-*",
        )
    return "online", f"W&B: online, {settings.base_url}"


def _has_wandb_key(settings: Any) -> bool:
    """Return whether W&B would find credentials, without the network that ``wandb.login`` uses."""
    from wandb.sdk.lib.wbauth import read_netrc_auth

    return bool(settings.api_key or settings.identity_token_file or read_netrc_auth(host=settings.base_url))


def _reachable(url: str, timeout_s: float) -> bool:
    """Return whether the server, or the proxy before it, takes a TCP connection in time. In a thread, since no timeout
    of a socket bounds the look-up of its name."""
    parts = urlsplit(getproxies().get(urlsplit(url).scheme, url))
    port = parts.port or (80 if parts.scheme == "http" else 443)
    connected = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((parts.hostname or "", port), timeout=timeout_s).close()
            connected.set()
        except OSError:
            pass

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return connected.is_set()
