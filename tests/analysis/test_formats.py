"""A table for other programs, a figure for the browser: the same cells and the same numbers."""

import base64
import hashlib
import html
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from analysis import assembly
from analysis.drawing import formats
from analysis.drawing.interactive import SIGNS, Unknown, describe
from analysis.drawing.pieces import Picture
from analysis.drawing.tables import narrow
from analysis.drawing.traces import MARKERS, to_html
from analysis.drawing.typeset import Cell, Table
from analysis.export import export
from analysis.page import build_page
from analysis.study.load import load
from stability.web import app

from .synthetic import write_study

TABLE = Table(
    "Median α_max & co",
    "100 % of 3_4; ξ ≥ 2",
    ("LR", "sa", "sc", "sa"),
    (
        (Cell("1e-3"), Cell("2.0", "1–3, n=3\nfailed 1/4", bold=True), Cell("a,b"), Cell("50 %")),
        (Cell("1e-2"), Cell("--"), Cell('"q"'), Cell("0 %")),
    ),
    groups=(("", 1), ("median", 2), ("% stable", 1)),
)


def test_a_csv_is_read_back_cell_by_cell():
    read = pd.read_csv(io.StringIO(formats.csv(TABLE)), dtype=str, keep_default_na=False)
    names = ["LR", "median / sa", "median / sa: detail", "median / sa: bold", "median / sc", "% stable / sa"]
    assert list(read.columns) == names
    assert read.iloc[0].tolist() == ["1e-3", "2.0", "1–3, n=3; failed 1/4", "True", "a,b", "50 %"]
    assert read.iloc[1].tolist() == ["1e-2", "--", "", "False", '"q"', "0 %"]


def test_what_is_broken_into_lines_for_a_narrow_column_is_whole_in_the_data():
    cells = (Cell("1.371", "1.362–1.376, n=3\nplateaued 1/3", bold=True), Cell("diverged 3/3"))
    broken = tuple(map(narrow, cells))
    assert broken[0].detail == "1.362–\n1.376\nn=3\nplateaued\n1/3" and broken[1].text == "diverged"
    assert formats.frame(Table("t", "", ("a", "b"), (broken,))).equals(
        formats.frame(Table("t", "", ("a", "b"), (cells,)))
    )


def test_numbers_are_floats_beside_their_text():
    rows = [["1e-3", "≥ 1.50"], ["−2.5e-1", "--"], ["+50 %", "diverged 3/3"], ["×0.16", "3 of 4"], ["", "1–2"]]
    table = Table("t", "", ("a", "b"), tuple(tuple(map(Cell, row)) for row in rows))
    found = formats.add_numbers(table)
    assert list(found.columns) == ["a", "a: number", "b", "b: number"]
    assert found["a: number"].tolist()[:4] == [1e-3, -0.25, 50.0, 0.16] and found["a: number"].isna().tolist()[4]
    assert found["b: number"].dropna().tolist() == [1.5]
    assert "b: number" not in formats.add_numbers(Table("t", "", ("a", "b"), table.rows[1:])).columns


def test_columns_of_one_name_are_numbered():
    twice = Table("t", "c", ("x", "n", "n"), ((Cell("1"), Cell("2"), Cell("3")),))
    assert formats.columns(twice) == ["x", "n", "n (3)"]
    assert formats.frame(twice).iloc[0].tolist() == ["1", "2", "3"]


def test_markdown_has_a_row_for_each_and_nothing_is_taken_for_markup():
    title, _, head, sides, first, second, _, caption, *_ = formats.markdown(TABLE).split("\n")
    assert title == "**Median α\\_max & co**" and caption == "100 % of 3\\_4; ξ ≥ 2"
    assert head.count("|") == sides.count("|") == first.count("|") == second.count("|") == 5
    assert "**2.0**<br><sub>1–3, n=3</sub><br><sub>failed 1/4</sub>" in first
    assert formats.markdown(Table("t", "", ("*a|b*",), ())).count(r"\*a\|b\*") == 1


def test_latex_is_booktabs_with_everything_escaped():
    source = formats.latex(TABLE, "median-alpha-max-co", has_long_caption=True)
    assert r"\caption{\textbf{Median $\alpha_{\max}$ \& co.} 100 \% of 3\_4; $\xi$ $\geq$ 2}" in source
    assert r" & \multicolumn{2}{c}{median} & \multicolumn{1}{c}{\% stable} \\" in source
    assert r"\cmidrule(lr){2-3}\cmidrule(lr){4-4}" in source
    assert r"\makecell[t]{\textbf{2.0} \\ {\scriptsize 1--3, n=3} \\ {\scriptsize failed 1/4}}" in source
    assert source.isascii() and source.count(r"\toprule") == source.count(r"\bottomrule") == 1
    assert formats.tex("a\\b{c}~^#$&\u200b") == r"a\textbackslash{}b\{c\}\textasciitilde{}\textasciicircum{}\#\$\&"


def test_a_latex_table_has_a_label_and_its_title_alone_as_its_caption():
    lines = formats.latex(TABLE, "median-alpha-max-co").split("\n")
    assert lines[2:4] == [r"\caption{Median $\alpha_{\max}$ \& co}", r"\label{tab:median-alpha-max-co}"]
    assert "of 3" not in "\n".join(lines)


def figure_of_everything():
    figure = Figure(figsize=(4, 3))
    above, below = figure.subplots(2, 1)
    above.plot([1e-3, 1e-2, 1e-1], [1.0, np.nan, 3.0], "s-", color="#0072B2", label="sa")
    above.axvline(1e-2, color="red", linestyle="--")
    above.fill_between([1e-3, 1e-1], [0.5, 0.5], [2.0, 2.0], color="#009E73", alpha=0.25)
    above.set(xscale="log", xlabel=r"learning rate $\alpha$", ylabel="NLL", title="a & b")
    above.legend()
    below.barh([0, 1], [2.0, 3.0], color="#CC79A7")
    below.annotate("here", (2.0, 0.5))
    below.pcolormesh([4.0, 5.0, 6.0], [0.0, 1.0], [[1e-3, 1e-1]], norm=LogNorm(1e-3, 1e-1))
    return figure


def test_a_figure_keeps_its_numbers_colours_and_words():
    spec = json.loads(json.dumps(describe(figure_of_everything()), allow_nan=False))
    area, line, rule, *rest = sorted(spec["data"], key=lambda trace: (trace["xaxis"], trace.get("fill") is None))
    assert (line["x"], line["y"]) == ([1e-3, 1e-2, 1e-1], [1.0, None, 3.0])
    assert (line["name"], line["line"]["color"], line["marker"]["symbol"]) == ("sa", "#0072b2", "square")
    assert rule["x"] == [1e-2, 1e-2] and rule["line"]["dash"] != "solid" == line["line"]["dash"]
    assert rule["y"] == spec["layout"]["yaxis"]["range"]
    assert area["fillcolor"] == "rgba(0,158,115,0.250)" and {*area["y"]} == {0.5, 2.0}
    assert spec["layout"]["xaxis"]["type"] == "log" and spec["layout"]["xaxis"]["title"]["text"] == "learning rate α"
    bars = [trace for trace in rest if trace.get("fill")]
    assert [max(bar["x"]) for bar in bars] == [2.0, 3.0]
    (mesh,) = [trace for trace in rest if trace["type"] == "heatmap"]
    assert mesh["z"] == [[-3.0, -1.0]] and (mesh["zmin"], mesh["zmax"]) == (-3.0, -1.0)
    words = {note["text"] for note in spec["layout"]["annotations"]}
    assert {"a &amp; b", "here"} <= words and '<span style="color:#0072b2">■</span> sa' in words


def test_every_marker_has_a_sign_in_legends():
    assert set(SIGNS) == set(MARKERS) and len(set(SIGNS.values())) == len(SIGNS)


def test_what_plotly_has_no_words_for_is_named():
    figure = Figure()
    figure.add_subplot(projection="3d")
    with pytest.raises(Unknown, match="3d axes"):
        describe(figure)
    figure = Figure()
    figure.subplots().quiver([0], [0], [1], [1])
    with pytest.raises(Unknown, match="Quiver"):
        describe(figure)


def test_mathematics_of_labels_becomes_plain_html():
    assert to_html(r"$\alpha_\mathrm{max}$ < $10^{-3}$") == "α<sub>max</sub> &lt; 10<sup>-3</sup>"
    assert to_html("median α_max") == "median α<sub>max</sub>"


@pytest.fixture(scope="module")
def study_dir(tmp_path_factory):
    lrs = (1e-3, 1e-2)
    return write_study(
        tmp_path_factory.mktemp("pool"), mechanisms=("sa", "sc"), lrs=lrs, alpha=lambda *_: [1e-2, float("inf")]
    )


@pytest.fixture(scope="module")
def study(study_dir):
    """Read and drawn once."""
    return load(study_dir)


@pytest.fixture(scope="module")
def pieces(study):
    return [piece for part in assembly.pieces(study) for piece in part]


def test_the_page_has_every_table_and_figure_and_needs_nothing_beside_itself(study, study_dir, pieces, tmp_path):
    page = build_page([study], "synthetic", tmp_path).read_text("utf-8")
    body = page.partition("</head>")[2]
    tables = [piece for piece in pieces if isinstance(piece, Table)]
    pictures = [piece for piece in pieces if isinstance(piece, Picture)]
    assert len(tables) == body.count("<table>") > 3 and len(pictures) == body.count("Plotly.newPlot(") > 2
    for table in tables:
        title = html.escape(table.title).replace("α_max", "α<sub>max</sub>")
        found = body.partition(f"{title}.</b>")[2].partition("</table>")[0]
        assert found.count("<tr>") == len(table.rows) + 1 + bool(table.groups)
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", body)
    assert build_page([study_dir], "synthetic", tmp_path / "again").read_text("utf-8") == page


class Scripts(HTMLParser):
    """What a browser finds: each script's text, and the page's policy."""

    def __init__(self, page):
        super().__init__()
        self.texts, self.policy, self.in_script = [], "", False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.in_script = tag == "script"
        if self.in_script:
            assert not attrs, "a script from elsewhere"
            self.texts.append("")
        if tag == "meta" and ("http-equiv", "Content-Security-Policy") in attrs:
            assert not self.texts, "a policy holds for what follows it"
            self.policy = dict(attrs)["content"]

    def handle_endtag(self, tag):
        self.in_script = False

    def handle_data(self, data):
        if self.in_script:
            self.texts[-1] += data


def test_the_page_runs_its_own_scripts_alone_and_loads_nothing(study, pieces, tmp_path):
    found = Scripts(build_page([study], "synthetic", tmp_path).read_text("utf-8"))
    rules = dict(rule.split(" ", 1) for rule in found.policy.split("; "))
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found.texts}
    assert len(found.texts) == 1 + sum(isinstance(piece, Picture) for piece in pieces)
    assert set(rules.pop("script-src").split(" ")) == hashes
    assert "\r" not in "".join(found.texts), "a browser hashes line ends as \\n"
    assert rules == {
        "default-src": "'none'",
        "style-src": "'unsafe-inline'",  # plotly's own, and its attributes
        "img-src": "data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_no_button_sends_a_figure_elsewhere(study, pieces, tmp_path):
    body = build_page([study], "synthetic", tmp_path).read_text("utf-8").partition("</head>")[2]
    assert body.count('"showSendToCloud": false') == sum(isinstance(piece, Picture) for piece in pieces) > 2
    assert "showSendToCloud: false" in (Path(app.__file__).parent / "static/web.js").read_text("utf-8")


def test_the_contents_tell_the_appendix_from_its_sections(study, tmp_path):
    page = build_page([study], "synthetic", tmp_path).read_text("utf-8")
    assert page.count(' class="part">') == 2  # its link and its heading
    assert '<a href="#Appendix" class="part">Appendix</a> <a href="#What-was-run">' in page


def test_the_appendix_is_folded_by_section_and_every_link_has_its_place(study, tmp_path):
    body = build_page([study], "synthetic", tmp_path).read_text("utf-8").partition("</head>")[2]
    links = re.findall('<a href="#([^"]+)"', body)
    folded = re.findall('<details id="([^"]+)"><summary><h3>', body)
    assert len(folded) > 3 and folded == links[links.index("Appendix") + 1 :]
    assert all(body.count(f' id="{each}"') == 1 for each in links)
    assert body.count("</details>") == len(folded) and body.index("</nav>") < body.index("<h1>")


def test_a_page_of_two_studies_names_each(study, tmp_path):
    page = build_page([study, study], "both", tmp_path).read_text("utf-8")
    assert page.count("<h2 id=") == 2 and "<h1>Learning-rate stability: both</h1>" not in page
    (heading,) = re.findall(r"<h1>(.*?)</h1>", page)
    assert heading.count("?") == 1 and heading.partition("? ")[2].count(f"{study.name}: ") == 2
    assert page.count(f'<a href="#{study.name}" class="part">') == 2


def test_files_hold_every_table_in_four_formats_and_every_figure_in_three(study, pieces, tmp_path):
    paths = {path.relative_to(tmp_path).as_posix() for path in export(study, tmp_path)}
    pictures = {
        f"figures/{piece.name}.{suffix}"
        for piece in pieces
        if isinstance(piece, Picture)
        for suffix in ("pdf", "svg", "png")
    }
    assert paths == {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")} and pictures <= paths
    tables = sorted(path for path in paths - pictures if path.endswith(".csv"))
    assert len(tables) == sum(isinstance(piece, Table) for piece in pieces) == len(paths - pictures) / 4
    for name in tables:
        as_text = pd.read_csv(tmp_path / name, dtype=str, keep_default_na=False)
        whole = pd.read_parquet(tmp_path / name.replace(".csv", ".parquet")).astype(str)
        texts = [column for column in whole if not column.endswith(": number")]
        pd.testing.assert_frame_equal(as_text, whole[texts], check_dtype=False)
        latex = (tmp_path / name).with_suffix(".tex").read_text()
        assert latex.count(rf"\label{{tab:{(tmp_path / name).stem}}}") == 1
    before = {path: (tmp_path / path).read_bytes() for path in paths}
    export(study, tmp_path)
    assert {path: (tmp_path / path).read_bytes() for path in paths} == before
