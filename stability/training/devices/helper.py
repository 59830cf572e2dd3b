"""``python -m stability.training.devices.helper FILE``: a further process of a run that takes several devices. It goes
through those methods of its part of the run that all processes go through together, when the run's own says so, until
its input ends."""

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
    """Join the run and follow it. ``settings``: what `Helpers` wrote."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # a batch system sends them to every process of a job; what they mean for the run, its own process decides
        signal.signal(number, signal.SIG_IGN)
    add_plugins(settings["spec"].get("plugins"))  # the run's own process has them from its command
    spec, device, told = parse_run(settings["spec"]), device_of(settings), instructions(settings)
    corpus = load(Path(settings["cache_dir"]), spec.data_fingerprint)
    rank, size = settings["rank"], settings["size"]
    if settings["shard"]:
        join(settings, device)
        part = Replica(spec, corpus, device, ShardedDevices(device, rank, size))
    else:
        part = Microbatches(spec, corpus, device, rank, size)
        join(settings, device)  # only now: the run notices a helper that dies before, and waits for none after
    follow(part, told)


def follow(part: Replica | Microbatches, told: Iterable[Sequence[Any]]) -> None:
    """Call the methods that are named, each with the numbers after its name. Errors: ``KeyError`` for a method that is
    not among those of ``part.FOLLOWED``."""
    for method, *numbers in told:
        if method not in part.FOLLOWED:
            raise KeyError(method)
        getattr(part, method)(*numbers)


if __name__ == "__main__":
    help_out(json.loads(Path(sys.argv[1]).read_text()))
