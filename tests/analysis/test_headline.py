"""The short text after a sweep, on studies with known answers."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from analysis import report
from analysis.claims.judging import judge
from analysis.claims.windows import common_line
from analysis.numbers.windows import windows
from analysis.report import ending
from analysis.sections import headline
from analysis.sections.headline import MOST_LINES, answer_table, recommendation, title
from analysis.sections.nll import window_table
from analysis.sections.nll_figures import nll_caption, nll_figure
from analysis.study.load import load
from stability.cli import publish
from stability.runs import up_to_date
from stability.runs.study import StudyFolder

from .synthetic import UNIGRAM, write_study

RATES = (1e-3, 1e-2, 1e-1, 1.0)


def said(tmp_path, nlls, *, seeds=3, rates=RATES, statuses=None):
    """The sentence on a mechanism whose seeds have the same NLL at each rate."""
    table = dict(zip(rates, nlls, strict=True))
    folder = write_study(
        tmp_path, mechanisms=("sa",), lrs=rates, seeds=seeds, nll=lambda _, lr, __: table[lr], statuses=statuses
    )
    study = load(folder)
    assert f"sa: {recommendation(study, 'sa', windows(study)['sa'].median)}" in " ".join(ending(folder).split())
    return f"sa: {recommendation(study, 'sa', windows(study)['sa'].median)}"


@pytest.mark.parametrize(
    ("nlls", "sentence"),
    [
        # 5 % of 2.0 is lost a quarter of the decade beyond 1e-2, at 10^-1.75
        ((2.2, 2.0, 2.4, 3.3), "take 1e-2; up to 1.8e-2 costs < 5 %; at 1e0 it learns nothing"),
        ((2.2, 2.0, 3.3, 3.3), "take 1e-2; up to 1.2e-2 costs < 5 %; from 1e-1 on it learns nothing"),
        ((2.2, 2.0, math.inf, math.inf), "take 1e-2; from 1e-1 on it diverges"),
        ((2.2, 2.0, 2.05, math.inf), "take 1e-2; up to 1e-1 costs < 5 %; at 1e0 it diverges"),
        ((2.2, 2.0, 2.05, 2.1), "take 1e-2; up to 1e0, the largest swept, costs < 5 %"),
        ((2.3, 2.2, 2.1, 2.0), "take 1e0 (the largest swept: try larger ones)"),
        ((2.0, 3.3, math.inf, 3.3), "take 1e-3 (the smallest swept: try smaller ones); up to 1.2e-3 costs < 5 %; "
         "at 1e-2 it learns nothing; at 1e-1 it diverges"),
        ((3.3, 3.25, 3.3, math.inf),
         "learned nothing at any rate swept (token frequencies reach 3.200); train longer (steps=200 now)"),
        ((math.inf,) * 4, "every run diverged"),
        ((2.2, 2.0, 3.3, 2.4), "take 1e-2; up to 1.2e-2 costs < 5 %; at 1e-1 it learns nothing"),
    ],
)  # fmt: skip
def test_the_sentence_names_the_rate_to_take_the_largest_good_one_and_the_first_that_fails(tmp_path, nlls, sentence):
    assert UNIGRAM == 3.2 and said(tmp_path, nlls) == f"sa: {sentence}"


def test_a_mechanism_that_learned_nothing_has_no_window(tmp_path):
    nlls = {"sa": 2.0, "sc": 3.21}
    folder = write_study(tmp_path, mechanisms=("sa", "sc"), lrs=RATES, seeds=2, nll=lambda name, _, __: nlls[name])
    rows = {line.split()[0]: line.split()[1:] for line in ending(folder).splitlines()[3:5]}
    whole = ["1.0e-3–1.0e0", "(≥", "3.00)"]
    assert rows["sa"] == ["1e-3", "2.000", *whole, *whole]
    assert rows["sc"] == ["--", "3.210", "learned", "nothing", "--"]


def test_a_limit_of_half_the_learning_is_not_called_five_percent(tmp_path):
    """Token frequencies 3.2: 5 % of 3.0 is 0.15, half of the learning 0.1 nats, the limit of the common windows, too."""
    nlls = {"sa": (3.05, 3.0, 3.05, 3.15), "echo": (3.12, 3.11, 3.12, 3.15)}
    folder = write_study(
        tmp_path, mechanisms=("sa", "echo"), lrs=RATES, nll=lambda name, lr, _: nlls[name][RATES.index(lr)]
    )
    study, text = load(folder), " ".join(ending(folder).split())
    assert title(study).endswith(
        "pushed keeping half of sa’s learning? sa to between 1e-1 and 1e0; echo at no swept rate"
    )
    assert "Own window (decades): keeping half of its learning; common: of sa's learning." in text
    assert "sa: take 1e-2; up to 3.2e-1 keeps half of the learning;" in text
    assert "Here 5 % of the NLL is more than half of the learning." in answer_table(study).caption
    caption = nll_caption(study, nll_figure(study))
    assert "thick, own window, keeping half of its learning; thin, common window, keeping half of sa's" in caption
    claim = next(each for each in judge(study) if each.about == ("own window", "echo"))
    assert common_line(study, ("echo", "sa"), ("echo", "sa")).startswith(
        "Keeping half of sa's learning: echo none, sa "
    )
    assert "At an equal share of what was learned: the same limit, half of the learning" in claim.note


def test_a_study_that_learned_much_is_limited_by_five_percent_alone(tmp_path):
    nlls = {"sa": (2.2, 2.0, 2.05, 3.15), "echo": (2.4, 2.2, 2.3, 3.15)}
    folder = write_study(
        tmp_path, mechanisms=("sa", "echo"), lrs=RATES, nll=lambda name, lr, _: nlls[name][RATES.index(lr)]
    )
    study = load(folder)
    table = answer_table(study)
    assert "Own window (decades): within 5 % of its best NLL; common: of sa's best NLL. Windows" in table.caption
    assert table.header[3:5] == ("own window", "common window")
    assert "half" not in title(study) + table.caption + nll_caption(study, nll_figure(study))
    line = common_line(study, ("echo", "sa"), ("echo", "sa"))
    assert line.startswith("Within 5 % of sa's best validation NLL: echo ")
    findings = " ".join(each.finding for each in judge(study))
    assert "echo's own window" in findings and "echo's common window" in findings and "stable window" not in findings


def test_the_quickstart_s_end_fits_80_columns_and_25_lines(tmp_path, monkeypatch, capsys):
    """Four mechanisms with long sentences; with the line on ended runs before it and the one on α_max after it."""
    nlls = {
        "sa": (2.2, 2.0, 3.3, 9.0),
        "sc": (2.25, 2.01, 2.3, 9.0),
        "mix": (2.2, 2.0, 3.3, 9.0),
        "sw": (2.3, 2.0, 2.6, 3.1),
    }
    values = {("sa", 1.0, 0): 3.1, ("sc", 1.0, 0): 3.15, ("mix", 1e-1, 0): 3.1, ("mix", 1.0, 0): 3.1}
    folder = write_study(
        tmp_path, name="quickstart", mechanisms=tuple(nlls), lrs=RATES, seeds=3,
        nll=lambda name, lr, seed: values.get((name, lr, seed), nlls[name][RATES.index(lr)] + 0.001 * seed),
    )  # fmt: skip
    monkeypatch.setattr(publish, "_collect", lambda study: [])
    monkeypatch.setattr(report, "build_together", lambda *_: tmp_path / "reports" / "quickstart.pdf")
    monkeypatch.setattr(up_to_date, "Published", lambda *_: SimpleNamespace(record=lambda text: None))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(tmp_path)
    publish.publish(StudyFolder(folder), "reports", tables="best")
    lines = capsys.readouterr().out.replace(str(tmp_path / "reports"), "reports").splitlines()
    assert len(lines) <= 23 and max(map(len, lines)) <= 80, "two lines are printed beside these"
    for start in (
        *(f"{name}: take 1e-2" for name in nlls),
        "Lowest NLL: ",
        "Established (n = 3): ",
        "report: ",
        "every table: ",
    ):
        assert any(line.startswith(start) for line in lines), start
    assert lines[-3] == "figure for a paper, with format=files: reports/quickstart/figures/nll.pdf"
    alone = write_study(tmp_path / "alone", name="alone", mechanisms=("sa", "sc"), lrs=(1e-3,), seeds=2)
    publish.publish(StudyFolder(alone), "reports", tables="best")
    out = capsys.readouterr().out
    assert "sa: take 1e-3 (the only rate swept)" in out and "figure for a paper" not in out, "one rate has no curve"


def test_a_reference_that_learned_nothing_is_said_to_be_why_nothing_is_compared(tmp_path):
    nlls = {"sa": 3.3, "echo": 2.0}
    folder = write_study(tmp_path, mechanisms=("sa", "echo"), lrs=RATES, nll=lambda name, _, __: nlls[name])
    assert "echo is not compared with sa: sa learned too little." in ending(folder)


def test_open_windows_ask_for_rates_and_not_for_seeds(tmp_path):
    """Both fill the sweep: no number of seeds tells which is wider, and their NLLs need seeds as before."""
    folder = write_study(
        tmp_path, mechanisms=("sa", "echo"), seeds=3, lrs=RATES, nll=lambda _, lr, seed: 2.0 + 0.01 * lr + 0.001 * seed
    )
    said = " ".join(ending(folder).split())
    assert "for 2 a window is open or ends at a divergence (other rates are needed); the others need more seeds" in said


def test_one_rate_of_one_seed_is_said_to_be_that(tmp_path):
    assert said(tmp_path, (2.0,), seeds=1, rates=(1e-2,)) == "sa: take 1e-2 (the only rate swept)"


def test_a_rate_at_which_some_seeds_diverge_is_named_with_their_number(tmp_path):
    statuses = {("sa", 1e-1, seed): ("diverged", "planted") for seed in (0, 1)}
    assert "at 1e-1, 2 of 4 diverge" in said(tmp_path, (2.2, 2.0, 2.05, 2.1), seeds=4, statuses=statuses)


def test_seeds_are_named_where_some_have_no_result(tmp_path):
    statuses = {("sa", 1e-2, 0): ("failed", "planted")}
    assert said(tmp_path, (2.2, 2.0, 2.4, 2.5), statuses=statuses).endswith("; known from 2 of 3 seeds")


def test_rates_not_run_yet_are_none_at_which_nothing_was_learned(tmp_path):
    statuses = {("sa", lr, seed): ("queued", "") for lr in RATES[1:] for seed in range(3)}
    sentence = said(tmp_path, (3.3, 3.25, 3.3, 3.3), statuses=statuses)
    assert sentence == "sa: learned nothing at the 1 of 4 rates with a result (token frequencies reach 3.200)"


def test_a_rate_without_a_result_is_no_failure(tmp_path):
    statuses = {("sa", 1.0, seed): ("failed", "planted") for seed in range(3)}
    sentence = said(tmp_path, (2.2, 2.0, 2.05, 2.1), statuses=statuses)
    assert sentence == "sa: take 1e-2; up to 1e-1, the last with a result, costs < 5 %"


@pytest.mark.parametrize("num", [1, 4, 5, 6, 7, 23])
def test_the_text_of_any_number_of_series_fits_and_has_the_best(tmp_path, num):
    names = [f"m{index:02}" for index in range(num)]
    folder = write_study(
        tmp_path, mechanisms=names, seeds=2, lrs=RATES, nll=lambda name, lr, _: 3.0 - int(name[1:]) / 100 + lr
    )
    lines = ending(folder).splitlines()
    assert len(lines) <= MOST_LINES
    assert any(line.startswith(f"{names[-1]}: take 1e-3") for line in lines)
    assert any(line.startswith(f"tables=all has the {num} series") for line in lines) == (num > 4)


def test_a_sentence_on_open_comparisons_that_does_not_fit_keeps_their_number(quickstart, monkeypatch):
    monkeypatch.setattr(headline, "MOST_LINES", 60)
    whole = headline.answer(quickstart).splitlines()
    place = next(place for place, line in enumerate(whole) if line.startswith("Undecided: "))
    short = f"{whole[place].partition(';')[0]}."
    assert short.endswith("comparisons (appendix).") and whole[place] != short
    monkeypatch.setattr(headline, "MOST_LINES", place + 1)
    assert headline.answer(quickstart).splitlines() == [*whole[:place], short]


def test_a_study_of_nothing_but_failures_says_so(tmp_path):
    statuses = {("sa", lr, seed): ("failed", "planted") for lr in RATES for seed in range(3)}
    study = load(write_study(tmp_path, mechanisms=("sa",), lrs=RATES, seeds=3, statuses=statuses))
    assert recommendation(study, "sa", None) == "every run failed"
    statuses[("sa", 1e-3, 0)] = ("running", "")
    study = load(write_study(tmp_path, mechanisms=("sa",), lrs=RATES, seeds=3, statuses=statuses))
    assert recommendation(study, "sa", None) == "no run has a result"


def test_a_series_whose_runs_are_all_queued_is_not_run_yet_everywhere(tmp_path):
    """It read "learned too little" in the comparisons and "no run has a result" on the first page."""
    nlls = {"sa": (2.2, 2.0, 2.4, 3.1), "sc": (2.1, 2.0, 2.2, 2.9), "echo": (2.2, 2.1, 2.4, 3.1)}
    statuses = {(name, lr, seed): ("queued", "") for name in ("sc", "echo") for lr in RATES for seed in range(3)}
    folder = write_study(
        tmp_path, mechanisms=tuple(nlls), lrs=RATES, seeds=3, statuses=statuses,
        nll=lambda name, lr, seed: nlls[name][RATES.index(lr)] + 0.001 * seed,
    )  # fmt: skip
    study = load(folder)
    assert answer_table(study).rows[1][3].text == "not run yet"
    said = " ".join(ending(folder).split())
    assert "sc: not run yet" in said and "echo: not run yet" in said
    assert "sc is not compared with sa: sc is not run yet. 1 more: appendix." in said
    whole = report.summary(study)
    assert "too little" not in whole and "no run has a result" not in whole and "no run finished" not in whole
    rows = {row[0].text: row for row in window_table(study).rows}
    assert rows["echo"][2].text == "not run yet" and rows["sa"][2].text == "2.001"
    for series, queued in (("sc", "running"), ("echo", "interrupted")):
        statuses[(series, 1e-3, 0)] = (queued, "")
    begun = load(write_study(tmp_path, mechanisms=tuple(nlls), lrs=RATES, seeds=3, statuses=statuses))
    assert answer_table(begun).rows[1][3].text == "no run has ended yet"
    assert recommendation(begun, "echo", None) == "no run has ended yet"
