"""The PDF and the terminal summary of studies of every shape; figures are checked for what they hold, not pixel by
pixel."""

import io
import math
import re
import subprocess
import sys
from dataclasses import replace

import matplotlib
import numpy as np
import pypdf
import pytest
import typst

from analysis.assembly import pictures, sections
from analysis.drawing import pieces, style, typeset
from analysis.drawing.files import lay_out
from analysis.report import build, build_together, summary
from analysis.sections import nll_figures
from analysis.sections.alpha import alpha_figures, state_ratio
from analysis.sections.steps import verification
from analysis.study.load import load
from tests.analysis.figures import write_figures
from tests.analysis.synthetic import FINGERPRINT, UNIGRAM, quickstart_alpha, write_study

NASTY = 'a #b *c* _d_ $e$ `f` <g> @h \\ "i" [j] // k ' + "x" * 200


def text_of(pdf):
    pages = pypdf.PdfReader(pdf).pages
    assert len(pages) > 0
    # Zero-width spaces mark where a long word may break.
    return " ".join(" ".join(page.extract_text() for page in pages).replace("\u200b", "").split())


@pytest.fixture(scope="session")
def quickstart_text(quickstart, tmp_path_factory):
    path = build_together([quickstart], quickstart.name, tmp_path_factory.mktemp("reports"))
    assert path.name == "quickstart.pdf" and [each.name for each in path.parent.iterdir()] == ["quickstart.pdf"]
    return text_of(path)


def test_importing_the_report_imports_no_torch_and_of_stability_columns_names_words_and_printing_alone():
    heavy = "('torch', 'hydra', 'ray', 'matplotlib.pyplot')"
    ours = f"[m for m in sorted(sys.modules) if m in {heavy} or m.split('.')[0] == 'stability']"
    code = f"import sys, analysis.report; print({ours})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    words = "'stability.runs.older', 'stability.runs.schema', 'stability.runs.verdict', 'stability.runs.words'"
    assert found == f"['stability', 'stability.primary', 'stability.printable', 'stability.runs', {words}]"


def test_the_report_says_what_was_run(quickstart_text):
    for words in (
        "python -m stability.sweep", "0123456789abcdef0123456789abcdef01234567, with uncommitted changes", "AMD EPYC 7B13, 2 cores, 16 GB memory, no GPU",
        "torch 2.13.0+cpu", "The standard library's docstrings", f"fingerprint {FINGERPRINT[:12]}", "5 min 39 s, the sum of the runs’ own clocks", "42 stable, 4 diverged, 2 learned nothing",
    ):  # fmt: skip
        assert words in quickstart_text


def test_the_report_holds_the_numbers_and_the_claims(quickstart, quickstart_text):
    best = quickstart.of("sc").groupby("lr")["val_nll"].median().min()
    assert f"{best:.3f}" in quickstart_text and "diverged 2/2" in quickstart_text
    assert "Each mechanism against the reference" in quickstart_text and "learned nothing" in quickstart_text
    assert "times that in its own" in quickstart_text and "non-finite loss at step 57" in quickstart_text
    assert (
        "Methods: taylor (1,700 steps) and finite_difference (500 steps)" in quickstart_text
        and "largest 2.0e-5" in quickstart_text
    )
    assert quickstart_text.count(FINGERPRINT[:12]) == 2, "the first page and the appendix name the data"
    assert all(f"Figure {n}:" in quickstart_text for n in range(1, 11)) and "Figure 11:" not in quickstart_text


# what a shape that is about something else is drawn for: axes cost the most
SMALL = {"mechanisms": ["sa", "sc"], "lrs": [1e-3, 1e-1]}
SHAPES = {
    "one_run": {"mechanisms": ["sc"], "lrs": [1e-3], "seeds": 1},
    "one_mechanism": {**SMALL, "mechanisms": ["sc"], "alpha": quickstart_alpha},
    "all_diverged": {**SMALL, "nll": lambda *_: math.inf, "alpha": lambda *_: [math.nan, 0.0, math.inf]},
    "all_failed": {"statuses": {(m, lr, s): ("failed", "x") for m in ("sa", "sc") for lr in (1e-3, 1e-2) for s in (0, 1)}, "mechanisms": ["sa", "sc"],
                   "lrs": [1e-3, 1e-2], "curves": False},
    "nothing_recorded": {**SMALL, "curves": False, "provenance": None},
    "untrained": {**SMALL, "nll": lambda *_: 3.19},
    "far_below_unigram": {**SMALL, "nll": lambda _m, lr, _s: 1.0 + 0.01 * abs(math.log10(lr)), "unigram": 4.2},
    "above_axis": {**SMALL, "nll": lambda _m, lr, _s: 30.0 if lr > 5e-2 else 2.9},
    "no_unigram": {**SMALL, "unigram": math.nan},
    "settings": {"mechanisms": ["sa", "sc"], "lrs": [1e-3, 1e-2], "settings": ({"optimizer": "adamw"}, {"optimizer": "muon"}), "alpha": quickstart_alpha,
                 "states": ["checkpoint"]},
    "many": {"mechanisms": ["sa", "fox", "gla", "retnet", "a_mechanism_with_a_long_name"], "lrs": [1e-3, 2e-3], "alpha": quickstart_alpha,
             "states": ["checkpoint"]},
    "one_state_early": {"states": ["checkpoint"], "phases": ["earliest"], "alpha": quickstart_alpha, "mechanisms": ["sa", "sc"], "lrs": [1e-3, 1e-2]},
    "half_measured": {"alpha": lambda m, lr, s, state: quickstart_alpha(m, lr, s, state) if (m, state) != ("sa", "paper") else [],
                      "mechanisms": ["sa", "sc"], "lrs": [1e-3, 1e-2]},
}  # fmt: skip
EXPECTED = {
    "one_run": "A single learning rate makes neither a curve nor a stable window",
    "one_mechanism": "All this is at",
    "all_diverged": "No run ended with a finite validation NLL",
    "all_failed": "No training loss was recorded.",
    "nothing_recorded": "Hardware not recorded",
    "untrained": "sa is untrained",
    "settings": "Setting adamw:",
    "one_state_early": "earliest checkpoint",
}


# each a report: those whose difference is one number are drawn in `make slow`
SLOW = (
    "many",
    "settings",
    "untrained",
    "far_below_unigram",
    "above_axis",
    "no_unigram",
    "one_state_early",
    "half_measured",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in SHAPES]
)
@pytest.mark.filterwarnings("error::UserWarning")
def test_every_shape_of_study_makes_a_report_and_a_summary(tmp_path, name):
    folder = write_study(tmp_path, name=name, **SHAPES[name])
    text = text_of(build(folder, tmp_path / "reports"))
    assert EXPECTED.get(name, "") in text and not re.search(r"\bnan\b", text)
    printed = summary(folder)
    assert (
        "Validation NLL against learning rate" in printed
        and ("Stable windows" in printed) is (name != "one_run")
        and max(map(len, printed.splitlines())) < 160
    )


def test_text_of_any_kind_is_not_taken_for_markup(tmp_path):
    provenance = {
        "command": NASTY,
        "commit": "",
        "versions": {"#let": "x = 1"},
        "hardware": {"cpu": NASTY},
        "data_description": NASTY,
        "wall_s": "soon",
    }
    folder = write_study(
        tmp_path,
        name="nasty",
        mechanisms=["sa"],
        lrs=[1e-3],
        provenance=provenance,
        statuses={("sa", 1e-3, 0): ("failed", NASTY)},
    )
    text = text_of(build(folder, tmp_path / "reports"))
    assert 'a #b *c* _d_ $e$ `f` <g> @h \\ "i" [j] // k' in text and "#let x = 1" in text


def test_several_studies_make_one_report_with_the_figures_of_each(tmp_path, drawn):
    drawn("nll")
    studies = [
        write_study(tmp_path, name=name, mechanisms=["sa", "sc"], lrs=lrs)
        for name, lrs in (("first", [1e-3, 1e-2]), ("second", [2e-3, 5e-2]))
    ]
    alone = [len(pypdf.PdfReader(build(study, tmp_path / "alone")).pages) for study in studies]
    reader = pypdf.PdfReader(build_together(studies, "both", tmp_path))
    pages = [page.extract_text() for page in reader.pages]
    assert "Learning-rate stability: both" in pages[0]
    starts = [
        next(number for number, text in enumerate(pages[1:], 1) if text.lstrip().startswith(name))
        for name in ("first", "second")
    ]
    assert starts[0] == 1 and abs(starts[1] - starts[0] - alone[0]) <= 1 and abs(len(pages) - starts[1] - alone[1]) <= 1
    assert "5e-2" not in "".join(pages[starts[0] : starts[1]]) and "5e-2" in "".join(pages[starts[1] :])


def test_a_failed_build_leaves_the_old_report_and_no_rubbish(tmp_path, monkeypatch):
    folder = write_study(tmp_path, name="s", mechanisms=["sa"], lrs=[1e-3])
    before = build(folder, tmp_path / "reports").read_bytes()
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        build(folder, tmp_path / "reports")
    assert (tmp_path / "reports" / "s.pdf").read_bytes() == before and len(list((tmp_path / "reports").iterdir())) == 1


def test_without_typst_tables_are_printed_and_a_pdf_says_what_it_needs(tmp_path):
    """In a process of its own: this one has imported it."""
    study = write_study(tmp_path, mechanisms=("sa",), lrs=(1e-3,))
    code = f"""
import sys
sys.modules["typst"] = None
from analysis.report import build, summary
print(len(summary({str(study)!r})) > 100)
try:
    build({str(study)!r}, {str(tmp_path)!r})
except RuntimeError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.splitlines() == ["True", f"{study.name}.pdf needs typst: pip install typst, or choose report=false"]


def test_a_missing_study_is_a_value_error(tmp_path):
    with pytest.raises(ValueError, match="makes it"):
        build(tmp_path / "nothing", tmp_path / "reports")
    assert not (tmp_path / "reports").exists()


def test_summary_prints_all_tables_and_the_claims(quickstart_dir):
    printed = summary(quickstart_dir)
    for words in (
        "3.034–3.046, n=2",
        "≥ 2.02",
        "paper's warm-up state",
        "run's own state",
        "each cell over 2 runs, 50 steps",
        "Indicated (n = 2): sc's own window is at least 0.40",
    ):
        assert words in printed


def test_cells_of_one_run_are_counted_as_one_run(tmp_path):
    study = write_study(tmp_path, mechanisms=["sa"], lrs=[1e-3], seeds=1, alpha=lambda *_: [0.1, 0.2])
    assert "each cell over 1 run, 2 steps. " in " ".join(summary(study).split())


def test_figures_are_written_as_files_twice_the_same(tmp_path):
    study = write_study(tmp_path, **SMALL, alpha=quickstart_alpha)
    names = [path.name for path in write_figures(study, tmp_path / "a")]
    of_phase = ["alpha-terminal-0.svg", "steps-terminal-0.svg"]
    assert names == ["nll.svg", "window.svg", *of_phase, "curves.svg", "curves-by-lr.svg"]
    write_figures(study, tmp_path / "b")
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)


def test_verification_without_a_check_says_so(tmp_path, quickstart):
    assert "in 88 steps the curvature was compared" in verification(quickstart)
    study = load(write_study(tmp_path, mechanisms=["sa"], lrs=[1e-3], alpha=lambda *_: [1.0]))
    study.curvature["rel_error"] = math.nan
    assert verification(study) == "Methods: taylor (4 steps). No curvature was compared with central differences."


def test_the_nll_figure_marks_divergences_and_the_token_frequencies(quickstart):
    figure = nll_figures.nll_figure(quickstart)
    main, bars = figure.axes
    texts = [text.get_text() for text in main.texts]
    assert texts.count("2/2") == 2 and "learned nothing:\ntoken\nfrequencies" in texts
    assert main.get_ylim()[0] < 2.86 < UNIGRAM < main.get_ylim()[1]
    assert [label.get_text() for label in bars.get_yticklabels()] == ["sa", "sc", "mix", "sw"]
    assert [label.get_text() for label in bars.get_xticklabels()] == ["3e-4", "1e-3", "3e-3", "1e-2", "3e-2", "1e-1"]


def test_a_far_line_of_token_frequencies_is_named_above_the_axis_and_a_bad_run_does_not_stretch_it(tmp_path):
    far = nll_figures.nll_figure(load(write_study(tmp_path / "far", **SHAPES["far_below_unigram"]))).axes[0]
    assert far.get_ylim()[1] < 2 and "learned nothing:\ntoken\nfrequencies\n4.20 ↑" in [
        text.get_text() for text in far.texts
    ]
    assert (
        nll_figures.nll_figure(load(write_study(tmp_path / "above", **SHAPES["above_axis"]))).axes[0].get_ylim()[1] < 4
    )


def test_the_alpha_figure_counts_what_has_no_place_on_a_log_axis(tmp_path):
    study = load(
        write_study(
            tmp_path, mechanisms=["sa", "sc"], lrs=[1e-3], alpha=lambda *_: [1e-2, 0.0, 0.0, math.inf, math.nan]
        )
    )
    (figure,) = alpha_figures(study)
    assert len(figure.axes) == 4 and all(
        [text.get_text() for text in ax.texts] == ["2", "4", "2"] for ax in figure.axes
    )
    assert alpha_figures(study, "earliest") == []


def test_a_state_that_a_series_lacks_says_so_in_its_panel(tmp_path):
    (figure,) = alpha_figures(load(write_study(tmp_path, **SHAPES["half_measured"])))
    assert [[text.get_text() for text in ax.texts] == ["not recorded"] for ax in figure.axes].count(True) == 1


def test_no_label_is_clipped_or_overlaps_another_axis(quickstart):
    drawn = {each.name: each.figure for part in sections(quickstart) for each in pictures(part, quickstart)}
    assert set(drawn) >= {"nll", "window", "curves", "alpha-terminal-0"}
    with matplotlib.rc_context(style.RC):
        for figure in drawn.values():
            lay_out(figure)
            figure.savefig(io.BytesIO(), format="png", dpi=72)
            page = figure.bbox
            for ax in figure.axes:
                box = ax.get_tightbbox()
                assert (
                    box.x0 >= page.x0 - 1 and box.x1 <= page.x1 + 1 and box.y0 >= page.y0 - 1 and box.y1 <= page.y1 + 1
                )


def test_colours_are_fixed_for_the_papers_four_and_distinct_for_others():
    names = ["sa", "sc", "mix", "sw", "fox", "gla", "retnet", "deltanet", "hgrn2", "titans"]
    looks = style.mechanism_looks(names)
    assert {name: looks[name] for name in style.FIXED} == style.FIXED and len(set(looks.values())) == len(names)
    assert style.mechanism_looks(["fox"])["fox"] == style.mechanism_looks(["sa", "fox"])["fox"]
    assert len(style.mechanism_looks([f"m{i}" for i in range(20)])) == 20


def test_settings_differ_by_dashes_mechanisms_by_colour(tmp_path):
    looks = style.looks(load(write_study(tmp_path, **SHAPES["settings"])))
    assert (
        looks["sa adamw"].color == looks["sa muon"].color != looks["sc muon"].color
        and looks["sa adamw"].dashes != looks["sa muon"].dashes
    )


def test_literals_survive_typst():
    assert typeset.literal('a"b\\c\nd\x00e') == '"a\\"b\\\\c d\\\\x00e"'
    body = pieces.typst(pieces.paragraph(NASTY) + pieces.box(["α_max over log10 LR"]))
    pdf = typst.compile(typeset.document("T", "s", body).encode(), ignore_system_fonts=True)
    assert "αmax over log10 LR" in text_of(io.BytesIO(pdf))


def test_the_states_are_compared_from_the_studys_own_runs(quickstart):
    medians = {}
    for (run_id, state), rows in quickstart.curvature[quickstart.curvature["phase"] == "terminal"].groupby(
        ["run_id", "state"]
    ):
        finite = sorted(value for value in rows["alpha_max"] if np.isfinite(value))
        if finite:
            middle = len(finite) // 2
            medians[run_id, state] = finite[middle] if len(finite) % 2 else (finite[middle - 1] + finite[middle]) / 2
    runs = {run_id for run_id, _ in medians}
    ratios = [
        medians[run, "paper"] / medians[run, "checkpoint"]
        for run in runs
        if (run, "paper") in medians and medians.get((run, "checkpoint"))
    ]
    text = state_ratio(quickstart)
    assert f"{np.median(ratios):.1f} times" in text
    assert f"median of {len(ratios)} runs; {min(ratios):.1f} to {max(ratios):.1f}" in text
    assert state_ratio(replace(quickstart, curvature=quickstart.curvature.iloc[:0])) == ""
