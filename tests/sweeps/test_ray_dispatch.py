"""What becomes of trials whose worker or node dies, on a Ray that is made up; and how many workers a node holds."""

from __future__ import annotations

import itertools
import sys
import types

import pytest

from sweeps.interrupt import Interrupt
from sweeps.launchers.ray import dispatch as ray_dispatch
from sweeps.launchers.ray import shared_folder
from sweeps.launchers.ray.dispatch import Dispatch
from sweeps.launchers.ray.share import Share
from sweeps.launchers.ray.workers import Held
from tests.sweeps import fakes


class RayError(Exception):
    pass


class ActorDiedError(RayError):
    pass


class MadeUpRay(types.ModuleType):
    """Runs a trial in this process when somebody waits for it. ``deaths``: for each run of a trial, by its seed,
    whether "worker" or "node" dies."""

    def __init__(self, deaths):
        super().__init__("ray")
        self.exceptions = types.SimpleNamespace(
            RayError=RayError,
            ActorDiedError=ActorDiedError,
            RayTaskError=type("RayTaskError", (RayError,), {}),
            TaskCancelledError=type("T", (RayError,), {}),
        )
        self.deaths, self.dead_nodes, self.ran_on = deaths, set(), []

    def wait(self, pending, timeout):
        return pending[:1], pending[1:]

    def get(self, pending):
        trial, run, node = pending.arguments
        self.ran_on.append((trial.spec["seed"], node))
        death = next(self.deaths.get(trial.spec["seed"], itertools.repeat(None)))
        if death == "node":
            self.dead_nodes.add(node)
        if death:
            raise ActorDiedError("The actor died unexpectedly")
        for _ in run(trial):
            pass


class Pending:
    def __init__(self, *arguments):
        self.arguments = arguments


class Handle:
    def __init__(self, node):
        self.run = types.SimpleNamespace(remote=lambda trial, run: Pending(trial, run, node))


class MadeUpWorkers:
    """A worker on each of several nodes, or another of them on a node that lives."""

    def __init__(self, ray, num_nodes):
        self.ray, self.idle, self.starting, self.total = ray, [], {}, 0
        self.nodes = [f"node{index}" for index in range(num_nodes)]

    def grow(self, num_wanted):
        living = [node for node in self.nodes if self.is_alive(node)]
        while self.total < min(num_wanted, len(living)):
            self.idle.append(Held(Handle(living[self.total % len(living)]), living[self.total % len(living)]))
            self.total += 1
        return ""

    def forget(self, worker):
        self.total -= 1

    def is_alive(self, node):
        return node not in self.ray.dead_nodes

    def is_alone(self):
        return len(self.nodes) == 1


@pytest.fixture
def dispatch(tmp_path, monkeypatch):
    for name in ("LAST_BREATH_S", "NODE_DEATH_S", "NO_NODE_S"):
        monkeypatch.setattr(ray_dispatch, name, 0.05)

    def run(deaths, num_nodes=3, num_trials=3):
        ray, said = MadeUpRay(deaths), []
        monkeypatch.setitem(sys.modules, "ray", ray)
        trials = [fakes.make_trial(tmp_path, index) for index in range(num_trials)]
        workers = MadeUpWorkers(ray, num_nodes)
        Dispatch(
            trials,
            fakes.run_fake,
            workers,
            node_retries=2,
            on_tick=lambda: None,
            interrupt=Interrupt(),
            say=said.append,
        ).work()
        return [trial.directory.status() for trial in trials], ray.ran_on, said

    return run


def test_a_trial_whose_node_dies_goes_on_on_another_and_is_not_failed(dispatch):
    statuses, ran_on, said = dispatch({1: iter(["node", "node", None])})
    assert [status["state"] for status in statuses] == ["stable"] * 3
    nodes = [node for seed, node in ran_on if seed == 1]
    assert len(nodes) == len(set(nodes)) == 3
    assert said == ["a node died under sa lr=0.01 seed=1 (000000000001), which goes on on another"] * 2


def test_a_trial_under_which_node_after_node_dies_is_failed_after_its_retries(dispatch):
    statuses, ran_on, _ = dispatch({1: itertools.repeat("node")}, num_nodes=5)
    assert [status["state"] for status in statuses] == ["stable", "failed", "stable"]
    assert statuses[1]["reason"] == "the node it ran on died, 3 times in all"
    assert [seed for seed, _ in ran_on].count(1) == 3


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_a_worker_that_dies_on_a_node_that_lives_fails_its_trial_at_once(dispatch, num_nodes):
    statuses, ran_on, said = dispatch({1: itertools.repeat("worker")}, num_nodes=num_nodes)
    assert [status["state"] for status in statuses] == ["stable", "failed", "stable"]
    assert statuses[1]["reason"] == "its worker process died: killed, out of memory, or a crash in native code"
    assert ([seed for seed, _ in ran_on].count(1), said) == (1, [])


def test_when_the_last_node_has_died_the_sweep_ends_and_says_so(dispatch):
    with pytest.raises(
        RuntimeError, match="no node of the Ray cluster that has room for a trial is left; the same command goes on"
    ):
        dispatch({0: itertools.repeat("node")}, num_nodes=1)


@pytest.mark.parametrize(
    ("share", "resources", "number"),
    [
        (Share(1, 0), {"CPU": 8.0}, 8),
        (Share(0.1, 0), {"CPU": 0.3}, 3),
        (Share(1, 0.25), {"CPU": 16.0, "GPU": 2.0}, 8),
        (Share(1, 0.3333), {"CPU": 16.0, "GPU": 1.0}, 3),
        (Share(1, 0.4), {"CPU": 16.0, "GPU": 4.0}, 8),  # two a GPU: none lies across two
        (Share(1, 2), {"CPU": 16.0, "GPU": 5.0}, 2),
        (Share(1, 1), {"CPU": 16.0}, 0),
        (Share(4, 0.25), {"CPU": 6.0, "GPU": 1.0}, 1),
    ],
)
def test_a_node_holds_as_many_workers_as_its_cpus_and_gpus_allow(share, resources, number):
    assert share.fits(resources) == number


NODES = [
    {"NodeID": name, "NodeManagerHostname": f"host-{name}", "NodeManagerAddress": f"10.0.0.{name}"}
    for name in ("1", "2")
]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(shared_folder, "ARRIVAL_S", 0.05)
    monkeypatch.setattr(shared_folder, "_answer", lambda answer: answer)


def test_nodes_that_see_the_runs_folder_pass_and_no_token_is_left(tmp_path, quick):
    shared_folder.check(str(tmp_path), NODES, ask=shared_folder.reply)
    assert list(tmp_path.iterdir()) == []


def elsewhere(folder, token, name, token_file):
    """Node 2 answers as one on which the path leads to a folder of its own."""
    return shared_folder.reply(f"{folder}-of-{name}" if name == "2" else folder, token, name, token_file)


def deaf(folder, token, name, token_file):
    return ""


@pytest.mark.parametrize(
    ("ask", "name", "reason"),
    [(elsewhere, "2", "it is not there"), (deaf, "1", "what it writes there does not arrive here")],
)
def test_the_node_that_does_not_see_the_runs_folder_is_named(tmp_path, quick, ask, name, reason):
    with pytest.raises(RuntimeError) as error:
        shared_folder.check(str(tmp_path), NODES, ask=ask)
    rule = "every node must see it under the same path; put runs_dir on a shared file system"
    assert (
        str(error.value)
        == f"node host-{name} (10.0.0.{name}) of the Ray cluster and the runs' folder {tmp_path}: {reason};\n{rule}"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_the_same_name_with_another_token_is_another_folder(tmp_path):
    (tmp_path / "token").write_text("other")
    assert shared_folder.reply(str(tmp_path), "mine", "1", "token") == "another folder of that name lies there"
