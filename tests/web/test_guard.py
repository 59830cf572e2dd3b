"""Nobody but the browser with the printed token, on the page's own address, reads or starts anything."""

from __future__ import annotations

import json
import re

import pytest
from starlette.testclient import TestClient

from benchmarks.web import plant
from stability.config.entries import WebSpec
from stability.runs.study import StudyFolder
from stability.web import jobs
from tests.web.conftest import HOST, ORIGIN, TOKEN, Page

POSTS = ("/", "/check", "/start", "/yaml", "/studies/x/stop", "/studies/x/go_on", "/studies/x/report")
GETS = ("/", "/studies", "/studies/x", "/static/web.js", "/runs/0123456789ab", "/reports/x.pdf")


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    """Every start is an error: what is refused here must not get that far."""
    monkeypatch.setattr(jobs.subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))


def stranger(page):
    """Another browser, without the cookie."""
    return TestClient(page.app, base_url=ORIGIN, follow_redirects=False)


@pytest.mark.parametrize("path", GETS)
def test_without_the_cookie_nothing_is_shown(page, path):
    assert stranger(page).get(path).status_code == 403
    assert stranger(page).get(path, headers={"Cookie": "stability_8000=guess"}).status_code == 403


@pytest.mark.parametrize("token", ["", "guess", TOKEN[:-1], TOKEN + "0", TOKEN.upper(), "ü"])
def test_a_guessed_token_opens_nothing(tmp_path, token):
    page = Page(tmp_path)
    fresh = TestClient(page.app, base_url=ORIGIN, follow_redirects=False)
    assert fresh.get("/", params={"token": token}).status_code == 403


def test_the_printed_token_works_once_and_is_taken_off_the_address(page):
    assert stranger(page).get(f"/?token={TOKEN}").status_code == 403  # the fixture has used it
    fresh = Page(page.pool.parent, "fedcba9876543210")
    other = TestClient(fresh.app, base_url=ORIGIN, follow_redirects=False)
    assert other.get("/?token=fedcba9876543210").status_code == 403


def test_the_cookie_is_for_this_page_alone(tmp_path):
    from stability.web.app import make_app

    client = TestClient(make_app(tmp_path, tmp_path, [HOST], TOKEN), base_url=ORIGIN, follow_redirects=False)
    answer = client.get(f"/studies?token={TOKEN}&a=b")
    assert (answer.status_code, answer.headers["location"]) == (303, "/studies?a=b")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and "domain" not in cookie and TOKEN not in cookie


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1", "127.0.0.1:8001", "localhost", ""])
def test_another_host_is_refused_even_with_the_cookie(page, host):
    assert page.get("/", headers={"Host": host}).status_code == 403
    assert page.post("/start", {"command": "sweep"}, Host=host).status_code == 403


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:8001"},
        {"Origin": f"https://{HOST}"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/json"},
    ],
)
def test_a_form_of_another_page_is_refused(page, path, headers):
    assert page.post(path, {"command": "sweep"}, **headers).status_code == 403


@pytest.mark.parametrize("path", POSTS)
def test_a_form_without_its_token_or_origin_is_refused(page, path):
    for csrf in ("", "guess", page.csrf[:-1]):
        assert page.post(path, {"csrf": csrf}).status_code == 403
    assert page.client.post(path, data={"csrf": page.csrf}).status_code == 403  # no Origin
    assert page.post(path, {"more": "x" * 1_100_000}).status_code == 403  # too long


@pytest.mark.parametrize("path", [path for path in POSTS if path != "/"])
def test_no_get_has_an_effect_and_no_other_method_exists(page, path):
    assert page.get(path).status_code in (404, 405)
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        assert page.client.request(method, path, headers={"Origin": ORIGIN}).status_code in (404, 405)


def test_every_answer_forbids_frames_foreign_code_and_sharing(page):
    for answer in (page.get("/"), page.get("/studies"), page.get("/nothing"), stranger(page).get("/")):
        assert answer.headers["x-frame-options"] == "DENY" and answer.headers["x-content-type-options"] == "nosniff"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and not any(name.startswith("access-control") for name in answer.headers)
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=", page.get("/").text)  # no inline code


@pytest.mark.parametrize(
    "path",
    [
        "/runs/{run}/files/../../../secret.txt",
        "/runs/{run}/files/%2e%2e/%2e%2e/secret.txt",
        "/runs/{run}/files//etc/passwd",
        "/runs/{run}/files/link.txt",
        "/runs/{run}/files/folder/spec.json",
        "/runs/../files/spec.json",
        "/runs/%2e%2e%2fother/files/spec.json",
        "/static/../app.py",
        "/static/%2e%2e%2fapp.py",
        "/reports/..%2fsecret.txt",
        "/reports/notes.txt",
        "/studies/%2e%2e",
        "/studies/linked",
        "/studies/%3Cscript%3E",
    ],
)
def test_no_path_leaves_its_folder(page, tmp_path, path):
    (tmp_path / "secret.txt").write_text("secret")
    page.reports.mkdir()
    (page.reports / "notes.txt").write_text("secret")
    run = page.pool / "0123456789ab"
    run.mkdir()
    (run / "spec.json").write_text("{}")
    (run / "link.txt").symlink_to(tmp_path / "secret.txt")
    (run / "folder").symlink_to(run)
    (page.pool / "studies" / "own").mkdir(parents=True)
    (page.pool / "studies" / "linked").symlink_to(page.pool / "studies" / "own")
    assert page.get(f"/runs/{run.name}/files/spec.json").text == "{}"
    answer = page.get(path.format(run=run.name))
    assert answer.status_code in (403, 404) and "secret" not in answer.text


@pytest.mark.parametrize("name", ["%00", "a%00", "a" * 300, "a" * 5000, "%0a", "a%0a", "%ff"])
@pytest.mark.parametrize(
    "path", ["/studies/{}", "/static/{}", "/reports/{}.pdf", "/runs/0123456789ab/files/{}", "/runs/{}", "/?from={}"]
)
def test_a_name_that_no_file_system_has_is_not_found(page, path, name):
    (page.pool / "0123456789ab").mkdir()
    answer = page.get(path.format(name))
    assert answer.status_code == 404 or (path == "/?from={}" and "Compose a command" in answer.text)


def test_a_study_whose_folder_cannot_be_made_is_a_mistake_of_the_form(page):
    (page.pool / "studies").write_text("a file in the way")
    answer = page.post("/start", {"command": "sweep", "k:name": "fine"})
    assert answer.status_code == 200 and "studies" in answer.text and "Compose a command" in answer.text


def test_a_second_cookie_opens_nothing_and_a_port_of_letters_is_another_host(page):
    assert (
        stranger(page).get("/studies", headers={"Cookie": "a=b; stability_8000=x; stability_8000="}).status_code == 403
    )
    for host in ("127.0.0.1:abc", "LOCALHOST:8000", "localhost.:8000", "evil@127.0.0.1:8000", "127.1:8000"):
        assert page.get("/studies", headers={"Host": host}).status_code == 403


def test_names_with_markup_are_inert(page):
    plant(page.pool, "fine", 80)
    evil = "<script>alert(1)</script>"
    record = StudyFolder.of(page.pool, "fine").file
    found = json.loads(record.read_text())
    spec = page.pool / found["run_ids"][0] / "spec.json"
    spec.write_text(json.dumps({**json.loads(spec.read_text()), "mechanism": {"name": evil}}))
    record.write_text(json.dumps({**found, "command": f"python {evil}", "variants": {found["run_ids"][1]: evil}}))
    strange = page.pool / "studies" / "<script>"
    strange.mkdir()
    (strange / "study.json").write_text(record.read_text())
    for path in ("/studies", "/studies/fine", f"/runs/{spec.parent.name}", "/?k:name=%3Cscript%3Ealert(1)"):
        answer = page.get(path)
        assert (
            answer.status_code == 200 and "<script>alert" not in answer.text and 'href="/studies/<' not in answer.text
        )
    assert "<script>" not in page.get("/studies/fine/figures").text
    assert page.get("/studies/%3Cscript%3E").status_code == 404


def test_a_downloaded_file_is_an_attachment_and_a_report_has_no_right_here(page):
    run = page.pool / "0123456789ab"
    run.mkdir()
    (run / "page.html").write_text("<script>alert(1)</script>")
    page.reports.mkdir()
    for name in ("mine.html", "mine.pdf"):
        (page.reports / name).write_text("<script>alert(1)</script>")
    for path in (f"/runs/{run.name}/files/page.html", "/reports/mine.pdf"):
        assert page.get(path).headers["content-disposition"].startswith("attachment")
    policy = page.get("/reports/mine.html").headers["content-security-policy"]
    assert policy.startswith("sandbox allow-scripts") and "allow-same-origin" not in policy


def test_the_page_shows_one_pool_and_starts_nothing_elsewhere(page, tmp_path):
    answer = page.post("/start", {"command": "sweep", "k:runs_dir": str(tmp_path / "elsewhere")})
    assert answer.status_code == 200 and "leave runs_dir out" in answer.text
    assert "only sweeps start here" in page.post("/start", {"command": "report", "k:name": "x"}).text


def test_another_address_needs_a_token_of_ones_own():
    with pytest.raises(ValueError, match="add token"):
        WebSpec(host="0.0.0.0")
    assert WebSpec(host="0.0.0.0", token=TOKEN).host == "0.0.0.0"
    with pytest.raises(ValueError, match="at least 16"):
        WebSpec(token="short")
