"""The W&B sink and the probe before it: a run lands offline, and nothing that W&B does reaches the training loop."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from stability.runs import wandb_sink
from stability.runs.directory import RunDirectory, read_jsonl
from stability.runs.log import RunLog, Sinks
from stability.runs.sink import failure_file, pool_mark
from stability.runs.wandb_sink import WandbSink, probe_wandb
from tests.runs.reading_sinks import records_of

KEY = "0123456789" * 4


@pytest.fixture(autouse=True)
def no_account(tmp_path, monkeypatch):
    """Nobody's credentials, settings or caches: a home of its own and no W&B variables."""
    for name in [name for name in os.environ if name.startswith("WANDB_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(WandbSink, "_offline_from_now", False)


def probe(environment):
    """`probe_wandb` in a process of its own, since W&B reads its settings once."""
    script = "from stability.runs.wandb_sink import probe_wandb; print(*probe_wandb(1.0), sep='|')"
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root, **environment}
    printed = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    mode, message = printed.strip().split("|")
    return mode, message


def test_without_a_key_it_is_offline():
    mode, message = probe({})
    assert mode == "offline"
    assert message.startswith("W&B: offline, no API key found; upload later with:")


@pytest.mark.parametrize(("wanted", "mode"), [("offline", "offline"), ("dryrun", "offline"), ("disabled", "disabled")])
def test_wandb_mode_is_respected(wanted, mode):
    assert probe({"WANDB_MODE": wanted, "WANDB_API_KEY": KEY}) == (mode, f"W&B: {mode}, as WANDB_MODE says")


def test_online_needs_a_server_that_takes_a_connection():
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert probe({"WANDB_API_KEY": KEY, "WANDB_BASE_URL": url}) == ("online", f"W&B: online, {url}")
    mode, message = probe({"WANDB_API_KEY": KEY, "WANDB_BASE_URL": url, "WANDB_MODE": "online"})
    assert mode == "offline"
    assert message.startswith(f"W&B: offline, {url} does not answer; upload later with: wandb sync")


def test_a_name_that_is_slow_to_resolve_holds_nobody_up(monkeypatch):
    resolved = threading.Event()
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: resolved.wait() and socket.socket())
    assert not wandb_sink._is_reachable("https://example.invalid", 0.2)  # waiting for the name would never end
    resolved.set()


def test_the_proxy_is_asked_where_there_is_one(monkeypatch):
    asked = []
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: asked.append(address) or socket.socket())
    assert wandb_sink._is_reachable("https://example.invalid", 1.0)
    assert asked == [("proxy.example", 3128)]


def test_without_wandb_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        RuntimeError, match="logger=wandb needs Weights & Biases: pip install wandb, or choose logger=files"
    ):
        probe_wandb()


def row(step):
    return {
        "step": step,
        "loss": 5.0 / step,
        "grad_norm": 1.0,
        "update_norm": None,
        "lr": 0.01,
        "val_nll": 2.5 if step == 3 else None,
    }


def write_run(directory, steps, resume_after=-1, mode="offline"):
    told = {"group": "my-study", "config": {"lr_peak": 0.01}, "name": "sa lr=0.01"}
    sinks = Sinks(directory, {"to": {"wandb": {"mode": mode}}, **told})
    run_log = RunLog(directory, resume_after=resume_after, sinks=sinks)
    for step in steps:
        run_log.write_metrics(row(step))
    run_log.close()
    sinks.close()


def test_an_offline_run_lands_in_its_directory_and_a_resumed_one_beside_it(tmp_path, capsys):
    directory = RunDirectory(tmp_path / "pool", "0123456789ab")
    write_run(directory, [1, 2, 3])
    write_run(directory, [3, 4], resume_after=2)
    first, second = sorted((directory.path / "wandb").glob("offline-run-*/*.wandb"))
    assert [row["step"] for row in read_jsonl(directory.metrics_file)] == [1, 2, 3, 4]
    for path, steps in ((first, [1, 2, 3]), (second, [3, 4])):
        records = records_of(path)
        (run,) = [record["run"] for record in records if record["type"] == "run"]
        assert (run["run_group"], run["run_id"], run["project"], run["display_name"]) == (
            "my-study",
            f"0123456789ab-{pool_mark(tmp_path / 'pool')}",
            "stability",
            "sa lr=0.01",
        )
        history = [record["history"] for record in records if record["type"] == "history"]
        assert [(item["step"]["num"], item["item"]["loss"], item["item"].get("val_nll")) for item in history] == [
            (step, pytest.approx(5.0 / step), 2.5 if step == 3 else None) for step in steps
        ]
    assert capsys.readouterr().out == ""
    assert not failure_file(directory, "wandb").exists()


@pytest.mark.parametrize(("verdict", "artifacts"), [("stable", ["checkpoint-0123456789ab-MARK"]), (None, [])])
def test_the_last_checkpoint_of_a_finished_run_is_an_artifact_on_request(tmp_path, verdict, artifacts):
    directory = RunDirectory(tmp_path / "pool", "0123456789ab")
    for step in (2, 4):
        folder = directory.path / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"parameters %d" % step)
    if verdict is not None:
        directory.set_status(verdict, step=4, reason="", result={})
    told = {"group": "my-study", "config": {"lr_peak": 0.01}, "name": "sa lr=0.01"}
    sinks = Sinks(directory, {"to": {"wandb": {"mode": "offline", "checkpoints": True}}, **told})
    sinks.open(-1)
    sinks.close()
    (file,) = (directory.path / "wandb").glob("offline-run-*/*.wandb")
    sent = [record["artifact"] for record in records_of(file) if record["type"] == "artifact"]
    mark = pool_mark(tmp_path / "pool")
    assert [each["name"] for each in sent] == [name.replace("MARK", mark) for name in artifacts]
    for each in sent:
        (content,) = each["manifest"]["contents"]
        assert Path(content["local_path"]).read_bytes() == b"parameters 4"


def broken_init(fails_at, calls, times=1):
    """A stand-in for `wandb.init` whose run fails at the named method so many times."""

    def fails(name):
        return name == fails_at and calls.count(name) <= times

    class Run:
        resumed = False

        class summary:
            update = staticmethod(lambda values: None)

        def log(self, values, step):
            self.called("log")

        def finish(self):
            self.called("finish")

        def called(self, name):
            calls.append(name)
            if fails(name):
                raise ConnectionResetError("Connection lost")

    def init(mode, **arguments):
        calls.append(mode)
        if fails(mode) or fails_at == "always":
            raise TimeoutError("no answer\nfrom there")
        return Run()

    return init


ANEW = ["offline", "log", "log", "finish"]  # of a run of two steps: all that was logged, and the end


@pytest.mark.parametrize(
    ("fails_at", "times", "calls"),
    [
        ("log", 1, ["online", "log", "offline", "log", "log", "finish"]),
        ("log", 9, ["online", "log", "offline", "log", "offline", "log"]),
        ("finish", 1, ["online", "log", "log", "finish", *ANEW]),
        ("online", 1, ["online", *ANEW]),
        ("always", 9, ["online", "offline", "offline"]),
    ],
)
def test_whatever_wandb_raises_the_run_goes_on_and_a_substitute_gets_all_rows(
    tmp_path, monkeypatch, capsys, fails_at, times, calls
):
    seen = []
    monkeypatch.setattr(wandb_sink, "init_run", broken_init(fails_at, seen, times))
    monkeypatch.setattr(wandb_sink, "_teardown_wandb", lambda: None)
    directory = RunDirectory(tmp_path, "0123456789ab")
    write_run(directory, [1, 2], mode="online")
    assert seen == calls
    assert len(directory.metrics_file.read_text().splitlines()) == 2
    told = "TimeoutError: no answer" if fails_at in ("online", "always") else "ConnectionResetError: Connection lost"
    recovered = " (it began anew, and has all rows)" if calls[-1] == "finish" else ""
    assert failure_file(directory, "wandb").read_text() == f"{told}{recovered}\n"
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"0123456789ab: W&B failed, the run goes on ({told})"] * (1 if recovered else 3)


def services():
    """The processes of W&B that this one has started."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"wandb-core" in (folder / "cmdline").read_bytes():
                yield int(folder.name)


@pytest.mark.skipif(sys.platform != "linux", reason="finds W&B's process in /proc")
def test_nothing_is_lost_when_wandb_s_process_is_killed(tmp_path, monkeypatch):
    """Neither of the run that it happens to nor of the next one in the process."""
    hit, later = (RunDirectory(tmp_path / "pool", name * 12) for name in "ab")
    write = RunLog.write_metrics

    def metrics(log, row):
        write(log, row)
        if row["step"] == 2 and not killed:
            killed.extend(services())
            for process in killed:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)

    killed = []
    monkeypatch.setattr(RunLog, "write_metrics", metrics)
    for directory in (hit, later):
        write_run(directory, [1, 2, 3, 4])
    assert len(killed) == 1
    assert failure_file(hit, "wandb").read_text().endswith("(it began anew, and has all rows)\n")
    assert not failure_file(later, "wandb").exists()
    for directory in (hit, later):
        newest = sorted((directory.path / "wandb").glob("offline-run-*"), key=lambda each: each.stat().st_mtime_ns)[-1]
        assert [
            record["history"]["step"]["num"]
            for record in records_of(next(newest.glob("*.wandb")))
            if record["type"] == "history"
        ] == [1, 2, 3, 4]


def test_after_one_timeout_the_trials_that_follow_in_the_process_stay_offline(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(wandb_sink, "init_run", broken_init("online", seen))
    monkeypatch.setattr(wandb_sink, "_teardown_wandb", lambda: None)
    for index in range(3):
        write_run(RunDirectory(tmp_path, f"{index:012x}"), [], mode="online")
    assert [mode for mode in seen if mode != "finish"] == ["online", "offline", "offline", "offline"]


@pytest.mark.slow
def test_a_server_that_takes_connections_and_says_nothing_does_not_stop_a_run(tmp_path, monkeypatch, capfd):
    wandb_sink._teardown_wandb()  # what it has read of the environment before, it keeps for the process
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_SILENT", "true")  # as `probe_wandb` leaves it
        directory = RunDirectory(tmp_path / "pool", "0123456789ab")
        write_run(directory, [1, 2], mode="online")
    assert len(directory.metrics_file.read_text().splitlines()) == 2
    assert list((directory.path / "wandb").glob("offline-run-*/*.wandb"))
    printed = capfd.readouterr()
    assert len(printed.out.splitlines()) == 1
    assert printed.err == ""
