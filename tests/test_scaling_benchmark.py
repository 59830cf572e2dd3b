"""`benchmarks.scaling`: counts of known operations, exponents of known growth, and the verdict on Table 1."""

from __future__ import annotations

import pytest
import torch

from benchmarks import scaling


def test_products_are_counted_and_sums_are_not():
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    with scaling.MultiplyAdds() as counted:
        product = a @ b
        product + product
        assert counted.count == 60
        product * product
    assert counted.count == 60 + 15


@pytest.mark.parametrize("mechanism", ["sa", "sc"])
def test_exponents_are_table_1s_without_the_projections_and_above_it_in_d_with_them(mechanism):
    for factor, printed in scaling.PRINTED[mechanism].items():
        far, bare = scaling.far_exponents(mechanism, factor)
        assert bare == pytest.approx(printed, abs=scaling.ROUNDING)
        assert far > 1.5 if factor == "d" else far <= printed + scaling.ROUNDING


@pytest.mark.parametrize(
    ("far", "printed", "said"), [(1.0, 1, "supported"), (1.5, 1, "not supported"), (1.5, 2, "supported")]
)
def test_the_verdict_is_by_the_far_counts(far, printed, said):
    growth = scaling.Growth([1, 2], far, 1.0, [1.0, 2.0], [9.0], 9.0)
    assert scaling.verdict(growth, printed) == said


def test_each_turn_has_its_exponent_and_every_second_runs_backwards(monkeypatch):
    orders = []

    def timed(calls, repeats):
        orders.append([int(name) for name in calls])
        return {name: [len(orders) * int(name) ** 1.5] for name in calls}

    monkeypatch.setattr(scaling, "calls_of", lambda *_, **__: (None, None))
    monkeypatch.setattr(scaling, "interleaved", timed)
    monkeypatch.setattr(scaling, "peak_bytes", lambda _: 7)
    found = scaling.grow("sc", "r", 2)
    assert found.turns == pytest.approx([1.5, 1.5]) and found.memory == pytest.approx(0)
    assert orders == [[4, 8, 16], [16, 8, 4]]
    assert found.milliseconds == pytest.approx([1.5e3 * value**1.5 for value in (4, 8, 16)])
