"""`benchmarks.gpu_day`: a failing step never stops the next, none outlives its time, a cut run keeps its tables, and all
of it without packages; the real steps are rehearsed by `make slow`, the cheapest of them always."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from benchmarks import gpu_day
from benchmarks.gpu_day import STEPS, Cut, Day, Step

ROOT = Path(__file__).parents[1]
SLEEPER = "import time; print('a row', flush=True); time.sleep(600)"


def step(label, code, share=1.0, needs=(), part="toy"):
    return Step(part, label, ("-c", "raise SystemExit('never run in a rehearsal')"), ("-c", code), share, needs)


def has_everything(self):
    """What a probe finds where nothing is missing, without importing torch to see it."""
    return {"python": "3.12.3", "torch": "2.11", "card": None, "cuda": False, "missing": []}


@pytest.fixture
def probed(monkeypatch):
    monkeypatch.setattr(Day, "_probe", has_everything)


def day_of(tmp_path, *steps, seconds=600.0):
    return Day(steps, seconds, tmp_path / "out", tmp_path / "scratch", is_rehearsal=True)


def texts(tmp_path):
    return {path.name.partition("_2")[0]: path.read_text() for path in (tmp_path / "out").glob("*.txt")}


def test_a_step_that_fails_is_named_with_its_last_words_and_the_next_goes_on(tmp_path, probed):
    failing = "print('FAILED tests/test_a.py::test_b - x'); print('1 failed in 3 s'); raise ValueError('why it failed')"
    day = day_of(tmp_path, step("bad", failing), step("good", "print('head'); print('ö 1 row')"))
    assert day.run() == 1
    summary, table = texts(tmp_path)["gpu_day"], texts(tmp_path)["toy"]
    assert "1 failed in 3 s" in summary and "FAILED tests/test_a.py::test_b - x" in summary
    assert "ValueError: why it failed" in summary
    assert [outcome.state for outcome in day.outcomes] == ["failed", "done"] and day.outcomes[1].last == "ö 1 row"
    assert table.index("1 failed") < table.index("-- failed after") < table.index("ö 1 row")


def test_a_step_beyond_its_time_ends_with_all_its_processes_and_the_next_goes_on(tmp_path, monkeypatch, probed):
    monkeypatch.setattr(gpu_day, "GRACE_S", 1.0)
    child = tmp_path / "child"
    deaf = (
        "import signal, subprocess, sys, time; "
        "[signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)]; "
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); open({str(child)!r}, 'w').write(str(child.pid)); "
        "print('a row', flush=True); time.sleep(600)"
    )
    day = day_of(tmp_path, step("deaf", deaf, share=1e-9), step("next", "print('2 rows')"))
    day.seconds = 1e10  # the first step's share of it: ten seconds
    assert day.run() == 1
    assert [outcome.state for outcome in day.outcomes] == ["out of time", "done"]
    assert "a row\n" in texts(tmp_path)["toy"]
    with pytest.raises(ProcessLookupError):
        wait_for_end(int(child.read_text()))


def wait_for_end(pid):
    """A process whose parent died is collected by the system a moment later."""
    for _ in range(200):
        os.kill(pid, 0)
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            raise ProcessLookupError
        time.sleep(0.1)


def test_what_is_left_goes_to_the_steps_that_are_left(tmp_path, monkeypatch, probed):
    limits = []
    monkeypatch.setattr(Day, "_execute", lambda self, outcome, limit: limits.append(limit))
    missing = step("c", "", 10.0, ("no_such_package",))
    day = day_of(tmp_path, step("a", "", 3.0), step("b", "", 1.0), missing, seconds=1e9)
    day.found["missing"].append("no_such_package")
    day.run()
    assert limits == [pytest.approx(0.75e9, rel=1e-4), pytest.approx(1e9, rel=1e-4)], (
        "a skipped step's share is not kept"
    )


def test_without_time_nothing_is_started(tmp_path, probed):
    day = day_of(tmp_path, step("a", "print(1)"), seconds=gpu_day.LEAST_S / 2)
    assert day.run() == 1
    assert day.outcomes[0].state == "out of time" and not (tmp_path / "out" / "toy").exists()


def test_a_missing_package_skips_its_steps_alone_and_says_how_to_get_it(tmp_path, probed):
    day = day_of(tmp_path, step("a", "print(1)", needs=("no_such_package",)), step("b", "print('2 rows')"))
    day.found["missing"].append("no_such_package")
    assert day.run() == 0
    summary = texts(tmp_path)["gpu_day"]
    assert "missing: no_such_package; wheels=DIR, see below" in summary
    assert "pip download --no-deps --only-binary=:all: --python-version 3.12" in summary and "pip wheel" in summary


def run_by_command(tmp_path, *words, **more):
    """Start the day in a process of its own, with two toy steps in place of its own."""
    code = (
        "import sys; from benchmarks import gpu_day; from tests.test_gpu_day import SLEEPER, has_everything, step; "
        "gpu_day.Day._probe = has_everything; "
        "gpu_day.STEPS = (step('first', \"print('whole table')\", 1e-3), step('second', SLEEPER)); "
        "raise SystemExit(gpu_day.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "--rehearse", f"out={tmp_path / 'out'}", *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_cut_keeps_every_row(tmp_path, number):
    process = run_by_command(tmp_path)
    table = tmp_path / "out"
    while "a row" not in texts(tmp_path).get("toy", ""):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    summary = texts(tmp_path)["gpu_day"]
    assert "first" in summary and "whole table" in summary and "running" in summary
    os.kill(process.pid, number)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == (128 + number if number == signal.SIGTERM else -number)
    assert "whole table" in texts(tmp_path)["toy"] and "a row" in texts(tmp_path)["toy"]
    assert not list(table.glob("*.part"))
    if number == signal.SIGTERM:
        assert "-- cut after" in texts(tmp_path)["toy"] and "cut" in printed


def test_a_table_is_never_written_over(tmp_path, probed):
    first = day_of(tmp_path, step("a", "print('of the first')"))
    first.run()
    second = day_of(tmp_path, step("a", "print('of the second')"))
    second.run()
    assert second.suffix == f"{first.suffix}_2"
    assert "of the first" in first.table("toy").read_text() and "of the second" not in first.table("toy").read_text()


def test_wheels_are_unpacked_for_the_steps(tmp_path, probed):
    with zipfile.ZipFile(tmp_path / "carried-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried/__init__.py", "ROWS = 3")
    gpu_day.unpack(tmp_path, tmp_path / "scratch" / "site")
    day = day_of(tmp_path, step("a", "import carried; print(carried.ROWS, 'rows')"))
    assert day.run() == 0 and day.outcomes[0].last == "3 rows"
    with pytest.raises(ValueError, match=r"has no wheel"):
        gpu_day.unpack(tmp_path / "out", tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["minutes=soon"], "minutes=soon: not one of minutes=25 out=DIR wheels=DIR parts=tests,kernels --rehearse"),
        (["parts=tests,nonsense"], "parts=nonsense: choices are tests, kernels, pairs, packing, study"),
    ],
)
def test_an_unknown_word_is_refused_in_a_line(words, message, capsys):
    assert gpu_day.main(words) == 2
    assert capsys.readouterr().err == f"python -m benchmarks.gpu_day: error: {message}\n"


def test_without_a_gpu_only_a_rehearsal_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_day, "PROBE", "print('{\"cuda\": false}')")
    monkeypatch.setattr(gpu_day.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match="^2$"):
        gpu_day.main([f"out={tmp_path}"])
    assert "torch sees no CUDA device; --rehearse needs none" in capsys.readouterr().err


def test_a_probe_says_what_its_interpreter_has(tmp_path):
    """Of Python with nothing installed: no torch, no pydantic."""
    day = Day([], 1.0, tmp_path, tmp_path, is_rehearsal=True)
    assert day.found["torch"] == torch_version() and "pydantic" not in day.found["missing"]
    bare = subprocess.run([sys.executable, "-S", "-c", gpu_day.PROBE], capture_output=True, text=True, check=True)
    found = json.loads(bare.stdout)
    assert found["torch"] is None and not found["cuda"] and {"pydantic", "hydra", "pytest"} <= {*found["missing"]}


def torch_version():
    import torch

    return torch.__version__


def test_the_day_itself_needs_python_alone():
    """Of Python with nothing installed: not even torch."""
    code = "import sys; sys.path.insert(0, '.'); import benchmarks.gpu_day; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("False\n", "")


def test_a_signal_is_no_error_that_a_step_s_handler_catches():
    assert not issubclass(Cut, Exception)


def test_curves_differ_by_what_they_are_apart():
    from benchmarks import training_pairs

    plain, found = training_pairs.Curve([3.0, 2.0, 1.0, 1.0], 1.0), training_pairs.Curve([3.5, 2.0, 0.0, 1.25], 1.0)
    assert training_pairs.distances(found, plain) == (0.5, 1.0, 0.25)


def test_stacked_models_train_as_each_does_alone():
    """Against torch's own AdamW and clipping, one model at a time: rates from 1e-4 to 1e-2, five steps."""
    import torch

    from benchmarks import gpu_packing
    from benchmarks._training import training

    size, rates = gpu_packing.SIZES["smoke"], torch.tensor([1e-4, 1e-3, 1e-2])
    step_of_all = gpu_packing.stacked(size, rates, "cpu")
    together = torch.tensor([step_of_all() for _ in range(5)])
    for number, rate in enumerate(rates.tolist()):
        alone = training(gpu_packing.PARTS, size, "cpu")
        optimizer = torch.optim.AdamW(alone.net.parameters(), lr=rate, **gpu_packing.ADAM)
        for row in together:
            loss = alone.loss(dict(alone.net.named_parameters()))
            assert float(row[number]) == pytest.approx(loss.item(), rel=1e-5)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(alone.net.parameters(), 1.0)
            optimizer.step()


@pytest.mark.slow
def test_all_steps_are_rehearsed(tmp_path):
    """Every step's tiny command on the CPU, kernels in Triton's interpreter."""
    day = Day(STEPS, 3600.0, tmp_path / "out", tmp_path, is_rehearsal=True)
    (tmp_path / "page.txt").write_text("a page of text\n" * 500)
    assert day.run() == 0, day.table("gpu_day").read_text()
    assert all(outcome.state == "done" for outcome in day.outcomes), day.table("gpu_day").read_text()


@pytest.mark.parametrize("label", ["resume", "mini"])
def test_the_cheapest_steps_are_rehearsed_with_every_test(tmp_path, probed, label):
    day = Day([each for each in STEPS if each.label == label], 600.0, tmp_path / "out", tmp_path, is_rehearsal=True)
    (tmp_path / "page.txt").write_text("a page of text\n" * 500)
    assert day.run() == 0, day.table("gpu_day").read_text()
