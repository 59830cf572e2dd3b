"""Start, stop, go on: real sweeps of three tiny runs, and a server that is killed in the middle."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from http.cookiejar import CookieJar

import pytest

from benchmarks.web import plant
from stability.runs.directory import RunDirectory
from stability.runs.processes import Process
from stability.runs.study import StudyFolder
from stability.web import jobs
from tests.web.conftest import Page

WORDS = (
    "data=text mechanism=[sa] model.layers=2 model.width=16 model.heads=2 model.positions=16 steps=600 batch=4 name=toy"
    " evaluation.every_steps=100 evaluation.sequences=8 lr=[1e-3,3e-3,1e-2] seeds=1 launcher=serial device=cpu report=false"
    " hessian=false checkpoint.every_steps=50"
)


def wait_for(condition, longest_s=240.0):
    """Wait until a condition holds; the clock only ends a test that hangs."""
    end = time.monotonic() + longest_s
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.1)


def states(pool):
    """State and step of each run of the study."""
    study = StudyFolder.of(pool, "toy")
    return [] if not study.file.exists() else [(run.status()["state"], run.status()["step"]) for run in study.runs()]


def logged_steps(pool):
    study = StudyFolder.of(pool, "toy")
    runs = study.runs() if study.file.exists() else []
    return sum(run.metrics_file.read_bytes().count(b"\n") for run in runs if run.metrics_file.exists())


def results(pool):
    """The bytes of a study's logs and last models."""
    found = {}
    for run in StudyFolder.of(pool, "toy").runs():
        model = run.checkpoints()[-1] / "model.safetensors"
        found[run.run_id] = (run.metrics_file.read_bytes(), model.read_bytes())
    return found


def test_a_sweep_outlives_its_server_and_ends_like_one_that_nobody_touched(tmp_path, text_file):
    folder, pool = tmp_path / "web", tmp_path / "web" / "runs"
    folder.mkdir()
    words = [*WORDS.split(), f"data.path={text_file}"]
    argv = [sys.executable, "-m", "stability.web", f"runs_dir={pool}", f"reports_dir={folder}/reports"]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    address = server.stdout.readline().strip()
    site = address.partition("/?")[0]
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    first = browser.open(address).read().decode()
    fields = {"csrf": re.search(r'name="csrf" value="([^"]+)"', first)[1], "command": "sweep"}
    fields |= {f"k:{word.partition('=')[0]}": word.partition("=")[2] for word in words} | {"k:mechanism": "sa"}
    form = urllib.parse.urlencode(fields).encode()
    request = urllib.request.Request(f"{site}/start", form, {"Origin": site})
    assert "toy" in browser.open(request).read().decode()

    wait_for(lambda: logged_steps(pool) > 20)
    server.kill()
    server.wait()
    page = Page(folder)
    seen = logged_steps(pool)
    wait_for(lambda: logged_steps(pool) > seen)  # it goes on
    text = page.get("/studies/toy").text
    assert ">Stop<" in text and "1 running" in text and "data.path=" in text
    assert page.post("/studies/toy/go_on").status_code == 409  # it is running

    job = jobs.find_job(pool / "studies" / "toy")
    assert page.post("/studies/toy/stop").status_code == 303
    wait_for(lambda: not job.is_running)
    interrupted = states(pool)
    assert "interrupted" in [state for state, _ in interrupted] or all(step == 600 for _, step in interrupted)
    assert any(step < 600 for _, step in interrupted), "it ended before it could be stopped"

    again = Page(folder)  # another server
    text = again.get("/studies/toy").text
    assert ">Go on<" in text and "1 interrupted" in text
    assert again.post("/studies/toy/go_on").status_code == 303
    assert again.post("/studies/toy/go_on").status_code == 409
    wait_for(lambda: not jobs.find_job(pool / "studies" / "toy").is_running)
    time.sleep(1)
    text = again.get("/studies/toy").text
    assert "3 runs: 3 done" in text and ">Go on<" not in text and ">Stop<" not in text

    alone = tmp_path / "alone"
    subprocess.run(
        [sys.executable, "-m", "stability.sweep", *words, f"runs_dir={alone}"], check=True, capture_output=True
    )
    assert results(pool) == results(alone)


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "page.txt"
    path.write_text(
        "\n".join(f"line {number} of a page that is read by tiny models, {number * 7919}" for number in range(400))
    )
    return path


def test_a_recycled_process_number_is_never_signalled(tmp_path, monkeypatch):
    folder = tmp_path / "studies" / "x"
    folder.mkdir(parents=True)
    own = Process.current()
    process = {"host": own.host, "machine": own.machine, "pid": own.pid, "started": "1"}  # this one began later
    (folder / "web.json").write_text(json.dumps({"argv": ["a=b"], "process": process, "started_at": 1.0}))
    monkeypatch.setattr(jobs.os, "killpg", lambda *_: pytest.fail("signalled"))
    job = jobs.find_job(folder)
    assert not job.is_running and jobs.stop(job) is False


@pytest.mark.parametrize("text", ["", "{", "[]", '{"argv": 3}', '{"argv": [], "process": {"pid": 1}, "started_at": 1}'])
def test_a_damaged_job_file_is_no_job(tmp_path, text):
    (tmp_path / "web.json").write_text(text)
    assert jobs.find_job(tmp_path) is None and jobs.find_job(tmp_path / "nowhere") is None


def test_a_child_that_has_ended_is_reaped_and_its_mistake_is_on_the_page(page):
    assert (
        page.post("/start", {"command": "sweep", "k:name": "wrong", "more": "plugins=[no_such_module]"}).status_code
        == 303
    )
    job = jobs.find_job(page.pool / "studies" / "wrong")
    wait_for(lambda: not job.is_running)
    assert job.process.pid not in jobs._children
    text = page.get("/studies/wrong").text
    assert "no_such_module" in text and "no record yet" in text
    assert 'href="/studies/wrong"' in page.get("/studies").text


def test_a_later_check_ends_the_one_before_and_a_long_one_is_cut(monkeypatch):
    checker = jobs.Checker()
    slow = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    checker._child = slow
    valid, text = checker.check("report", ["name=x", "format=[pdf]"])
    assert slow.wait() == -9 and valid and text.startswith("valid")
    valid, text = checker.check("report", ["nam=x"])
    assert not valid and text.startswith("error: nam: unknown key; did you mean 'name'?")
    monkeypatch.setattr(jobs, "CHECK_S", 0.05)
    assert checker.check("report", ["name=x"])[1].startswith("no answer within 0 s")


def test_the_study_of_another_terminal_can_be_continued_only_where_its_words_are_known(page):
    study = StudyFolder.of(page.pool, "theirs")
    RunDirectory(page.pool, "0" * 12).path.mkdir(parents=True)
    for command, words in (
        ("python -m stability.sweep name=theirs lr=[1e-3,1e-2]", ["name=theirs", "lr=[1e-3,1e-2]"]),
        ("python -m stability.sweep name=theirs data.path=a b", None),
        ("python -m stability.sweep 'name=theirs'", None),
        ("python study.py", None),
        ("", None),
    ):
        study.write([], command=command)
        page.get("/studies/theirs")
        assert page.app and watched_words(page) == words
        if words is None:
            assert page.post("/studies/theirs/go_on").status_code == 404


@pytest.mark.parametrize(
    ("words", "status"),
    [([], 303), (["name=theirs", "seeds=3"], 303), (["runs_dir={pool}"], 303), (["runs_dir=/elsewhere"], 409)],
)
def test_go_on_stays_in_this_pool_whatever_folder_the_terminal_was_in(page, monkeypatch, words, status):
    started = []
    monkeypatch.setattr(jobs, "start", lambda folder, command, words, kind: started.append(list(words)))
    words = [word.format(pool=page.pool) for word in words]
    plant(page.pool, "theirs", 80)
    study = StudyFolder.of(page.pool, "theirs")
    record = study.read()
    run = RunDirectory(page.pool, record["run_ids"][0])
    run.set_status("interrupted", step=7, num_steps=200)
    study.file.write_text(json.dumps({**record, "command": " ".join(["python -m stability.sweep", *words])}))
    text = page.get("/studies/theirs").text
    assert ">Go on<" in text and "change it in the form" in text  # also of a command without a word
    assert page.post("/studies/theirs/go_on").status_code == status
    places = [f"runs_dir={page.pool}", f"reports_dir={page.reports}"]
    assert started == ([[*words, *(word for word in places if word not in words)]] if status == 303 else [])


def watched_words(page):
    from stability.web.watching import Pool

    watched = Pool(page.pool).study("theirs")
    watched.poll()
    return watched.words
