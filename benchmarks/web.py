"""Time the web page: ``python -m benchmarks.web [runs=1000]``.

A study of that many finished runs is planted as files. Each line has CPU time, then wall time, each the median of
several calls. The promises hold for CPU time, because others may use the machine: a cold start within 2 s, a study
within 300 ms, a look at the files within 50 ms.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict
from http.cookiejar import CookieJar
from pathlib import Path
from statistics import median
from typing import Any

from starlette.testclient import TestClient

from benchmarks._machine import machine
from stability.cli.compose import read
from stability.cli.words import Invocation
from stability.config.identity import run_id
from stability.config.sweep import SweepSpec
from stability.runs.directory import RunDirectory
from stability.runs.study import StudyFolder
from stability.runs.words import Words
from stability.web import watching
from stability.web.app import make_app

TOKEN, HOST, CALLS = "0123456789abcdef", "testserver", 7
HEADER = f"{'milliseconds':44}{'CPU':>8}{'wall':>8}{'promised':>10}"
Times = tuple[float, float]  # seconds: CPU, wall


def plant(pool: Path, name: str, num_runs: int) -> None:
    """Write the files of a study of four mechanisms and ten seeds over learning rates.

    Args:
        pool: folder of the runs.
        name: the study's name.
        num_runs: number of runs, a multiple of 40.
    """
    words = ["mechanism=[sa,sc,mix,sw]", "seeds=10", f"lr.num={num_runs // 40}", "hessian=false", f"name={name}"]
    spec = read(SweepSpec, Invocation.of(words))
    ids = []
    for place, (_, run) in enumerate(spec.points("f" * 64)):
        directory = RunDirectory(pool, run_id(run))
        directory.path.mkdir(parents=True)
        directory.spec_file.write_text(json.dumps(run.model_dump(mode="json")))
        result = {
            "val_nll": 2 + (place % 7) / 10,
            "unigram_nll": 3.3,
            "init_nll": 5.5,
            "num_params": 1e5,
            "wall_s": 9.0,
        }
        state = {"state": "stable", "step": 200, "num_steps": 200, "changed_at": 1e9, "result": result}
        directory.status_file.write_text(json.dumps(state))
        ids.append(directory.run_id)
    about = {"spec": spec.model_dump(mode="json"), "words": asdict(Words())}
    StudyFolder.of(pool, name).write(ids, command=f"python -m stability.sweep name={name}", **about)


def cold_start(pool: Path) -> Times:
    """Return the time from the command to the first page in the browser's hands."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    argv = [sys.executable, "-m", "stability.web", f"runs_dir={pool}"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        assert b"Compose a command" in opener.open(address).read()
        seconds = time.perf_counter() - began
        process.terminate()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, seconds


def main() -> None:
    """Print a line for each promise."""
    num_runs = int(next((word.partition("=")[2] for word in sys.argv[1:] if word.startswith("runs=")), "1000"))
    with tempfile.TemporaryDirectory() as folder:
        pool = Path(folder) / "runs"
        plant(pool, "large", num_runs)
        print(f"{num_runs} runs; {machine()}\n{HEADER}")
        _print("cold start: command to first page", _middle([cold_start(pool) for _ in range(3)]), 2000)
        app = make_app(pool, Path(folder) / "reports", [HOST], TOKEN)
        client = TestClient(app, base_url=f"http://{HOST}")
        assert "csrf" in client.get(f"/?token={TOKEN}").text
        watching.POLL_S = 0.0  # every call looks at the files
        _print("first page of the study, with imports", _time(lambda: client.get("/studies/large")))
        page = client.get("/studies/large").text
        assert len(re.findall(r'href="/runs/[0-9a-f]{12}"', page)) == num_runs
        watched = watching.Pool(pool).study("large")
        assert watched is not None
        _print("first look at all files", _time(watched.poll))
        _print("one look at the files (a tick)", _middle([_time(watched.poll) for _ in range(CALLS)]), 50)
        _print("page of the study", _middle([_time(lambda: client.get("/studies/large")) for _ in range(CALLS)]), 300)
        _print("its figures", _middle([_time(lambda: client.get("/studies/large/figures")) for _ in range(CALLS)]))
        run = next(iter(watched.rows)).trial.directory

        def after_a_change() -> None:
            run.status_file.touch()
            client.get("/studies/large")

        _print("page after a run has changed", _middle([_time(after_a_change) for _ in range(CALLS)]), 300)
        _print("page of all studies", _middle([_time(lambda: client.get("/studies")) for _ in range(CALLS)]))


def _time(call: Callable[[], Any]) -> Times:
    began, used = time.perf_counter(), time.process_time()
    call()
    return time.process_time() - used, time.perf_counter() - began


def _middle(times: Sequence[Times]) -> Times:
    return median(cpu for cpu, _ in times), median(wall for _, wall in times)


def _print(what: str, times: Times, promised_ms: int | None = None) -> None:
    numbers = "".join(f"{seconds * 1e3:8.0f}" for seconds in times)
    print(f"{what:44}{numbers}{'' if promised_ms is None else promised_ms:>10}")


if __name__ == "__main__":
    main()
