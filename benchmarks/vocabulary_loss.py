"""Compare a loss over 50,258 tokens in chunks of positions (`objective.loss_chunk`) with that of whole logits: ``python
-m benchmarks.vocabulary_loss``.

A gradient is forward and backward pass of the project's own model (4 layers, width 64, 8 sequences of 128 positions,
float32, one CPU thread) up to the gradient of every parameter, those of embedding and head (13 MB each) among them; a
curvature is uᵀHu by taylor. The plain version and the chunked ones take turns; ratios are of medians of the thread's
own CPU seconds. Memory is the allocator's peak beyond what stands before the call (the parameters). "off by": the norm
of the gradient's difference from the plain one over its norm; for a curvature, that of uᵀHu.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks._measuring import Call, Promise, interleaved, peak_bytes  # isort: skip (before torch, see there)

import torch
from torch import Tensor

from benchmarks._machine import machine
from stability.build import build_model, build_objective
from stability.config.parse import parse_run
from stability.curvature import directional

VOCABULARY, BATCH, POSITIONS = 50_258, 8, 128
MEMORY_LIMIT = 0.35  # in units of the plain version's
OBJECTIVES = ("mlm", "ar", "score_entropy")
Problem = tuple[Call, Call]


def problem(objective: str, chunk: int | None) -> Problem:
    """Return (gradient, curvature) of the same model on the same batch; each call returns one vector."""
    sizes = {"name": "benchmark", "layers": 4, "width": 64, "heads": 4, "positions": POSITIONS}
    parts: dict[str, Any] = {
        "mechanism": "sa",
        "data": "stdlib",
        "residual": "identity",
        "optimizer": "adamw",
        "norm": "layernorm",
    }
    numbers = {
        "steps": 1,
        "batch": BATCH,
        "clip_norm": 1.0,
        "lr_peak": 1e-3,
        "seed": 0,
        "data_fingerprint": "none",
        "schedule": {"name": "constant"},
    }
    spec = parse_run({"model": sizes, "objective": {"name": objective, "loss_chunk": chunk}, **parts, **numbers})
    built, model = build_objective(spec, VOCABULARY), build_model(spec, VOCABULARY)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():  # off the initial zeros of a conditioned model
            param.add_(0.02 * torch.randn(param.shape, generator=generator))
    tokens_BN = torch.randint(VOCABULARY, (BATCH, built.tokens_needed(POSITIONS)), generator=generator)
    examples = built.examples(tokens_BN, generator)
    params = {name: param.detach() for name, param in model.named_parameters()}
    direction = {name: torch.randn(param.shape, generator=generator) for name, param in params.items()}

    def mean(at: dict[str, Tensor] | None = None) -> Tensor:
        total, count = built.loss(model, examples, at)
        return total / count

    def gradient() -> Tensor:
        found = torch.autograd.grad(mean(), list(model.parameters()), materialize_grads=True)
        return torch.cat([part.flatten() for part in found])

    def curvature() -> Tensor:
        return torch.tensor([directional(mean, params, direction, "taylor").curvature])

    return gradient, curvature


def compare(objective: str, chunks: list[int], repeats: int) -> list[Promise]:
    """Print one objective's table; return the promises about its gradient's memory.

    Args:
        objective: the objective.
        chunks: positions of a chunk, one version each.
        repeats: turns.
    """
    problems = {
        "plain": problem(objective, None),
        **{f"chunks of {chunk}": problem(objective, chunk) for chunk in chunks},
    }
    promises = []
    for index, what in enumerate(("gradient", "curvature")):
        calls = {name: pair[index] for name, pair in problems.items()}
        times = {name: statistics.median(values) for name, values in interleaved(calls, repeats).items()}
        memory = {name: peak_bytes(call) for name, call in calls.items()}
        exact = torch.as_tensor(calls["plain"]())
        for name, call in calls.items():
            off = float((torch.as_tensor(call()) - exact).norm() / exact.norm())
            row = (
                f"{1e3 * times[name]:8.0f} ms{times[name] / times['plain']:7.2f}{memory[name] / 2**20:9.0f} "
                f"MiB{memory[name] / memory['plain']:7.2f}"
            )
            print(f"{objective:<15}{what:<11}{name:<15}{row}{off:10.0e}")
        if what == "gradient":
            promises += [
                Promise(f"{objective}, {name}: memory", memory[name] / memory["plain"], MEMORY_LIMIT)
                for name in list(calls)[1:]
            ]
    return promises


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="turns (default 5)")
    parser.add_argument("--chunks", type=int, nargs="+", default=[32, 128], help="positions of a chunk")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("$ python -m benchmarks.vocabulary_loss")
    print(machine())
    print(
        f"\n{VOCABULARY:,} tokens, {BATCH} × {POSITIONS} "
        f"positions\n{'':41}{'time':>11}{'/plain':>7}{'memory':>13}{'/plain':>7}{'off by':>10}"
    )
    promises = [promise for objective in OBJECTIVES for promise in compare(objective, options.chunks, options.repeats)]
    print("\nwhat was promised", *promises, sep="\n")


if __name__ == "__main__":
    main()
