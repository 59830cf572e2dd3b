"""Time and memory of uᵀHu over those of one gradient of the same model, side by side in one process: ``python -m benchmarks.curvature``.

GPT with tied embeddings (d = 256, 4 layers, 4 heads, vocabulary 1,000), float32, one CPU thread, one sequence of N = 256 and of 1,024. The methods take
turns, and each turn's times, the thread's own CPU seconds, are divided by that turn's gradient; medians are shown. Memory is the allocator's
peak beyond what stands before the call (parameters and direction), from torch.profiler's record of every allocation. pyhessian and curvlinops are measured
where they are installed (PYTHONPATH will do). Then the α_max of every training step inside the quickstart's model, in steps without it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # before torch is imported: the profiler announces itself otherwise

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from stability.build import build_model, build_objective
from stability.config import parse_run
from stability.curvature import GradientWithGraph, directional, step_direction

WIDTH, LAYERS, HEADS, VOCABULARY = 256, 4, 4, 1000
LIMITS = {256: (1.9, 1.1), 1024: (2.2, 1.5)}  # N -> what taylor may cost in gradients: time, memory
QUICKSTART_LIMIT = 2.2
Call = Callable[[], object]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, positions: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(positions, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.norm(self.blocks(x)) @ self.tokens.weight.T


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def methods(positions: int, rows: int) -> dict[str, Call]:
    """What is compared, by name; "gradient" is the unit."""
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
    calls |= {name: lambda name=name: directional(loss, params, u, name) for name in ("taylor", "double_backward", "finite_difference")}
    calls["gradient, then double backward on its graph"] = lambda: GradientWithGraph(loss, params, method="double_backward").along(u)
    calls["jvp of grad"] = jvp_of_grad
    return calls | installed(net, inputs, targets, list(u.values()))


def installed(net: nn.Module, inputs: Tensor, targets: Tensor, u: list[Tensor]) -> dict[str, Call]:
    """pyhessian's and curvlinops' Hessian-vector product, where they are importable."""
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
                param.grad = None  # its gradients hold their graph, which holds the parameters
            return product

        calls["pyhessian"] = pyhessian
    except ImportError:
        print("pyhessian is not installed: not measured")
    try:
        from curvlinops import HessianLinearOperator

        data = [(inputs, targets.flatten())]
        options = {"check_deterministic": False, "num_data": targets.numel(), "batch_size_fn": torch.numel}
        operator = HessianLinearOperator(nn.Sequential(net, nn.Flatten(0, 1)), nn.CrossEntropyLoss(), list(net.parameters()), data, **options)

        def curvlinops() -> object:
            with sdpa_kernel(SDPBackend.MATH):
                return operator @ u

        calls["curvlinops"] = curvlinops
    except ImportError:
        print("curvlinops is not installed: not measured")
    return calls


def interleaved(calls: dict[str, Call], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each call, a turn of all of them at a time; one turn beforehand warms up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-1, repeats):
        for name, call in calls.items():
            start = time.thread_time()
            call()
            if turn >= 0:
                times[name].append(time.thread_time() - start)
    return times


def ratio(times: dict[str, list[float]], name: str, unit: str) -> float:
    return statistics.median(a / b for a, b in zip(times[name], times[unit], strict=True))


def peak_bytes(call: Call) -> int:
    """The most that was allocated at once during the call."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    events = (event for event in record.profiler.kineto_results.events() if event.name() == "[memory]")
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def compare(positions: int, rows: int, repeats: int) -> None:
    """The table of one length."""
    calls = methods(positions, rows)
    times, peaks = interleaved(calls, repeats), {name: peak_bytes(call) for name, call in calls.items()}
    print(f"\nN = {positions}, {rows} sequence(s): gradient {statistics.median(times['gradient']) * 1e3:.0f} ms, {peaks['gradient'] / 2**20:.1f} MiB")
    print(f"{'':46s} {'time':>6s} {'memory':>7s}   in gradients; taylor may take {LIMITS[positions][0]} and {LIMITS[positions][1]}")
    for name in calls:
        print(f"{name:46s} {ratio(times, name, 'gradient'):6.2f} {peaks[name] / peaks['gradient']:7.2f}")


def microbatched(rows: int) -> None:
    """Peak memory of α_max over that of the training step, one sequence at a time in both."""
    torch.manual_seed(0)
    net = GPT(256)
    params = dict(net.named_parameters())
    optimizer = torch.optim.AdamW(params.values(), lr=1e-3)
    batches = list(torch.randint(VOCABULARY, (rows, 1, 257)))
    u = {name: 0.1 * torch.randn_like(param) for name, param in params.items()}

    def loss(p: dict[str, Tensor], tokens: Tensor) -> tuple[Tensor, int]:
        total = F.cross_entropy(functional_call(net, p, (tokens[:, :-1],)).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        return total, tokens[:, 1:].numel()

    def step() -> None:
        for tokens in batches:
            total, count = loss(params, tokens)
            (total / (rows * count)).backward()
        optimizer.step()
        optimizer.zero_grad()

    unit = peak_bytes(step)
    ratios = {name: peak_bytes(lambda name=name: directional(loss, params, u, name, batches=batches)) / unit for name in ("taylor", "double_backward")}
    print(f"\nN = 256, {rows} sequences one at a time: peak memory of α_max over that of the training step ({unit / 2**20:.1f} MiB); may be 1.05")
    print("  ".join(f"{name} {value:.2f}" for name, value in ratios.items()))


def quickstart(repeats: int) -> None:
    """Every step of the quickstart's model with its α_max, in steps without."""
    print(f"\nα_max of every step of the quickstart (d = 64, N = 64, 8 sequences), in steps without it; may take {QUICKSTART_LIMIT}")
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
        print(f"{mechanism:46s} {ratio(times, 'measured', 'plain') - 1:6.2f}   ({statistics.median(times['plain']) * 1e3:.0f} ms a step)")


def quickstart_model(mechanism: str) -> tuple[nn.Module, Callable[[dict[str, Tensor]], Tensor]]:
    """The nano model with its masked-language-modelling loss on one batch of random bytes."""
    sizes = {"name": "benchmark", "layers": 4, "width": 64, "heads": 4, "positions": 64}
    parts = {"objective": "mlm", "data": "stdlib", "residual": "identity", "optimizer": "adamw", "norm": "layernorm", "schedule": {"name": "constant"}}
    numbers = {"steps": 1, "batch": 8, "clip_norm": 1.0, "lr_peak": 1e-3, "seed": 0, "data_fingerprint": "none"}
    spec = parse_run({"model": sizes, "mechanism": {"name": mechanism}, **parts, **numbers})
    model, objective = build_model(spec, 257), build_objective(spec, 257)
    generator = torch.Generator().manual_seed(0)
    examples = objective.examples(torch.randint(257, (8, 64), generator=generator), generator)

    def loss(params: dict[str, Tensor]) -> Tensor:
        total, count = objective.loss_sum(functional_call(model, params, (examples.inputs_BN,)), examples)
        return total / count

    return model, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rows", type=int, default=1, help="sequences in the batch")
    parser.add_argument("--positions", type=int, nargs="*", default=list(LIMITS), choices=list(LIMITS))
    parser.add_argument("--no-quickstart", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for positions in options.positions:
        compare(positions, options.rows, options.repeats)
    microbatched(4)
    if not options.no_quickstart:
        quickstart(3 * options.repeats)


if __name__ == "__main__":
    main()
