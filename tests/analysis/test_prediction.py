"""Does α_max predict the edge? On studies made so that it does, does not, or cannot be asked."""

import math

import numpy as np
import pytest
from scipy.stats import mannwhitneyu, spearmanr

from analysis.claims import prediction as said
from analysis.drawing.pieces import Paragraph, typst
from analysis.drawing.style import INK, MUTED
from analysis.numbers.early_measurements import early_curves, early_runs
from analysis.numbers.early_measurements import join_early_curves as early_curves_of
from analysis.numbers.early_measurements import join_early_runs as early_runs_of
from analysis.numbers.prediction import (
    GROUPS,
    LEFT_OUT,
    NEAR,
    POOLED,
    SAME_RATE,
    TWO_GROUPS,
    best_baseline,
    score_curves,
    score_runs,
    select_judged,
    unit_of,
    verdict,
)
from analysis.numbers.ranking import Draws, near_pairs, share_in_order
from analysis.sections import contents, headline, prediction
from analysis.study.load import load
from tests.analysis.foretelling import LAST, run, study_of
from tests.analysis.synthetic import quickstart_alpha, write_study

MECHANISMS = ("sa", "sc", "mix", "sw", "gla")
LRS = (1e-3, 1e-2, 1e-1)


def grid(alpha, breaks, seeds=3, mechanisms=MECHANISMS, **more):
    """Runs of every mechanism, rate and seed; ``alpha`` and ``breaks`` of (mechanism, lr, seed)."""
    return [
        run(lr, alpha(m, lr, seed), mechanism=m, seed=seed,
            **({"status": "diverged", "end": 120} if breaks(m, lr, seed) else {"status": "stable"}),
            **{key: value(m, lr, seed) for key, value in more.items()})
        for m in mechanisms for lr in LRS for seed in range(seeds)
    ]  # fmt: skip


def edge_of(mechanism):
    return 3e-2 if mechanism in ("sc", "mix") else 3e-3


def breaks_beyond_edge(m, lr, seed):
    return lr > edge_of(m)


def knowing(m, lr, seed):
    return edge_of(m) * (1 + 0.01 * seed)


def ignorant(m, lr, seed):
    return 10 ** np.random.default_rng([MECHANISMS.index(m), round(-math.log10(lr)), seed]).uniform(-3, -1)


def best_at_edge(m, lr, seed):
    return 2.0 + abs(math.log10(lr / edge_of(m) * 3))


def by_column(scored):
    return {each.predictor.column: each for each in scored}


@pytest.fixture(scope="module")
def known():
    return study_of(grid(knowing, breaks_beyond_edge))


@pytest.fixture(scope="module")
def unknown():
    return study_of(grid(ignorant, breaks_beyond_edge))


def test_an_alpha_max_that_is_the_edge_tells_every_run_and_beats_every_baseline_but_one_that_luck_helps(known):
    """Of five mechanisms two have one edge and three the other: (2/5)⁵ + (3/5)⁵ = 9 % of the draws hold one edge only, and
    there the rate alone knows as much."""
    found = by_column(score_runs(early_runs(known), "broke"))["alpha_max_ratio"]
    assert (found.scopes[POOLED].value, found.scopes[SAME_RATE].value) == (1.0, 1.0)
    judged = {column: verdict(each) for column, each in found.beyond.items()}
    assert judged.pop("lr") == "cannot tell" and found.beyond["lr"].low == 0
    assert judged == dict.fromkeys(("grad_norm", "loss", "grad_norm_next", "loss_next"), "better")


def test_the_areas_are_scipys_with_the_alarming_side_fixed_beforehand(unknown):
    frame = select_judged(early_runs(unknown))
    for each in score_runs(early_runs(unknown), "broke"):
        values = each.predictor.sign * frame[each.predictor.column]
        low, high = values[~frame["broke"]], values[frame["broke"]]
        expected = mannwhitneyu(high, low).statistic / (len(low) * len(high))
        assert each.scopes[POOLED].value == pytest.approx(expected), each.predictor.name


def test_an_alpha_max_that_knows_nothing_cannot_be_told_from_chance_and_the_text_says_so(unknown):
    scored = score_runs(early_runs(unknown), "broke")
    found = by_column(scored)["alpha_max"]
    assert found.scopes[POOLED].low < 0.5 < found.scopes[POOLED].high
    claim = next(each for each in said.claims_on_runs(early_runs(unknown), scored, "broke") if "α_max:" in each.subject)
    assert claim.verdict == "contradicted" and "Worse than learning rate α alone" in claim.text
    assert "cannot tell from" in claim.text.lower() and "not told from chance" in claim.text


def test_the_rate_alone_tells_nothing_among_runs_of_one_rate(unknown):
    assert by_column(score_runs(early_runs(unknown), "broke"))["lr"].scopes[SAME_RATE].value == 0.5


NEIGHBOURS = {"sa": 1.0, "sc": 1.01, "mix": 1.02, "sw": 1.03, "gla": 1.04}


def of_neighbours(alpha, factors=NEIGHBOURS, early=("sa", "mix"), seeds=3):
    """Mechanisms with rates of their own beside each other's; ``early`` ones break from the third of four rates on, the
    others at the last; ``alpha`` of (mechanism, rate)."""
    return study_of([
        run(place * factor, alpha(m, place * factor), mechanism=m, seed=seed, val_nll=2.0 + place,
            **({"status": "diverged", "end": 120} if place > (0.3 if m in early else 0.6) else {}))
        for m, factor in factors.items() for place in (0.1, 0.2, 0.4, 0.8) for seed in range(seeds)
    ])  # fmt: skip


def at_same_rate(study):
    return by_column(score_runs(early_runs(study), "broke"))


def test_an_alpha_max_that_knows_each_edge_orders_every_pair_at_one_rate_of_which_the_rate_orders_half():
    """Two mechanisms broke at the third rate and three did not: one broken one has the highest rate of its pairs once
    and the lowest five times, of nine pairs of seeds each."""
    found = at_same_rate(of_neighbours(lambda m, lr: 1.0 if m in ("sa", "mix") else 10.0))
    ratio, rate = found["alpha_max_ratio"], found["lr"]
    assert (ratio.scopes[SAME_RATE].value, rate.scopes[SAME_RATE].value) == (1.0, 0.5)
    assert (ratio.numbers[SAME_RATE], ratio.numbers[LEFT_OUT], ratio.numbers[GROUPS]) == (18, 36, 5)
    assert (ratio.scopes[TWO_GROUPS].value, ratio.numbers[TWO_GROUPS]) == (1.0, 18)


@pytest.mark.parametrize("power", [-2, -0.5, 0, 0.5, 2])
def test_an_alpha_max_that_is_a_function_of_the_rate_alone_orders_half_of_the_pairs_at_one_rate(power):
    study = of_neighbours(lambda m, lr: lr**power)
    found = at_same_rate(study)
    for column in ("alpha_max", "alpha_max_ratio", "lr"):
        assert found[column].scopes[SAME_RATE].value == 0.5
    assert "Undecided at the same rate (within 5 %): a share of 0.50" in prediction.title(study)
    assert " of 18 pairs in order, by the rate 0.50" in prediction.title(study)


def test_where_no_two_runs_of_nearly_the_same_rate_ended_differently_that_is_said():
    far = of_neighbours(lambda m, lr: lr, {m: 1.1**place for place, m in enumerate(NEIGHBOURS)})
    told = "no two runs of nearly the same rate ended differently"
    assert at_same_rate(far)["alpha_max"].numbers[SAME_RATE] == 0
    assert prediction.title(far).endswith(told.replace("no", "No", 1)) and told in prediction.conclusion(far).lower()
    assert f"; {told}" in text_of(far)


def test_pairs_at_one_rate_that_the_rate_orders_all_alike_ask_nothing_of_others():
    study = of_neighbours(lambda m, lr: lr, {"sc": 1.0, "sa": 1.03})
    assert at_same_rate(study)["alpha_max"].numbers[SAME_RATE] == 0
    assert "The rate orders all 9 pairs within 5 % alike" in prediction.title(study)


def test_the_share_of_near_pairs_is_that_of_a_loop_over_all_pairs_in_every_draw():
    rng = np.random.default_rng(0)
    number, within = 60, math.log10(NEAR)
    places, scores = rng.integers(0, 12, number) * 0.01, rng.integers(0, 9, number).astype(float)
    scores[:2], hit = (np.inf, 0.0), rng.random(number) < 0.4
    strata, units = list(rng.integers(0, 2, number)), list(rng.integers(0, 6, number))
    draws = Draws(units, num=40)
    near = near_pairs(places, hit, strata, within)
    found, pairs = share_in_order(scores, places, near, draws)

    def loop(copies):
        won, all_of = dict.fromkeys((-1, 0, 1), 0.0), dict.fromkeys((-1, 0, 1), 0)
        for i in range(number):
            for j in range(number):
                if hit[i] and not hit[j] and strata[i] == strata[j] and abs(places[i] - places[j]) <= within:
                    order = int(np.sign(places[i] - places[j]))
                    weight = copies[draws.codes[i]] * copies[draws.codes[j]]
                    all_of[order] += weight
                    won[order] += weight * (1.0 if scores[i] > scores[j] else 0.5 if scores[i] == scores[j] else 0.0)
        least = min(all_of[1], all_of[-1])
        balanced = sum(least * won[order] / all_of[order] for order in (1, -1)) if least else 0.0
        return (won[0] + balanced) / (all_of[0] + 2 * least), all_of[0] + 2 * least, sum(all_of.values())

    share, kept, every = loop(np.ones(6))
    assert found.value == pytest.approx(share) and pairs == kept < every == len(near[0])
    assert found.draws == pytest.approx([loop(np.bincount(drawn, minlength=6))[0] for drawn in draws.drawn])


def test_groups_are_drawn_where_there_are_four_and_curves_where_there_are_fewer(known):
    frame = select_judged(early_runs(known))
    assert unit_of(frame) == "group"
    assert unit_of(frame[frame["mechanism"].isin(("sa", "sc"))]) == "curve"


def test_where_alpha_max_falls_below_the_rate_ranks_the_edges_as_scipy_does(known):
    curves = early_curves(known)
    found = by_column(score_curves(curves, "edge"))["alpha_cross"]
    assert found.scopes[POOLED].value == pytest.approx(spearmanr(curves["alpha_cross"], curves["edge"]).statistic)
    assert found.decades == pytest.approx(np.median(np.abs(np.log10(curves["alpha_cross"] / curves["edge"]))))
    assert math.isnan(found.scopes["sa"].value), "three curves of a mechanism have no rank correlation"


def test_the_best_baseline_is_the_one_with_the_largest_area(known):
    assert best_baseline(score_runs(early_runs(known), "broke")).predictor.column == "lr"


def test_the_first_page_has_the_area_of_alpha_max_over_the_rate_beside_the_best_baselines(known):
    scored = by_column(score_runs(early_runs(known), "broke"))
    ratio, rate = (scored[name].scopes[POOLED].value for name in ("alpha_max_ratio", "lr"))
    told = prediction.conclusion(known)
    assert (
        f"α_max / α tells with an AUC of {ratio:.2f} (" in told and f", learning rate α alone with {rate:.2f} (" in told
    )
    assert ratio != pytest.approx(rate, abs=0.02)
    silent = prediction.conclusion(study_of(grid(knowing, lambda *_: False, val_nll=best_at_edge)))
    assert "AUC" not in silent


def text_of(study):
    return typst(prediction.body(study, {}))


def test_a_study_of_which_every_run_diverged_says_why_nothing_can_be_judged():
    text = text_of(study_of(grid(knowing, lambda *_: True)))
    assert "of 45 judged runs every did, and that needs some of both" in text
    assert "cannot be ranked: 0 of 15 curves have one" in text
    assert "Nothing can be said here" in text


def test_a_study_of_which_every_run_diverged_before_step_k_names_them():
    study = study_of([run(1e-1, None, "diverged", end=20, seed=seed) for seed in range(3)] + [run(1e-3, 1.0)])
    told = said.count_runs(early_runs(study))[0]
    assert "Of 4 runs 1 are judged" in told and "3 runs that diverged or spiked by step k" in told
    assert "(sa 1e-1 (3))" in told


def test_a_study_in_which_nothing_diverged_has_ranks_of_the_best_rate_alone():
    study = study_of(grid(knowing, lambda *_: False, val_nll=best_at_edge))
    text = text_of(study)
    assert "of 45 judged runs none did" in text and "ranks the best learning rate of 15 curves" in text


def test_a_study_of_one_run_has_one_line_each_and_no_table():
    study = study_of([run(1e-2, 1.0)])
    assert prediction.tables_of(prediction.evidence(study)) == [] and prediction.figures(study) == {}
    text = text_of(study)
    assert "of 1 judged run none did" in text and "0 of 1 curve have one, and 4 are needed" in text
    assert "Intervals:" not in text


def test_a_study_without_early_alpha_max_has_no_such_section(quickstart):
    assert not prediction.applies(quickstart)


def test_captions_leave_the_data_s_fingerprint_to_the_first_page(known):
    """Tables and figures of this section alone still had it, and the objective, at the end of each caption."""
    found = prediction.evidence(known)
    drawn = prediction.figures_of(found)
    captions = [*(table.caption for table in prediction.tables_of(found)), *(each.caption for each in drawn.values())]
    assert len(captions) > 3 and not [text for text in captions if "ingerprint" in text or "Objective:" in text]


def test_runs_of_several_studies_are_judged_as_one_and_those_without_are_named(known, unknown, quickstart):
    one = study_of(grid(knowing, breaks_beyond_edge, mechanisms=["sa"]), "one")
    other = study_of(grid(knowing, breaks_beyond_edge, mechanisms=["sc"]), "other")
    pieces = prediction.together([one, other, quickstart])
    text = " ".join(piece.text for piece in pieces if isinstance(piece, Paragraph))
    assert "Of 18 runs 18 are judged (2 groups, 3 seeds, 6 curves)" in text
    assert "not here: quickstart (python -m stability.hessian" in text
    assert prediction.together([one, quickstart]) == () == prediction.together([quickstart, quickstart])


def test_a_study_in_which_nothing_learned_enters_no_question_of_several_and_is_named():
    """Its runs end on either side of the token frequencies by chance: 3.19 and 3.21 around 3.2."""
    made = {name: grid(knowing, breaks_beyond_edge, mechanisms=["sa"]) for name in ("one", "other", "idle")}
    idle = [each | {"val_nll": 3.19 + 0.02 * (number % 2)} for number, each in enumerate(made["idle"])]
    studies = [study_of(made["one"], "one"), study_of(made["other"], "other"), study_of(idle, "idle")]
    text = " ".join(piece.text for piece in prediction.together(studies) if isinstance(piece, Paragraph))
    assert "Of 18 runs 18 are judged" in text and "Not here, since no mechanism learned: idle." in text
    assert prediction.together(studies[1:]) == ()
    assert prediction.applies(studies[0]) and not prediction.applies(studies[2]), "nor does it ask one of its own"


def test_a_curve_that_two_studies_share_is_ranked_once():
    shared = [run(lr, 1.0, run_id=f"shared{lr}") for lr in LRS]
    own = [run(lr, 1.0, mechanism="sc") for lr in LRS]
    studies = [study_of(shared, "one"), study_of([*shared, *own], "two")]
    for order in (studies, studies[::-1]):
        assert early_curves_of(order)["curve"].tolist() == ["two|sa|0", "two|sc|0"]
        assert early_runs_of(order)["study"].tolist() == ["two"] * 6


def test_what_differs_between_studies_enters_nothing():
    """Losses, gradients and rates of another study may be a hundred times as large, as of other data and in other
    units (multiples of reference rates): every area and every ρ stays as it is."""
    losses = {"loss": lambda m, lr, seed: 3.0 + lr, "grad_norm": lambda m, lr, seed: 1.0 + MECHANISMS.index(m)}
    given = {"val_nll": best_at_edge, **losses}
    one = study_of(grid(ignorant, breaks_beyond_edge, mechanisms=["sa", "sc", "gla"], **given), "one")
    runs = grid(knowing, breaks_beyond_edge, mechanisms=["sa", "mix", "sw"], **given)
    large = [each | {name: 100 * each[name] for name in ("lr", "alpha", "loss", "grad_norm")} for each in runs]
    multiples = {"lr_multiples": [1, 10], "lr_references": {"adamw": 1e-3, "sgd": 1e-1}}
    others = [study_of(runs, "other"), study_of(large, "other")]
    others[1].study.update(multiples)
    found = [prediction.Evidence([one, other]) for other in others]
    for name, kinds in (("of_runs", ("broke",)), ("of_curves", ("best_lr", "edge"))):
        for kind in kinds:
            plain, scaled = (by_column(getattr(each, name)[kind]) for each in found)
            assert set(plain) == set(scaled) and "loss" in plain
            for column, each in plain.items():
                there, here = (list(each.scopes.values()), list(scaled[column].scopes.values()))
                assert [e.value for e in there] == pytest.approx([e.value for e in here], nan_ok=True), (kind, column)
    alone = [by_column(prediction.Evidence([each]).of_runs["broke"])["alpha_max"] for each in (one, others[0])]
    pairs = [
        sum(broke) * sum(~broke) for broke in (select_judged(early_runs(each))["broke"] for each in (one, others[0]))
    ]
    mean = np.average([each.scopes[POOLED].value for each in alone], weights=pairs)
    assert by_column(found[0].of_runs["broke"])["alpha_max"].scopes[POOLED].value == pytest.approx(mean)
    text = typst(prediction.together([one, others[1]]))
    assert "Of 54 runs 54 are judged" in text and "(2 such sets here)" in text


def test_optimizers_of_one_study_are_not_compared_with_each_other(tmp_path):
    """By sgd every run breaks and has twice the α_max, by adamw none does: there is nothing to tell."""
    both = [
        each | {"optimizer": name, "alpha": factor * each["alpha"]}
        for name, factor, breaks in (("adamw", 1, lambda *_: False), ("sgd", 2, lambda *_: True))
        for each in grid(knowing, breaks, val_nll=lambda m, lr, seed: 2.0 + (m == "sa") / 2, mechanisms=["sa", "sc"])
    ]
    study = study_of(both)
    assert prediction.evidence(study).of_runs["broke"] == []
    text = text_of(study)
    assert "of 36 judged runs every or none of those that can be compared did" in text
    assert (
        "the best learning rate cannot be ranked: it is the same for all 6 curves that can be compared" in text.lower()
    )
    assert "(2 such sets here)" in text


def test_series_that_learned_nothing_or_too_little_are_not_asked_but_named():
    """Frequencies reach 3.2: sw is above them, gla has a tenth of what the best learns."""
    nll = {"sw": 3.4, "gla": 3.1}
    runs = grid(knowing, breaks_beyond_edge, val_nll=lambda m, lr, seed: nll.get(m, 2.2))
    found = prediction.evidence(study_of(runs))
    assert list(dict.fromkeys(found.runs["mechanism"])) == ["sa", "sc", "mix"]
    assert set(found.curves["mechanism"]) == {"sa", "sc", "mix"}
    assert "Not here, since too little was learned: sw and gla." in found.told()
    without = prediction.evidence(study_of([each for each in runs if each["mechanism"] not in nll]))
    assert "too little" not in without.told()
    pooled = [[each.scopes[POOLED].value for each in one.of_runs["broke"]] for one in (found, without)]
    assert pooled[0] == pytest.approx(pooled[1], nan_ok=True)


def test_the_rates_of_a_series_that_is_left_out_change_no_curve():
    """sa has a rate of its own, so only the rates of all count; sw, which learned nothing, has none of these."""
    more = [run(3e-2, 0.1, mechanism="sa", seed=seed, val_nll=2.3) for seed in range(3)]
    learned = [*grid(knowing, breaks_beyond_edge, mechanisms=["sa", "sc", "mix"], val_nll=best_at_edge), *more]
    other = [run(lr, 0.1, mechanism="sw", seed=seed, val_nll=3.4) for lr in (0.2, 0.4) for seed in range(3)]
    names = ["curve", "alpha_max", "alpha_cross", "loss_best"]
    with_it, without = (early_curves(study_of(runs))[names] for runs in ([*learned, *other], learned))
    assert with_it.equals(without) and len(without) == 9


def test_a_run_of_two_studies_stays_with_the_one_in_which_its_series_learned():
    """Beside sc's 0.5 nats the 1.0 of sa is enough; beside mix's 2.9 nats, in the larger study, 0.6 is asked for."""
    nll = {"sa": 2.6, "sc": 2.7, "mix": 0.3, "sw": 0.4}
    of = lambda names: grid(knowing, breaks_beyond_edge, mechanisms=names, val_nll=lambda m, lr, seed: nll[m])  # noqa: E731
    small, large = study_of(of(["sa", "sc"]), "small"), study_of(of(["sa", "mix", "sw"]), "large")
    found = prediction.Evidence([small, large])
    assert found.untrained == ["sa of large"]
    assert set(found.runs["group"]) == {"small|sa", "small|sc", "large|mix", "large|sw"}
    assert "too little was learned: sa of large." in typst(prediction.together([small, large]))


def test_only_runs_that_are_in_a_pair_count_and_the_sets_are_named():
    """By adamw nothing breaks; by sgd what lies beyond the edge does."""
    runs = [
        each | {"optimizer": name}
        for name, breaks in (("adamw", lambda *_: False), ("sgd", breaks_beyond_edge))
        for each in grid(knowing, breaks)
    ]
    study = study_of(runs)
    found = prediction.evidence(study)
    alone = prediction.Evidence([study_of([each for each in runs if each["optimizer"] == "sgd"])])
    for each, own in zip(found.of_runs["broke"], alone.of_runs["broke"], strict=True):
        assert each.numbers == own.numbers and each.numbers[POOLED] == 45
        pairs = [(each.scopes[name], own.scopes[name]) for name in own.scopes]
        assert all((a.value, a.low, a.high) == pytest.approx((b.value, b.low, b.high), nan_ok=True) for a, b in pairs)
    text = text_of(study)
    assert "which of 45 runs diverge or spike" in text
    assert "Which runs diverge or spike: judged of 45 of made_up sgd, intervals over 5 whole groups." in text


def test_sets_of_runs_have_tables_and_differences_of_their_own():
    """In one set α_max knows the edge, in the other it is the rate's opposite."""

    def wrong(m, lr, seed):
        return 1e3 * lr**2

    runs = [
        each | {"optimizer": name, "seed": each["seed"]}
        for name, alpha in (("adamw", knowing), ("sgd", wrong))
        for each in grid(alpha, breaks_beyond_edge)
    ]
    found = prediction.evidence(study_of(runs))
    ratio = by_column(found.of_runs["broke"])["alpha_max_ratio"]
    assert ratio.sets["made_up adamw"].value == 1.0 > ratio.scopes[POOLED].value > ratio.sets["made_up sgd"].value
    assert ratio.beyond_in["made_up adamw"]["lr"].value > 0 > ratio.beyond_in["made_up sgd"]["lr"].value
    [table] = [
        table for table in prediction.tables_of(found) if table.title == "Which runs diverge or spike, set by set"
    ]
    assert table.header == ("AUC", "made_up adamw", "made_up sgd")
    row = next(row for row in table.rows if row[0].text == "α_max / α")
    assert row[1].text == "1.00" and row[0].detail == "n=90"
    claim = next(each for each in found.claims() if each.subject.startswith("α_max / α"))
    assert "Set by set, less learning rate α alone: made_up adamw +" in claim.text and "; made_up sgd −" in claim.text


def test_nothing_is_compared_with_what_is_told_the_outcome(known):
    scored = score_curves(early_curves(known), "edge")
    told = by_column(scored)["decade_below"]
    assert told.scopes[POOLED].value == pytest.approx(1.0) and told.beyond == {}
    assert best_baseline(scored) is not told
    assert all("decade_below" not in each.beyond for each in scored)


def test_a_rate_that_alpha_max_meets_nowhere_is_a_bound_and_no_distance():
    """Of sc and mix α_max falls below the rate at 3e-2, of the others it lies above every rate."""

    def alpha(m, lr, seed):
        return 3e-2 if m in ("sc", "mix") else 1e3

    scored = score_curves(early_curves(study_of(grid(alpha, breaks_beyond_edge))), "edge")
    found = by_column(scored)["alpha_cross"]
    assert found.num_bounds == 9 and found.numbers[POOLED] == 15
    assert found.decades == pytest.approx(math.log10(math.sqrt(1e-2 * 1e-1) / 3e-2))
    assert "(a bound in 9: they meet at no rate that was swept)" in text_of(study_of(grid(alpha, breaks_beyond_edge)))


def test_a_predictor_of_which_all_known_runs_ended_alike_is_not_judged():
    runs = grid(knowing, breaks_beyond_edge, critical=lambda m, lr, seed: math.nan if lr > edge_of(m) else 1.0)
    study = study_of(runs)
    claims = said.claims_on_runs(early_runs(study), score_runs(early_runs(study), "broke"), "broke")
    claim = next(each for each in claims if each.subject.startswith("Critical LR"))
    assert claim.verdict == "not judged" and "of the 21 runs that have it all ended alike" in claim.text


def test_runs_that_plateaued_are_a_question_of_their_own():
    """A rate so large that nothing is learned, with finite numbers, neither diverges nor spikes."""
    runs = grid(knowing, breaks_beyond_edge)
    runs = [
        each | ({"status": "plateaued", "end": LAST} if each["status"] == "diverged" and each["seed"] else {})
        for each in runs
    ]
    found = prediction.evidence(study_of(runs))
    assert by_column(found.of_runs["unstable"])["alpha_max_ratio"].scopes[POOLED].value == 1.0
    assert by_column(found.of_runs["broke"])["alpha_max_ratio"].scopes[POOLED].value < 1.0


def test_files_older_than_a_checkpoints_step_cannot_say_what_lies_after_it(tmp_path):
    folder = write_study(tmp_path, mechanisms=["sa"], lrs=[1e-3, 1e-1], alpha=quickstart_alpha, phases=["earliest"])
    assert prediction.SECTION in contents.SECTIONS and prediction.applies(load(folder))
    assert "4 runs that have no result" in (text := text_of(load(folder))) and "Nothing can be said here" in text


def test_figures_and_tables_of_a_study_that_can_be_judged(known):
    drawn = prediction.figures(known)
    assert set(drawn) == {"prediction-roc", "prediction-ranks"}
    tables = {table.title: table for table in prediction.tables_of(prediction.evidence(known))}
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in tables["Which runs diverge or spike"].rows}
    assert rows["runs that do, of all"] == ["6 of 9", "3 of 9", "3 of 9", "24 of 45", "54 pairs, 5 groups", ""]
    assert rows["α_max / α"] == ["1.00", "1.00", "1.00", "1.00", "1.00", "+0.05"]
    assert "Which runs diverge or spike, continued" in tables


def test_curves_of_predictors_have_no_hue_and_their_dashes_beside_their_names(known):
    panels = prediction.figures(known)["prediction-roc"].figure.axes
    for left, right in zip(panels[::2], panels[1::2], strict=True):
        curves, samples = (
            {each.get_label(): (each.get_color(), each._unscaled_dash_pattern) for each in ax.lines}
            for ax in (left, right)
        )
        curves = {label: look for label, look in curves.items() if not label.startswith("_")}
        assert len(curves) > 3 and {color for color, _ in curves.values()} == {INK, MUTED}
        assert len(set(map(str, curves.values()))) == len(curves), "no two look alike"
        assert set(curves) <= {each.get_text() for each in right.get_yticklabels()}
        assert {label: samples[label] for label in curves} == curves


def test_a_study_whose_series_have_rates_of_their_own_is_titled_by_what_early_alpha_tells():
    # α_max says nothing of which runs break, the rate all: 3 of 6 rates of each series do, at no rate of another
    def made(shift):
        return study_of([
            run(rate * factor, rate * factor * (1 + (5 * place + seed) % 7), "diverged" if place > 2 else "stable",
                mechanism=name, seed=seed, end=150 if place > 2 else LAST, val_nll=2.0 + 0.1 * place)
            for name, factor in (("sa", 1.0), ("sw", shift))
            for place, rate in enumerate((0.1, 0.2, 0.4, 0.8, 1.6, 3.2))
            for seed in range(3)
        ])  # fmt: skip

    said = headline.title(made(1.03))
    assert said.startswith(
        "Does α_max predict the edge? Worse than the learning rate α alone at telling which runs break"
    )
    assert " against 1.00" in said
    assert headline.title(made(1.0)).startswith("How far can the learning rate be pushed")


def test_series_with_rates_of_their_own_of_which_none_broke_are_asked_how_far_the_rate_goes():
    runs = [
        run(rate * factor, 2 * rate, mechanism=name, seed=seed, val_nll=2.0 + abs(place - 1))
        for name, factor in (("sa", 1.0), ("sw", 2.0))
        for place, rate in enumerate((1e-3, 1e-2, 1e-1))
        for seed in range(3)
    ]
    assert headline.title(study_of(runs)).startswith("How far can the learning rate be pushed")
