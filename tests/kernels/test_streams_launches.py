"""What the launches of `kernels.streams` move, counted by the interpreter, and what they take of a GPU, told by the
compiler."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.kernel_cases.streams import traffic
from kernels.roofline import H100, Traffic
from kernels.streams import join
from tests.kernels.ahead import compiled
from tests.kernels.counting import counting
from tests.kernels.interpreted import interpreter_is_prepared_once
from tests.kernels.streams_reference import Case

__all__ = ["interpreter_is_prepared_once"]

NOTHING = Traffic(0, 0, 0)
LAUNCHED = {
    "mhc": Case("mhc", 3, 40, 35, iterations=1),
    "mhc_lite": Case("mhc_lite", 4, 24, 9),
    "hc": Case("hc", 3, 40, 11),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAUNCHED)
def test_traffic_is_what_the_interpreter_counts(name, dtype):
    case = dataclasses.replace(LAUNCHED[name], dtype=dtype)
    given, gradients = case.drawn()
    leaves = [each.requires_grad_() for each in given]
    options = {"hc": 0, "mhc": case.streams**2, "mhc_lite": 24}[case.scheme]
    sizes = {"tokens": case.tokens, "streams": case.streams, "width": case.width, "options": options}
    sizes |= {"lite": case.scheme == "mhc_lite", "iterations": case.iterations, "itemsize": dtype.itemsize}
    expected = lambda *names: sum((traffic(each, **sizes, once=False) for each in names), NOTHING)  # noqa: E731
    with counting() as count:
        u, coefficients, x = case.kernels(*leaves)
    assert (count.read, count.written) == (expected("read").read, expected("read").written)
    with counting() as count:
        torch.autograd.grad((u, coefficients, x), leaves, gradients)
    found = expected("logits_backward", "read_backward")
    assert (count.read, count.written) == (found.read, found.written)
    for by_differences, backward in ((True, "join_backward"), (False, "join_backward_plain")):
        inputs = [each.detach().requires_grad_() for each in (x, coefficients, u)]
        with counting() as count:
            out = join(*inputs, by_differences=by_differences)
        assert (count.read, count.written) == (expected("join").read, expected("join").written)
        with counting() as count:
            torch.autograd.grad(out, inputs, gradients[2])
        assert (count.read, count.written) == (expected(backward).read, expected(backward).written)


def test_a_connection_moves_its_streams_as_often_as_it_must():
    """Forward: read once, read to be joined, written; backward, with the gradient: five reads and two writes."""
    sizes = {"tokens": 65536, "streams": 4, "width": 1024, "options": 24, "lite": True, "itemsize": 2}
    whole = sizes["tokens"] * sizes["streams"] * sizes["width"] * 2
    forward, backward = traffic("forward", **sizes), traffic("backward", **sizes)
    assert 3 <= forward.bytes / whole <= 3.7
    assert 7 <= backward.bytes / whole <= 8.2
    mhc = sizes | {"options": 16, "lite": False}
    for each in ("forward", "backward"):
        assert H100.seconds(traffic(each, **mhc)) <= 1.2 * H100.seconds(traffic(each, **sizes))


@pytest.mark.slow
def test_the_kernels_compile_for_an_h100_without_spilling():
    code = """
    import torch
    from kernels.streams import join, read_gated, read_hyper
    from tests.kernels.streams_reference import Case
    for scheme in ("mhc_lite", "mhc", "hc"):
        case = Case(scheme, 4, 256, 512, torch.bfloat16, iterations=20)
        given, gradients = case.drawn()
        leaves = [each.requires_grad_() for each in given]
        out = case.kernels(*leaves)
        torch.autograd.grad(out, leaves, gradients)
        given = leaves if scheme == "hc" else [*leaves, case.p]
        parts = [(None if each is None else each.detach(), None, None) for each in given]
        (read_hyper if scheme == "hc" else read_gated).second_order(*parts, **case.settings)
    added, coefficients, gradient = (each.requires_grad_() for each in gradients)
    x = given[0].detach().requires_grad_()
    out = join(x, coefficients, added, by_differences=True)
    torch.autograd.grad(out, (x, coefficients, added), gradient.detach())
    join.second_order(*[(each.detach(), None, None) for each in (x, coefficients, added)], by_differences=True)
    """
    found = compiled(code)
    assert len(found) == 3 * 4 + 3
    for each in found:
        each.assert_fits()
        assert each.stack <= (64 if "taylor" in each.name else 0), each
