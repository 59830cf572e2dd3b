"""A section of the report is one file and two words in `contents`, also one that comes from outside."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from analysis.drawing.pieces import heading, shown
from analysis.drawing.typeset import Cell, Table
from analysis.report import build, summary
from analysis.sections import contents
from analysis.sections.section import Captioned, Section, pictures, sourced
from analysis.study.load import load
from tests.analysis.figures import write_figures
from tests.analysis.synthetic import write_study
from tests.analysis.test_edge_and_search import with_search
from tests.analysis.test_report import text_of

# ---- what would be the one file: how many steps the runs took, by learning rate


def step_table(study):
    counts = study.runs.groupby("lr")["num_steps"].sum()
    rows = tuple((Cell(f"{lr:g}"), Cell(f"{number:g}")) for lr, number in counts.items())
    return Table("Steps from outside", "All runs of a rate.", ("rate", "steps outside"), rows)


def figures(study):
    figure = Figure(figsize=(3, 2))
    figure.subplots().plot(study.runs["lr"], study.runs["num_steps"], "o")
    return {"steps-from-outside": Captioned(figure, "Steps of every run against its rate.")}


def tables(study, phases):
    return [step_table(study), f"Nobody waited for the {phases[0]} checkpoints."]


def body(study, drawn):
    return heading("What an outsider saw") + pictures(drawn) + shown([step_table(study)])


OUTSIDER = Section(body, figures=figures, tables=tables)
# ---- and its word in the list; the other is the import


@pytest.fixture
def with_outsider(monkeypatch):
    monkeypatch.setattr(contents, "SECTIONS", (*contents.SECTIONS, OUTSIDER))


@pytest.fixture
def study_dir(tmp_path):
    return write_study(tmp_path, mechanisms=["sa"], lrs=[1e-3, 1e-2], seeds=1, curves=False)


@pytest.mark.usefixtures("with_outsider")
def test_a_section_from_outside_stands_in_the_pdf_among_the_figures_and_in_what_a_sweep_prints(study_dir, tmp_path):
    pdf = text_of(build(study_dir, tmp_path / "reports"))
    captioned = "Steps of every run against its rate."
    for words in (captioned, "rate steps outside 0.001 200 0.01 200"):
        assert pdf.count(words) == 1
    assert pdf.count("What an outsider saw") == 2, "in the contents, and as a heading"
    assert "steps-from-outside.svg" in [path.name for path in write_figures(study_dir, tmp_path / "figures")]
    printed = summary(study_dir, ("earliest",))
    in_order = (
        "Stable windows",
        "Steps from outside",
        "Nobody waited for the earliest checkpoints.",
        "All this is at",
    )
    places = [printed.index(words) for words in in_order]
    assert places == sorted(places), "the claims stand last"


def test_without_it_nothing_of_it_is_there(study_dir, tmp_path):
    assert "Steps from outside" not in summary(study_dir)
    assert "steps-from-outside.svg" not in [path.name for path in write_figures(study_dir, tmp_path)]


@pytest.mark.usefixtures("with_outsider")
def test_a_search_whose_runs_have_settings_of_their_own_has_no_section_about_rates(tmp_path):
    assert "Steps from outside" not in summary(with_search(tmp_path))


def test_a_section_that_does_not_apply_is_asked_nothing_else(study_dir, tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("asked all the same")

    silent = Section(never, applies=lambda study: False, figures=never, tables=never)
    monkeypatch.setattr(contents, "SECTIONS", (contents.SECTIONS[0], silent))
    monkeypatch.setattr(contents, "PRINTED_LAST", ())
    assert summary(study_dir) == "\n" and write_figures(study_dir, tmp_path / "figures") == []
    assert "What was run" in text_of(build(study_dir, tmp_path / "reports"))


def test_no_word_stands_twice_in_the_contents():
    assert len({id(section) for section in contents.SECTIONS}) == len(contents.SECTIONS)
    assert all(any(section is each for each in contents.SECTIONS) for section in contents.PRINTED_LAST)


def test_a_section_written_for_older_captions_still_works(study_dir):
    figure = Figure()
    assert sourced(load(study_dir), figure, "Steps.") == Captioned(figure, "Steps.")
