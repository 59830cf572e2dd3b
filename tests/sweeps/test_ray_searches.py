"""Searches in rounds on `launcher=ray`: each round is a Tuner of its own, and the ledger is that of `launcher=serial`."""

import pytest

from sweeps.launchers.ray.cluster import cluster as open_cluster
from tests.sweeps.searching import Sweep, along_a_valley


@pytest.fixture(scope="module")
def cluster():
    with open_cluster(num_cpus=2) as scratch:
        yield scratch


# Ray's workers start again in every round; the fast suite has the rounds on `launcher=serial`, and asha on Ray
pytestmark = pytest.mark.slow
RATES = "lr=[1e-4,3e-4,1e-3,3e-3,1e-2,3e-2]"


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            [
                RATES,
                "search=asha",
                "search.synchronous=true",
                "search.first_step=6",
                "steps=18",
                "evaluation.every_steps=6",
            ],
            id="asha",
        ),
        pytest.param(["lr=edge"], id="edge"),
        pytest.param([RATES, "search=pbt", "search.every_steps=6", "steps=18", "evaluation.every_steps=6"], id="pbt"),
        pytest.param(["search=optuna", "search.num=14", "search.startup=5", "search.batch=3"], id="optuna"),
    ],
)
def test_a_search_in_rounds_leaves_the_ledger_that_serial_leaves(cluster, tmp_path, words):
    sweeps = []
    for launcher in ("serial", "ray"):
        (tmp_path / launcher).mkdir()
        sweeps.append(Sweep(tmp_path / launcher, *words, f"launcher={launcher}"))
        assert sweeps[-1].run(along_a_valley).num_failed == 0
    serial, ray = sweeps
    assert ray.printed.count("round ") == serial.printed.count("round ") > 1
    assert ray.study.read()["run_ids"] == serial.study.read()["run_ids"]
    assert ray.search.record() == serial.search.record()
    for one, other in zip(serial.study.runs(), ray.study.runs(), strict=True):
        assert one.metrics_file.read_bytes() == other.metrics_file.read_bytes()
        assert one.status()["state"] == other.status()["state"]
    again = Sweep(tmp_path / "ray", *words, "launcher=ray")
    assert again.run(along_a_valley).num_trained == 0
