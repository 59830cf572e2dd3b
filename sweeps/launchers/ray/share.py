"""Define a trial's share of a node, and count the shares per node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROUNDING = 1e-6  # 0.3 / 0.1 is 3


@dataclass(frozen=True)
class Share:
    """The CPUs and GPUs of one worker on its node."""

    cpus: float
    gpus: float

    def fits(self, resources: dict[str, float]) -> int:
        """Return how many workers fit a node with these resources."""
        numbers = [int(resources.get("CPU", 0.0) / self.cpus + ROUNDING)]
        if self.gpus >= 1:
            numbers.append(int(resources.get("GPU", 0.0) / self.gpus + ROUNDING))
        elif self.gpus:
            # a worker cannot span two GPUs
            numbers.append(int(resources.get("GPU", 0.0)) * int(1 / self.gpus + ROUNDING))
        return min(numbers)


def require_room(share: Share, nodes: Sequence[dict[str, float]]) -> None:
    """Raise a ``RuntimeError`` if no node has room for a single worker.

    ``nodes``: the resources of each node.
    """
    if any(share.fits(node) for node in nodes):
        return
    for name, asked in (("CPU", share.cpus), ("GPU", share.gpus)):
        most = max((node.get(name, 0.0) for node in nodes), default=0.0)
        if asked > most:
            raise RuntimeError(f"{name.lower()}s_per_trial={asked:g}, but {_room(name, most, len(nodes) == 1)}")
    raise RuntimeError(
        f"no node has room for cpus_per_trial={share.cpus:g} together with gpus_per_trial={share.gpus:g}; give less "
        "of one"
    )


def _room(name: str, most: float, is_alone: bool) -> str:
    """Describe the largest available amount of a resource, and the value to request instead."""
    if name == "GPU" and not most:
        return f"{'there is no GPU' if is_alone else 'no node has a GPU'}; give gpus_per_trial=0 or auto"
    there = (
        (f"there is {most:g} {name}" if most == 1 else f"there are {most:g} {name}s")
        if is_alone
        else f"no node has more than {most:g}"
    )
    return f"{there}; give at most {most:g}"
