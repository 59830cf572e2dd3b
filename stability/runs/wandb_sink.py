"""Weights & Biases sink: uploads of a run's numbers, and the check of its server."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from stability.config.training import PROJECT
from stability.runs.sink import AbstractSink, Told, earlier_wandb_id, pool_mark, wandb_id

CHECKPOINT_STEP = "checkpoint_step"


class WandbSink(AbstractSink):
    """One W&B run per trial, grouped by study, in ``<run>/wandb``.

    The driver alone decides ``mode``, once (`probe_wandb`).
    """

    title: ClassVar[str] = "W&B"
    _offline_from_now = False  # of this process: after one timeout, later trials do not wait for another

    def __init__(
        self,
        mode: str,
        project: str = PROJECT,
        entity: str | None = None,
        checkpoints: bool = False,
        begun_anew: bool = False,
    ):
        self._mode = "offline" if mode == "online" and WandbSink._offline_from_now else mode
        self._place = {"project": project, "entity": entity}
        self._checkpoints, self._begun_anew = checkpoints, begun_anew

    @classmethod
    def require(cls) -> None:
        require_wandb()

    @classmethod
    def prepare(cls, runs_dir: str, study: str) -> tuple[dict[str, Any] | None, str]:
        mode, message = probe_wandb()
        pool_mark(Path(runs_dir).resolve())  # created before concurrent workers need it
        return {"mode": mode}, message.replace("RUNS_DIR", runs_dir)

    def open(self, run: Told) -> bool:
        folder = run.directory.path
        is_known = earlier_wandb_id(folder, run.run_id) is not None
        self._id = wandb_id(folder, run.run_id, folder.parent)
        about = {"group": run.group, "name": run.name, "id": self._id, "dir": str(folder)}
        self._directory = run.directory
        self._run = init_run(self._mode, config=run.config, **self._place, **about)
        return not (is_known or self._run.resumed)

    def write(self, row: dict[str, Any]) -> None:
        self._run.log({name: value for name, value in row.items() if name != "step"}, step=row["step"])

    def write_measured(self, row: dict[str, Any]) -> None:
        """Send a row with the checkpoint's step as a separate axis: W&B refuses earlier steps."""
        values = {name: value for name, value in row.items() if name != "step"}
        for name in values:
            self._run.define_metric(name, step_metric=CHECKPOINT_STEP)
        self._run.log({CHECKPOINT_STEP: row["step"], **values})

    def close(self, summary: dict[str, Any]) -> None:
        if "verdict" in summary:
            self._run.tags = (*(self._run.tags or ()), summary["verdict"])
            if self._checkpoints:
                artifact = importlib.import_module("wandb").Artifact(f"checkpoint-{self._id}", type="model")
                artifact.add_dir(str(self._directory.checkpoints()[-1]))
                self._run.log_artifact(artifact)
        self._run.summary.update(summary)
        self._run.finish()

    def substitute(self) -> AbstractSink | None:
        """Return an offline sink for an online one, or, once, for an offline one.

        After an online failure all later sinks of this process are offline, too. The second case is a dead service
        process: it fails all current runs, and would fail every later one.
        """
        if self._mode != "online" and self._begun_anew:
            return None
        WandbSink._offline_from_now = self._mode == "online" or WandbSink._offline_from_now
        begun_anew = self._mode != "online"
        _teardown_wandb()
        return WandbSink("offline", **self._place, checkpoints=self._checkpoints, begun_anew=begun_anew)


def _teardown_wandb() -> None:
    """End W&B's service process; it blocks the id of a run that failed to start."""
    import wandb

    # for a dead process W&B drops it and then raises; the next run starts a new one
    with contextlib.suppress(ConnectionError):
        wandb.teardown()


def init_run(mode: Any, **arguments: Any) -> Any:
    """Begin or resume a W&B run of an id, with our common settings."""
    import wandb

    settings = wandb.Settings(silent=True, init_timeout=10, finish_timeout=15, console="off", x_disable_stats=True)
    return wandb.init(resume="allow", mode=mode, settings=settings, **arguments)


def require_wandb() -> Any:
    """Return the package wandb.

    Raises:
        RuntimeError: it is not installed.
    """
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise RuntimeError("logger=wandb needs Weights & Biases: pip install wandb, or choose logger=files") from None


def probe_wandb(timeout_s: float = 3.0) -> tuple[str, str]:
    """Return (mode, message for the user); "online" only with a key and a reachable server.

    The server must accept a connection within ``timeout_s`` seconds. The driver checks once for all trials, since W&B
    itself would block each of them for a minute or more. ``WANDB_MODE`` is respected, but ``online`` becomes offline
    without key or server.

    Raises:
        RuntimeError: wandb is not installed.
    """
    wandb = require_wandb()
    os.environ.setdefault("WANDB_SILENT", "true")  # also for workers: its output would break the live table
    settings = wandb.setup().settings
    if settings.mode in ("disabled", "offline", "dryrun"):
        mode = "disabled" if settings.mode == "disabled" else "offline"
        return mode, f"W&B: {mode}, as WANDB_MODE says"
    from wandb.sdk.lib.wbauth import read_netrc_auth  # without the network access of wandb.login

    if not (settings.api_key or settings.identity_token_file or read_netrc_auth(host=settings.base_url)):
        return (
            "offline",
            "W&B: offline, no API key found; upload later with: wandb login && wandb sync "
            "RUNS_DIR/*/wandb/offline-run-*",
        )
    if not _is_reachable(settings.base_url, timeout_s):
        return (
            "offline",
            f"W&B: offline, {settings.base_url} does not answer; upload later with: wandb sync "
            "RUNS_DIR/*/wandb/offline-run-*",
        )
    return "online", f"W&B: online, {settings.base_url}"


def _is_reachable(url: str, timeout_s: float) -> bool:
    """Return whether the server or its proxy accepts a TCP connection in time."""
    parts = urlsplit(getproxies().get(urlsplit(url).scheme, url))
    port = parts.port or (80 if parts.scheme == "http" else 443)
    connected = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((parts.hostname or "", port), timeout=timeout_s).close()
            connected.set()
        except OSError:
            pass

    # In a thread: a socket's timeout does not bound the name lookup.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return connected.is_set()


def default_entity() -> str:
    """Return the account's default entity from the server."""
    return str(importlib.import_module("wandb").Api().default_entity)
