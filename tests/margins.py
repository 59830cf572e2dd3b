"""A pytest plugin: error ÷ tolerance of every numeric comparison that a test makes.

    python -m pytest -p tests.margins --margins=FOLDER [--moved] tests/mechanisms

It sees `pytest.approx`, `torch.testing.assert_close`, `torch.allclose`, `torch.autograd.gradcheck`, `numpy.allclose`,
`numpy.testing.assert_allclose`, `math.isclose` and `tests.within.assert_within`. Exact comparisons (tolerance 0,
integers) have no margin and are left out, and so is whatever happens inside ``pytest.raises(AssertionError)``.
``FOLDER/WORKER.jsonl``: one line for each test and line of code, with the largest ratio there.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import within

# error ÷ tolerance by test and line of code
Ratios = dict[tuple[str, str], float]
TESTS = str(Path(__file__).parent)
OWN = (__file__, within.__file__)
SMALLEST = 0.01  # ratios below are not written down
SHOWN = 10
# what draws a tensor by torch; `--moved` moves what tests draw by it
DRAWS = ("randn", "rand", "randn_like", "rand_like", "normal")


class Margins:
    """The largest ratio by line of code, of the test that runs."""

    def __init__(self) -> None:
        self.ratios: dict[str, float] = {}
        self.raising = 0  # depth of pytest.raises(AssertionError)

    def record(self, error: Any, tolerance: Any) -> None:
        """Record a comparison of the nearest frame of the tests."""
        error, tolerance = abs(error), float(tolerance)
        if self.raising or error == 0 or tolerance == 0 or not math.isfinite(tolerance):
            return
        ratio, site = float(error) / tolerance, _site()
        self.ratios[site] = max(self.ratios.get(site, 0.0), ratio if math.isfinite(ratio) else math.inf)

    def record_entries(self, found: Any, expected: Any, rtol: float, atol: float) -> None:
        """Record the entry that is nearest to its tolerance, atol + rtol·|expected|."""
        found, expected = within.as_tensor(found), within.as_tensor(expected)
        if not (found.is_floating_point() or found.is_complex()) or not found.numel():
            return
        wide = torch.complex128 if found.is_complex() or expected.is_complex() else torch.float64
        found, expected = torch.broadcast_tensors(found.to(wide), expected.to(wide))
        errors, tolerances = (found - expected).abs(), atol + rtol * expected.abs()
        errors = errors.where(errors.isfinite(), 0.0)  # ∞ = ∞ and NaN = NaN, or the test fails
        worst = int((errors / tolerances.clamp_min(1e-300)).argmax())
        self.record(errors.flatten()[worst].item(), tolerances.flatten()[worst].item())


def install(margins: Margins, patch: pytest.MonkeyPatch) -> None:
    """Have every comparison recorded before it is made."""

    def before(owner: Any, name: str, note: Callable[..., None], *, by_tests: bool = False) -> None:
        made = getattr(owner, name)

        def compare(*args: Any, **kwargs: Any) -> Any:
            if not by_tests or _is_of_tests(sys._getframe(1)):
                note(*args, **kwargs)
            return made(*args, **kwargs)

        patch.setattr(owner, name, compare)

    def of_approx(self: Any, actual: Any) -> None:
        if not isinstance(actual, float | complex | np.floating) or not isinstance(
            self.expected, int | float | complex
        ):
            return  # an array comes entry by entry; integers and words are exact
        if math.isfinite(abs(self.expected)) and math.isfinite(abs(actual)):
            margins.record(actual - self.expected, self.tolerance)

    def of_tensors(self: Any, actual: Tensor, expected: Tensor, *, rtol: float, atol: float, **_: Any) -> None:
        margins.record_entries(actual, expected, rtol, atol)

    def of_numbers(self: Any) -> None:
        if isinstance(self.actual, float):
            margins.record_entries(self.actual, self.expected, self.rtol, self.atol)

    def of_entries(found: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-8, **_: Any) -> None:
        margins.record_entries(found, expected, rtol, atol)

    def of_numpy_test(actual: Any, desired: Any, rtol: float = 1e-7, atol: float = 0, **_: Any) -> None:
        margins.record_entries(actual, desired, rtol, atol)

    def of_isclose(a: float, b: float, *, rel_tol: float = 1e-9, abs_tol: float = 0.0) -> None:
        margins.record(a - b, max(rel_tol * max(abs(a), abs(b)), abs_tol))

    before(type(pytest.approx(1.0)), "__eq__", of_approx)
    before(torch.testing._comparison.TensorLikePair, "_compare_regular_values_close", of_tensors)
    before(torch.testing._comparison.NumberPair, "compare", of_numbers)
    before(sys.modules["torch.autograd.gradcheck"], "_allclose_with_type_promotion", of_entries)
    for module in (torch, np):
        before(module, "allclose", of_entries, by_tests=True)
    before(np.testing, "assert_allclose", of_numpy_test, by_tests=True)
    before(math, "isclose", of_isclose, by_tests=True)
    patch.setattr(within, "observers", [*within.observers, margins.record])
    _suspend_where_a_fault_is_expected(margins, patch)


def _suspend_where_a_fault_is_expected(margins: Margins, patch: pytest.MonkeyPatch) -> None:
    begin, end = pytest.RaisesExc.__enter__, pytest.RaisesExc.__exit__

    def depth(context: Any) -> int:
        return any(issubclass(AssertionError, each) for each in context.expected_exceptions)

    def enter(self: Any) -> Any:
        margins.raising += depth(self)
        return begin(self)

    def leave(self: Any, *error: Any) -> Any:
        margins.raising -= depth(self)
        return end(self, *error)

    patch.setattr(pytest.RaisesExc, "__enter__", enter)
    patch.setattr(pytest.RaisesExc, "__exit__", leave)


def _is_of_tests(frame: Any) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(TESTS) and name not in OWN


def _site() -> str:
    """Return file:line of the nearest frame that stands in the tests."""
    frame: Any = sys._getframe(1)
    while frame is not None and not _is_of_tests(frame):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).relative_to(TESTS).as_posix()}:{frame.f_lineno}" if frame else ""


def moved(drawn: Tensor) -> Tensor:
    """Move each entry by one unit of float32's last place, in place, up or down as a hash of its own bits says: equal
    draws stay equal, and what is drawn in float64 moves in float32, too."""
    if drawn.dtype in (torch.float32, torch.float64):
        with torch.no_grad():
            single = drawn.float()
            is_up = (single.view(torch.int32) * 0x61C88647) & (1 << 20) != 0
            beyond = torch.nextafter(single, torch.where(is_up, torch.inf, -torch.inf).to(single))
            step = torch.where(single == 0, 0.0, beyond - single)
            drawn.add_(step.to(drawn.dtype))
    return drawn


class Moving:
    """The moving of what tests themselves draw by `moved`: the code under test and its oracle read the same. A test that
    draws again what the code under test or another process draws is left alone: it is marked ``redraws``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_on = True
        for name in DRAWS:
            patch.setattr(torch, name, self._moving(getattr(torch, name)))

    def _moving(self, draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def drawn(*args: Any, **kwargs: Any) -> Tensor:
            found = draw(*args, **kwargs)
            return moved(found) if self.is_on and _is_of_tests(sys._getframe(1)) else found

        return drawn

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.is_on = item.get_closest_marker("redraws") is None


def read(folder: Path) -> Ratios:
    """Read what all workers of one pytest run wrote: the largest ratio by test and line of code."""
    found: Ratios = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            key = row["test"], row["site"]
            found[key] = max(found.get(key, 0.0), row["ratio"])
    return found


def largest(ratios: Ratios, count: int = SHOWN) -> Iterable[str]:
    """Format the largest ratios, one line each."""
    for (test, site), ratio in sorted(ratios.items(), key=lambda item: -item[1])[:count]:
        yield f"{ratio:6.2f}  {test}  ({site})"


class Plugin:
    """The recording of one pytest process."""

    def __init__(self, folder: Path):
        self.folder, self.margins = folder, Margins()
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.jsonl"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self.margins.ratios, self.margins.raising = {}, 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        passed = False
        try:
            result = yield
            passed = True
            return result
        finally:
            # above 1 in a test that passed: it asserts that two numbers differ
            kept = {site: ratio for site, ratio in self.margins.ratios.items() if not passed or ratio <= 1}
            rows = [
                {"test": item.nodeid, "site": site, "ratio": ratio} for site, ratio in kept.items() if ratio >= SMALLEST
            ]
            with self.file.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("largest error ÷ tolerance")
        for line in largest(read(self.folder)):
            terminalreporter.write_line(line)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--margins", metavar="FOLDER", help="write error ÷ tolerance of every comparison to FOLDER")
    parser.addoption("--moved", action="store_true", help="move what tests draw by one unit in the last place")


def pytest_configure(config: pytest.Config) -> None:
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    if folder := config.getoption("--margins"):
        plugin = Plugin(Path(folder).resolve())
        config.pluginmanager.register(plugin, "margins-recording")
        install(plugin.margins, patch)
    if config.getoption("--moved"):
        config.pluginmanager.register(Moving(patch), "margins-moving")
