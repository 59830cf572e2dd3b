"""`benchmarks.mechanisms`: every mechanism that is trained beside `sa` of its direction, in time and memory."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from benchmarks import mechanisms as benchmark
from benchmarks._measuring import peak_bytes
from benchmarks._training import Size
from stability.registry import Registry, add_plugin

SKIPPING = "tests.mechanisms.plugins.skipping"  # it stands in for another one, and is not trained
TINY = Size(1, 16, 2, 16, 2)


@pytest.fixture
def measured():
    """Two mechanisms with made-up numbers: the second takes nine times as long, and twice the memory."""
    (plain, other), _ = benchmark.cases(["sa", "sw"], ["causal"])
    return {
        plain: benchmark.Measured([0.1, 0.2, 0.1], 2**20, 0.01),
        other: benchmark.Measured([0.9, 1.8, 0.9], 2**21, 0.01),
    }


def test_every_mechanism_that_is_trained_stands_beside_sa_of_each_direction_that_it_reads():
    _, name = add_plugin(SKIPPING)
    registry = Registry("mechanisms")
    found, absent = benchmark.cases(list(registry.names(cross=False)), ["bidirectional", "causal"])
    pairs = [(case.name, case.direction) for case in found]
    trained = registry.names(cross=False, trainable=True)
    untrained = [each for each in registry.names(cross=False) if each not in trained]
    assert absent == [f"{each}: it is not trained" for each in untrained]
    assert name in untrained and not {*untrained} & {each for each, _ in pairs}
    assert pairs[0] == ("sa", "bidirectional") and next(pair for pair in pairs if pair[1] == "causal")[0] == "sa"
    assert ("sc", "causal") not in pairs and ("sc", "bidirectional") in pairs
    assert {*trained} <= {each for each, _ in pairs}, "one that is new needs no line"


def test_settings_that_stand_beside_the_defaults_have_a_row_of_their_own(monkeypatch):
    monkeypatch.setitem(benchmark.VARIANTS, "sw", ({"window": 7},))
    found, _ = benchmark.cases(["sw"], ["causal"])
    assert [case.label for case in found] == ["sa", "sw", "sw window=7"]
    assert found[2].parts(TINY) == {"mechanism": {"name": "sw", "window": 7}, "objective": "ar"}


def test_peak_memory_is_what_stands_at_once():
    def call():
        first = torch.ones(256, 256)  # 256 KiB
        second = first + 1  # 512 KiB at once
        del first
        return second * 2  # the first is gone: 512 KiB again

    assert peak_bytes(call) == pytest.approx(2 * 256 * 256 * 4, rel=0.01)


def test_rows_have_the_ratio_of_each_turn_and_say_what_takes_longer_than_is_allowed(measured):
    _, _, plain, other = benchmark.size_lines("N=512", TINY, measured)
    assert plain.split()[1:5] == ["causal", "100.0", "1.00", "1.00-1.00"] and plain.endswith("8 met")
    assert other.split()[1:7] == ["causal", "900.0", "9.00", "9.00-9.00", "2.0", "2.00"]
    assert other.endswith("8 MISSED")


def test_growth_is_the_power_of_n_for_a_sequence():
    sizes = (Size(1, 16, 2, 512, 4), Size(1, 16, 2, 2048, 1))
    assert benchmark.exponent(4 * 512**2, 2048**2, sizes) == pytest.approx(2)
    assert benchmark.exponent(4 * 512, 2048, sizes) == pytest.approx(1)
    (sa, sw), _ = benchmark.cases(["sa", "sw"], ["causal"])
    assert benchmark.declared(sa, TINY) == pytest.approx(2, abs=0.01)
    assert benchmark.declared(sw, TINY) == pytest.approx(1, abs=0.01)


def test_what_is_called_sub_quadratic_must_grow_so(measured):
    sizes = (Size(1, 16, 2, 512, 4), Size(1, 16, 2, 2048, 1))
    slower = {case: each._replace(alone=4 * each.alone) for case, each in measured.items()}  # of a sequence 16 times
    _, _, sa, sw = benchmark.growth_lines((measured, slower), sizes)
    assert "2.00" in sa and not sa.endswith("MISSED"), "attention is not called sub-quadratic"
    assert sw.endswith("MISSED")
    assert [*benchmark.growth_lines((measured, measured), sizes)][3].endswith("met")


def test_what_is_recurrent_is_measured_by_that_word_and_must_take_linear_time(measured, monkeypatch):
    _, name = add_plugin("tests.mechanisms.plugins.remembering")
    found = benchmark.named(["sw", "recurrent"])
    assert found[0] == "sw" and name in found and "sa" not in found and len(found) == len({*found})
    assert set(benchmark.named(None)) == {*Registry("mechanisms").names(cross=False)}
    sizes = (Size(1, 16, 2, 512, 4), Size(1, 16, 2, 2048, 1))
    slower = {case: each._replace(alone=each.alone * 4**0.3) for case, each in measured.items()}  # N to the 1.3
    assert [*benchmark.growth_lines((measured, slower), sizes)][3].endswith("met")
    monkeypatch.setattr(benchmark, "is_recurrent", lambda name: name == "sw")
    assert [*benchmark.growth_lines((measured, slower), sizes)][3].endswith("MISSED")


def test_it_runs_and_names_what_a_size_does_not_fit(monkeypatch, capsys):
    larger = TINY._replace(positions=32, batch=1)
    monkeypatch.setattr(benchmark, "SIZES", {"N=512": TINY, "N=2048": larger})
    monkeypatch.setattr(benchmark, "DEFAULT", ("N=512", "N=2048"))
    monkeypatch.setitem(benchmark.SETTINGS, "sc", lambda size: {"window": 20, "edge_hidden": 4})
    arguments = ["--mechanisms", "sw", "sc", "two_way", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", ["benchmarks.mechanisms", *arguments])
    benchmark.main()
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    assert [row[:2] for row in rows].count(["sw", "causal"]) == 3, "two sizes, and the growth between them"
    assert [row[:2] for row in rows].count(["two_way", "bidirectional"]) == 3
    alone = next(row for row in rows if row[:2] == ["sa", "causal"])
    assert all(math.isfinite(float(value)) and float(value) > 0 for value in (alone[2], alone[5]))
    refused = "N=512: sc (bidirectional): mechanism.sc.window=20 must be below model.positions=16"
    assert f"left out: {refused}" in printed and [row[0] for row in rows if row].count("sc") == 1
