"""`benchmarks.kernels`: bounds alone where there is no GPU, every contestant at tiny sizes, promises judged."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

from benchmarks import kernels as benchmark
from benchmarks.kernel_cases.case import EAGER, OURS, Case, Promise
from benchmarks.kernels import Result
from kernels.roofline import H100, Traffic

BOTH = {OURS: lambda device: lambda: None, EAGER: lambda device: lambda: None}
# 3.35 MB: a microsecond of the H100's memory
CASE = Case("toy", "N=8", BOTH, lambda: Traffic(3_350_000, 0, 67_000_000), "float32")


def raises(device):
    raise ImportError("no such library\nand more")


def test_the_bounds_alone_are_printed_where_there_is_no_cuda_device(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    benchmark.main([])
    told = capsys.readouterr().out
    assert "Nothing was measured: torch sees no CUDA device" in told
    for name in benchmark.KERNELS:
        assert any(line.startswith(name) for line in told.splitlines()), name


def test_a_bound_is_the_time_of_its_bytes_or_of_its_operations():
    (row,) = benchmark.bounds([CASE]).splitlines()[1:]
    assert row.split() == [
        "toy",
        "N=8",
        "float32",
        "3.4",
        "0.0",
        "0.1",
        "0.001",
        "ms",
        "memory",
        "0.001",
        "ms",
        "compute",
    ]


def test_who_cannot_take_part_is_named_with_the_reason_and_the_others_go_on():
    case = Case("toy", "N=8", {**BOTH, "library": raises})
    found = benchmark.measured(case, torch.device("cpu"), 2)
    assert found["library"] == Result(failure="ImportError: no such library")
    assert found[OURS].seconds > 0 and found[EAGER].seconds > 0
    assert [line[58:74].strip() for line in benchmark.rows(case, found)] == [OURS, "library", EAGER]
    assert benchmark.notes({case.name: found}) == ["-- toy N=8 float32, library: ImportError: no such library"]


def test_a_contestant_that_is_left_out_is_not_called():
    found = benchmark.measured(Case("toy", "N=8", {**BOTH, "library": raises}), torch.device("cpu"), 1, ["library"])
    assert found["library"] == Result(failure="left out by --without")


@pytest.mark.parametrize(
    ("promise", "line"),
    [
        (
            Promise(OURS, EAGER, 4, is_gain=True),
            "met           toy N=8 float32: time of ours and eager, at least 4: 5.00",
        ),
        (Promise(OURS, EAGER, 0.1), "MISSED        toy N=8 float32: time of ours and eager, at most 0.1: 0.20"),
        (
            Promise(OURS, EAGER, 0.5, quantity="memory"),
            "met           toy N=8 float32: memory of ours and eager, at most 0.5: 0.50",
        ),
        (
            Promise(OURS, "bound", 0.8, is_gain=True),
            "met           toy N=8 float32: time of ours and bound, at least 0.8: 1.00",
        ),
        (Promise(OURS, "fla", 1), "not measured  toy N=8 float32: time of ours and fla, at most 1"),
    ],
)
def test_a_promise_is_met_or_missed_by_what_was_measured(promise, line):
    case = Case(CASE.kernel, CASE.label, BOTH, CASE.traffic, CASE.precision, (promise,))
    found = {case.name: {OURS: Result(1e-6, 100), EAGER: Result(5e-6, 200)}}
    assert benchmark.kept([case], found, H100) == [line]


def test_an_unknown_kernel_is_refused(capsys):
    with pytest.raises(SystemExit, match="^2$"):
        benchmark.main(["--kernels", "nonsense"])
    assert "no nonsense; choices: consensus, band_attention" in capsys.readouterr().err


def test_how_far_gradients_lie_off_is_told_where_they_are_of_the_same_tensors():
    truth = (torch.tensor([3.0, 0.0]), torch.tensor([[4.0]]))
    assert benchmark.off_by((torch.tensor([3.0, 0.5]), torch.tensor([[4.0]])), truth) == pytest.approx(0.1)
    assert benchmark.off_by((torch.tensor([3.0]),), truth) is None and benchmark.off_by(None, truth) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", benchmark.KERNELS)
def test_ours_takes_part_at_tiny_sizes_and_has_the_gradients_of_torch(name):
    """In Triton's interpreter, where there is no GPU. bfloat16 leaves a hundredth."""
    pytest.importorskip(f"kernels.{name}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for case in importlib.import_module(f"benchmarks.kernel_cases.{name}").cases(True):
        wanted = {key: make for key, make in case.contestants.items() if key in (OURS, EAGER)}
        found = benchmark.measured(replace(case, contestants=wanted), device, 1)
        assert not found[OURS].failure and not found[EAGER].failure
        assert found[OURS].off is None or found[OURS].off < 1e-2, case.name
        assert benchmark.moved(case) is not None
