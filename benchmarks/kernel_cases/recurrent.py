"""Layers of gla, deltanet and gated_deltanet: the recurrence with its projections and convolutions."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from benchmarks.kernel_cases.case import COMPILED, EAGER, OURS, Case, Promise, ceil_div, module_step
from kernels.roofline import Traffic
from stability.mechanisms import build

FLA = "fla"
# layer -> (settings that make keys as wide as values, whether it has the delta rule, its decays)
LAYERS: dict[str, tuple[dict[str, Any], bool, str | None]] = {
    "gla": ({"expand_k": 1.0}, False, "features"),
    "deltanet": ({}, True, None),
    "gated_deltanet": ({"expand_v": 1}, True, "heads"),
}


def cases(smoke: bool) -> list[Case]:
    """Return the cases: the three layers; tiny ones if ``smoke``."""
    batch, heads, positions, width = (1, 1, 32, 16) if smoke else (4, 12, 4096, 64)
    shape = (batch, positions, heads * width)
    found = []
    for name, (settings, is_delta, decay) in LAYERS.items():
        sizes = {"width": heads * width, "heads": heads, "direction": "causal", "chunk": 32, **settings}
        contestants = {
            label: _layer(name, impl, sizes, shape, compiled=label == COMPILED)
            for label, impl in ((OURS, "triton"), (EAGER, "reference"), (COMPILED, "reference"), (FLA, "fla"))
        }
        decays = {None: 0, "heads": 1, "features": width}[decay]
        of_heads = {"batch": batch, "heads": heads, "positions": positions, "keys": width, "values": width}
        # under autocast gla gets q, k and v in bfloat16; the delta rule normalises them in float32
        input_bytes = 4 if is_delta else 2
        counted = partial(_both_passes, **of_heads, delta=is_delta, decays=decays, input_bytes=input_bytes)
        label = f"{name} B={batch} H={heads} N={positions:,} K={width}"
        found.append(Case("recurrent", label, contestants, counted, "bf16", (Promise(OURS, FLA, 1.0),)))
    return found


def _layer(name: str, impl: str, sizes: dict[str, Any], shape: tuple[int, ...], *, compiled: bool) -> Any:
    return module_step(lambda: build(name, impl=impl, **sizes), *shape, precision="bf16", compiled=compiled)


def _both_passes(**sizes: Any) -> Traffic:
    return traffic(**sizes, part="forward") + traffic(**sizes, part="backward")


def traffic(
    *,
    batch: int,
    heads: int,
    positions: int,
    keys: int,
    values: int,
    delta: bool,
    decays: int = 0,
    part: Literal["forward", "backward", "second_order"] = "forward",
    input_bytes: int = 4,
) -> Traffic:
    """Return the bytes and multiplications of one part's launches.

    Operations are those in matrix products over whole chunks and blocks; second_order has none and counts the
    multiply-adds for state and reads. An input read by several programs counts for each. A gradient's parts are summed
    by torch; these sums are left out.

    Args:
        batch: sequences.
        heads: heads per layer.
        positions: sequence length.
        keys: features per key.
        values: features per value.
        delta: whether the delta rule is used.
        decays: per position and head: 0 (none), 1 or ``keys``.
        part: "forward", "backward" or "second_order".
        input_bytes: per element in q, k, v; β, ln a and outputs have 4.
    """
    from kernels.recurrent import CHUNK, blocks  # needs triton

    key_block, value_block = blocks(keys, values)
    of_values, chunks = ceil_div(values, value_block), ceil_div(positions, CHUNK)
    sequences = batch * heads
    each = sequences * of_values * positions  # a position in each of its programs
    q_or_k, v = each * keys * input_bytes, sequences * positions * values * input_bytes
    scalars, out = 4 * each * (delta + decays), 4 * sequences * positions * values
    if part == "second_order":
        per_number = 2 * 6 * (2 + delta + (decays > 0))
        flops = each * key_block * value_block * per_number
        return Traffic(3 * (2 * q_or_k + v + scalars), 3 * out, flops)
    solved, state, read, back = _products(key_block, value_block, delta=delta, features_decay=decays > 1)
    programs = sequences * of_values * chunks
    if part == "forward":
        return Traffic(2 * q_or_k + v + scalars, out, 2 * programs * (solved + state + read))
    states = 4 * sequences * chunks * keys * values
    of_states = Traffic(q_or_k + v + scalars, states, 2 * programs * (solved + state))
    gradients = 4 * 2 * each * keys + scalars + out
    return of_states + Traffic(2 * q_or_k + v + scalars + states + out, gradients, 2 * programs * (solved + back))


def _products(keys: int, values: int, *, delta: bool, features_decay: bool) -> tuple[int, int, int, int]:
    """Return one chunk's multiply-adds in one program, for blocks this wide: written, state, read, gradients."""
    from kernels.recurrent import CHUNK

    levels = CHUNK.bit_length() - 1
    pairs, of_keys, of_values = CHUNK**2 * keys, CHUNK * keys * values, CHUNK**2 * values
    decays = 2 * pairs if features_decay else CHUNK**3
    scores = decays + (levels * (2 + delta) if features_decay else 1 + delta) * pairs
    system = 2 * (levels - 1) * CHUNK**3 + of_keys + of_values if delta else 0
    of_scores = (levels * (4 + delta) if features_decay else 2 + delta) * pairs
    of_scores += decays if features_decay else 2 * decays  # decays of pairs are computed again
    back = of_scores + 2 * of_values + 4 * of_keys + delta * 2 * (of_values + of_keys)
    return scores + system, of_keys, of_keys + of_values, back
