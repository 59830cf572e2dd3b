"""The Ray launcher, on one small cluster for all tests of this file."""

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from torch.func import functional_call

from stability.curvature import AlphaMaxMonitor, parallel_directional
from stability.runs.processes import Process
from sweeps import launch as launching
from sweeps.launchers import Interrupt
from sweeps.launchers.ray import address as ray_address
from sweeps.launchers.ray import cluster as ray_cluster
from sweeps.launchers.ray import launcher as ray_launcher
from sweeps.launchers.ray import shared_folder
from sweeps.launchers.ray.share import Share
from sweeps.reaper import session
from sweeps.trial import run_trial
from tests.sweeps import fakes, outsiders
from tests.sweeps.real import make_sweep
from tests.sweeps.tune_tables import assert_agrees, last_rows, told

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster.cluster(num_cpus=2) as scratch:
        yield scratch


def launch(trials, on_tick=lambda: None, **more):
    folder = Path(trials[0].pool) / "studies/study/ray"
    with Interrupt() as interrupt:
        ray_launcher.launch(trials, on_tick=on_tick, interrupt=interrupt, folder=folder, **more)
    return interrupt


def states(trials):
    return [trial.directory.status()["state"] for trial in trials]


def worker_of(trial):
    return json.loads((trial.directory.path / "worker.json").read_text())


@pytest.mark.slow  # three processes that import torch; the next one keeps a death in the fast suite
def test_a_dead_worker_fails_its_own_trial_only(cluster, tmp_path, capfd):
    trials = [fakes.make_trial(tmp_path, index) for index in range(6)]
    assert not launch(trials, run=fakes.run_and_die, node_retries=0).requested
    assert states(trials) == ["stable", "failed", *["stable"] * 4]
    status = trials[1].directory.status()
    assert (status["step"], status["num_steps"]) == (2, 4)
    assert status["reason"] == "its worker process died: killed, out of memory, or a crash in native code"
    account = trials[1].directory.traceback_file.read_text()
    assert re.search(r"The actor (died unexpectedly|[0-9a-f]+ is unavailable)", account)  # by which call finds it out
    workers = [worker_of(trial) for trial in trials]
    # two slots, and one in place of the dead one: actors are reused
    assert len({worker["pid"] for worker in workers}) <= 3
    assert {worker["omp"] for worker in workers} == {"1"}
    assert {worker["cwd"] for worker in workers} == {str(Path.cwd())}
    printed = capfd.readouterr()
    assert printed.out + printed.err == ""


def test_a_ray_of_this_machine_is_reached_from_this_machine_alone_and_asks_for_a_token(cluster, tmp_path):
    trial, seen, head = fakes.make_trial(tmp_path, steps=20), {}, ray_cluster.session().head

    def look():
        if trial.directory.metrics_file.exists() and not seen:
            for pid in session(str(cluster)) | {os.getpid()}:
                words = (Path("/proc") / str(pid) / "cmdline").read_bytes().decode()
                seen[pid] = (words, outsiders.listening(pid), oct(cluster.stat().st_mode & 0o777))

    launch([trial], look, run=fakes.run_slowly)
    sockets = [each for _, found, _ in seen.values() for each in found]
    assert [each for each in sockets if not outsiders.is_loopback(each[0])] == []
    assert head.address in {f"127.0.0.1:{port}" for _, port in sockets}
    for part in ("gcs_server", "raylet/raylet", "launchers/ray/head.py"):
        assert any(part in words and found for words, found, _ in seen.values()), f"no socket of {part} was seen"
    assert seen[os.getpid()][1] and seen[worker_of(trial)["pid"]][1], "the driver's and the worker's were seen, too"
    assert {mode for *_, mode in seen.values()} == {"0o700"}
    token = head.access["RAY_AUTH_TOKEN"]
    assert not any(token in words for words, *_ in seen.values())
    assert not [file for file in cluster.rglob("*") if file.is_file() and token.encode() in file.read_bytes()]
    assert token not in repr(head)
    assert "InvalidAuthToken" in outsiders.told(outsiders.ASK, head.address)
    access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    assert outsiders.told(outsiders.ASK, head.address, **access) == "let in 1"  # who has it is: the question is one


def test_a_sweep_that_lacks_the_token_of_a_cluster_is_told_what_to_export(cluster, monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name)
    address = ray_cluster.session().head.address
    with pytest.raises(
        RuntimeError, match=f"^ray.address={address}: its Ray demands a token; export RAY_AUTH_MODE=token"
    ):
        ray_address.check(address)
    assert ray_address._is_of_a_sweep(address)
    assert not ray_address._is_of_a_sweep("127.0.0.1:1")


@pytest.mark.slow  # ray.init tries for 20 s; the one before asks the same head in half a second
@pytest.mark.parametrize("guess", [{}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}])
def test_a_process_that_knows_host_and_port_alone_cannot_join(cluster, guess):
    told = outsiders.told(outsiders.JOIN, ray_cluster.session().head.address, **guess)
    assert told.startswith("refused Failed to connect to Ray cluster at 127.0.0.1:")


def test_a_run_whose_worker_dies_goes_on_in_another_where_it_stopped(cluster, tmp_path):
    trials, said = [fakes.make_trial(tmp_path, index, steps=6) for index in range(5)], []
    launch(trials, run=fakes.run_and_die_once, say=said.append)
    assert states(trials) == ["stable"] * 5
    begun = (trials[1].directory.path / "begun.txt").read_text().split()
    assert len(begun) == len(set(begun)) == 2  # another process went on …
    steps = [json.loads(line)["step"] for line in trials[1].directory.metrics_file.read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]  # … where the first had stopped
    assert said == ["a worker process died under sa lr=0.01 seed=1 (000000000001), which goes on in another"]


@pytest.mark.slow  # a process that hangs is waited for; that it is found and killed is tested without Ray, too
def test_a_run_whose_worker_hangs_goes_on_in_another_where_it_stopped(cluster, tmp_path):
    trials, said = [replace(fakes.make_trial(tmp_path, index, steps=6), launch="own") for index in range(2)], []
    launch(trials, run=fakes.run_and_hang_once, say=said.append, hang_s=3.0)
    assert states(trials) == ["stable"] * 2
    begun = (trials[1].directory.path / "begun.txt").read_text().split()
    assert len(begun) == len(set(begun)) == 2
    steps = [json.loads(line)["step"] for line in trials[1].directory.metrics_file.read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert said == [
        "kills the process of sa lr=0.01 seed=1 (000000000001): no step for 3 s (ray.hang_s)",
        "a worker process died under sa lr=0.01 seed=1 (000000000001), which goes on in another",
    ]


@pytest.mark.parametrize(
    "where",
    ["the worker", "the driver, too"],
)
@pytest.mark.slow  # the rarest of errors, and Ray's workers start again for it
def test_an_error_that_cannot_be_written_down_is_not_tried_again(cluster, tmp_path, monkeypatch, where):
    trials = [fakes.make_trial(tmp_path, index) for index in range(3)]

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    if where == "the worker":
        launch(trials, run=fakes.run_on_a_full_disk)
        assert states(trials) == ["stable", "failed", "stable"]
        assert trials[1].directory.status()["reason"] == "OSError: [Errno 28] No space left on device"
        assert "in run_on_a_full_disk" in trials[1].directory.traceback_file.read_text()
    else:
        monkeypatch.setattr(fakes.imported("sweeps.launchers.ray.board"), "mark_failed", full)
        with pytest.raises(OSError, match="No space left on device"):
            launch(trials, run=fakes.run_on_a_full_disk)
    assert len((trials[1].directory.path / "begun.txt").read_text().split()) == 1


@pytest.mark.slow  # a mistake of clusters of several versions: Ray's workers start and end for it
def test_workers_that_cannot_start_end_the_sweep_with_a_word_and_fail_no_run(cluster, tmp_path):
    trials = [fakes.make_trial(tmp_path, index) for index in range(3)]
    with pytest.raises(
        RuntimeError, match="^no worker starts on a node of the Ray cluster: .*: only another version has it$"
    ):
        launch(trials, run=fakes.Unknown())
    assert states(trials) == ["queued"] * 3


def test_a_worker_that_does_not_see_the_runs_folder_says_so(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(fakes.imported("sweeps.launchers.ray.trainable"), "ARRIVAL_S", 0.1)
    with pytest.raises(RuntimeError, match="^the runs' folder is not there on node [0-9a-f]{56}$"):
        fakes.worker(fakes.make_trial(tmp_path), fakes.run_fake, tmp_path / "elsewhere", Process.current())


def test_tunes_table_says_of_a_run_that_another_sweep_works_on_that_it_is_left_to_it(tmp_path):
    trial = replace(fakes.make_trial(tmp_path), launch="own")
    trial.directory.set_status("running", step=0, num_steps=4)
    lock = replace(trial, launch="other").lock
    assert lock.acquire()
    try:
        result = fakes.worker(trial, fakes.run_valley, tmp_path, Process.current()).step()
    finally:
        lock.release()
    assert (result["state"], result["done"]) == ("left to another sweep", True)
    assert fakes.worker(trial, fakes.run_valley, tmp_path, Process.current()).step()["state"] == "stable"


def test_a_node_that_does_not_see_the_runs_folder_is_refused_at_first_and_later_left_out(
    cluster, tmp_path, monkeypatch
):
    monkeypatch.setattr(ray_cluster, "_session", own := ray_cluster.Session(None, ray_cluster.session().watch))
    monkeypatch.setattr(ray_cluster, "list_living_nodes", lambda: [{"NodeID": "8a2f"}])
    for module in (ray_cluster, shared_folder):
        monkeypatch.setattr(
            module, "find_unseen", lambda pool, nodes, ask=None: {"8a2f": f"node gpu-07 and {pool}: no"}
        )
    said = []
    with pytest.raises(RuntimeError, match=f"^node gpu-07 and {tmp_path}: no;\nevery node must see it under the same"):
        ray_cluster.admit(str(tmp_path), said.append)
    own.is_admitted = True
    ray_cluster.admit(str(tmp_path), said.append)
    assert said == [f"node gpu-07 and {tmp_path}: no; it is left out ({shared_folder.RULE})"]
    assert own.left_out == {"8a2f"}


def test_a_node_that_is_left_out_is_asked_for_nothing_more(cluster, monkeypatch):
    import ray

    asked = fakes.imported("sweeps.launchers.ray.request").request(Share(1, 0))
    left_out = {"0" * 56, ray.get_runtime_context().get_node_id(), "f" * 56}
    arrived = []
    for ids, patience_s in ((set(), 30), (left_out, 2)):  # what arrives does so within some hundredths of a second
        monkeypatch.setattr(ray_cluster.session(), "left_out", ids)
        group = asked.to_placement_group()
        arrived.append((group.wait(patience_s), len(ray_cluster.list_living_nodes())))
        ray.util.remove_placement_group(group)
    assert arrived == [(True, 1), (False, 0)]


@pytest.mark.slow
def test_where_the_dashboard_is_is_told_once(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_cluster.session(), "dashboard", "10.0.0.1:8265")
    said = []
    for index in range(2):
        launch([fakes.make_trial(tmp_path, index)], run=fakes.run_fake, say=said.append)
    assert said == ["Ray's dashboard: http://10.0.0.1:8265"]


def test_an_interrupt_saves_what_runs_and_starts_nothing_more(cluster, tmp_path):
    trials = [fakes.make_trial(tmp_path, index, steps=200) for index in range(5)]

    assert launch(trials, on_tick=fakes.interrupt_once(trials[:2]), run=fakes.run_slowly).requested
    assert states(trials) == ["interrupted"] * 2 + ["queued"] * 3
    saved = [json.loads((trial.directory.path / "saved.json").read_text()) for trial in trials[:2]]
    assert all(0 < step < 200 for step in saved)


@pytest.mark.slow  # workers start once more; that a run goes on where it stopped is in the test of a worker that dies
def test_what_was_interrupted_goes_on_where_it_stopped(cluster, tmp_path):
    trials = [fakes.make_trial(tmp_path, index, steps=200) for index in range(5)]
    launch(trials, on_tick=fakes.interrupt_once(trials[:2]), run=fakes.run_slowly)
    launch(trials[:2], run=fakes.run_fake)
    assert states(trials[:2]) == ["stable"] * 2
    assert [len(trial.directory.metrics_file.read_text().splitlines()) for trial in trials[:2]] == [200, 200]


def ledger(trials):
    """What must not depend on who ran it: every file's name, and the bytes of spec, metrics and parameters."""
    exact = ("spec.json", "metrics.jsonl", "model.safetensors")
    files = [path for trial in trials for path in sorted(trial.directory.path.rglob("*")) if path.is_file()]
    return {str(path.relative_to(trials[0].pool)): path.read_bytes() if path.name in exact else b"" for path in files}


# a run of each mechanism, its α_max and two samples of it
MEASURED = ("lr=1e-2", "hessian=true", "curvature.batch=2", "curvature.warmup_batches=2", "curvature.warmup_steps=1")
MEASURED += ("curvature.recorded_steps=2", "generate.num=2")


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The trials of one sweep by each launcher, trained and measured when a test first asks for them."""
    folder, found = tmp_path_factory.mktemp("ledger"), {}

    def by(launcher, *more):
        if launcher not in found:
            spec, trials = make_sweep(folder, *MEASURED, f"launcher={launcher}", *more, pool=launcher)
            assert (sweep(spec, trials).num_trained, len(trials)) == (2, 2)
            found[launcher] = trials
        return found[launcher]

    return by


@pytest.fixture(scope="module")
def serial_ledger(swept):
    trials = swept("serial")
    return Path(trials[0].pool).parent, ledger(trials)


def sweep(spec, trials):
    return launching.run(spec, trials, console=Console(file=io.StringIO()))


@pytest.mark.parametrize(
    "choice",
    [  # slurm's jobs are in `test_slurm_launcher`, with a stand-in for the training, which is the same code
        pytest.param(["ray"], id="ray"),
        pytest.param(["slurm", "slurm.executor=local"], id="slurm", marks=pytest.mark.slow),
    ],
)
def test_every_launcher_leaves_the_same_ledger_byte_for_byte(cluster, swept, serial_ledger, choice):
    trials, (_, expected) = swept(*choice), serial_ledger
    assert ledger(trials) == expected
    assert {name.rpartition("/")[2] for name in expected} >= {"metrics.jsonl", "model.safetensors", "status.json"}
    owners = {trial.directory.status()["owner"]["pid"] for trial in trials}
    assert os.getpid() not in owners, "one worker may have taken both, where the other was slow to start"


def test_what_is_finished_is_not_handed_to_tune_and_tunes_own_tables_say_what_the_ledger_does(
    cluster, serial_ledger, tmp_path
):
    spec, serial = make_sweep(serial_ledger[0], "lr=1e-2", pool="serial")
    spec, trials = make_sweep(tmp_path, "lr=1e-2", "launcher=ray", "name=study")
    shutil.copytree(serial[0].directory.path, trials[0].directory.path)
    before = trials[0].directory.metrics_file.stat().st_mtime_ns
    outcome = sweep(spec, trials)
    assert (outcome.num_skipped, outcome.num_trained, outcome.num_failed) == (1, 1, 0)
    assert trials[0].directory.metrics_file.stat().st_mtime_ns == before
    assert_agrees(launching.folder_of(spec), [trials[1].directory])
    assert told(trials[1].directory)[2] == trials[1].directory.status()["result"]["val_nll"]


def run_and_crash_once(trial):
    """Seed 1 of sc raises after two steps; the others are trained."""
    is_doomed = (trial.spec["mechanism"]["name"], trial.spec["seed"]) == ("sc", 1)
    yield from run_trial(trial, *([crash] if is_doomed else []))


def crash(trial):
    for count, _ in enumerate(fakes.run_fake(trial), 1):
        yield
        if count == 2:
            raise ValueError("planted")


@pytest.mark.slow
def test_tunes_own_tables_say_of_finished_diverged_and_failed_runs_what_the_ledger_does(cluster, tmp_path):
    spec, trials = make_sweep(tmp_path, "lr=[1e-2,1e4]", "seeds=2", "launcher=ray", "name=study")
    launching.run(spec, trials, console=Console(file=io.StringIO()), run=run_and_crash_once)
    assert len(set(states(trials))) == 3 and {"diverged", "failed"} < set(states(trials))  # and a verdict of the rest
    assert_agrees(launching.folder_of(spec), [trial.directory for trial in trials])


@pytest.mark.slow
def test_tunes_own_tables_are_copied_to_the_study_while_its_runs_are_trained(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_launcher, "COPY_S", 1)
    monkeypatch.setenv("TUNE_GLOBAL_CHECKPOINT_S", "1")
    trial, seen = fakes.make_trial(tmp_path, steps=80), []

    def look():
        if trial.directory.status()["state"] == "running":
            seen.extend(row["step"] for row in last_rows(tmp_path / "studies/study/ray").values())

    launch([trial], on_tick=look, run=fakes.run_slowly)
    assert seen and all(0 < step <= 80 for step in seen)


def run_and_leave_a_mess(trial):
    """A trial after which everything global is another than before."""
    yield from run_trial(trial)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.manual_seed(trial.spec["seed"] + 17)
    np.random.seed(trial.spec["seed"] + 17)


@pytest.mark.slow
def test_a_worker_runs_the_same_spec_first_and_last_with_the_same_bits(cluster, tmp_path):
    first, *others = make_sweep(tmp_path, "lr=1e-2", "seeds=2")[1]
    last = replace(first, run_id="0" * 12)
    trials = [first, *others, last]
    assert len(trials) == 5
    launch(trials, cpus_per_trial=2, run=run_and_leave_a_mess)
    assert len({trial.directory.status()["owner"]["pid"] for trial in trials}) == 1
    one, other = ({Path(name).parts[1:]: file for name, file in ledger([trial]).items()} for trial in (first, last))
    assert one == other


def test_ray_and_serial_write_the_same_curvature_bit_for_bit(cluster, swept):
    for one, other in zip(swept("serial"), swept("ray"), strict=True):
        tables = [pd.read_parquet(trial.directory.curvature_file("terminal")) for trial in (one, other)]
        assert len(tables[0]) == 4  # two states, two steps
        assert np.isfinite(tables[0][["slope", "curvature"]]).all(axis=None)
        pd.testing.assert_frame_equal(*tables, check_exact=True)


def test_ray_and_serial_write_the_same_samples_byte_for_byte(cluster, swept):
    for one, other in zip(swept("serial"), swept("ray"), strict=True):
        files = [(trial.directory.path / "samples" / "terminal.jsonl").read_bytes() for trial in (one, other)]
        assert files[0] == files[1] and len(files[0].splitlines()) == 2


@pytest.mark.slow  # a worker of its own; curvature in Ray's workers is measured in the test above but one
def test_the_monitor_and_parallel_directional_work_inside_a_ray_task(cluster):
    import ray

    assert ray.get(ray.remote(num_cpus=0)(measured).remote()) == measured()


def measured():
    """A step's row by the monitor, and the numbers of a batch in two parts."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    x, optimizer = torch.randn(6, 3), torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = AlphaMaxMonitor(model, optimizer, lambda net, rows: net(rows).square().mean())
    with monitor.step(x):
        model(x).square().mean().backward()
        optimizer.step()
    params = {name: param.detach() for name, param in model.named_parameters()}
    direction = {name: torch.ones_like(param) for name, param in params.items()}
    found = parallel_directional(
        lambda p, rows: (functional_call(model, p, (rows,)).square().sum(), len(rows)),
        params,
        direction,
        batches=x.split(3),
    )
    return (*astuple(monitor.history[0]), found.slope, found.curvature)


@pytest.mark.parametrize(
    ("share", "text"),
    [
        ({"cpus_per_trial": 3}, "cpus_per_trial=3, but there are 2 CPUs; give at most 2"),
        ({"gpus_per_trial": 0.5}, "gpus_per_trial=0.5, but there is no GPU; give gpus_per_trial=0 or auto"),
    ],
)
def test_a_trial_that_asks_for_more_than_there_is_is_refused(cluster, tmp_path, share, text):
    with pytest.raises(RuntimeError, match=text):
        launch([fakes.make_trial(tmp_path)], **share)


def test_the_head_of_a_cluster_is_one_that_can_be_joined_and_another_of_its_ports_is_not(cluster, capfd):
    import ray

    ray_address.check(ray.get_runtime_context().gcs_address)
    other = f"{ray.nodes()[0]['NodeManagerAddress']}:{ray.nodes()[0]['NodeManagerPort']}"
    with pytest.raises(
        RuntimeError,
        match=f"^ray.address={other}: no Ray cluster that can be joined: what answers there is not the head of a Ray "
        "cluster",
    ):
        ray_address.check(other)
    assert capfd.readouterr() == ("", "")


def test_a_ray_that_another_sweep_started_for_itself_is_not_found_by_auto(cluster, monkeypatch, capfd):
    import ray

    # where auto looks first: on a machine of many Rays it would find any
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    with pytest.raises(
        RuntimeError,
        match="^ray.address=auto: no Ray cluster that can be joined: what runs on this machine is another sweep's own "
        "Ray, which ends with it; start one with: ray start --head$",
    ):
        ray_address.check("auto")
    assert capfd.readouterr() == ("", "")


def test_without_ray_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        RuntimeError, match=r"launcher=ray needs Ray .*: pip install 'ray\[tune\]', or choose launcher=serial"
    ):
        launch([fakes.make_trial(tmp_path)])


SWEEP = """
import sys
import tempfile
sys.path[:0] = sys.argv[2:3]
from pathlib import Path
from sweeps import launch
from tests.sweeps import fakes, real
folder = Path(sys.argv[1])
spec, _ = real.make_sweep(folder, "launcher=ray")
trials = [fakes.make_trial(folder / "pool", index, steps=100) for index in range(5)]
sys.exit(130 if launch.run(spec, trials, run=fakes.run_slowly).interrupted else 0)
"""


def processes_of(session):
    """Ids of the processes of a session, zombies left out."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number_of_signals", [1, 2])
def test_ctrl_c_leaves_no_process_and_no_folder_behind(tmp_path, number_of_signals, request):
    # short enough for Ray's sockets, and nobody else's
    scratch, home = Path(tempfile.mkdtemp(dir="/tmp")), tmp_path / "home"
    request.addfinalizer(partial(shutil.rmtree, scratch, ignore_errors=True))
    home.mkdir()
    script = tmp_path / "sweep.py"
    script.write_text(SWEEP)
    environment = {**os.environ, "TMPDIR": str(scratch), "HOME": str(home)}
    arguments = [sys.executable, str(script), str(tmp_path), str(ROOT)]
    sweep = subprocess.Popen(
        arguments,
        env=environment,
        cwd=home,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("pool/*/metrics.jsonl"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(scratch.glob("stability-ray-*"))
    for _ in range(number_of_signals):
        os.killpg(sweep.pid, signal.SIGINT)
        time.sleep(0.05)
    printed, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 130, printed
    assert printed.endswith("interrupted: run the same command again, it goes on where this one stopped\n")
    assert processes_of(sweep.pid) == []
    assert list(scratch.glob("stability-ray-*")) == []
    assert [path.name for path in home.iterdir() if path.name != ".cache"] == []
    if number_of_signals == 1:
        assert len(list(tmp_path.glob("pool/*/saved.json"))) == 2


@pytest.mark.slow
def test_a_sweep_on_two_nodes_of_which_one_is_killed_finishes_with_the_same_bytes(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run(
        [sys.executable, "-m", "tests.faults.two_nodes", str(tmp_path)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert killed.returncode == 0, killed.stdout + killed.stderr
    assert "all finished" in killed.stdout and "metrics.jsonl byte for byte the undisturbed ones" in killed.stdout
