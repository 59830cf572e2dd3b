"""`benchmarks.report_scale`: a command's memory is its own, not the benchmark's."""

from __future__ import annotations

import pytest

from benchmarks.report_scale import spent


def test_a_commands_memory_excludes_the_process_that_starts_it():
    large = b"x" * (256 * 2**20)
    assert spent(["-S", "-c", "pass"]).peak_mib < len(large) / 2**20 / 4


def test_a_commands_memory_is_its_peak():
    assert spent(["-S", "-c", "b'x' * (128 * 2**20)"]).peak_mib > 128


def test_a_failed_command_raises_with_its_exit_status():
    with pytest.raises(RuntimeError, match="ended with 3"):
        spent(["-S", "-c", "raise SystemExit(3)"])
