"""The journey in Chromium: compose → check → start → the curve moves → stop → go on → the report opens.

It needs the package playwright and a Chromium of the system; ``SHOTS=FOLDER`` keeps pictures of every page.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.web import plant
from stability.runs.directory import RunDirectory
from stability.runs.study import StudyFolder
from tests.web.test_jobs import logged_steps, wait_for

playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
LONGEST_MS = 240_000
FIELDS = {
    "name": "toy", "steps": "200", "batch": "4", "lr": "[1e-3,1e-2]", "seeds": "1", "evaluation.every_steps": "10",
    "evaluation.sequences": "8", "model.layers": "2", "model.width": "16", "model.heads": "2", "model.positions": "16",
    "checkpoint.every_steps": "20", "curvature.recorded_steps": "3", "curvature.batch": "4",
    "curvature.parity_steps": "0",
}  # fmt: skip
# what a screen reader and a keyboard need: [problem, element]
AXE = """() => {
  const shown = e => e.offsetParent !== null && getComputedStyle(e).visibility === "visible";
  const found = [];
  const name = e => (e.getAttribute("aria-label") || [...(e.labels || [])].map(l => l.textContent).join("") || e.textContent || e.title || "").trim();
  document.querySelectorAll("input:not([type=hidden]), select, textarea, button, a[href]").forEach(e => { if (shown(e) && !name(e)) found.push(["no name", e.outerHTML.slice(0, 90)]); });
  const ids = [...document.querySelectorAll("[id]")].map(e => e.id);
  ids.filter((id, at) => ids.indexOf(id) !== at).forEach(id => found.push(["id twice", id]));
  document.querySelectorAll("[tabindex]").forEach(e => { if (e.tabIndex > 0) found.push(["focus order", e.outerHTML.slice(0, 90)]); });
  if (document.querySelectorAll("h1").length !== 1 || !document.documentElement.lang || !document.querySelector("main")) found.push(["landmarks", ""]);
  const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number).map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const back = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (!/, 0\\)$/.test(c)) return c; } return "rgb(255, 255, 255)"; };
  document.querySelectorAll("p, a, td, th, label, button, summary, code, pre, h1, h2, span, legend, dt, dd").forEach(e => {
    if (!shown(e) || !e.textContent.trim() || e.closest("svg, .plot")) return;
    const [a, b] = [light(getComputedStyle(e).color), light(back(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) found.push(["contrast", e.outerHTML.slice(0, 90)]);
  });
  return found;
}"""


@pytest.fixture
def served(tmp_path):
    """The address of a page of its own, and its server."""
    argv = [sys.executable, "-m", "stability.web", f"runs_dir={tmp_path}/runs", f"reports_dir={tmp_path}/reports"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        yield server.stdout.readline().strip(), server
        server.terminate()


@pytest.fixture
def tab(served):
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_context(viewport={"width": 1280, "height": 860}).new_page()
        tab.set_default_timeout(LONGEST_MS)
        tab.errors = []
        tab.on("pageerror", lambda error: tab.errors.append(str(error)))
        address, tab.server = served
        tab.goto(address)
        yield tab
        browser.close()


def look(tab, name):
    """Check a page at both widths: nothing is wider than the window, and everybody can use it."""
    for width in (1280, 400):
        tab.set_viewport_size({"width": width, "height": 860})
        if tab.locator(".plot").count():
            tab.wait_for_selector(".plot .main-svg")
            tab.wait_for_timeout(500)
        if folder := os.environ.get("SHOTS"):
            tab.screenshot(path=f"{folder}/{name}_{width}.png", full_page=name != "compose")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate(AXE) == []
    tab.set_viewport_size({"width": 1280, "height": 860})


def button(tab, name):
    """The button of a name, as a screen reader finds it."""
    return tab.get_by_role("button", name=name, exact=True)


def until(tab, expression, argument=None):
    """Wait until an expression is true on the page; `wait_for_function` would need eval, which the page forbids."""
    for _ in range(LONGEST_MS // 200):
        if tab.evaluate(expression, argument):
            return
        tab.wait_for_timeout(200)
    raise AssertionError(expression)


def points(tab):
    """How many marks the chart of NLL against the learning rate has, and which."""
    return tab.evaluate("JSON.stringify((document.getElementById('nll').data || []).map(t => [t.x, t.y]))")


def test_compose_check_start_watch_stop_go_on_report(tab, tmp_path):
    pool = tmp_path / "runs"
    assert "token" not in tab.url
    tab.check("[id='f-mechanism-sa']")
    tab.check("[id='f-mechanism-sc']")
    tab.wait_for_selector("[id='f-mechanism.sc.window']", state="attached")  # a part's settings appear with it
    tab.evaluate("document.querySelectorAll('#fields details').forEach(each => { each.open = true; })")
    for key, value in FIELDS.items():
        tab.fill(f"[id='f-{key}']", value)
    tab.select_option("[id='f-launcher']", "serial")
    tab.select_option("[id='f-device']", "cpu")
    until(tab, "document.getElementById('line').textContent.includes('device=cpu')")
    line = tab.inner_text("#line")
    assert all(f"{key}={value}" in line for key, value in FIELDS.items()) and "'mechanism=[sa,sc]'" in line

    tab.fill("[id='f-steps']", "0")
    until(tab, "document.getElementById('e-steps').textContent.includes('greater than')")
    assert tab.get_attribute("[id='f-steps']", "aria-invalid") == "true"
    tab.fill("[id='f-steps']", FIELDS["steps"])
    until(tab, "document.getElementById('e-steps').textContent === ''")
    tab.fill("#search", "warmup_share")
    assert tab.locator(".row:visible").count() < 4
    tab.fill("#search", "")
    look(tab, "compose")

    button(tab, "Check").click()
    tab.wait_for_selector("#plan pre")
    plan = tab.inner_text("#plan")
    assert "4 runs" in plan or "no answer within" in plan  # a machine under load may need longer than 20 s
    tab.click("button.go")
    tab.wait_for_url("**/studies/toy")

    wait_for(lambda: logged_steps(pool) > 12)
    until(tab, "(document.getElementById('nll').data || []).some(t => t.x.length)")
    before = points(tab)
    until(tab, "before => JSON.stringify(document.getElementById('nll').data.map(t => [t.x, t.y])) !== before", before)
    look(tab, "study")
    button(tab, "Stop").click()
    button(tab, "Go on").wait_for()
    stopped_at = logged_steps(pool)
    assert stopped_at < 4 * int(FIELDS["steps"])
    button(tab, "Go on").click()
    tab.wait_for_selector("text=4 runs: 4 done", timeout=3 * LONGEST_MS)
    button(tab, "Make the report").click()
    tab.wait_for_selector("text=Report (page)")
    look(tab, "finished")
    with tab.expect_popup() as opened:
        tab.click("text=Report (page)")
    opened.value.wait_for_selector(".main-svg")  # its own figures draw
    assert "Stable windows" in opened.value.content()
    # without any right here
    assert opened.value.evaluate("window.origin") == "null"
    with pytest.raises(playwright.Error, match="sandboxed"):
        opened.value.evaluate("document.cookie")
    assert (tmp_path / "reports" / "toy.pdf").read_bytes().startswith(b"%PDF")

    tab.locator(".runs a").first.click()
    look(tab, "run")
    tab.goto(f"{tab.url.partition('/runs')[0]}/studies")
    look(tab, "studies")
    assert tab.errors == []


def test_a_study_stays_live_under_the_focus_and_says_when_its_server_has_gone(tab, tmp_path):
    pool = tmp_path / "runs"
    plant(pool, "large", 200)
    study = StudyFolder.of(pool, "large")
    tab.goto(f"{tab.url.rstrip('/')}/studies/large")
    tab.wait_for_selector("#nll .main-svg")
    tab.evaluate("document.querySelector('.runs').focus(); document.querySelector('.runs').scrollTop = 300")
    RunDirectory(pool, study.read()["run_ids"][0]).set_status("interrupted", step=7, num_steps=200)
    until(tab, "document.getElementById('live').textContent.includes('7/200')")
    assert tab.evaluate("document.activeElement.matches('.runs') && document.activeElement.scrollTop") == 300
    assert tab.is_hidden("#lost")
    tab.server.kill()
    tab.wait_for_selector("#lost", state="visible")


def test_the_form_is_usable_by_keyboard_alone(tab):
    for _ in range(40):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.id") == "f-mechanism-sc":
            break
    tab.keyboard.press("Space")
    until(tab, "document.getElementById('line').textContent.includes('mechanism=sc')")
    # a new form was drawn, and the focus is where it was
    assert tab.evaluate("document.activeElement.id") == "f-mechanism-sc"
    outline = tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_without_javascript_the_form_composes_and_says_mistakes(served):
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_context(java_script_enabled=False).new_page()
        tab.set_default_timeout(LONGEST_MS)
        tab.goto(served[0])
        tab.check("[id='f-mechanism-sc']")
        tab.fill("[id='f-seeds']", "0")
        tab.press("[id='f-seeds']", "Enter")
        tab.wait_for_load_state()
        assert "mechanism=sc seeds=0" in tab.inner_text("#line")
        assert "greater than or equal to 1" in tab.inner_text("[id='e-seeds']")
        assert tab.locator("[id='f-mechanism.sc.window']").count() == 1
        browser.close()


def test_a_page_of_another_origin_can_neither_read_nor_start_anything(tab, tmp_path):
    site = tab.url.rstrip("/")
    csrf = tab.input_value("#compose [name=csrf]")
    other = Path(tmp_path / "evil.html")
    other.write_text(
        f'<form id="f" method="post" action="{site}/start"><input name="csrf" value="{csrf}"><input name="k:name" value="evil"></form>'
    )
    evil = tab.context.new_page()
    evil.goto(other.as_uri())
    evil.evaluate("document.getElementById('f').submit()")
    evil.wait_for_url(f"{site}/start")
    assert "open the address" in evil.inner_text("body") or "another page" in evil.inner_text("body")
    evil.goto(other.as_uri())
    assert (
        evil.evaluate(f"fetch('{site}/studies', {{credentials: 'include'}}).then(a => a.text()).catch(() => 'refused')")
        == "refused"
    )
    evil.set_content(f'<iframe src="{site}/studies"></iframe>')
    evil.wait_for_timeout(1000)
    assert all("No study yet" not in frame.content() for frame in evil.frames)
    assert not (tmp_path / "runs" / "studies").exists()
