"""Time and memory of uᵀHu over those of one gradient of the same model, side by side in one process: ``python -m
benchmarks.curvature``.

GPT with tied embeddings (d = 256, 4 layers, 4 heads, vocabulary 1,000), float32, one CPU thread, one sequence of N =
256 and of 1,024. The methods take turns, and each turn's times, the thread's own CPU seconds, are divided by that
turn's gradient; medians are shown. Memory is the allocator's peak beyond what stands before the call (parameters and
direction), from torch.profiler's record of every allocation. pyhessian and curvlinops are measured where they are
installed (the extra `peers`). Then microbatches, the bytes that a parameter costs, and the α_max of every training step
inside the quickstart's model, in steps without it; last, what was promised beside what was measured.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks._measuring import Call, Promise, interleaved, peak_bytes  # isort: skip (before torch, see there)

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks._curvature_models import GPT, VOCABULARY, quickstart_model, token_loss
from benchmarks._machine import machine
from stability.curvature import GradientWithGraph, directional, step_direction

LIMITS = {256: (1.9, 1.1), 1024: (2.2, 1.5)}  # N -> taylor's limits in gradients: time, memory
QUICKSTART_LIMIT, MICROBATCH_LIMIT = 2.2, 1.05
OTHERS, OTHERS_TIMES, OTHERS_MEMORY = ("pyhessian", "curvlinops"), 1.5, 3.0  # taylor's least advantage
GPU_MEMORY_GB = (24, 141)


def methods(positions: int, rows: int) -> dict[str, Call]:
    """Return the compared calls by name; "gradient" is the unit."""
    torch.manual_seed(0)
    net = GPT(positions)
    tokens = torch.randint(VOCABULARY, (rows, positions + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    params = {name: param.detach() for name, param in net.named_parameters()}
    u = {name: 0.1 * torch.randn_like(param) for name, param in params.items()}

    def loss(p: dict[str, Tensor]) -> Tensor:
        return token_loss(functional_call(net, p, (inputs,)), targets)

    def gradient() -> object:
        leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
        return torch.autograd.grad(loss(leaves), list(leaves.values()))

    def jvp_of_grad() -> object:
        with sdpa_kernel(SDPBackend.MATH):
            return torch.func.jvp(torch.func.grad(loss), (params,), (u,))

    calls: dict[str, Call] = {"gradient": gradient}
    calls |= {
        name: lambda name=name: directional(loss, params, u, name)
        for name in ("taylor", "double_backward", "finite_difference")
    }
    calls["gradient, then double backward on its graph"] = lambda: GradientWithGraph(
        loss, params, method="double_backward"
    ).along(u)
    calls["jvp of grad"] = jvp_of_grad
    return calls | installed(net, inputs, targets, list(u.values()))


def installed(net: nn.Module, inputs: Tensor, targets: Tensor, u: list[Tensor]) -> dict[str, Call]:
    """Return the Hessian-vector products of pyhessian and curvlinops, if installed.

    Args:
        net: the model.
        inputs: tokens, shape (rows, positions).
        targets: tokens, shape (rows, positions).
        u: direction, one tensor a parameter.
    """
    calls: dict[str, Call] = {}
    try:
        from pyhessian import hessian
        from pyhessian.utils import hessian_vector_product

        def pyhessian() -> object:
            net.zero_grad()
            with sdpa_kernel(SDPBackend.MATH):
                held = hessian(net, token_loss, data=(inputs, targets), cuda=False)
                product = hessian_vector_product(held.gradsH, held.params, u)
            for param in net.parameters():
                param.grad = None  # gradients refer to their graph, and the graph to the parameters
            return product

        calls["pyhessian"] = pyhessian
    except ImportError:
        print("pyhessian is not installed: not measured")
    try:
        from curvlinops import HessianLinearOperator

        data = [(inputs, targets.flatten())]
        options = {"check_deterministic": False, "num_data": targets.numel(), "batch_size_fn": torch.numel}
        operator = HessianLinearOperator(
            nn.Sequential(net, nn.Flatten(0, 1)), nn.CrossEntropyLoss(), list(net.parameters()), data, **options
        )

        def curvlinops() -> object:
            with sdpa_kernel(SDPBackend.MATH):
                return operator @ u

        calls["curvlinops"] = curvlinops
    except ImportError:
        print("curvlinops is not installed: not measured")
    return calls


def ratio(times: dict[str, list[float]], name: str, unit: str) -> float:
    """Return the median over turns of one call's time over another's.

    Args:
        times: seconds of each turn, by call.
        name: the numerator.
        unit: the denominator.
    """
    return statistics.median(a / b for a, b in zip(times[name], times[unit], strict=True))


def compare(positions: int, rows: int, repeats: int) -> list[Promise]:
    """Print one length's table and return its promises.

    Args:
        positions: sequence length N.
        rows: sequences in the batch.
        repeats: turns.
    """
    calls = methods(positions, rows)
    times, peaks = interleaved(calls, repeats), {name: peak_bytes(call) for name, call in calls.items()}
    print(
        f"\nN = {positions}, {rows} sequence(s): gradient {statistics.median(times['gradient']) * 1e3:.0f} ms, "
        f"{peaks['gradient'] / 2**20:.1f} MiB"
    )
    print(
        f"{'':46s} {'time':>6s} {'memory':>7s}   in gradients; taylor may take {LIMITS[positions][0]} and "
        f"{LIMITS[positions][1]}"
    )
    for name in calls:
        print(f"{name:46s} {ratio(times, name, 'gradient'):6.2f} {peaks[name] / peaks['gradient']:7.2f}")
    promises = [
        Promise(f"taylor, N = {positions}: time", ratio(times, "taylor", "gradient"), LIMITS[positions][0]),
        Promise(f"taylor, N = {positions}: memory", peaks["taylor"] / peaks["gradient"], LIMITS[positions][1]),
    ]
    for other in (name for name in OTHERS if name in calls):
        promises.append(
            Promise(
                f"{other} over taylor, N = {positions}: time",
                ratio(times, other, "taylor"),
                OTHERS_TIMES,
                at_least=True,
            )
        )
        promises.append(
            Promise(
                f"{other} over taylor, N = {positions}: memory",
                peaks[other] / peaks["taylor"],
                OTHERS_MEMORY,
                at_least=True,
            )
        )
    return promises


def microbatched(rows: int) -> list[Promise]:
    """Measure α_max's peak memory over the training step's, one sequence at a time."""
    torch.manual_seed(0)
    net = GPT(256)
    params = dict(net.named_parameters())
    optimizer = torch.optim.AdamW(params.values(), lr=1e-3)
    batches = list(torch.randint(VOCABULARY, (rows, 1, 257)))
    u = {name: 0.1 * torch.randn_like(param) for name, param in params.items()}

    def loss(p: dict[str, Tensor], tokens: Tensor) -> tuple[Tensor, int]:
        total = F.cross_entropy(
            functional_call(net, p, (tokens[:, :-1],)).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )
        return total, tokens[:, 1:].numel()

    def step() -> None:
        for tokens in batches:
            total, count = loss(params, tokens)
            (total / (rows * count)).backward()
        optimizer.step()
        optimizer.zero_grad()

    unit = peak_bytes(step)
    ratios = {
        name: peak_bytes(lambda name=name: directional(loss, params, u, name, batches=batches)) / unit
        for name in ("taylor", "double_backward")
    }
    print(
        f"\nN = 256, {rows} sequences one at a time: peak memory of α_max over that of the training step "
        f"({unit / 2**20:.1f} MiB)"
    )
    print("  ".join(f"{name} {value:.2f}" for name, value in ratios.items()))
    return [Promise("α_max one row at a time: memory", ratios["taylor"], MICROBATCH_LIMIT)]


def bytes_per_parameter() -> None:
    """Print the bytes a parameter in float32, and the largest models that fit.

    Both come from the peaks of a shallow and a deep model on the same 32 tokens. "along a given u": θ and u are stored,
    `directional` uses taylor. "a training step and its α_max": θ, AdamW's m and v are stored; gradient, step, u and
    α_max are computed. Not counted: one layer's intermediate results and the logits, because they don't grow with
    depth.
    """
    costs: dict[str, list[tuple[int, int]]] = {}
    for layers in (4, 16):
        for name, (standing, call, parameters) in _scaling_calls(layers).items():
            costs.setdefault(name, []).append((parameters, standing + peak_bytes(call)))
    print(
        "\nbytes a parameter costs in float32 (slope between 4 and 16 layers), and the largest model that fits, one "
        "short sequence at a time"
    )
    for name, ((small, few), (large, many)) in costs.items():
        cost = (many - few) / (large - small)
        sizes = ", ".join(f"{gigabytes} GB: {gigabytes / cost:.1f} B parameters" for gigabytes in GPU_MEMORY_GB)
        print(f"{name:46s} {cost:6.1f}   {sizes}")


def _scaling_calls(layers: int) -> dict[str, tuple[int, Call, int]]:
    """Return calls by name: (bytes stored before the call, the call, parameter count)."""
    torch.manual_seed(0)
    net = GPT(32, layers)
    params = dict(net.named_parameters())
    optimizer = torch.optim.AdamW(params.values(), lr=1e-3)
    tokens = torch.randint(VOCABULARY, (1, 33))
    u = {name: 0.1 * torch.randn_like(param) for name, param in params.items()}
    plain = {name: param.detach() for name, param in params.items()}
    size = sum(param.numel() for param in params.values())

    def loss(p: dict[str, Tensor]) -> Tensor:
        return token_loss(functional_call(net, p, (tokens[:, :-1],)), tokens[:, 1:])

    def step(method: str) -> None:
        held = GradientWithGraph(loss, params, method=method)
        for name, gradient in held.gradient().items():
            params[name].grad = gradient
        held.along(step_direction(optimizer, params, 1e-3))
        optimizer.zero_grad()

    def training() -> None:
        loss(params).backward()
        optimizer.step()
        optimizer.zero_grad()

    training()
    return {
        "along a given u, taylor": (8 * size, lambda: directional(loss, plain, u, "taylor"), size),
        "along a given u, double_backward": (8 * size, lambda: directional(loss, plain, u, "double_backward"), size),
        "a training step alone, AdamW": (12 * size, training, size),
        "a training step and its α_max, taylor": (12 * size, lambda: step("taylor"), size),
    }


def quickstart(repeats: int) -> list[Promise]:
    """Time every step of the quickstart's model with its α_max, in steps without."""
    promises = []
    print(
        "\nα_max of every step of the quickstart (d = 64, N = 64, 8 sequences), in steps without it; may take "
        f"{QUICKSTART_LIMIT}"
    )
    for mechanism in ("sa", "sc", "mix", "sw"):
        model, loss = quickstart_model(mechanism)
        params = dict(model.named_parameters())
        optimizer = torch.optim.AdamW(params.values(), lr=1e-3, weight_decay=1e-2)

        def plain(params=params, loss=loss, optimizer=optimizer) -> None:
            gradients = torch.autograd.grad(loss(params), list(params.values()))
            for param, gradient in zip(params.values(), gradients, strict=True):
                param.grad = gradient
            optimizer.step()

        def measured(params=params, loss=loss, optimizer=optimizer) -> None:
            held = GradientWithGraph(loss, params)
            for name, gradient in held.gradient().items():
                params[name].grad = gradient
            found = held.along(step_direction(optimizer, params, 1e-3))
            assert found.method == "taylor", found

        times = interleaved({"plain": plain, "measured": measured}, repeats)
        added = ratio(times, "measured", "plain") - 1
        print(f"{mechanism:46s} {added:6.2f}   ({statistics.median(times['plain']) * 1e3:.0f} ms a step)")
        promises.append(Promise(f"every step of the quickstart, {mechanism}: added time", added, QUICKSTART_LIMIT))
    return promises


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rows", type=int, default=1, help="sequences in the batch")
    parser.add_argument("--positions", type=int, nargs="*", default=list(LIMITS), choices=list(LIMITS))
    parser.add_argument("--no-quickstart", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    promises = [
        promise
        for positions in options.positions
        for promise in compare(
            positions, options.rows, options.repeats if positions < 1024 else (options.repeats + 1) // 2
        )
    ]
    promises += microbatched(4)
    bytes_per_parameter()
    if not options.no_quickstart:
        promises += quickstart(3 * options.repeats)
    print(
        f"\nwhat was promised ({machine().split(', load')[1].split(';')[0].strip()}: load at the end)",
        *promises,
        sep="\n",
    )


if __name__ == "__main__":
    main()
