"""The html report in Chromium, without a network: contents, folded sections, sorting, printing.

It needs the package playwright and a Chromium of the system.
"""

import shutil

import pytest

from analysis.drawing.pieces import heading
from analysis.drawing.typeset import Cell, Table
from analysis.page import _Page, build_page
from tests.analysis.synthetic import write_study

playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
LONGEST_MS = 240_000  # of a busy machine
ROWS = (("sa", "1.5", "3 min", "1e-3"), ("sc", "−0.5", "20 s", "3e-4"), ("mix", "--", "1 h", "1e-2"))


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=LONGEST_MS)
        yield found
        found.close()


@pytest.fixture
def opened(browser):
    """Opens a file; at the end no script may have failed."""
    errors = []
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.set_default_timeout(LONGEST_MS)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)

    def open_file(path, hash_=""):
        page.goto(f"{path.as_uri()}{hash_}")
        return page

    yield open_file
    page.close()
    assert errors == []


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pool")
    return build_page([write_study(folder, mechanisms=("sa", "sc"), lrs=(1e-3, 1e-2))], "synthetic", folder)


def test_a_link_of_the_contents_opens_its_section_and_draws_its_figures(report, opened):
    page = opened(report)
    drawn = "section => [...section.querySelectorAll('.plotly-graph-div')].map(each => each.childElementCount > 0)"
    sections = page.locator("details")
    assert sections.count() > 3 and page.locator("details[open]").count() == 0
    section = page.locator("details:has(.plotly-graph-div)").first
    assert not any(section.evaluate(drawn)), "a closed section's figures cost no time"
    anchor = section.get_attribute("id")
    link = page.locator(f'nav a[href="#{anchor}"]')
    for _ in range(2):  # closed by hand, it opens again
        link.focus()
        page.keyboard.press("Enter")
        page.wait_for_function("anchor => document.getElementById(anchor).open", arg=anchor)
        page.wait_for_function(f"anchor => ({drawn})(document.getElementById(anchor)).every(Boolean)", arg=anchor)
        assert -1 <= section.evaluate("each => each.getBoundingClientRect().top") < 900
        assert 0 <= link.evaluate("each => each.getBoundingClientRect().top") < 900, "the contents stay in view"
        section.evaluate("each => { each.open = false; }")
    page.goto("about:blank")  # the same address would load nothing
    page = opened(report, f"#{anchor}")
    page.wait_for_function("anchor => document.getElementById(anchor).open", arg=anchor)


def test_printing_opens_and_draws_every_section(report, opened):
    page = opened(report)
    page.evaluate("() => { dispatchEvent(new Event('beforeprint')); }")
    assert page.locator("details[open]").count() == page.locator("details").count() > 3
    assert page.locator(".plotly-graph-div:empty").count() == 0


def test_a_column_of_one_unit_sorts_by_click_and_by_key(tmp_path, opened):
    table = Table("some", "", ("name", "gain", "time", "rate"), tuple(tuple(map(Cell, row)) for row in ROWS))
    written = _Page()
    written.add([heading("first"), (table,)])
    page = opened(written.write("title", "", "some", tmp_path))
    assert page.locator("th button").all_inner_texts() == ["name", "gain", "rate"], "minutes and hours are no one unit"

    def order():
        return [
            page.locator("tbody tr td:first-child").all_inner_texts(),
            *page.locator("th").evaluate_all("heads => heads.map(each => each.ariaSort)"),
        ]

    page.locator("th button").nth(1).click()
    assert order() == [["sc", "sa", "mix"], None, "ascending", None, None]
    page.keyboard.press("Enter")
    assert order() == [["sa", "sc", "mix"], None, "descending", None, None], "no value stays last"
    page.keyboard.press("Space")
    assert order() == [["sa", "sc", "mix"], None, None, None, None]
    page.locator("th button").nth(2).click()
    assert order() == [["sc", "sa", "mix"], None, None, None, "ascending"], "by size, not by letters"


@pytest.mark.parametrize("width", [420, 1400])
def test_the_contents_stay_in_view_and_nothing_but_tables_and_figures_is_wider_than_the_screen(width, report, opened):
    page = opened(report)
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate("() => { document.querySelectorAll('details').forEach(each => { each.open = true; }); }")
    page.evaluate("() => scrollTo(0, document.body.scrollHeight / 2)")
    assert page.locator("nav").evaluate("each => each.getBoundingClientRect().top") == 0
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
