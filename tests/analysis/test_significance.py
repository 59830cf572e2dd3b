"""Holm's correction and p-values, against a slow loop and scipy."""

import dataclasses
import math

import numpy as np
import pytest

from analysis.claims.claim import Claim, correct, correction_note, word_claim
from analysis.claims.judging import claims_table, judge
from analysis.numbers.comparison import decide
from analysis.numbers.side_by_side import Ratio, ratio
from analysis.numbers.spread import (
    holm,
    p_beyond,
    p_of_bounds,
    p_of_share,
    p_of_signs,
    share_interval,
    signs_decide,
)
from analysis.sections.overview import reference_table
from tests.analysis.test_claims import FINE
from tests.analysis.test_paper_claims import FINEST, SLOPES, study_of, vee


def step_down(p_values, level):
    """Holm's procedure as he states it: reject the smallest as long as each is at most level / (number left)."""
    rejected, left = set(), dict(enumerate(p_values))
    while left:
        index = min(left, key=left.__getitem__)
        if left.pop(index) > level / (len(left) + 1):
            break
        rejected.add(index)
    return rejected


def test_corrected_p_values_reject_what_the_step_down_procedure_rejects():
    draws = np.random.default_rng(0)
    for number in (1, 2, 5, 13):
        for _ in range(200):
            p_values = (draws.uniform(size=number) ** 3).tolist()
            found = holm(p_values)
            for level in (0.01, 0.05, 0.2):
                assert {index for index, p in enumerate(found) if p <= level} == step_down(p_values, level)


def test_corrected_p_values_are_those_of_scipys_formula():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == [] and holm([0.9, 0.8]) == [1.0, 1.0]


def test_p_values_are_scipys_and_agree_with_the_interval():
    stats = pytest.importorskip("scipy.stats")
    draws = np.random.default_rng(1)
    for number in (3, 4, 9):
        for _ in range(50):
            values = draws.normal(0.5, 1, number).tolist()
            assert p_beyond(values) == pytest.approx(
                min(1.0, 2 * stats.ttest_1samp(values, 0, alternative="greater").pvalue)
            )
            p, (direction, _) = p_of_bounds(values, values), decide(values, values)
            assert p == pytest.approx(stats.ttest_1samp(values, 0).pvalue) and (p < 0.05) == (direction != 0)
    assert math.isnan(p_beyond([1.0, 2.0])) and p_beyond([1.0, math.inf, 2.0]) == 1.0
    assert p_beyond([1.0] * 3) == 0.0 and p_beyond([0.0] * 3) == 1.0


def test_the_exact_p_value_of_a_share_is_scipys_and_agrees_with_the_interval():
    stats = pytest.importorskip("scipy.stats")
    for number in range(1, 21):
        for hits in range(number + 1):
            p, (low, high) = p_of_share(hits, number), share_interval(hits, number)
            assert p == pytest.approx(stats.binomtest(hits, number).pvalue)
            assert (p < 0.05) == (not low <= 0.5 <= high)


def test_signs_alone_decide_from_six_seeds_on():
    assert [p_of_signs(number) for number in (3, 5, 6)] == pytest.approx([1 / 4, 1 / 16, 1 / 32])
    assert math.isnan(p_of_signs(2)) and [signs_decide(number) for number in (1, 2, 3, 5, 6)] == [0, 1, 0, 0, 1]


def test_the_sign_test_of_turns_agrees_with_the_interval_of_their_median(tmp_path):
    draws = np.random.default_rng(2)
    study = study_of(tmp_path)
    for _ in range(60):
        seconds = {"sa": np.ones(12), "sc": draws.normal(1.05, 0.1, 12)}
        rows = [{"series": name, "seconds": list(each), "tokens_per_step": 64} for name, each in seconds.items()]
        found = ratio(dataclasses.replace(study, throughput={"rows": rows}), "sc", "sa")
        assert (found.p_beyond(1.0) <= 0.05) == (not found.low <= 1.0 <= found.high)
    assert Ratio(1.0, 1.0, 1.0, (1.0, 1.0, 1.2)).p_beyond(1.0) == 1.0  # two turns equal to the limit say nothing


def claim(subject, p, verdict="holds"):
    return word_claim(
        Claim(subject, verdict, n=3, finding=f"{subject} is larger", test=(subject,), p=p, differences=(0.2, 1.1, 2.3))
    )


def test_a_claim_that_only_stands_alone_becomes_undecided_and_says_both_p_values():
    one, two, three = correct([claim("a", 0.001), claim("b", 0.03), claim("c", 0.5, "undecided")])
    assert (one.verdict, two.verdict, three.verdict) == ("holds", "undecided", "undecided")
    assert "Alone p = 3.0e-2, corrected for 3 comparisons 6.0e-2." in two.text
    # mean 1.2, deviation 1.054, level 5 % / 3: t_6 · 1.054 / √7 = 1.31 (3.287), t_7 · 1.054 / √8 = 1.16 (3.128)
    assert two.text.startswith("Undecided: needs about 8 seeds in all.")
    assert correct([claim("b", 0.03)])[0].verdict == "holds"


def test_the_primary_claim_is_not_corrected_and_counts_among_no_others():
    """0.04 alone stands; 0.03 twice over two comparisons does not, and would be 0.09 over three."""
    found = correct([claim("a", 0.04), claim("b", 0.03), claim("c", 0.03)], primary=("a",))
    assert [(each.verdict, each.is_primary) for each in found] == [
        ("holds", True),
        ("undecided", False),
        ("undecided", False),
    ]
    assert "declared with the sweep: not corrected" in found[0].text
    assert "corrected for 2 comparisons 6.0e-2" in found[1].text
    assert correction_note(found).startswith(
        "Verdicts stand after Holm's correction over the 2 comparisons of this report besides the primary claim;"
    )
    assert [each.verdict for each in correct([claim("a", 0.04), claim("b", 0.03)], primary=("a",))] == ["holds"] * 2


def declaring(tmp_path, primary, **settings):
    """sc's window is wider than sa's and sw's by much the same; the same study whose sweep declared a claim."""
    study = study_of(tmp_path / primary, lrs=FINE, **settings)
    declared = {"ended": 0, "runs": 12, "at": "2026-11-29 01:02:03 +0000"}
    return dataclasses.replace(study, study=study.study | {"spec": {"primary": primary}, "declared": declared})


def test_a_declared_claim_is_found_among_a_studys_and_its_paper_claim_is_the_same_test(tmp_path):
    found = judge(declaring(tmp_path, "sc.window"))
    primary = {claim.subject for claim in found if claim.is_primary}
    assert primary == {"own window: sc", "window"}
    (best,) = [claim for claim in judge(declaring(tmp_path, "mix.best")) if claim.is_primary]
    assert best.subject == "best NLL: mix"
    text = " ".join(claim.text for claim in judge(declaring(tmp_path, "gla.window")))
    assert "The declared primary claim, gla.window, fits no comparison: all are corrected." in text
    assert "declared primary" not in " ".join(claim.text for claim in judge(study_of(tmp_path / "none", lrs=FINE)))


def test_a_claim_declared_after_runs_had_ended_is_corrected_and_the_table_says_so(tmp_path):
    before = declaring(tmp_path / "before", "sc.window")
    at = {"at": "2026-11-29 01:02:03 +0000"}
    for declared, text in (
        ({"ended": 0, "runs": 130}, "is not corrected: none of 130 runs had ended when it was declared."),
        ({"ended": 0, "runs": 1} | at, "is not corrected: none of 1 run had ended when it was declared on 2026-11-29."),
        ({"ended": 42, "runs": 130} | at, "is corrected as the others are: 42 of 130 runs had ended when it was declared "
         "on 2026-11-29, or when they joined its study."),
        ({"ended": 130, "runs": 130}, "is corrected as the others are: all 130 runs known by then had ended when its "
         "record began."),
        (None, "is corrected as the others are: its record lacks when it was declared."),
    ):  # fmt: skip
        study = dataclasses.replace(before, study=before.study | {"declared": declared})
        assert any(claim.is_primary for claim in judge(study)) == text.startswith("is not")
        assert f"The primary claim, sc.window, {text}" in claims_table(study).caption
        assert f"The primary claim, sc.window, {text}" in reference_table(study).caption


def test_a_cell_whose_verdict_the_correction_undoes_has_the_corrected_p_value(tmp_path):
    """Without it an interval that excludes 0 would stand beside "undecided"."""
    nll = vee(SLOPES, seeds=(0.0, 0.01, 0.03))  # sc's window is 1.20, 1.05 and 0.83 decades wider than sw's
    study = study_of(tmp_path, lrs=FINEST, nll=nll)
    undone = [claim for claim in judge(study) if claim.corrected]
    assert undone and {claim.verdict for claim in undone} == {"undecided"}
    cells = [cell for table in (claims_table(study), reference_table(study)) for row in table.rows for cell in row]
    for each in undone:
        assert each.p < 0.05 and any(each.corrected in (cell.detail or "").splitlines() for cell in cells), each.subject
    assert "where it undoes a verdict, the corrected p stands beside" in correction_note(judge(study))


def test_verdicts_without_a_p_value_are_counted_beside_the_corrected_ones():
    bound = Claim("bound", "holds", n=96, finding="within")
    assert "no p-value" not in correction_note([claim("a", 0.001), claim("b", 0.03)])
    assert "1 verdict has no p-value and no correction" in correction_note([claim("a", 0.001), claim("b", 0.03), bound])


def test_a_residual_connections_claim_may_be_declared(tmp_path):
    settings = [{"residual": each, "objective": "ar"} for each in ("identity", "mhc", "mhc_lite")]
    found = judge(declaring(tmp_path, "mhc_lite.best", mechanisms=["sa"], settings=settings))
    assert [claim.subject for claim in found if claim.is_primary and claim.about[0]] == ["best NLL: sa mhc_lite"]


def test_a_primary_claim_names_a_size_by_the_words_of_the_table(tmp_path):
    settings = [{"model": f"nano width={each}"} for each in (64, 256)]
    for name, subjects in (
        ("sc width=256.best", ["best NLL: sc width=256"]),
        ("width=64 sc.best", ["best NLL: sc width=64"]),
        ("sc layernorm width=64.best", ["best NLL: sc width=64"]),
        ("sc.best", []),
    ):
        study = declaring(tmp_path, name, mechanisms=["sa", "sc"], settings=settings)
        found = judge(study)
        assert [claim.subject for claim in found if claim.is_primary] == subjects
        several = "sc.best, fits 2 comparisons (sc width=64 and sc width=256): all are corrected."
        assert (several in reference_table(study).caption) == (not subjects)


def test_a_variants_claim_may_be_declared_and_is_not_its_bases(tmp_path):
    settings = [{"variant": each} for each in ("", "window=4", "model.logit_softcap=0.5")]
    for declared, subject in (
        ("model.logit_softcap=0.5.best", "best NLL: sa model.logit_softcap=0.5"),
        ("window=4.best", "best NLL: sa window=4"),
    ):
        found = judge(declaring(tmp_path, declared, mechanisms=["sa"], settings=settings))
        assert [claim.subject for claim in found if claim.is_primary] == [subject]
    found = judge(declaring(tmp_path, "sc.best", mechanisms=["sa", "sc"], settings=settings[:2]))
    assert [claim.subject for claim in found if claim.is_primary and claim.about[0]] == ["best NLL: sc"]


def test_two_claims_on_one_comparison_are_counted_once():
    """0.02 and 0.03 stand as two comparisons (0.04); as three, 0.02 would be 0.06."""
    twice = [claim("a", 0.03), claim("a", 0.03), claim("b", 0.02)]
    assert [each.verdict for each in correct(twice)] == ["holds"] * 3
