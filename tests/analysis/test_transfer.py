"""Best rates by size: vertices, laws, back-tests and predictions against closed forms and other libraries."""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from analysis import assembly
from analysis.claims.judging import judge
from analysis.drawing.pieces import Picture
from analysis.numbers.best_rates import find_best, find_vertex
from analysis.numbers.size_laws import LEVEL, find_extra_terms, fit_law
from analysis.numbers.transfer import Group, compare_groups, find_groups, has_sizes, require_same_recipe
from analysis.report import ending, summary
from analysis.sections import transfer
from analysis.sections.headline import answer
from analysis.sections.transfer_figures import draw
from analysis.study.load import load
from stability.config.sweep import SweepSpec
from tests.analysis.synthetic import write_study, write_table
from tests.reading import read_spec

RATES = [5e-4 * 2**k for k in range(8)]
WIDTHS = (64, 128, 256, 512)


def parabola(rates, log_best, curvature=0.2, lowest=2.0):
    return [lowest + curvature * (math.log10(rate) - log_best) ** 2 for rate in rates]


@pytest.mark.parametrize("log_best", [-2.31, -2.0, -2.6])
def test_the_vertex_of_a_parabola_is_found_exactly(log_best):
    vertex, spacing, reason = find_vertex(RATES, parabola(RATES, log_best))
    assert (vertex, spacing, reason) == (pytest.approx(log_best, abs=1e-9), pytest.approx(math.log10(2)), "")


def test_a_neighbour_far_above_the_lowest_nll_does_not_move_the_vertex():
    nlls = parabola(RATES, -2.31)
    worst = int(np.argmin(nlls)) + 2
    nlls[worst] += 1.0
    assert find_vertex(RATES, nlls)[0] == pytest.approx(-2.31, abs=1e-9)


@pytest.mark.parametrize(
    ("nlls", "reason"),
    [
        (parabola(RATES, -4), "the lowest NLL is at the smallest rate swept, 5e-4: try smaller ones"),
        (parabola(RATES, -0.5), "the lowest NLL is at the largest rate swept, 6.4e-2: try larger ones"),
        ([3, 2.5, 2.2, math.inf, math.inf, 3, 3, 3], "runs diverged beside the lowest NLL, at 2e-3"),
        ([math.nan] * 8, "no run finished"),
        ([2.0] * 8, "smallest"),
    ],
)
def test_an_unknown_best_rate_has_its_reason(nlls, reason):
    vertex, _, found = find_vertex(RATES, nlls)
    assert math.isnan(vertex) and reason in found


def test_the_error_of_a_best_rate_has_its_seeds_and_the_spacing_of_the_rates():
    logs = [-2.3, -2.2, -2.1]
    best = find_best(pd.DataFrame({seed: parabola(RATES, log) for seed, log in enumerate(logs)}, index=RATES))
    assert best.log_lr == pytest.approx(-2.2)
    assert best.error == pytest.approx(math.sqrt(0.01 / 3 + math.log10(2) ** 2 / 12))


def test_a_curve_is_open_where_half_of_the_seeds_are():
    table = pd.DataFrame({0: parabola(RATES, -2.3), 1: parabola(RATES, -4)}, index=RATES)
    assert "smallest rate" in find_best(table).open
    table[2] = parabola(RATES, -2.1)
    assert find_best(table).log_lr == pytest.approx(-2.2) and find_best(table).seeds == 2


def sizes_of(widths):
    return [(float(width), 2.0, 200.0, 16.0) for width in widths]


def test_a_law_and_its_interval_are_those_of_ordinary_least_squares():
    y = np.array([-2.0, -2.4, -2.5, -3.1, -3.2])
    sizes = sizes_of((64, 128, 256, 512, 1024))
    law, other = fit_law(sizes, y, [0.1] * 5, 0.0), scipy.stats.linregress(range(5), y)
    assert law is not None and law.slope(0)[0] == pytest.approx(other.slope)
    assert law.slope(0, 0.05)[1] == pytest.approx(scipy.stats.t.ppf(0.975, 3) * other.stderr)
    # the textbook's prediction interval: s² (1 + 1/n + (x − x̄)² / Sxx)
    residual = y - other.intercept - other.slope * np.arange(5)
    spread = math.sqrt(residual @ residual / 3 * (1 + 1 / 5 + (5 - 2) ** 2 / 10))
    value, half = law.predict((2048.0, 2.0, 200.0, 16.0))
    assert value == pytest.approx(other.intercept + 5 * other.slope)
    assert half == pytest.approx(scipy.stats.t.ppf(1 - LEVEL / 2, 3) * spread)


def test_weights_of_a_law_are_those_of_a_weighted_fit():
    y, errors = np.array([-2.0, -2.4, -2.5, -3.1, -3.2]), np.array([0.05, 0.3, 0.1, 0.2, 0.05])
    law = fit_law(sizes_of((64, 128, 256, 512, 1024)), y, errors, 0.0)
    coefficients, covariance = np.polyfit(range(5), y, 1, w=1 / errors, cov=True)
    assert law is not None and law.coefficients == pytest.approx(coefficients[::-1])
    assert law.covariance == pytest.approx(covariance[::-1, ::-1])


def test_a_law_has_a_term_for_each_size_and_none_for_sizes_that_grow_together():
    sizes = [(w, layers, 200.0, 16.0) for w in (64.0, 128.0, 256.0) for layers in (2.0, 4.0, 8.0)]
    values = [-2 - 0.3 * math.log2(w / 64) + 0.1 * math.log2(layers / 2) for w, layers, *_ in sizes]
    law = fit_law(sizes, values, [0.1] * 9, 0.0)
    assert law is not None and law.coefficients == pytest.approx([-2, -0.3, 0.1])
    together = [(w, w / 32, 200.0, 16.0) for w in (64.0, 128.0, 256.0)]
    assert fit_law(together, [-2, -2.3, -2.6], [0.1] * 3, 0.0) is None


def test_exact_values_keep_the_floor_of_the_scatter_and_the_resolution():
    law = fit_law(sizes_of(WIDTHS), [-2, -2.3, -2.6, -2.9], [0.1] * 4, 2.0)
    assert law is not None and law.scatter == 0.05
    assert law.predict((1024.0, 2.0, 200.0, 16.0)) == (pytest.approx(-3.2), 1.0), "half the resolution, 2 decades"


def test_a_bend_is_seen_beyond_the_scatter_alone():
    y = np.array([-2.0, -2.3, -2.6, -2.9, -3.2])
    sizes = sizes_of((64, 128, 256, 512, 1024))
    assert find_extra_terms(sizes, y, [0.1] * 5) == []
    assert find_extra_terms(sizes, y + 0.1 * np.arange(5.0) ** 2, [0.1] * 5) == [(0, 0)]


@pytest.mark.parametrize(("scatter", "least", "most"), [(0.15, 0.77, 0.86), (0.01, 0.99, 1.0)])
def test_intervals_cover_as_often_as_they_say_and_more_below_the_floor(scatter, least, most):
    draws, sizes, inside = np.random.default_rng(0), sizes_of((64, 128, 256, 512, 1024)), []
    for _ in range(2000):
        y = -2 + draws.uniform(-0.4, 0.1) * np.arange(5) + draws.normal(0, scatter, 5)
        value, half = fit_law(sizes[:4], y[:4], [0.1] * 4, 0.0).predict(sizes[4])
        inside.append(abs(value - y[4]) <= half)
    assert least <= np.mean(inside) <= most


SLOPES = {"standard": -0.3, "mup": 0.0}
WORDS = ["mechanism=[sa]", "objective=ar", "model.head_width=32", "model.layers=2", "hessian=false", "seeds=3"]


def write_sizes(
    folder,
    *words,
    slope=lambda name, axis, doublings: SLOPES[name] * doublings,
    lowest=2.0,
    unigram=3.3,
    mechanisms=("sa",),
):
    """A study whose best rates follow a law exactly: 1e-2 at the smallest size, ``slope`` decades from there."""
    named = [f"mechanism=[{','.join(mechanisms)}]"]
    spec: SweepSpec = read_spec("sweep", [*WORDS, *named, f"lr=[{','.join(map(str, RATES))}]", *words])
    axis = spec.vary[0]
    models = dict.fromkeys(
        f"nano {'' if run.parametrization.name == 'standard' else 'parametrization=mup '}{label}".strip()
        for label, run in spec.kinds()
    )
    settings = [{"model": model} for model in models]
    study = write_study(
        folder, name="sizes", mechanisms=mechanisms, lrs=RATES, seeds=3, settings=settings, unigram=unigram
    )
    runs = pd.read_parquet(study / "results" / "runs.parquet")
    for row in runs.index:
        label, seed = str(runs.loc[row, "model"]), int(runs.loc[row, "seed"])
        name = "mup" if "mup" in label else "standard"
        value = float(label.rpartition("=")[2])
        doublings = math.log2(value / min(axis.values))
        log_best = -2 + slope(name, axis.key, doublings) + (seed - 1) * 0.02
        runs.loc[row, "val_nll"] = parabola([runs.loc[row, "lr"]], log_best, lowest=lowest - 0.1 * doublings)[0]
    runs["status"] = "stable"
    write_table(study / "results" / "runs.parquet", "runs", runs)
    record = json.loads((study / "study.json").read_text())
    (study / "study.json").write_text(json.dumps(record | {"spec": spec.model_dump(mode="json")}))
    return load(study)


WIDE = ("model.width=[64,128,256,512]", "parametrization=[standard,mup]")


def test_a_parametrization_shares_the_run_of_its_base(tmp_path):
    study = write_sizes(tmp_path, *WIDE)
    groups = {group.name: group for group in find_groups([study])}
    assert set(groups) == {"sa standard", "sa mup"} and has_sizes(study)
    for name, group in groups.items():
        assert [curve.size[0] for curve in group.curves] == list(WIDTHS)
        slope = SLOPES[name.split()[1]]
        expected = [-2 + slope * place for place in range(4)]
        assert [curve.best.log_lr for curve in group.curves] == pytest.approx(expected, abs=1e-9)
    assert groups["sa mup"].curves[0].series == groups["sa standard"].curves[0].series


def test_laws_are_judged_and_the_next_doubling_is_predicted(tmp_path):
    study = write_sizes(tmp_path, *WIDE)
    groups = {group.name: group for group in find_groups([study])}
    assert {name: group.law.judge(0) for name, group in groups.items()} == {
        "sa standard": "drifts",
        "sa mup": "transfers",
    }
    found = groups["sa standard"].predict({"width": 1024})
    assert found.log_lr == pytest.approx(-3.2) and found.reasons == ()
    assert found.interval[0] < 10**-3.2 < found.interval[1]
    question = assembly.question(study)
    assert question.startswith("Which learning rate at a larger size, at width 1,024? ")
    assert "sa mup: 1.0e-2 (7.1e-3 to 1.4e-2)" in question
    assert "sa standard: 6.3e-4 (4.5e-4 to 8.9e-4)" in question
    said = " ".join(transfer.sentences(study))
    assert "sa standard at width 1,024: take 6.3e-4 (80 %: 4.5e-4 to 8.9e-4); up to about 2.7e-3 costs < 5 %" in said
    assert "sa mup at width 1,024: take 1.0e-2" in said


@pytest.mark.parametrize(("sizes", "is_compared"), [("64,256", True), ("64,128,256", False)])
def test_mechanisms_at_two_sizes_are_compared_and_at_three_make_a_law(tmp_path, sizes, is_compared):
    words = ("objective=mlm", f"model.width=[{sizes}]")
    study = write_sizes(tmp_path, *words, mechanisms=("sa", "sc"))
    assert assembly.question(study).startswith("How far can the learning rate be pushed") is is_compared
    assert ("cannot predict" not in answer(study) and "Own window" in answer(study)) is is_compared
    assert transfer.applies(study)  # and the appendix has the best rates by size
    assert not [claim for claim in judge(study) if claim.statement.endswith(": ")]  # a remark is no row of claims
    front = next(assembly.pieces(study))
    assert next(piece.name for piece in front if isinstance(piece, Picture)) == ("nll" if is_compared else "transfer")
    assert assembly.first_figure(study) == ("nll.pdf" if is_compared else "transfer.pdf")  # what a sweep's end names
    alone = write_sizes(tmp_path / "alone", *words)
    assert assembly.question(alone).startswith("Which learning rate at a larger size, ")


def test_a_back_test_stands_beside_rules_without_a_law(tmp_path):
    group = next(group for group in find_groups([write_sizes(tmp_path, *WIDE)]) if group.name == "sa standard")
    tried = {trial.rule: trial for trial in group.trials}
    # truth at 512: −2.9; the law is exact; the rules are −2, −2.6, −2.6 − log10 2, and −2.6 − 1.426 log10 2
    errors = {"law": 0.0, "smallest size’s rate": 0.9, "last size’s rate": 0.3, "halve per doubling": 0.3 - math.log10(2),
              "Step Law": 0.3 - 1.426 * math.log10(2)}  # fmt: skip
    assert {rule: trial.error for rule, trial in tried.items()} == pytest.approx(errors, abs=1e-9)
    # linear interpolation exceeds the parabola by at most a quarter of its chord's square
    assert tried["law"].is_inside and 0 <= tried["law"].regret <= 0.2 * (math.log10(2) / 2) ** 2
    # the parabola's own loss, 0.2 · 0.9²; linear interpolation between swept rates and a lowest swept rate beside it
    assert tried["smallest size’s rate"].regret == pytest.approx(0.2 * 0.9**2, abs=0.01)


def test_regrets_by_size_are_those_of_the_curves(tmp_path):
    """Each size's curve is steeper than the last, so rows and columns differ."""
    group = next(group for group in find_groups([write_sizes(tmp_path, *WIDE)]) if group.name == "sa standard")
    steeper = [replace(curve, table=curve.table * place) for place, curve in enumerate(group.curves, 1)]
    found = Group(group.name, tuple(steeper)).regrets()
    for row, here in enumerate(group.curves):
        for column, there in enumerate(group.curves):
            expected = 0.2 * (here.best.log_lr - there.best.log_lr) ** 2
            assert found[row][column] / (column + 1) == pytest.approx(expected, abs=0.01)


def test_nlls_at_the_best_rates_are_compared_over_seeds_and_corrected_for_the_number_of_sizes(tmp_path):
    """mup's curves are scaled by known factors; t-tests by scipy, Holm's factors 3, 2, 1 by hand."""
    standard, mup = find_groups([write_sizes(tmp_path, *WIDE)])
    assert (standard.name, mup.name) == ("sa standard", "sa mup")
    shares = {128: (0.030, 0.031, 0.032), 256: (0.02, 0.03, 0.045), 512: (-0.05, 0.03, 0.04)}
    curves = [mup.curves[0]]
    for curve, beside in zip(mup.curves[1:], standard.curves[1:], strict=True):
        factors = [1 + share for share in shares[int(curve.size[0])]]
        assert list(beside.table.columns) == [0, 1, 2]
        curves.append(replace(curve, table=beside.table * factors, best=beside.best))
    found = compare_groups([standard, Group(mup.name, tuple(curves))])
    assert [each.size[0] for each in found] == list(shares)  # the base's runs are the same: no comparison
    p_values = [scipy.stats.ttest_1samp(each, 0).pvalue for each in shares.values()]
    assert [each.bests.result.p for each in found] == pytest.approx(p_values, rel=1e-6)
    assert p_values[1] < 0.05 < 2 * p_values[1]  # decided alone, not as one of three
    assert [each.is_decided for each in found] == [3 * p_values[0] < 0.05, False, False] == [True, False, False]
    assert [each.bests.result.size[0] for each in found] == pytest.approx([np.mean(each) for each in shares.values()])
    interval = scipy.stats.t.interval(0.95, 2, np.mean(shares[512]), scipy.stats.sem(shares[512]))
    assert found[2].bests.result.interval == pytest.approx(interval, rel=1e-6)
    said = transfer.describe_comparisons([standard, Group(mup.name, tuple(curves))])
    assert said == (
        "sa mup against sa standard at width 512, each at its own best rate: NLL +0.7 % "
        f"(95 %: {100 * interval[0]:+.1f} to {100 * interval[1]:+.1f} %, 3 seeds): undecided."
    )
    verdicts = [row[-1].text for row in transfer.comparison_table([standard, Group(mup.name, tuple(curves))]).rows]
    assert verdicts == ["higher", "undecided", "undecided"]


def test_nlls_are_compared_over_each_groups_own_rates(tmp_path):
    standard, mup = find_groups([write_sizes(tmp_path, *WIDE)])
    moved = [replace(curve, table=1.1 * curve.table.set_axis(10 * curve.table.index)) for curve in standard.curves]
    found = compare_groups([standard, Group("moved", tuple(replace(each, series="moved") for each in moved))])
    assert [each.bests.result.size[0] for each in found] == pytest.approx([0.1] * 4)


def test_a_size_whose_best_rate_is_open_is_not_compared(tmp_path):
    standard, mup = find_groups(
        [write_sizes(tmp_path, *WIDE, slope=lambda name, _, d: -0.5 * d * (name == "standard"))]
    )
    assert standard.curves[3].best.open and not mup.curves[3].best.open
    assert [each.size[0] for each in compare_groups([standard, mup])] == [128, 256]
    assert compare_groups([standard]) == [] and transfer.comparison_table([standard]) is None


NARROW = ("model.width=[64,128,256,512]",)
FIVE = ("model.width=[64,128,256,512,1024]",)


@pytest.mark.parametrize(
    ("words", "options", "target", "reason"),
    [
        (NARROW, {}, {"layers": 8}, "the sweep has layers 2 alone, the target 8"),
        (("model.width=[64,128]",), {}, {"width": 256}, "2 values of width make no law; 3 are needed"),
        (NARROW, {"slope": lambda *a: -1.2 * a[2]}, {"width": 1024}, "the lowest NLL is at the smallest rate swept"),
        (NARROW, {}, {"width": 8192}, "width 8,192 is further from 512 than the sweep spans (64 to 512)"),
        (NARROW, {"unigram": 2.2}, {"width": 1024}, "at width 64 the model learned 0.20 nats beyond token frequencies"),
        (FIVE, {"slope": lambda *a: 0.075 * a[2] ** 2 - 0.3 * a[2]}, {"width": 2048}, "the best rates bend away"),
        (NARROW, {"slope": lambda *a: 0.5 * (a[2] == 3)}, {"width": 1024}, "the law misses the best rate at width 512 by -0.50"),
        (NARROW, {"slope": lambda *a: 0.8 * (a[2] == 3) - 0.3}, {"width": 1024}, "% of the NLL at width 512, more than 1 %"),
        (NARROW, {"slope": lambda *a: [0, 0.4, -0.4, 0][int(a[2])]}, {"width": 1024}, "decades, wider than ±0.5"),
    ],
)  # fmt: skip
def test_what_cannot_be_predicted_has_its_reason(tmp_path, words, options, target, reason):
    (group,) = find_groups([write_sizes(tmp_path, *words, **options)])
    found = group.predict(target)
    assert any(reason in each for each in found.reasons), found.reasons
    assert (said := transfer.describe_prediction(group, target)).startswith(f"{group.name} {transfer.locate(target)}: ")
    assert "cannot predict: " in said


def test_the_reason_against_a_law_is_said_once(tmp_path):
    study = write_sizes(tmp_path, *NARROW, slope=lambda *a: -1.2 * a[2])
    (group,) = find_groups([study])
    assert group.law is None
    texts = " ".join(transfer.sentences(study)), transfer.answer_text(study, 30, 80), transfer.describe([study], {})
    for text in (" ".join(each.split()) for each in texts):
        assert text.count("cannot predict: ") == text.count("at width 128 the lowest NLL is at the smallest rate") == 1


def test_a_rule_of_thumb_is_not_held_against_a_law(tmp_path):
    """Three sizes of two axes make a law, the smaller two none: only the rules are tried at the largest."""
    (group,) = find_groups([write_sizes(tmp_path, *NARROW, slope=lambda *a: -0.3 * a[2])])
    steps = (200.0, 400.0, 200.0)
    joined = Group("joined", tuple(
        replace(curve, size=(curve.size[0], 2.0, number, 16.0)) for curve, number in zip(group.curves[:3], steps, strict=True)
    ))  # fmt: skip
    assert joined.law is not None and joined.law_trial is None and len(joined.trials) > 2
    assert max(trial.share for trial in joined.trials) > 0.01
    assert not any("law of the smaller sizes" in reason for reason in joined.predict({"width": 512}).reasons)


def test_a_target_within_reach_is_predicted(tmp_path):
    (group,) = find_groups([write_sizes(tmp_path, *NARROW, slope=lambda *a: -0.2 * a[2])])
    assert group.predict({"width": 2048}).reasons == ()


def with_runs_of(study, size, other, place):
    """A study that has another's runs at a size: equal specs have equal ids."""
    here, there = (each.runs["model"].str.endswith(f" {label}") for each, label in ((study, size), (other, place)))
    ids = study.runs["run_id"].copy()
    ids[here] = other.runs.loc[there, "run_id"].to_numpy()
    return replace(study, runs=study.runs.assign(run_id=ids))


def test_studies_of_other_sizes_make_one_law_and_those_of_other_recipes_none(tmp_path):
    slopes = {"width": -0.3, "steps": -0.1}
    by_axis = {"slope": lambda name, axis, doublings: slopes[axis] * doublings}
    wide = write_sizes(tmp_path / "a", *NARROW, "steps=200", **by_axis)
    long = write_sizes(tmp_path / "b", "model.width=64", "steps=[200,400,800]", **by_axis)
    long = with_runs_of(long, "steps=200", wide, "width=64")
    (group,) = find_groups([wide, long])
    law = group.law
    assert law is not None and [law.slope(place)[0] for place in (0, 1)] == pytest.approx([-0.3, -0.1], abs=1e-6)
    found = group.predict({"width": 1024, "steps": 1600})
    assert found.log_lr == pytest.approx(-2 - 4 * 0.3 - 3 * 0.1) and found.reasons == ()
    other = write_sizes(tmp_path / "c", "steps=[200,400,800]", "clip_norm=2", **by_axis)
    with pytest.raises(ValueError, match="differ in clip_norm; sizes of one law share everything but"):
        find_groups([wide, other])


def test_two_studies_with_other_runs_at_one_size_are_refused(tmp_path):
    first, second = (
        write_sizes(tmp_path / name, f"model.width={widths}", slope=lambda name, axis, doublings: -0.3 * doublings)
        for name, widths in (("a", "[64,128,256]"), ("b", "[256,512,1024]"))
    )
    second = replace(second, runs=second.runs.assign(run_id="of_b_" + second.runs["run_id"]))
    with pytest.raises(ValueError, match=r"^sizes and sizes both have sa at width 256, .*; give one of them, or sweep"):
        find_groups([first, second])
    shared = with_runs_of(second, "width=256", first, "width=256")
    (group,) = find_groups([first, shared])
    assert [curve.size[0] for curve in group.curves] == [64, 128, 256, 512, 1024]
    is_lacking = first.runs["model"].str.endswith(" width=256") & (first.runs["seed"] == 0)
    (group,) = find_groups([replace(first, runs=first.runs[~is_lacking]), shared])
    assert group.curves[2].study is shared, "the study with more runs"
    halves = [
        replace(
            first, runs=first.runs[~(first.runs["model"].str.endswith(" width=256") & first.runs["seed"].isin(seeds))]
        )
        for seeds in ((0,), (1, 2))
    ]
    (group,) = find_groups([*halves, shared])
    assert group.curves[2].study is shared, "two studies, each with a part of what the third has"


def cross(curve, sizes, log_best):
    """A group of one curve's copies at other sizes (width, steps), with best rates by ``log_best`` of doublings."""
    found = []
    for width, steps in sizes:
        doublings = math.log2(width / 64), math.log2(steps / 200)
        best = replace(curve.best, log_lr=log_best(*doublings))
        table = pd.DataFrame({seed: parabola(RATES, best.log_lr) for seed in range(3)}, index=RATES)
        found.append(replace(curve, size=(float(width), 2.0, float(steps), 16.0), best=best, table=table))
    return Group("sa", tuple(sorted(found, key=lambda each: each.size)))


SQUARE = [(width, steps) for width in (64, 128, 256) for steps in (200, 400, 800)]
ARMS = [(64, 200), (128, 200), (256, 200), (64, 400), (64, 800)]


def test_two_sizes_that_depend_on_each_other_are_seen_where_runs_vary_both(tmp_path):
    curve = find_groups([write_sizes(tmp_path, *NARROW, slope=lambda *a: -0.3 * a[2])])[0].curves[0]
    target = {"width": 512, "steps": 1600}
    apart = cross(curve, SQUARE, lambda x, y: -2 - 0.1 * x - 0.05 * y)
    assert apart.predict(target).reasons == () and not apart.varies_apart
    assert apart.predict(target).log_lr == pytest.approx(-2 - 0.3 - 0.15)
    joint = cross(curve, SQUARE, lambda x, y: -2 - 0.11 * x * y)
    assert "the effects of width and steps depend on each other" in joint.predict(target).reasons
    bent = cross(curve, SQUARE, lambda x, y: -2 - 0.1 * x - 0.1 * y**2)
    assert "the best rates bend away from a straight line of steps" in bent.predict(target).reasons
    arms = cross(curve, ARMS, lambda x, y: -2 - 0.1 * x - 0.05 * y)
    assert arms.predict(target).reasons == () and arms.varies_apart
    said = transfer.describe_prediction(arms, target)
    assert said.endswith("No runs vary width and steps together: their effects are taken to add up.")
    assert "together" not in transfer.describe_prediction(apart, target)


def test_each_of_two_sizes_is_held_out(tmp_path):
    curve = find_groups([write_sizes(tmp_path, *NARROW, slope=lambda *a: -0.3 * a[2])])[0].curves[0]
    broken = cross(curve, ARMS, lambda x, y: -2 - 0.1 * x + 0.6 * (y == 2))
    tried = {held_out.size[::2]: trial.error for held_out, trial in broken.axis_trials}
    assert tried == {(256.0, 200.0): pytest.approx(0.0, abs=0.35), (64.0, 800.0): pytest.approx(-0.6)}
    reasons = broken.predict({"width": 512, "steps": 1600}).reasons
    assert any("misses the best rate at width 64 and after 800 steps by -0.60 decades" in each for each in reasons)


@pytest.mark.parametrize(
    ("here", "there", "key"),
    [
        (["mechanism=[sw]", "mechanism.sw.window=4"], ["mechanism=[sw]", "mechanism.sw.window=16"], "mechanism.sw"),
        (["model.head_width=16"], [], "heads"),
        (["parametrization=[mup]", "parametrization.mup.base_width=32"],
         ["parametrization=[mup]", "parametrization.mup.base_width=64"], "parametrization.mup"),
        (["parametrization=[mup]", "parametrization.mup.weight_decay=coupled"], ["parametrization=[mup]"],
         "parametrization.mup"),
    ],
)  # fmt: skip
def test_studies_with_other_settings_make_no_law(tmp_path, here, there, key):
    study = write_sizes(tmp_path, *NARROW)
    specs = [
        read_spec("sweep", [*WORDS, "lr=[1e-3,1e-2]", *NARROW, *words]).model_dump(mode="json")
        for words in (here, there)
    ]
    first, other = (replace(study, study=study.study | {"spec": spec}) for spec in specs)
    with pytest.raises(ValueError, match=f"differ in {key}; sizes of one law share everything but"):
        find_groups([first, other])


def test_a_base_that_is_written_out_is_that_of_the_smallest_size(tmp_path):
    study = write_sizes(tmp_path, *WIDE)
    words = [*WORDS, "lr=[1e-3,1e-2]", "model.width=1024", "parametrization=[mup]", "parametrization.mup.base_width=64"]
    spec = read_spec("sweep", words).model_dump(mode="json")
    require_same_recipe([study, replace(study, study=study.study | {"spec": spec})])
    spec["parametrization"][0]["base_width"] = 128
    with pytest.raises(ValueError, match="differ in parametrization.mup"):
        require_same_recipe([study, replace(study, study=study.study | {"spec": spec})])


def test_an_older_record_lacks_settings_that_came_later(tmp_path):
    study = write_sizes(tmp_path, *NARROW)
    spec = study.spec
    older = spec | {"mechanism": [{key: each[key] for key in each if key != "qk_norm"} for each in spec["mechanism"]]}
    assert "qk_norm" in spec["mechanism"][0]
    require_same_recipe([study, replace(study, study=study.study | {"spec": older})])
    normed = spec | {"mechanism": [each | {"qk_norm": "layernorm"} for each in spec["mechanism"]]}
    with pytest.raises(ValueError, match="differ in mechanism.sa"):
        require_same_recipe([study, replace(study, study=study.study | {"spec": normed})])


def test_what_is_not_known_yet_is_said(tmp_path):
    study = write_sizes(tmp_path, *NARROW)
    assert "have ended" not in transfer.describe([study], {"width": 1024})
    waiting = study.runs.assign(status=["running"] * 5 + ["stable"] * (len(study.runs) - 5))
    said = transfer.describe([replace(study, runs=waiting)], {"width": 1024})
    assert f"sizes: {len(waiting) - 5} of {len(waiting)} runs have ended; the numbers may still change." in said
    (group,) = find_groups([study])
    empty = replace(group.curves[-1], table=group.curves[-1].table * math.nan)
    assert "its cost is unknown: no runs at such rates" in transfer.describe_trials(
        Group(group.name, (*group.curves[:-1], empty))
    )
    open_edge = replace(group.curves[0], window=replace(group.curves[0].window, high=replace(
        group.curves[0].window.high, kind="open")))  # fmt: skip
    said = transfer.describe_prediction(Group(group.name, (open_edge, *group.curves[1:])), {"width": 1024})
    assert "the upper edge is unknown, since at width 64 no swept rate is too large" in said


def test_the_upper_edge_is_tried_on_the_largest_size_too(tmp_path):
    """At 512 the NLL is 1.7 + 0.2·x² at x decades from −2.9, 5 % above its lowest at x = 0.65: 5.7e-3, a little less by
    linear interpolation."""
    said = transfer.describe_trials(transfer.groups_of(write_sizes(tmp_path, *WIDE))[0])
    edge = said.rpartition("upper edge: ")[2]
    assert edge == "predicted 5.5e-3, found 5.5e-3."


def test_a_sensitivity_names_the_rates_that_all_sizes_share_and_needs_three(tmp_path):
    study = write_sizes(tmp_path, *WIDE)
    (standard, *_) = transfer.groups_of(study)
    first = transfer.best_table(study, [standard]).rows[0]
    assert first[0].detail == "S: 8 rates, 5.0e-4 to 6.4e-2"
    few = [
        replace(curve, table=curve.table.iloc[:5] if place else curve.table.iloc[3:])
        for place, curve in enumerate(standard.curves)
    ]
    found = transfer.best_table(study, [replace(standard, curves=tuple(few))])
    assert found.rows[0][0].detail == "" and "S" not in found.header


def test_the_first_page_and_the_end_of_a_sweep_answer_for_a_larger_size(tmp_path):
    study = write_sizes(tmp_path, *WIDE)
    text = ending(study)
    assert text.startswith("The best learning rate by size") and "sa mup at width 1,024: take 1.0e-2" in text
    assert len(text.splitlines()) <= 20 and max(map(len, text.splitlines())) <= 80
    for most in range(17, 60):
        cut = transfer.answer_text(study, most, 100)
        is_whole = transfer.describe_law(transfer.groups_of(study)[-1]).split()[-1] in cut.splitlines()[-1]
        assert is_whole != (transfer.REST in cut) and len(cut.splitlines()) <= most
    everything = summary(study)
    for title in (
        "How the best rate moves",
        "Back-test on the largest size",
        "Tuned at one size, used at another: sa mup",
    ):
        assert title in everything
    assert "α_max" not in transfer.best_table(study).text()  # hessian=false: neither a column nor its explanation
    first = next(iter(assembly.pieces(study)))
    assert "transfer" in [getattr(piece, "name", None) for piece in first]


def test_rates_in_multiples_and_records_without_settings_are_refused(tmp_path):
    study = write_sizes(tmp_path, *NARROW)
    scaled = replace(study, study=study.study | {"lr_multiples": True, "lr_references": {"adamw": 1e-3, "sgd": 0.1}})
    assert scaled.is_in_multiples and not transfer.applies(scaled)
    with pytest.raises(ValueError, match="multiples of each optimizer's own; sweep with lr="):
        transfer.describe([scaled], {"width": 1024})
    with pytest.raises(ValueError, match="^sizes: its record lacks the sweep's settings, and so its sizes$"):
        transfer.describe([replace(study, study=study.study | {"spec": {}})], {"width": 1024})


def test_a_study_without_sizes_has_no_such_section(tmp_path):
    assert not transfer.applies(load(write_study(tmp_path)))


def test_a_study_of_sizes_at_one_rate_has_no_such_section(tmp_path):
    study = write_sizes(tmp_path, *NARROW)
    one = replace(study, runs=study.runs[study.runs["lr"] == RATES[3]])
    assert transfer.applies(study) and not transfer.applies(one)


def test_best_rates_outside_the_grid_leave_a_panel_that_says_so(tmp_path):
    """An empty logarithmic axis cannot be drawn."""
    study = write_sizes(tmp_path, *NARROW, slope=lambda *_: 3.0)
    figure = draw(transfer.groups_of(study))
    assert assembly.render(figure, "png")
    assert [text.get_text() for text in figure.axes[-1].texts] == ["none lies inside the grid"]


def test_a_report_of_studies_that_differ_in_sizes_begins_with_their_joint_law(tmp_path):
    by_axis = {"slope": lambda name, axis, doublings: -0.3 * doublings}
    small = write_sizes(tmp_path / "a", "model.width=[64,128]", **by_axis)
    spec = read_spec("sweep", [*WORDS, "lr=[1e-3,1e-2]", "model.width=[256,512]"]).model_dump(mode="json")
    large = write_sizes(
        tmp_path / "b", "model.width=[256,512]", slope=lambda name, axis, doublings: -0.3 * (doublings + 2)
    )
    large = replace(large, study=large.study | {"name": "large", "spec": spec})
    (group,) = transfer.join([small, large])
    assert [curve.size[0] for curve in group.curves] == list(WIDTHS)
    first, figure, *tables = assembly.comparison([small, large])
    prediction, trial, *_ = first.paragraphs
    assert prediction.startswith("sa at width 1,024: take "), "the answer first"
    assert trial.startswith("Back-test of sa at width 512 (best 1.3e-3), from the smaller sizes: law 1.3e-3")
    assert figure.name == "transfer" and [table.title for table in tables] == [
        transfer.TITLE,
        "Back-test on the largest size",
    ]
    other = replace(large, name="large", study=large.study | {"spec": spec | {"clip_norm": 2.0}})
    assert transfer.join([small, other]) == [] and assembly.comparison([small, other])[0] != first
    (first, *_) = assembly.comparison([small, other])
    assert first.paragraphs[-1] == (
        "No joint law of the sizes: sizes and large differ in clip_norm; sizes of one law share everything but width, "
        "layers, steps and batch."
    )


def test_a_report_of_studies_with_other_seeds_at_one_size_says_why_it_has_no_joint_law(tmp_path):
    first, second = (write_sizes(tmp_path / name, "model.width=[64,128]") for name in ("a", "b"))
    runs = second.runs.assign(seed=second.runs["seed"] + 3, run_id=second.runs["run_id"].map("other{}".format))
    second = replace(second, name="again", runs=runs)
    assert transfer.join([first, second]) == []
    (answers, *_) = assembly.comparison([first, second])
    assert answers.paragraphs[-1].startswith("No joint law of the sizes: sizes and again both have sa at width 64")
    of_one_size = [replace(each, study=each.study | {"spec": {**each.spec, "vary": []}}) for each in (first, second)]
    assert not any("No joint law" in text for text in assembly.comparison(of_one_size)[0].paragraphs)


@pytest.mark.parametrize(
    ("axis", "question", "place"),
    [
        ("model.layers=[2,4,8]", "Which learning rate at a larger size", "with 16 layers"),
        ("steps=[100,200,400]", "Which learning rate for longer training", "after 800 steps"),
        ("batch=[4,8,16]", "Which learning rate at a larger batch", "at batch 32"),
    ],
)
def test_a_size_is_said_in_words(tmp_path, axis, question, place):
    """Pages said "at layers 32", and of longer training "at a larger size" and "at steps 1,600"."""
    study = write_sizes(tmp_path, "objective=mlm", axis)
    assert transfer.title(study).startswith(f"{question}, {place}? sa: ")
    assert any(text.startswith(f"sa {place}: take ") for text in transfer.sentences(study))
    assert transfer.locate({"layers": 1, "width": 1024}) == "with 1 layer and at width 1,024"
