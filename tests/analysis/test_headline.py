"""The short text after a sweep, on studies with known answers."""

from __future__ import annotations

import math

import pytest

from analysis.report import ending
from analysis.sections import headline
from analysis.sections.headline import MOST_LINES, recommendation, title
from analysis.study.load import load

from .synthetic import UNIGRAM, write_study

RATES = (1e-3, 1e-2, 1e-1, 1.0)


def said(tmp_path, nlls, *, seeds=3, rates=RATES, statuses=None):
    """The sentence on a mechanism whose seeds have the same NLL at each rate."""
    table = dict(zip(rates, nlls, strict=True))
    folder = write_study(
        tmp_path, mechanisms=("sa",), lrs=rates, seeds=seeds, nll=lambda _, lr, __: table[lr], statuses=statuses
    )
    text = ending(folder)
    return next(line for line in text.splitlines() if line.startswith("sa: "))


@pytest.mark.parametrize(
    ("nlls", "sentence"),
    [
        # 5 % of 2.0 is lost a quarter of the decade beyond 1e-2, at 10^-1.75
        ((2.2, 2.0, 2.4, 3.3), "take 1e-2; up to 1.8e-2 costs < 5 %; at 1e0 it learns nothing; 3 seeds"),
        ((2.2, 2.0, 3.3, 3.3), "take 1e-2; up to 1.2e-2 costs < 5 %; from 1e-1 on it learns nothing; 3 seeds"),
        ((2.2, 2.0, math.inf, math.inf), "take 1e-2; from 1e-1 on it diverges; 3 seeds"),
        ((2.2, 2.0, 2.05, math.inf), "take 1e-2; up to 1e-1 costs < 5 %; at 1e0 it diverges; 3 seeds"),
        ((2.2, 2.0, 2.05, 2.1), "take 1e-2; up to 1e0, the largest swept, costs < 5 %; 3 seeds"),
        ((2.3, 2.2, 2.1, 2.0), "take 1e0 (the largest swept: try larger ones); 3 seeds"),
        ((2.0, 3.3, math.inf, 3.3), "take 1e-3 (the smallest swept: try smaller ones); up to 1.2e-3 costs < 5 %; "
         "at 1e-2 it learns nothing; at 1e-1 it diverges; 3 seeds"),
        ((3.3, 3.25, 3.3, math.inf), "learned nothing at any rate swept (token frequencies reach 3.200); 3 seeds"),
        ((math.inf,) * 4, "every run diverged"),
        ((2.2, 2.0, 3.3, 2.4), "take 1e-2; up to 1.2e-2 costs < 5 %; at 1e-1 it learns nothing; 3 seeds"),
    ],
)  # fmt: skip
def test_the_sentence_names_the_rate_to_take_the_largest_good_one_and_the_first_that_fails(tmp_path, nlls, sentence):
    assert UNIGRAM == 3.2 and said(tmp_path, nlls) == f"sa: {sentence}"


def test_a_mechanism_that_learned_nothing_has_no_window(tmp_path):
    nlls = {"sa": 2.0, "sc": 3.21}
    folder = write_study(tmp_path, mechanisms=("sa", "sc"), lrs=RATES, seeds=2, nll=lambda name, _, __: nlls[name])
    rows = {line.split()[0]: line.split()[1:] for line in ending(folder).splitlines()[4:6]}
    whole = ["1.0e-3–1.0e0", "(≥", "3.00)"]
    assert rows["sa"] == ["1e-3", "2.000", *whole, *whole, "none"]
    assert rows["sc"] == ["--", "3.210", "learned", "nothing", "--", "--"]


def test_a_limit_of_half_the_learning_is_not_called_five_percent(tmp_path):
    """Token frequencies 3.2: 5 % of 3.0 is 0.15, half of the learning 0.1 nats, the limit of the common windows, too."""
    nlls = {"sa": (3.05, 3.0, 3.05, 3.15), "echo": (3.12, 3.11, 3.12, 3.15)}
    folder = write_study(
        tmp_path, mechanisms=("sa", "echo"), lrs=RATES, nll=lambda name, lr, _: nlls[name][RATES.index(lr)]
    )
    study, lines = load(folder), ending(folder).splitlines()
    assert title(study).endswith(
        "within 5 % of sa’s best NLL and half of the learning? sa to between 1e-1 and 1e0; echo never"
    )
    assert (
        "(decades): rates within 5 % of each mechanism's best NLL, and of sa's, keeping half of the learning."
        in "\n".join(lines)
    )
    assert next(line for line in lines if line.startswith("sa: ")).startswith(
        "sa: take 1e-2; up to 3.2e-1 keeps half of the learning;"
    )
    assert "never reaches half of sa's learning" in next(line for line in lines if line.startswith("echo: "))


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
    assert said(tmp_path, (2.0,), seeds=1, rates=(1e-2,)) == "sa: take 1e-2 (the only rate swept); 1 seed"


def test_a_rate_at_which_some_seeds_diverge_is_named_with_their_number(tmp_path):
    statuses = {("sa", 1e-1, seed): ("diverged", "planted") for seed in (0, 1)}
    assert "at 1e-1 2 of 4 runs diverge; 4 seeds" in said(tmp_path, (2.2, 2.0, 2.05, 2.1), seeds=4, statuses=statuses)


def test_a_rate_without_a_result_is_no_failure(tmp_path):
    statuses = {("sa", 1.0, seed): ("failed", "planted") for seed in range(3)}
    sentence = said(tmp_path, (2.2, 2.0, 2.05, 2.1), statuses=statuses)
    assert sentence == "sa: take 1e-2; up to 1e-1, the last with a result, costs < 5 %; 3 seeds"


@pytest.mark.parametrize("num", [1, 4, 5, 6, 7, 23])
def test_the_text_of_any_number_of_series_fits_and_has_the_best(tmp_path, num):
    names = [f"m{index:02}" for index in range(num)]
    folder = write_study(
        tmp_path, mechanisms=names, seeds=2, lrs=RATES, nll=lambda name, lr, _: 3.0 - int(name[1:]) / 100 + lr
    )
    lines = ending(folder).splitlines()
    assert len(lines) <= MOST_LINES
    assert any(line.startswith(f"{names[-1]}: take 1e-3") for line in lines)
    assert (f"tables=all has the {num} series" in lines[-1]) == (num > 5)


def test_a_sentence_on_open_comparisons_that_does_not_fit_keeps_their_number(quickstart, monkeypatch):
    monkeypatch.setattr(answer, "MOST_LINES", 60)
    whole = headline.answer(quickstart).splitlines()
    place = next(place for place, line in enumerate(whole) if line.startswith("Undecided: "))
    short = f"{whole[place].partition(';')[0]}."
    assert short.endswith("comparisons (appendix).") and whole[place] != short
    monkeypatch.setattr(answer, "MOST_LINES", place + 1)
    assert headline.answer(quickstart).splitlines() == [*whole[:place], short]


def test_a_study_of_nothing_but_failures_says_so(tmp_path):
    statuses = {("sa", lr, seed): ("failed", "planted") for lr in RATES for seed in range(3)}
    study = load(write_study(tmp_path, mechanisms=("sa",), lrs=RATES, seeds=3, statuses=statuses))
    assert recommendation(study, "sa", None) == "no run has a result"
