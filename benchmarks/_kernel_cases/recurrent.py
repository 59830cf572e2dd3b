"""The recurrences of gla, deltanet and gated_deltanet, from queries, keys, values, strengths and decays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._kernel_cases._case import COMPILED, EAGER, OURS, Call, Case, Promise, drawn, step_of
from kernels.roofline import Traffic

FLA = "fla"
PASSES: Any = ("forward", "backward")
CHUNK = 64  # of the reference
RULES = {"gla": ("decayed", "features"), "deltanet": ("delta_rule", None), "gated_deltanet": ("delta_rule", "heads")}
Recurrence = Callable[..., Tensor]


def cases(smoke: bool) -> list[Case]:
    """Return the cases: the three recurrences. ``smoke``: tiny ones."""
    shape = (1, 1, 32, 16) if smoke else (4, 12, 4096, 64)
    found = []
    for name, (rule, decay) in RULES.items():
        contestants = {
            OURS: _maker(rule, decay, shape, _ours(rule)),
            EAGER: _maker(rule, decay, shape, _reference(rule)),
            COMPILED: _maker(rule, decay, shape, _reference(rule, compiled=True)),
            FLA: _maker(rule, decay, shape, _fla(rule)),
        }
        batch, heads, positions, width = shape
        label = f"{name} B={batch} H={heads} N={positions:,} K={width}"
        found.append(
            Case("recurrent", label, contestants, _traffic(rule, decay, shape), "bf16", (Promise(OURS, FLA, 1.0),))
        )
    return found


def _maker(
    rule: str, decay: str | None, shape: tuple[int, int, int, int], recurrence: Callable[[], Recurrence]
) -> Callable[[torch.device], Call]:
    """Return what makes the call of a recurrence, under autocast to bfloat16."""

    def on(device: torch.device) -> Call:
        """Return the call on this device; keys and queries have norm 1, and most of the state is kept."""
        q, k, v = (drawn(*shape, device=device, grad=False) for _ in range(3))
        parts = [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v]
        if rule == "delta_rule":
            parts.append(drawn(*shape[:3], device=device, grad=False).sigmoid())
        if decay is not None:
            width = shape[3] if decay == "features" else 1
            parts.append(F.logsigmoid(drawn(*shape[:3], width, device=device, grad=False) + 3))
        leaves = [part.detach().requires_grad_() for part in parts]
        given = [*leaves, None] if rule == "delta_rule" and decay is None else leaves
        run = recurrence()

        def forward() -> Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                return run(*given)

        return step_of(forward, leaves)

    return on


def _ours(rule: str) -> Callable[[], Recurrence]:
    def load() -> Recurrence:
        from kernels import recurrent

        return getattr(recurrent, rule)

    return load


def _fla(rule: str) -> Callable[[], Recurrence]:
    def load() -> Recurrence:
        from kernels import recurrences

        return getattr(recurrences, rule)

    return load


def _reference(rule: str, *, compiled: bool = False) -> Callable[[], Recurrence]:
    """Return what gives the project's own recurrence in torch's products."""

    def load() -> Recurrence:
        from stability.mechanisms._decayed import decayed
        from stability.mechanisms._delta_rule import delta_rule

        by_name: dict[str, Any] = {"decayed": decayed, "delta_rule": delta_rule}

        def run(*parts: Any) -> Tensor:
            return by_name[rule](*parts, chunk=CHUNK)

        return torch.compile(run, fullgraph=True, dynamic=False) if compiled else run

    return load


def _traffic(rule: str, decay: str | None, shape: tuple[int, int, int, int]) -> Callable[[], Traffic]:
    """Return what gives the bytes and operations of the launches of both passes."""

    def both() -> Traffic:
        from kernels.recurrent import traffic

        batch, heads, positions, width = shape
        decays = {None: 0, "heads": 1, "features": width}[decay]
        sizes = {"batch": batch, "heads": heads, "positions": positions, "keys": width, "values": width}
        parts = [traffic(**sizes, delta=rule == "delta_rule", decays=decays, part=part) for part in PASSES]
        return parts[0] + parts[1]

    return both
