"""NVML as a module of the test's own says it: no machine with a GPU is needed."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from stability.runs.directory import read_jsonl
from stability.training import run
from stability.training.devices import EVERY_S, Telemetry

CUDA = torch.device("cuda", 0)
UUID = "8f2c3d1e-0000-1111-2222-333344445555"


class FakeError(Exception):
    pass


class FakeNvml(SimpleNamespace):
    """Two devices, of which the second is ours; counts what is asked."""

    NVMLError, NVML_TEMPERATURE_GPU = FakeError, 0

    def __init__(self, **changes):
        self.calls = []
        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetHandleByUUID": {f"GPU-{UUID}": "ours"}.__getitem__,
            "nvmlDeviceGetPowerUsage": lambda handle: 312_500 if handle == "ours" else 0,
            "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=87, memory=40),
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(
                total=80 * 2**30, used=3 * 2**30, free=77 * 2**30
            ),
            "nvmlDeviceGetTemperature": lambda handle, sensor: 61,
        } | changes
        super().__init__(**{name: self._counted(name, answer) for name, answer in answers.items()})

    def _counted(self, name, answer):
        return lambda *arguments: (self.calls.append(name), answer(*arguments))[1]


def refuse(*_):
    raise FakeError("not supported")


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))

    def install(fake):
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


def test_the_device_s_own_numbers_with_their_units(nvml):
    nvml(FakeNvml())
    assert Telemetry(CUDA).sample() == {
        "gpu_power_w": 312.5,
        "gpu_utilisation_percent": 87,
        "gpu_memory_mb": 3072.0,
        "gpu_temperature_c": 61,
    }


def test_it_asks_at_most_every_few_seconds(nvml):
    fake, now = nvml(FakeNvml()), [100.0]
    telemetry = Telemetry(CUDA, clock=lambda: now[0])
    samples = []
    for now[0] in (100.0, 100.1, 100 + EVERY_S - 0.1, 100 + EVERY_S, 100 + EVERY_S + 0.1):
        samples.append(bool(telemetry.sample()))
    assert samples == [True, False, False, True, False]
    assert fake.calls.count("nvmlDeviceGetPowerUsage") == 2


def test_what_a_gpu_does_not_tell_is_left_out(nvml):
    fake = nvml(FakeNvml(nvmlDeviceGetPowerUsage=refuse))
    del fake.nvmlDeviceGetTemperature  # as bindings that dropped it
    assert set(Telemetry(CUDA).sample()) == {"gpu_utilisation_percent", "gpu_memory_mb"}


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_without_a_driver_or_the_device_there_is_none_and_no_error(nvml, name):
    nvml(FakeNvml(**{name: refuse}))
    telemetry = Telemetry(CUDA)
    assert telemetry.sample() == {}
    telemetry.close()


def test_without_the_package_there_is_none_and_no_error(nvml):
    nvml(None)  # what `import` takes for a module that is not there
    assert Telemetry(CUDA).sample() == {}


def test_a_run_on_a_cpu_does_not_ask(nvml):
    fake = nvml(FakeNvml())
    assert Telemetry(torch.device("cpu")).sample() == {}
    assert fake.calls == []


def test_a_run_s_clock_rows_carry_it_and_its_metrics_do_not(lab, nvml, monkeypatch):
    fake = nvml(FakeNvml())
    monkeypatch.setattr(run, "Telemetry", lambda device: Telemetry(CUDA))
    directory = lab.train(lab.spec())
    timings = list(read_jsonl(directory.timing_file))
    assert timings[0]["gpu_power_w"] == 312.5 and "gpu_power_w" not in timings[1]
    assert b"gpu" not in directory.metrics_file.read_bytes()
    assert fake.calls.count("nvmlInit") == fake.calls.count("nvmlShutdown") == 1
