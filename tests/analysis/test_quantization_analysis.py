"""`what=quantization` in a report: planted changes of the NLL give their slopes, ratios and verdicts."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from pypdf import PdfReader
from scipy import stats

from analysis.claims.judging import judge
from analysis.claims.quantization import PAPER
from analysis.numbers.quantization import compare_decay, compare_rates, count_lost
from analysis.report import build
from analysis.sections.quantization import TABLES, figures, sentences
from analysis.sections.sentences import sentences as first_sentences
from analysis.study.load import COLUMNS, load
from tests.analysis.synthetic import write_study, write_table

LRS = (3e-4, 1e-3, 3e-3, 1e-2)
NOISE = {0: 0.02, 1: -0.03, 2: 0.01}  # decades, by seed


def study_with(
    folder, slope=-0.5, ratio=0.3, *, seeds=3, sign=1.0, phases=("terminal", "before_decay"), nll=None, alpha=None
):
    """ΔNLL = 0.1·4^(2 − bits)·(lr / 1e-3)^(slope + noise) at the end, and 10^(−ratio − noise) of that before the decay."""
    folder = write_study(
        folder, mechanisms=("sa", "sw"), lrs=LRS, seeds=seeds, nll=nll or (lambda m, lr, seed: 2.8 + lr), alpha=alpha
    )
    runs = pd.read_parquet(folder / "results" / "runs.parquet")
    rows, layers = [], []
    for run in runs[runs["status"] != "diverged"].itertuples():
        for phase in phases:
            for bits in (8, 3, 2):
                change = 0.1 * 4.0 ** (2 - bits) * (run.lr / 1e-3) ** (slope + NOISE[run.seed])
                change *= 1.0 if phase == "terminal" else 10 ** -(ratio + NOISE[run.seed])
                change *= sign if bits == 3 and run.mechanism == "sw" else 1.0
                named = {"run_id": run.run_id, "phase": phase, "lr": run.lr, "bits": bits, "group": 0}
                numbers = {"sequences": 16, "share": 0.9, "nll": 2.8, "quantized_nll": 2.8 + change}
                rows.append({**named, **numbers, "difference": change})
                layers += [
                    {**named, "layer": layer, "branch": branch, "error": 2.0**-bits, "rms": 0.05, "kurtosis": 3.0}
                    for layer in (0, 1)
                    for branch in ("mixer", "ffn")
                ]
    for name, found in (("quantization", rows), ("quantization_layers", layers)):
        write_table(folder / "results" / f"{name}.parquet", name, pd.DataFrame(found, columns=COLUMNS[name]))
    return folder


def claims_of(study, kind):
    return {each.subject: each for each in judge(study) if each.subject.startswith(f"quantization {kind}")}


def test_slopes_and_ratios_are_the_planted_ones(tmp_path):
    study = load(study_with(tmp_path))
    for bits in (3, 2):
        found = compare_rates(study, "sa", bits)
        assert found.by_seed == pytest.approx([-0.5 + NOISE[seed] for seed in range(3)])
        assert found.rates == LRS and found.near == pytest.approx(found.by_seed)
        assert compare_decay(study, "sa", bits).by_seed == pytest.approx([0.3 + NOISE[seed] for seed in range(3)])


def test_verdicts_are_those_of_student_s_t(tmp_path):
    study = load(study_with(tmp_path))
    rate, decay = claims_of(study, "rate"), claims_of(study, "decay")
    assert set(rate) == {f"quantization rate {name} {bits}" for name in ("sa", "sw") for bits in (3, 2)}  # not 8 bits
    assert {each.verdict for each in (*rate.values(), *decay.values())} == {"holds"}
    values = [-0.5 + NOISE[seed] for seed in range(3)]
    found = rate["quantization rate sa 2"]
    assert found.p == pytest.approx(stats.ttest_1samp(values, 0).pvalue) and found.n == 3 and found.paper == PAPER
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert found.interval == f"95 %: −{-low:.2f} to −{-high:.2f} decades"
    assert (
        "the decay changes ΔNLL by +0.30 decades, to 2.00 times that before (95 %: "
        in decay["quantization decay sa 2"].text
    )


def test_the_opposite_is_not_supported_and_no_slope_undecided(tmp_path):
    study = load(study_with(tmp_path / "up", slope=0.5, ratio=-0.3))
    assert {each.verdict for kind in ("rate", "decay") for each in claims_of(study, kind).values()} == {"contradicted"}
    study = load(study_with(tmp_path / "flat", slope=0.0, ratio=0.0))
    assert {each.verdict for kind in ("rate", "decay") for each in claims_of(study, kind).values()} == {"undecided"}


def test_two_seeds_indicate_and_one_claims_nothing(tmp_path):
    two = claims_of(load(study_with(tmp_path / "two", seeds=2)), "rate")["quantization rate sa 2"]
    assert two.verdict == "holds" and two.text.startswith("Indicated (n = 2)")
    one = claims_of(load(study_with(tmp_path / "one", seeds=1)), "rate")["quantization rate sa 2"]
    assert one.verdict == "no claim" and math.isnan(one.p)


def test_a_change_of_either_sign_is_not_judged(tmp_path):
    study = load(study_with(tmp_path, sign=-1.0))
    found = claims_of(study, "rate")
    assert found["quantization rate sw 3"].verdict == "not judged"
    assert "rounding lowers the NLL of some runs" in found["quantization rate sw 3"].text
    assert found["quantization rate sw 2"].verdict == "holds"
    panels = {ax.get_title(loc="left"): ax for ax in figures(study)["quantization"].figure.axes}
    assert panels["2 bits"].get_yscale() == "log" and panels["3 bits"].get_yscale() == "linear"


def test_diverged_and_plateaued_runs_enter_no_slope_and_are_counted(tmp_path):
    def nll(mechanism, lr, seed):
        return math.inf if lr > 5e-3 and seed == 1 and mechanism == "sa" else 2.8 + lr

    study = load(study_with(tmp_path, nll=nll))
    assert compare_rates(study, "sa", 2).rates == LRS[:3] and compare_rates(study, "sw", 2).rates == LRS
    assert count_lost(study, "sa") == {"diverged": 1} and count_lost(study, "sw") == {}
    assert "Runs without a point: 1 diverged of 12 of sa." in figures(study)["quantization"].caption


def test_too_few_rates_are_named_with_what_counts_as_learned(tmp_path):
    def nll(mechanism, lr, seed):
        return math.inf if lr > 2e-3 and seed == 1 and mechanism == "sa" else 2.8 + lr

    found = claims_of(load(study_with(tmp_path, nll=nll)), "rate")
    assert found["quantization rate sa 2"].verdict == "not judged"
    assert found["quantization rate sa 2"].text.endswith(
        "not judged, since all seeds keep half of what the best rate learned at 2 of 4 learning rates, and 3 are needed."
    )
    assert found["quantization rate sw 2"].verdict == "holds"


def test_an_infinite_change_is_the_reason_that_is_given(tmp_path):
    found = compare_rates(load(study_with(tmp_path, sign=math.inf)), "sw", 3)
    assert found.why_not == "rounding makes the NLL of some runs infinite" and not found.by_seed


def test_without_checkpoints_before_a_decay_there_is_no_claim_about_it(tmp_path):
    study = load(study_with(tmp_path, phases=("terminal",)))
    assert claims_of(study, "decay") == {} and len(claims_of(study, "rate")) == 4
    assert "Dotted" not in figures(study)["quantization"].caption


def test_tables_have_each_rate_and_number_of_bits(tmp_path):
    study = load(study_with(tmp_path))
    first, layers, before, _ = TABLES.of_study(study)
    assert first.header == ("mechanism", "LR", "NLL", "8 bits", "3 bits", "2 bits") and len(first.rows) == 8
    assert first.rows[1][5].text == "+0.1000" and "before the decay" in before.title
    assert layers.header[2:4] == ("RMS", "kurtosis") and layers.rows[0][5].text == "1.2e-1"
    assert len(sentences(study)) == 8


def test_the_layers_table_has_alpha_max_of_the_terminal_checkpoint(tmp_path):
    """Of each run the median of its recorded steps, 2·LR; of seeds the median. The earliest checkpoint has another."""
    folder = study_with(tmp_path, alpha=lambda mechanism, lr, seed, state: [9 * lr, lr, 2 * lr])
    curvature = pd.read_parquet(folder / "results" / "curvature.parquet")
    earliest = curvature.assign(phase="earliest", alpha_max=1e3 * curvature["alpha_max"])
    write_table(folder / "results" / "curvature.parquet", "curvature", pd.concat([curvature, earliest]))
    layers = TABLES.of_study(load(folder))[1]
    assert layers.header[-1] == "α_max" and "median over recorded steps" in layers.caption
    assert [row[-1].text for row in layers.rows[:4]] == ["6.0e-4", "2.0e-3", "6.0e-3", "2.0e-2"]
    assert "α_max" not in TABLES.of_study(load(study_with(tmp_path / "without")))[1].header


def test_the_report_shows_verdicts_figure_and_table(tmp_path, drawn):
    drawn("quantization")
    pages = PdfReader(build(study_with(tmp_path), tmp_path)).pages
    text = " ".join("".join(page.extract_text() for page in pages).split())
    for words in ("Weights in few bits", "ΔNLL with rounded weights", "sa, 2 bits: a larger learning rate"):
        assert words in text


def test_rates_that_lost_half_of_the_learning_enter_no_slope(tmp_path):
    """Token frequencies have 3.2, the best rate 2.8: above 3.0 a run has little to lose."""
    study = load(study_with(tmp_path, nll=lambda mechanism, lr, seed: 2.8 if lr < 5e-3 else 2.99 + 0.02 * (seed == 2)))
    assert compare_rates(study, "sa", 2).rates == LRS[:3]
    kept = load(study_with(tmp_path / "kept", nll=lambda mechanism, lr, seed: 2.8 if lr < 5e-3 else 2.99))
    assert compare_rates(kept, "sa", 2).rates == LRS


def test_the_first_page_has_the_verdicts_on_rounded_weights(tmp_path):
    study = load(study_with(tmp_path / "all"))
    (said,) = [text for text in first_sentences(study) if text.startswith("Weights rounded to few bits")]
    rate = next(each for each in claims_of(study, "rate").values() if each.finding in said)
    decay = next(each for each in claims_of(study, "decay").values() if each.finding in said)
    assert said == (
        "Weights rounded to few bits (ΔNLL: the NLL added): a larger learning rate quantises better: 4 supported "
        f"(n = 3) ({rate.finding}, {rate.interval}); the decay makes quantisation worse: 4 supported (n = 3) "
        f"({decay.finding}, {decay.interval})."
    )
    assert rate.p == min(each.p for each in claims_of(study, "rate").values())
    assert " ".join(first_sentences(study)).count(rate.finding) == 1, "said once"
    mixed = load(study_with(tmp_path / "mixed", slope=0.0, sign=-1.0, phases=("terminal",)))
    (said,) = [text for text in first_sentences(mixed) if text.startswith("Weights rounded")]
    assert "quantises better: 3 undecided and 1 not judged (" in said and "decay" not in said
    unmeasured = load(write_study(tmp_path / "none", mechanisms=("sa", "sw"), lrs=LRS, seeds=3))
    assert not any("rounded" in text for text in first_sentences(unmeasured))
