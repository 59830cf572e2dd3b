"""Own and common windows, their brackets and their ends, of studies whose answers are known by hand."""

import math

import numpy as np
import pytest

from analysis.claims.judging import judge
from analysis.claims.reference import BEST, BEYOND, COMMON, OWN, against_reference
from analysis.numbers.common_windows import common_windows, widths_by_threshold
from analysis.numbers.comparison import bisections_needed, compare_windows
from analysis.numbers.window_ends import End, window_ends
from analysis.numbers.windows import SeriesWindows, window, windows
from analysis.sections.choice import choose
from analysis.sections.nll import nll_tables, window_table
from analysis.sections.overview import reference_table
from analysis.study.load import load
from analysis.study.reference import references
from tests.analysis.synthetic import INIT, UNIGRAM, write_study

FINE = tuple(float(f"{10 ** (place / 4):.9g}") for place in range(-16, 1))  # four rates a decade, from 1e-4 to 1
COARSE = (1e-3, 1e-2, 1e-1)


def valley(best, slope, seed=0, at=1e-2):
    return lambda lr: best + (slope + 0.001 * seed) * abs(math.log10(lr / at))


def study_of(tmp_path, curves, **settings):
    """Write a study with one curve, NLL by rate, for each mechanism; seeds differ by 0.0005 nats."""
    nll = lambda m, lr, seed: curves[m](lr) + 0.0005 * seed  # noqa: E731
    return load(
        write_study(tmp_path, **({"mechanisms": tuple(curves), "lrs": FINE, "seeds": 3, "nll": nll} | settings))
    )


# sa: best 2.0, 0.2 nats a decade, own limit 2.1: half a decade to either side. flat: best 2.3, limit 2.415 by 0.046 nats
# a decade: 2.5 decades to either side, more than the sweep; no rate of it comes within 5 % of 2.0
FLAT = {"sa": valley(2.0, 0.2), "flat": valley(2.3, 0.046)}


def test_a_mechanism_that_learns_less_but_flat_has_a_wide_own_window_and_no_common_one(tmp_path):
    study = study_of(tmp_path, FLAT)
    own, common = windows(study), common_windows(study)
    assert own["sa"].median.width == pytest.approx(1.0, abs=1e-3) and own["flat"].median.fills_grid
    assert common["flat"].median.is_empty and common["flat"].median.width == 0
    assert common["sa"].median == own["sa"].median
    claims = against_reference(judge(study))["flat"]
    assert (claims[OWN].verdict, claims[COMMON].verdict) == ("holds", "contradicted")
    assert "flat's common window is 1.00 decades narrower than sa's" in claims[COMMON].text
    assert claims[f"{BEST} NLL"].verdict == "contradicted"
    row = window_table(study).rows[1]
    assert (row[3].text, row[4].text) == ("≥ 4.00", "none")


def test_the_reference_is_a_setting_and_a_window_below_its_limit_follows(tmp_path):
    folder = write_study(tmp_path, mechanisms=("sa", "flat"), lrs=FINE, nll=lambda m, lr, seed: FLAT[m](lr))
    study = load(folder, "flat")
    # within 5 % of 2.3, 2.415: 0.415 / 0.2 = 2.075 decades to either side, the sweep ends after 2
    assert references(study) == {"sa": "flat"} and common_windows(study)["sa"].median.width == pytest.approx(4.0)
    with pytest.raises(ValueError, match="reference=mine: no run of synthetic has it; choose of sa, flat"):
        load(folder, "mine")


def test_every_width_below_a_threshold_is_that_of_a_dense_scan(tmp_path):
    """The scan walks outwards from the best rate on half a million points between the rates."""
    rough = {lr: 2.0 + 0.1 * abs(place - 7) + 0.05 * math.sin(5 * place) for place, lr in enumerate(FINE)}
    study = study_of(tmp_path, {"sa": rough.__getitem__}, seeds=1)
    x = np.linspace(-4, 0, 500_001)
    y = np.interp(x, np.log10(FINE), [rough[lr] for lr in FINE])
    found = widths_by_threshold(study)["sa"]
    assert len(found) > 60 and found["is_bound"].any() and not found["is_bound"].all()
    for row in found.itertuples():
        best, inside = int(y.argmin()), y <= row.threshold + 1e-12
        left = best - int(np.argmin(inside[best::-1])) if not inside[: best + 1].all() else -1
        right = best + int(np.argmin(inside[best:])) if not inside[best:].all() else len(x)
        assert row.width == pytest.approx(x[right - 1] - x[left + 1], abs=3e-5)
        assert row.is_bound == (left == -1 or right == len(x))


def test_an_edge_carries_the_two_rates_between_which_it_lies():
    found = window(COARSE, [2.3, 2.0, 2.2])
    assert (found.low.inside_lr, found.low.outside_lr) == (1e-2, 1e-3)
    assert (found.high.inside_lr, found.high.outside_lr) == (1e-2, 1e-1)
    assert found.bracket == pytest.approx((0, 2)) and found.low.bracket_decades == pytest.approx(1)
    assert window(COARSE, [2.05, 2.0, 2.2]).bracket == (pytest.approx(1), math.inf)
    assert window(COARSE, [math.inf, 2.0, math.nan]).bracket == (0, math.inf)


def test_a_grid_of_one_rate_a_decade_resolves_no_difference_of_half_a_decade(tmp_path):
    """Widths 1.0 and 1.6 decades, seeds that agree to 0.01: each edge lies somewhere within a decade."""
    curves = {"sa": valley(2.0, 0.2), "echo": valley(2.0, 0.125)}
    coarse = study_of(tmp_path / "a", curves, lrs=COARSE)
    claim = against_reference(judge(coarse))["echo"][OWN]
    assert claim.verdict == "unresolved" and claim.p < 0.01
    assert choose(coarse)[1] == "Widest own window: echo (grid too coarse against sa)."
    # four brackets of a decade, each halved three times, sum up to 0.5 < 0.6: twelve rates of three seeds
    assert claim.text.startswith("Not resolved by this grid: lr=edge needs about 36 more runs. Measured (n = 3):")
    assert "allow −2.00 to +2.00 decades" in claim.text
    fine = against_reference(judge(study_of(tmp_path / "b", curves)))["echo"][OWN]
    assert fine.verdict == "holds" and fine.text.startswith("Supported (n = 3): echo's own window is 0.60 decades")


def test_bisections_are_those_of_a_search_over_all_ways_to_halve():
    def slow(gaps, difference, most):
        ways = {tuple(sorted(gaps))}
        for number in range(most):
            if any(sum(way) < difference for way in ways):
                return number
            ways = {
                tuple(sorted((*way[:place], way[place] / 2, *way[place + 1 :])))
                for way in ways
                for place in range(len(way))
            }
        return None

    for gaps, difference in (((1.0,) * 4, 0.6), ((0.5, 0.25), 0.6), ((1.0, 0.3, 0.2), 0.4), ((0.36,) * 3, 0.32)):
        assert bisections_needed(gaps, difference) == slow(gaps, difference, 15)
    assert bisections_needed((1.0, 1.0), 0.0) is None and bisections_needed((), 0.1) == 0


def test_a_difference_is_resolved_exactly_if_no_widths_within_the_brackets_are_equal():
    """Against drawn edges: each lies anywhere in its bracket, and resolved differences never change their sign."""
    draws = np.random.default_rng(0)
    decided = 0
    for _ in range(60):
        lrs = np.sort(10 ** draws.uniform(-4, 0, 7))
        pair = [[draws.choice([2.0, 2.05, 2.3], p=[0.3, 0.3, 0.4]) for _ in lrs] for _ in range(2)]
        pair = [[*line[:3], 1.99, *line[4:]] for line in pair]
        first, second = (SeriesWindows("x", None, dict.fromkeys(range(3), window(lrs, line))) for line in pair)
        result = compare_windows(first, second)
        one, other = first.by_seed[0], second.by_seed[0]
        if result.scope != "whole" or any(each.open_low or each.open_high for each in (one, other)):
            continue
        ends = [(edge.inside_lr, edge.outside_lr) for each in (one, other) for edge in (each.low, each.high)]
        at = np.log10(ends)[:, :1] + np.diff(np.log10(ends), axis=1) * draws.uniform(size=(4, 4000))
        differences = (at[1] - at[0]) - (at[3] - at[2])
        decided += result.direction != 0
        assert (result.direction != 0) == bool((np.sign(differences) == np.sign(one.width - other.width)).all())
    assert decided > 3


def test_no_window_reaches_rates_that_lost_half_of_what_was_learned(tmp_path):
    """Best 3.1 of 3.2 nats: half is lost at 3.15, 5 % end at 3.255; 0.1 nats a decade."""
    study = study_of(tmp_path, {"sa": valley(3.1, 0.1), "sc": valley(3.1, 0.05)}, seeds=1)
    found = windows(study)["sa"].median
    assert found.threshold_nll == pytest.approx(3.15) and found.width == pytest.approx(1.0)
    assert found.is_capped and math.log10(found.uncounted[1] / found.uncounted[0]) == pytest.approx(3.1)
    assert "keeping half of the mechanism's learning" in window_table(study).caption
    # the reference's limit is the limit of all
    assert common_windows(study)["sc"].median.width == pytest.approx(2.0)


def test_a_series_that_learned_nothing_has_no_bar_and_no_claims(tmp_path):
    study = study_of(tmp_path, {"sa": valley(2.0, 0.2), "lazy": lambda lr: UNIGRAM + 0.01})
    assert "lazy" not in widths_by_threshold(study) and "lazy" not in window_ends(study)
    assert window_table(study).rows[1][3].text == "learned nothing"
    claims = against_reference(judge(study))["lazy"]
    assert list(claims) == [""] and claims[""].verdict == "not judged"
    assert reference_table(study) is None, "the remark says it"
    third = study_of(tmp_path / "b", {"sa": valley(2.0, 0.2), "echo": valley(2.0, 0.1), "lazy": lambda lr: UNIGRAM})
    assert reference_table(third).rows[1][1].text == "lazy learned too little"


def test_ends_name_the_most_frequent_outcome_at_the_first_rate_outside(tmp_path):
    curves = {"sa": valley(2.0, 0.2), "sc": valley(2.0, 0.2), "mix": valley(2.0, 0.2), "sw": valley(2.0, 0.0)}
    lrs = (1e-3, 1e-2, 1e-1, 1.0)
    statuses = {("sa", 1e-1, 0): ("diverged", ""), ("sa", 1e-1, 1): ("diverged", "")}
    statuses |= {("sa", 1e-3, 0): ("diverged", "")}  # one of three: most runs there are slow
    statuses |= {("sc", 1e-1, seed): ("spiked", "") for seed in range(3)}
    statuses |= {("mix", 1e-1, seed): ("plateaued", "") for seed in range(3)}
    study = study_of(tmp_path, curves, lrs=lrs, statuses=statuses)
    ends = window_ends(study)
    assert ends["sa"] == (End("slow", 1e-3, 2, 3), End("diverged", 1e-1, 2, 3))
    assert ends["sc"][1] == End("spiked", 1e-1, 3, 3) and ends["mix"][1].reason == "learned nothing"
    assert [end.reason for end in ends["sw"]] == ["end of the grid"] * 2 and math.isnan(ends["sw"][0].lr)
    assert window_table(study).rows[0][-1].text == "slow / diverged"


def test_all_diverged_is_said_and_nothing_else_is(tmp_path):
    study = study_of(tmp_path, {"sa": lambda lr: math.inf, "echo": lambda lr: math.inf})
    assert windows(study)["sa"].median is None and common_windows(study) == {} and window_ends(study) == {}
    assert {row[2].text for row in window_table(study).rows} == {"every run diverged"}
    claims = judge(study)
    assert {claim.verdict for claim in claims} == {"not judged"}
    assert not [claim for claim in claims if "holds" in claim.text or "annex" in claim.text]


def test_one_seed_makes_no_claim_on_any_quantity(tmp_path):
    study = study_of(tmp_path, FLAT, seeds=1, alpha=lambda *_: [1.0])
    claims = against_reference(judge(study))["flat"]
    verdicts = {name: claim.verdict for name, claim in claims.items()}
    assert verdicts.pop("time of a step") == "not judged" and set(verdicts.values()) == {"no claim"}
    assert len(verdicts) == 6 and claims[OWN].text.startswith("No claim: one seed. Measured: ")


def test_a_users_mechanism_alone_has_an_own_window_and_no_sentence_on_papers(tmp_path):
    study = study_of(tmp_path, {"echo": valley(2.0, 0.2)})
    assert windows(study)["echo"].median.width == pytest.approx(1.0, abs=1e-3) and references(study) == {}
    assert [claim.subject for claim in judge(study)] == ["scale"] and reference_table(study) is None
    assert "paper" not in judge(study)[0].text and "annex" not in judge(study)[0].text


def test_a_users_mechanism_beside_sa_is_judged_by_itself_and_no_paper_is_named(tmp_path):
    curves = {"sa": valley(2.0, 0.2), "echo": valley(1.98, 0.1)}
    study = study_of(tmp_path, curves, alpha=lambda m, lr, *_: [lr * (3 if m == "echo" else 2)] * 4)
    assert not [claim for claim in judge(study) if claim.paper]
    claims = against_reference(judge(study))["echo"]
    assert [claims[name].verdict for name in (OWN, COMMON, f"{BEST} NLL")] == ["holds"] * 3
    assert list(claims) == [OWN, COMMON, f"{BEST} NLL", BEYOND, "% stable", "α_max / α", "time of a step"]
    text = reference_table(study).text()
    assert "×1.50" in text and "Holm's correction over the 6 comparisons" in text


def test_an_nll_beyond_that_of_the_untrained_model_is_exploded_and_its_interval_never_negative(tmp_path):
    """One of three seeds at 1e6 nats: Student's interval of the mean reaches below −1e6."""
    nll = lambda m, lr, seed: (1e6, 1.7e9, 2.2)[seed] if lr == 1e-1 else 2.0  # noqa: E731
    study = load(write_study(tmp_path, mechanisms=("sa",), lrs=COARSE, seeds=3, nll=nll))
    assert INIT < 1e6
    cell = nll_tables(study)[0].rows[-1][1]
    assert cell.text == "exploded" and cell.detail.split("\n")[0] == "2.200–1.7e9, n=3"


def test_a_single_rate_has_no_windows_to_compare(tmp_path):
    study = study_of(tmp_path, FLAT, lrs=FINE[8:9])
    claims = against_reference(judge(study))["flat"]
    assert f"{BEST} NLL" in claims and not {OWN, COMMON} & claims.keys()
