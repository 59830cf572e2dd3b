"""Every sentence of the claims, each made to happen by a study built for it."""

import math

import pytest

from analysis.claims.judging import judge
from analysis.drawing.pieces import typst
from analysis.numbers.comparison import compare_windows, decide
from analysis.numbers.windows import SeriesWindows, window
from analysis.sections import overview
from analysis.study.load import load
from tests.analysis.synthetic import UNIGRAM, write_study

LRS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
FINE = tuple(float(f"{10 ** (place / 4):.9g}") for place in range(-16, 1))  # resolves windows of a decade
# Rise in nats per decade around 1e-2, from a best of 2.0: 5 % (0.1) is crossed 0.1/slope decades away, the window is
# 0.2/slope wide.
WIDE, MIDDLE, NARROW = 0.1, 0.15, 0.2


def vee(slopes, jitter=0.0, best=2.0):
    """NLL functions with one slope per mechanism; every seed's slope is ``jitter`` larger than the last one's."""
    return lambda mechanism, lr, seed: best + (slopes[mechanism] + jitter * seed) * abs(math.log10(lr / 1e-2))


def judged(tmp_path, **settings):
    """Subject → claim of a study; every text ends with a full stop and holds no placeholder."""
    study = load(write_study(tmp_path, **({"lrs": LRS, "mechanisms": ("sa", "sc", "mix")} | settings)))
    for text in (claim.text for claim in judge(study)):
        assert text.endswith(".") and "  " not in text and ".." not in text and " ." not in text, text
        assert "nan" not in text.replace("nats", "") and "inf" not in text.replace("infinite", ""), text
    return {claim.subject: claim for claim in judge(study)}


def windows_of(*nlls_by_seed, lrs=LRS):
    return SeriesWindows("x", None, {seed: window(lrs, nlls) for seed, nlls in enumerate(nlls_by_seed)})


def test_wider_is_indicated_by_two_seeds_that_agree(tmp_path):
    claim = judged(tmp_path, lrs=FINE, nll=vee({"sc": WIDE, "sa": NARROW, "mix": MIDDLE}, jitter=0.001))["window"]
    assert claim.verdict == "holds" and claim.text.startswith(
        "Indicated (n = 2): sc's own window is 0.99 decades wider than sa's (range: +0.99 to +1.00 decades)."
    )
    assert claim.effect == "sc 1.99, sa 1.00 decades" and claim.paper.startswith("Stabilizing Transformer")


def test_windows_of_mechanisms_that_learned_little_end_at_half_of_it(tmp_path):
    learned = 0.05 * UNIGRAM - 0.001
    slopes = {"sc": 0.05, "sa": NARROW}
    nll = lambda m, lr, seed: UNIGRAM - (learned if m == "sc" else 0.5) + slopes[m] * abs(math.log10(lr / 1e-2))  # noqa: E731
    claims = judged(tmp_path, nll=nll, mechanisms=("sa", "sc"), lrs=FINE)
    assert claims["little learned"].text == (
        f"Little was learned beyond token frequencies: sc {learned:.3f} nats (5.0 %) below the token-frequency NLL. "
        "What is said of windows is said of models at that stage."
    )
    # half of 0.159 nats, 0.05 a decade: 1.59 decades to either side; 5 % of 3.041 would be 3.04
    assert claims["window"].effect == "sc 3.18, sa 1.35 decades"
    much = judged(tmp_path / "much", nll=vee({"sc": WIDE, "sa": NARROW}), mechanisms=("sa", "sc"))
    assert "little learned" not in much


def test_a_short_report_says_which_mechanisms_learned_little_or_too_little(tmp_path):
    gains = {"sa": 1.0, "sc": 0.04, "mix": 0.3}
    falls = lambda m, lr, seed: UNIGRAM - gains[m] * UNIGRAM * 0.12 + 0.01 * abs(math.log10(lr / 1e-2))  # noqa: E731
    study = load(write_study(tmp_path, nll=falls, mechanisms=tuple(gains), lrs=LRS, seeds=3))
    found = typst(overview.CLAIMS.brief(study, {}))
    assert "sc is untrained: its best validation NLL" in found
    assert f"Little was learned beyond token frequencies: mix {0.036 * UNIGRAM:.3f} nats (3.6\xa0%)" in found


def test_wider_is_a_result_with_three_seeds_and_an_interval(tmp_path):
    curves = vee({"sc": WIDE, "sa": NARROW, "mix": MIDDLE}, jitter=0.001)
    claim = judged(tmp_path, lrs=FINE, nll=curves, seeds=3)["window"]
    assert claim.verdict == "holds" and claim.text.startswith(
        "Supported (n = 3): sc's own window is 0.99 decades wider than sa's (95 %: +0.9"
    )
    assert claim.text.endswith("Within 5 % of sa's best validation NLL: sc 1.98, sa 1.00 decades, wider.")


def test_narrower_contradicts_the_paper(tmp_path):
    claim = judged(tmp_path, lrs=FINE, nll=vee({"sc": NARROW, "sa": WIDE, "mix": MIDDLE}))["window"]
    assert claim.verdict == "contradicted"
    assert claim.text.startswith("Indicated against (n = 2): sc's own window is 1.00 decades narrower than sa's")


def test_two_seeds_that_disagree_decide_nothing(tmp_path):
    nll = lambda m, lr, seed: (  # noqa: E731
        2.0 + (0.15 + (0.05 if (m == "sc") == (seed == 0) else -0.05)) * abs(math.log10(lr / 1e-2))
    )
    claim = judged(tmp_path, nll=nll, mechanisms=("sa", "sc"))["window"]
    assert claim.verdict == "undecided" and claim.text.startswith(
        "Undecided: needs more than 100 seeds in all. Measured"
    )


def test_three_seeds_whose_interval_contains_zero_decide_nothing(tmp_path):
    nll = lambda m, lr, seed: 2.0 + (0.15 + (-0.05 + 0.04 * seed if m == "sc" else 0)) * abs(math.log10(lr / 1e-2))  # noqa: E731
    claim = judged(tmp_path, nll=nll, mechanisms=("sa", "sc"), seeds=3)["window"]
    assert claim.verdict == "undecided" and "95 %: −" in claim.text and "needs about" in claim.text


def test_one_seed_makes_no_claim(tmp_path):
    claims = judged(tmp_path, nll=vee({"sc": WIDE, "sa": NARROW, "mix": MIDDLE}), seeds=1, alpha=lambda *_: [1.0])
    subjects = ("window", "mix window", "mix best NLL", "stable steps paper", "median α_max checkpoint")
    assert [claims[subject].verdict for subject in subjects] == ["no claim"] * 5
    assert claims["window"].text.startswith("No claim: one seed. Measured: sc's own window is 1.00 decades wider")
    assert claims["mix best NLL"].text.startswith("No claim: one seed. Measured: mix's best validation NLL lies 0.00 %")
    assert claims["stable steps paper"].text.startswith("No claim: one seed. Measured: ")


def test_no_common_seed_makes_no_claim(tmp_path):
    statuses = {("sa", lr, 0): ("failed", "") for lr in LRS} | {("sc", lr, 1): ("failed", "") for lr in LRS}
    claim = judged(tmp_path, nll=vee({"sc": WIDE, "sa": NARROW}), mechanisms=("sa", "sc"), statuses=statuses)["window"]
    assert claim.verdict == "no claim" and claim.text.startswith("No claim: no seed has both. Measured: ")


@pytest.mark.parametrize(
    ("slopes", "verdict", "words"),
    [
        (
            {"sc": WIDE, "sa": NARROW, "mix": MIDDLE},
            "unresolved",
            "mix's own window is 0.33 decades wider than sa's",
        ),
        ({"sc": MIDDLE, "sa": NARROW, "mix": WIDE}, "holds", "mix's own window is 1.00 decades wider than sa's"),
        ({"sc": WIDE, "sa": NARROW, "mix": 0.5}, "contradicted", "mix's own window is 0.60 decades narrower than"),
        ({"sc": WIDE, "sa": NARROW, "mix": NARROW}, "undecided", "Undecided: needs more than 100 seeds in all."),
    ],
)
def test_mix_is_asked_for_a_wider_window_than_sa_whatever_sc_has(tmp_path, slopes, verdict, words):
    """The paper nowhere says that it lies between the two: wider than both is no contradiction."""
    claim = judged(tmp_path, lrs=FINE, nll=vee(slopes))["mix window"]
    assert claim.verdict == verdict and words in claim.text


def test_an_open_window_that_is_wider_already_is_wider_and_said_to_be_a_lower_bound(tmp_path):
    claim = judged(
        tmp_path,
        nll=lambda m, lr, _: 2.0 if m == "sc" and lr > 5e-4 else vee({"sa": NARROW, "sc": NARROW})(m, lr, 0),
        mechanisms=("sa", "sc"),
    )["window"]
    assert claim.verdict == "holds" and "sc's own window is at least 2." in claim.text and "sc ≥ 3." in claim.effect
    assert "Open windows are lower bounds (sc's at the high end)." in claim.text


def test_windows_open_at_the_same_end_are_compared_within_the_range_and_it_says_so(tmp_path):
    limits = {"sc": 1.0, "sa": 2.0}
    nll = lambda m, lr, _: 2.0 + limits[m] * max(0.0, math.log10(lr / 1e-2))  # noqa: E731
    fine = tuple(float(f"{10 ** (place / 80):.9g}") for place in range(-200, -119))  # edges 0.05 and 0.1 above 1e-2
    claim = judged(tmp_path, lrs=fine, nll=nll, mechanisms=("sa", "sc"))["window"]
    assert claim.verdict == "holds" and "0.05 decades wider than sa's within the swept range" in claim.text
    assert "(sc's at the low end and sa's at the low end), and beyond the sweep the order may be another." in claim.text


def test_windows_that_fill_the_sweep_ask_for_a_wider_one(tmp_path):
    claim = judged(tmp_path, nll=lambda *_: 2.0, mechanisms=("sa", "sc"))["window"]
    assert claim.verdict == "undecided"
    assert "Both windows fill the whole sweep, a wider range of learning rates would tell." in claim.text


def test_edges_next_to_divergences_that_leave_too_much_room_decide_nothing(tmp_path):
    # sc's edge lies somewhere in (1e-2, 1e-1), and so does sa's.
    nll = lambda m, lr, _: math.inf if lr > 5e-2 else 2.0 + (0.2 if m == "sa" else 0.1) * abs(math.log10(lr / 1e-2))  # noqa: E731
    claim = judged(tmp_path, nll=nll, mechanisms=("sa", "sc"))["window"]
    assert claim.verdict == "undecided" and "sc 1.00–2.00" in claim.effect and "leave too much room" in claim.text


def test_different_grids_are_not_compared_within_a_range():
    first = SeriesWindows("x", None, {0: window(LRS[:3], [2.0] * 3)})
    second = SeriesWindows("y", None, {0: window(LRS[:2], [2.0] * 2)})
    result = compare_windows(first, second)
    assert result.direction == 0 and result.why_undecided.startswith("the two were swept over different ranges")


def test_widths_within_a_hundredth_of_a_decade_are_a_tie():
    base = [2.0 + NARROW * abs(math.log10(lr / 1e-2)) for lr in LRS]
    same = [2.0 + (NARROW + 0.001) * abs(math.log10(lr / 1e-2)) for lr in LRS]
    assert compare_windows(windows_of(base, base), windows_of(same, same)).direction == 0


def test_bounds_decide_by_all_seeds_or_by_the_interval():
    assert decide([], [])[0] == 0
    assert decide([0.1, 0.2], [math.inf, math.inf]) == (1, (0.1, math.inf))
    assert decide([-math.inf, -0.5], [-0.1, -0.2])[0] == -1
    assert decide([0.1, -0.1], [0.1, -0.1])[0] == 0
    # mean 0.2, standard deviation 0.1: 0.2 ± 4.30·0.1/√3 = ±0.248 contains 0.
    assert decide([0.1, 0.2, 0.3], [0.1, 0.2, 0.3])[0] == 0
    assert decide([0.19, 0.2, 0.21], [0.19, 0.2, math.inf])[0] == 1


def learned(gains, unigram=UNIGRAM, jitter=0.0):
    """NLL functions whose best lies a gain per mechanism below the token-frequency NLL; every seed's NLL is ``jitter``
    larger than the last one's."""
    return lambda m, lr, seed: unigram - gains[m] * (1 - 0.2 * abs(math.log10(lr / 1e-2))) + jitter * seed


def test_a_mechanism_that_stayed_a_quarter_behind_the_others_is_untrained(tmp_path):
    claims = judged(tmp_path / "a", nll=learned({"sa": 1.2, "sc": 1.0, "mix": 0.299}))
    assert {claims[name].verdict for name in ("mix window", "mix best NLL", "trained mix")} == {"not judged"}
    assert claims["trained mix"].text == (
        "mix is untrained: its best validation NLL, 2.901, lies 0.299 nats below the token-frequency NLL of 3.200, "
        "less than a quarter of the 1.200 that another mechanism learned: no claim is made about its window, its NLL and its α_max."
    )
    claims = judged(tmp_path / "b", nll=learned({"sa": 1.2, "sc": 1.0, "mix": 0.301}))
    assert "trained mix" not in claims and claims["mix window"].verdict != "not judged"


@pytest.mark.parametrize("unigram", [1.386, 3.2, 5.53])
def test_below_a_hundredth_of_the_token_frequency_nll_nobody_is_trained(tmp_path, unigram):
    """Nucleotides, bytes, byte pairs: the same share."""
    claims = judged(
        tmp_path / "a", nll=learned(dict.fromkeys(("sa", "sc", "mix"), 0.0099 * unigram), unigram), unigram=unigram
    )
    assert {"trained sa", "trained sc", "trained mix"} <= claims.keys() and claims["window"].verdict == "not judged"
    assert f"where at least {0.01 * unigram:.3f} below is asked for (1 %)" in claims["trained sa"].text
    claims = judged(
        tmp_path / "b", nll=learned(dict.fromkeys(("sa", "sc", "mix"), 0.0101 * unigram), unigram), unigram=unigram
    )
    assert "trained sa" not in claims and claims["window"].verdict != "not judged"
    assert "little learned" in claims, "trained, and it is said how little"


def test_good_models_of_dna_count_as_trained_and_their_windows_end_at_half_of_what_they_learned(tmp_path):
    """1.386 → 1.35 nats, as on E. coli: 5 % reach to 1.4175, above the token-frequency NLL; half is lost at 1.368."""
    slopes = {"sc": 0.01, "sa": 0.02, "mix": 0.015}
    nll = lambda m, lr, seed: min(1.35 + slopes[m] * abs(math.log10(lr / 1e-2)) + 1e-4 * seed, 1.386)  # noqa: E731
    claims = judged(tmp_path, lrs=FINE, nll=nll, seeds=3, unigram=1.386)
    assert "trained sa" not in claims and claims["window"].verdict == "holds"
    assert claims["window"].effect == "sc 3.59, sa 1.79 decades"
    assert "sa 0.036 nats (2.6 %)" in claims["little learned"].text


def test_a_gain_that_the_seeds_do_not_settle_is_none(tmp_path):
    # gains at the best rate: 0.35, 0.05, −0.25; median 0.05 (1.6 %), Student-t 95 % interval 0.05 ± 0.75
    claims = judged(tmp_path, nll=learned(dict.fromkeys(("sa", "sc", "mix"), 0.35), jitter=0.3), seeds=3)
    assert "its seeds do not rule out that this is chance (NLLs up to 3.895)" in claims["trained sc"].text


def test_an_untrained_sa_or_sc_makes_the_claim_unjudgeable(tmp_path):
    claims = judged(tmp_path, nll=lambda m, *_: 3.3 if m == "sa" else 2.0, alpha=lambda *_: [1.0])
    assert "lies 0.100 nats above the token-frequency NLL" in claims["trained sa"].text
    assert claims["window"].text == "Not judged: sa learned too little."
    assert claims["mix window"].verdict == "not judged" and "stable steps paper" in claims


def test_a_mechanism_that_only_diverged_or_has_no_unigram_is_untrained(tmp_path):
    claims = judged(tmp_path, nll=lambda m, *_: math.inf if m == "sa" else 2.0)
    said = "sa diverged in every run: no claim is made about its window and its NLL, and its steps count as 0 % stable."
    assert claims["trained sa"].text == said
    failed = {("sa", 1e-4, 0): ("failed", "x")}
    claims = judged(tmp_path / "failed", nll=lambda m, *_: math.inf if m == "sa" else 2.0, statuses=failed)
    assert (
        claims["trained sa"].text
        == "sa has no learning rate at which most of its runs finished: no claim is made about its window, its NLL and its α_max."
    )
    claims = judged(tmp_path, nll=lambda *_: 2.0, unigram=math.nan)
    assert (
        claims["trained sc"].text
        == "sc cannot be said to have learned, the token-frequency NLL was not recorded: no claim is made about its window, its NLL and its α_max."
    )


@pytest.mark.parametrize("mechanisms", [("sc", "mix"), ("sa",), ("fox", "mix"), ("sa", "fox")])
def test_claims_on_mechanisms_that_the_study_lacks_are_not_made(tmp_path, mechanisms):
    claims = judged(tmp_path, mechanisms=mechanisms, nll=lambda *_: 2.0)
    assert not {"window", "window sw", "absent"} & claims.keys()


def shares(sc, sa):
    """α_max of ten steps of which the given numbers (by seed) lie above any training rate; the two highest LRs only,
    all stable below."""

    def alpha(mechanism, lr, seed, _):
        stable = {"sc": sc, "sa": sa}[mechanism][seed] if lr > 5e-2 else 10
        return [10.0] * stable + [1e-9] * (10 - stable)

    return alpha


@pytest.mark.parametrize(
    ("sc", "sa", "verdict", "words"),
    [
        ((8, 9), (1, 2), "holds",
            "Indicated (n = 2): sc has the largest share of stable steps at the highest learning rates that all have "
            "(1e-1 and 1e0), at terminal checkpoints, from the runs' own optimizer state: sc 85 %, sa 15 % (range: "
            "+70 to +70 points beyond sa)."),
        ((1, 2), (8, 9), "contradicted", "Indicated against (n = 2): sa has a larger share of stable steps than sc at"),
        ((5, 5), (4, 6), "undecided", "sc 50 %, sa 50 %; sc not apart from sa (range: −10 to +10 points beyond sa)."),
        # 70, 70, 40: mean 60, deviation 17.3, t = 6, p = 0.027; undecided after the correction for the other claims
        ((8, 9, 8), (1, 2, 4), "undecided", "Alone p = 2.7e-2, corrected for"),
        ((8, 8, 8), (1, 1, 1), "holds", "Supported (n = 3): sc has the largest share of stable steps"),
        ((8, 9, 2), (1, 2, 9), "undecided", "points beyond sa)."),
    ],
)  # fmt: skip
def test_stable_steps_at_the_highest_rates(tmp_path, sc, sa, verdict, words):
    claims = judged(
        tmp_path, mechanisms=("sa", "sc"), nll=vee({"sc": WIDE, "sa": NARROW}), seeds=len(sc), alpha=shares(sc, sa)
    )
    assert claims["stable steps checkpoint"].verdict == verdict and words in claims["stable steps checkpoint"].text
    assert (
        claims["stable steps paper"].verdict == verdict
        and "from the paper's warm-up state" in claims["stable steps paper"].text
    )


def test_steps_claims_need_rows_of_both_at_one_rate(tmp_path):
    nll = vee({"sc": WIDE, "sa": NARROW})
    none = judged(tmp_path / "a", mechanisms=("sa", "sc"), nll=nll)["stable steps"]
    assert none.verdict == "not judged" and none.text.startswith("No α_max was measured at terminal checkpoints")
    alpha = lambda m, lr, *_: [1.0] if (m == "sa") == (lr > 5e-3) else []  # noqa: E731
    apart = judged(tmp_path / "c", mechanisms=("sa", "sc"), nll=nll, alpha=alpha, states=["own"])["stable steps own"]
    assert apart.text == (
        "At terminal checkpoints, in state own, sc and sa share no learning rate with results of a seed of both: "
        "who has the largest share of stable steps cannot be judged."
    )


def test_runs_without_results_are_counted(tmp_path):
    statuses = {("sa", 1e-4, 0): ("failed", "x"), ("sa", 1e-4, 1): ("queued", ""), ("sc", 1e-4, 1): ("running", "")}
    claims = judged(tmp_path, mechanisms=("sa", "sc"), nll=lambda *_: 2.0, statuses=statuses)
    assert claims["coverage"].text.startswith("Of 20 runs, 1 failed, 1 running and 1 queued: these are no results")
    assert "coverage" not in judged(tmp_path / "clean", nll=lambda *_: 2.0)
    left = judged(
        tmp_path / "left",
        mechanisms=("sa", "sc"),
        nll=lambda *_: 2.0,
        statuses={("sa", 1e-4, 0): ("stopped", "rung 1")},
    )
    assert left["coverage"].text.startswith("Of 20 runs, 1 stopped: these are no results"), "left by a search"


def test_the_scale_is_stated(tmp_path):
    text = judged(tmp_path, nll=lambda *_: 2.0)["scale"].text
    assert text.startswith("All this is at 231 k to 248 k parameters, 200 steps and 102 k tokens per run, 2 seeds;")


def test_each_setting_is_judged_on_its_own(tmp_path):
    settings = ({"optimizer": "adamw"}, {"optimizer": "muon"})
    study = load(
        write_study(tmp_path, lrs=LRS, mechanisms=("sa", "sc"), nll=vee({"sc": WIDE, "sa": NARROW}), settings=settings)
    )
    texts = [claim.text for claim in judge(study) if claim.subject == "window"]
    assert [text.split(":")[0] for text in texts] == ["Setting adamw", "Setting muon"]
