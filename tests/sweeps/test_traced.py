"""What a trace on the meta device counts, against closed forms and against what a process really takes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from kernels.roofline import Device
from sweeps.traced import trace

NEVER = 1e300
SLOW_MEMORY = Device("slow memory", 1.0, {"float32": NEVER}, 1, 1, 1)
SLOW_PRODUCTS = Device("slow products", NEVER, {"float32": 1.0}, 1, 1, 1)


def meta(*shape, **options):
    return torch.empty(*shape, device="meta", **options)


def traced(model, loss, device=SLOW_PRODUCTS, num_counted=0, times=1):
    return trace(model, loss, device=device, precision="float32", num_counted=num_counted, times=times)


def stack(*widths):
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in zip(widths, widths[1:], strict=False)))


def test_linear_layers_take_two_operations_a_weight_and_row_forth_and_four_back():
    """But the first one, whose inputs need no gradient: two."""
    model, rows = stack(8, 32, 16, 4), 5
    found = traced(model, lambda: model(meta(rows, 8)).sum())
    assert found.flops == rows * (4 * 8 * 32 + 6 * 32 * 16 + 6 * 16 * 4) == found.seconds
    assert traced(model, lambda: model(meta(rows, 8)).sum(), times=3).flops == 3 * found.flops


def test_attention_takes_seven_products_of_its_matrix_and_memory_that_grows_with_its_length_alone():
    """Two forth; of the memory-efficient kernel five back, one of them again."""
    peaks, (batch, heads, width) = [], (2, 3, 16)
    for length in (256, 512):
        model = nn.Module()
        model.qkv = nn.Parameter(meta(3, batch, heads, length, width))
        found = traced(model, lambda model=model: nn.functional.scaled_dot_product_attention(*model.qkv).sum())
        assert found.flops == 7 * 2 * batch * heads * length**2 * width
        peaks.append(found.peak_bytes)
    assert peaks[1] == pytest.approx(2 * peaks[0], rel=1e-3)


def test_views_cost_nothing_and_every_other_operation_its_bytes():
    """x·2, whose square is summed, and back: forth 2 + 2 + 1 passes over x, back 1 + 3 + 2; a scalar's few bytes."""
    model, num = nn.Module(), 10_000
    model.x = nn.Parameter(meta(num))

    def loss():
        doubled = (model.x.view(100, 100).transpose(0, 1)[None] * 2).squeeze(0)
        return (doubled * doubled).sum()

    found = traced(model, loss, SLOW_MEMORY)
    passes = found.seconds / (4 * num)
    # doubled·doubled: two reads of the one tensor and a write forth; of each factor a product (2 reads, of which the
    # gradient of a sum is one number, and a write) back, their sum, and the product with 2
    assert passes == pytest.approx(2 + 3 + 1 + 2 * 2 + 3 + 2, abs=0.01)


def test_positions_that_count_are_as_many_as_is_said():
    model = stack(4, 4)
    seen = []

    def loss():
        index_R = meta(6, dtype=torch.bool).nonzero().squeeze(-1)
        seen.append(index_R.shape)
        return model(meta(6, 4))[index_R].sum()

    traced(model, loss, num_counted=2)
    assert seen == [(2,)]


def test_gradients_stand_while_a_second_microbatch_is_read():
    model = stack(64, 512, 64)
    weights = 4 * 2 * 64 * 512

    def peak(times):
        model.zero_grad(set_to_none=True)
        return traced(model, lambda: model(meta(1, 64)).sum(), times=times).peak_bytes

    one, two = peak(1), peak(2)
    assert one == pytest.approx(2 * weights, rel=0.02)  # the last moment: weights and gradients
    assert two == pytest.approx(2.5 * weights, rel=0.02)  # and the gradient of one layer, before it is added


PROCESS = """
import resource, torch
from pathlib import Path
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4)))
x = torch.randn(8192, 512)
def peak():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
model(x[:64]).square().mean().backward()
Path("/proc/self/clear_refs").write_text("5")
before = peak()
model(x).square().mean().backward()
print((peak() - before) * 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a process's peak memory is read where Linux has it")
def test_the_traced_peak_is_what_a_process_takes():
    taken = int(subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=True).stdout)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4)))
    standing = 4 * sum(parameter.numel() for parameter in model.parameters())
    found = traced(model, lambda: model(meta(8192, 512)).square().mean(), times=1)
    assert found.peak_bytes - standing == pytest.approx(taken, rel=0.1)
