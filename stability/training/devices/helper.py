"""Helper process of a run on several devices: ``python -m stability.training.devices.helper FILE``.

The run's main process sends it methods to call, common to all processes. It ends with its input.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from stability.config.parse import parse_run
from stability.corpora.cache import load
from stability.registry import add_plugins
from stability.training.devices.processes import device_of, instructions, join
from stability.training.devices.sharded import ShardedDevices
from stability.training.devices.shared import Microbatches
from stability.training.step import Replica


def help_out(settings: dict[str, Any]) -> None:
    """Join the run and follow its instructions.

    Args:
        settings: content of the file from `Helpers`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        # a batch system sends them to every process of a job; only the run's main process responds
        signal.signal(number, signal.SIG_IGN)
    add_plugins(settings["spec"].get("plugins"))  # the main process has them from its command
    spec, device, told = parse_run(settings["spec"]), device_of(settings), instructions(settings)
    corpus = load(Path(settings["cache_dir"]), spec.data_fingerprint)
    rank, size = settings["rank"], settings["size"]
    if settings["shard"]:
        join(settings, device)
        part = Replica(spec, corpus, device, ShardedDevices(device, rank, size))
    else:
        part = Microbatches(spec, corpus, device, rank, size)
        join(settings, device)  # last: a death in the setup above is then detected before the group forms
    follow(part, told)


def follow(part: Replica | Microbatches, told: Iterable[Sequence[Any]]) -> None:
    """Call each named method with the numbers after its name.

    Args:
        part: this process's part of the run.
        told: instructions (method, *numbers).

    Raises:
        KeyError: a method is not in ``part.FOLLOWED``.
    """
    for method, *numbers in told:
        if method not in part.FOLLOWED:
            raise KeyError(method)
        getattr(part, method)(*numbers)


if __name__ == "__main__":
    help_out(json.loads(Path(sys.argv[1]).read_text()))
