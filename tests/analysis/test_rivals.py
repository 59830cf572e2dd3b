"""What a study says that compares a mechanism or a residual scheme with its plain one."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pypdf
import pytest

from analysis.claims.judging import judge
from analysis.numbers.side_by_side import ratio
from analysis.report import build
from analysis.sections.throughput import throughput_table
from analysis.study.load import load
from stability.runs import results
from stability.runs.parquet import write_parquet
from tests.analysis.judged import claims_of
from tests.analysis.synthetic import write_study

LRS = (1e-3, 1e-2, 1e-1)


def study_of(tmp_path, gain, mechanisms=("sa", "attentionx"), accuracy=None, seeds=3):
    """Around 1e-2 both rise by 0.2 nats a decade; attentionx's best NLL lies ``gain`` below sa's 2.0, and its runs take
    1.25 times as long."""

    def nll(mechanism, lr, seed):
        return 2.0 + 0.2 * abs(math.log10(lr / 1e-2)) - gain * (mechanism == "attentionx") + 1e-3 * seed

    settings = ({"objective": "classify"} if accuracy else {},)
    folder = write_study(tmp_path, mechanisms=mechanisms, lrs=LRS, seeds=seeds, nll=nll, settings=settings)
    path = folder / "results" / "runs.parquet"
    runs = pd.read_parquet(path)
    runs["num_tokens"], runs["wall_s"] = (
        10_000,
        runs["mechanism"].map(lambda name: 1.25 if name == "attentionx" else 1.0),
    )
    if accuracy is not None:
        runs["val_accuracy"] = runs["mechanism"].map(accuracy) - 1e-3 * runs["seed"]
    write_parquet(runs, path, {"schema_version": str(results.SCHEMA_VERSION)})
    return folder


@pytest.mark.parametrize(("gain", "verdict", "word"), [(0.1, "holds", "lower"), (-0.1, "contradicted", "higher")])
def test_attentionx_is_compared_with_attention(tmp_path, gain, verdict, word):
    claims = {claim.subject: claim for claim in judge(load(study_of(tmp_path, gain)))}
    assert claims["best NLL attentionx"].verdict == verdict
    assert f"attentionx's best NLL is 0.100 nats {word} than sa's" in claims["best NLL attentionx"].text
    assert "Medians: 1.901 against 2.001" in claims["best NLL attentionx"].text or gain < 0
    text = " ".join(claim.text for claim in claims.values())
    assert "no sc runs" not in text and "385 million" not in text and "ViT-small and GPT-2" in text


def test_a_seed_in_which_attention_diverged_at_every_rate_has_no_window_at_all(tmp_path):
    nll = lambda mechanism, lr, seed: math.inf if mechanism == "sa" and seed == 2 else 2.0 + abs(math.log10(lr / 1e-2))  # noqa: E731
    claims = {
        claim.subject: claim
        for claim in judge(load(write_study(tmp_path, mechanisms=("sa", "attentionx"), lrs=LRS, seeds=3, nll=nll)))
    }
    claim = claims["own window: attentionx"]
    assert "no finished run" not in claim.text and claim.n == 3


def test_accuracy_is_compared_where_there_is_one_and_higher_is_better(tmp_path):
    claims = {
        claim.subject: claim for claim in judge(load(study_of(tmp_path, 0.1, accuracy={"sa": 0.5, "attentionx": 0.4})))
    }
    assert claims["best accuracy attentionx"].verdict == "contradicted"
    assert "is 10.00 points lower than sa's (95 %: −10.00 to −10.00 points)" in claims["best accuracy attentionx"].text
    assert claims["best NLL attentionx"].verdict == "holds"


def test_with_consensus_in_the_study_its_own_question_stands_first(tmp_path):
    claims = [claim.subject for claim in judge(load(study_of(tmp_path, 0.1, mechanisms=("sa", "sc", "attentionx"))))]
    assert claims.index("window") < claims.index("best NLL attentionx")


def of_masks(
    tmp_path, objective="mlm", variants=("", "mask_diagonal=true"), accuracy=None, attentionx=None, spec=True, cells=3
):
    """sa at 2.1, sa with a masked diagonal at 2.0 and attentionx at 1.9 nats, by a study.json that says which is which;
    of four ``cells`` attentionx with a masked diagonal at 1.8."""
    objective = "classify" if accuracy else objective
    settings = [{"variant": variant, "objective": objective} for variant in variants]
    folder = write_study(
        tmp_path,
        mechanisms=("sa", "attentionx"),
        lrs=LRS,
        seeds=3,
        settings=settings,
        nll=lambda m, lr, seed: 2.0 + 1e-3 * seed,
    )
    path = folder / "results" / "runs.parquet"
    runs = pd.read_parquet(path)
    runs = runs[(runs["mechanism"] == "sa") | (runs["variant"] == "") | (cells == 4)]
    runs["val_nll"] += (
        0.2 * np.abs(np.log10(runs["lr"] / 1e-2))
        + 0.1 * (runs["mechanism"] == "sa")
        - 0.1 * (runs["variant"] != "")
        - 0.1 * (runs["mechanism"] != "sa")
    )
    if accuracy:
        runs["val_accuracy"] = [
            accuracy[mechanism + variant[:1]] + 1e-4 * seed
            for mechanism, variant, seed in zip(runs["mechanism"], runs["variant"], runs["seed"], strict=True)
        ]
    write_parquet(runs, path, {"schema_version": str(results.SCHEMA_VERSION)})
    manifest = json.loads((folder / "study.json").read_text())
    if spec:
        manifest["spec"] = {
            "mechanism": [
                {"name": "sa", "mask_diagonal": False},
                {"name": "attentionx", "gamma": None, "mask_diagonal": attentionx},
            ]
        }
    (folder / "study.json").write_text(json.dumps(manifest))
    return folder


def test_attentionx_is_judged_against_attention_with_its_own_mask(tmp_path):
    """Masking alone gains 0.1 nats, and the discrepancy 0.0 or 0.1 beyond it: beside unmasked attention both would look
    like the mechanism's."""
    found = claims_of(of_masks(tmp_path, accuracy={"sa": 0.3, "sam": 0.5, "attentionx": 0.4}))
    best = found["best NLL attentionx"]
    assert (
        best.verdict == "holds"
        and "is 0.100 nats lower than sa mask_diagonal=true's" in best.text
        and "of the same mask" in best.statement
    )
    assert (
        found["best accuracy attentionx"].verdict == "contradicted"
        and "same mask" in found["best accuracy attentionx"].statement
    )
    assert found["throughput attentionx beside sa mask_diagonal=true"].verdict == "not judged"
    assert "same mask attentionx" not in found


def test_each_of_two_masks_of_attentionx_is_judged_against_attention_with_its_own(tmp_path):
    found = claims_of(of_masks(tmp_path, attentionx=False, cells=4))
    assert [subject for subject, claim in found.items() if subject.startswith("best") and claim.statement] == [
        "best NLL attentionx",
        "best NLL attentionx mask_diagonal=true",
    ]
    assert "lower than sa's" in found["best NLL attentionx"].text
    assert "lower than sa mask_diagonal=true's" in found["best NLL attentionx mask_diagonal=true"].text
    costs = sorted(claim.statement for subject, claim in found.items() if subject.startswith("throughput attentionx"))
    assert [cost.partition(": ")[2] for cost in costs] == ["attentionx", "attentionx mask_diagonal=true"]


def test_without_attention_of_its_mask_the_claim_is_not_judged(tmp_path):
    found = claims_of(of_masks(tmp_path, variants=("",)))
    missing = found["same mask attentionx"]
    assert (
        missing.verdict == "not judged"
        and "ablate.sa.mask_diagonal=[false,true] would judge it" in missing.text
        and missing.statement
    )
    assert "best NLL attentionx" not in found


@pytest.mark.parametrize(
    ("objective", "attentionx", "plain"),
    [
        ("ar", None, "sa"),
        ("mlm", None, "sa mask_diagonal=true"),
        ("classify", None, "sa mask_diagonal=true"),
        ("mlm", False, "sa"),
        ("ar", True, "sa mask_diagonal=true"),
    ],
)
def test_which_attention_has_the_same_mask_follows_the_settings_and_the_direction(
    tmp_path, objective, attentionx, plain
):
    best = claims_of(of_masks(tmp_path, objective=objective, attentionx=attentionx))["best NLL attentionx"]
    assert f"lower than {plain}'s" in best.text and "of the same mask" in best.statement


def test_a_record_without_settings_is_said_to_be_one(tmp_path):
    found = claims_of(of_masks(tmp_path, spec=False, variants=("",)))
    assert "record does not say whether both have the same mask" in found["best NLL attentionx"].text


def test_throughput_of_the_runs_own_clocks_makes_no_ratio(tmp_path, drawn):
    drawn("nll")
    study = study_of(tmp_path, 0.1)
    table = throughput_table(load(study))
    assert table.header == ("mechanism", "per second") and [[cell.text for cell in row] for row in table.rows] == [
        ["sa", "10,000"],
        ["attentionx", "8,000"],
    ]
    assert (
        "no ratio is made of it. python -m benchmarks.throughput runs/studies/synthetic measures" in table.caption
        and "AMD EPYC 7B13, 2 cores" in table.caption
    )
    assert "Throughput as trained" in " ".join(
        "".join(page.extract_text() for page in pypdf.PdfReader(build(study, tmp_path)).pages).split()
    )
    assert throughput_table(load(write_study(tmp_path / "other"))) is None


def side_by_side(study, seconds, version=1):
    """What `benchmarks.throughput` leaves: 512 tokens a step."""
    rows = [
        {"run_id": name, "series": name, "num_params": 1, "tokens_per_step": 512, "seconds": list(values)}
        for name, values in seconds.items()
    ]
    record = {"version": version, "device": "CPU, 1 thread", "machine": "a machine", "rows": rows}
    (study / "results" / "throughput.json").write_text(json.dumps(record))


def test_a_ratio_is_of_turns_side_by_side(tmp_path):
    study = study_of(tmp_path, 0.1)
    drift = np.linspace(1, 3, 25)  # the machine slows to a third: it takes the same of both
    side_by_side(study, {"sa": 0.1 * drift, "attentionx": 0.125 * drift * (1 + 0.01 * np.sin(np.arange(25)))})
    table = throughput_table(load(study))
    assert table.title == "Throughput side by side"
    (sa, _, one), (attentionx, _, less) = table.rows
    assert (sa.text, one.text, attentionx.text, less.text) == ("sa", "1.00", "attentionx", "0.80") and one.detail == ""
    low, high = map(float, less.detail.split("–"))
    assert 0.79 < low < 0.8 < high < 0.81 and "medians over 25 turns" in table.caption and "a machine" in table.caption


@pytest.mark.parametrize("turns", [6, 9, 25])
def test_the_interval_of_a_median_is_that_of_scipys_binomial(tmp_path, turns):
    stats = pytest.importorskip("scipy.stats")
    study = study_of(tmp_path, 0.1)
    values = np.random.default_rng(0).lognormal(size=turns)
    side_by_side(study, {"sa": values, "attentionx": np.ones(turns)})
    found, ordered = ratio(load(study), "attentionx", "sa"), np.sort(values)
    place = int(stats.binom.ppf(0.025, turns, 0.5)) - 1  # the largest k with P(X ≤ k) < 0.025
    assert stats.binom.cdf(place, turns, 0.5) <= 0.025 < stats.binom.cdf(place + 1, turns, 0.5)
    assert (found.low, found.high) == (pytest.approx(ordered[place]), pytest.approx(ordered[-1 - place]))


def test_too_few_turns_have_no_interval(tmp_path):
    study = study_of(tmp_path, 0.1)
    side_by_side(study, {"sa": [1.0] * 5, "attentionx": [1.1] * 5})
    assert (ratio(load(study), "attentionx", "sa").low, ratio(load(study), "attentionx", "sa").high) == (0.0, math.inf)


def test_a_throughput_of_another_version_is_refused_with_the_command_that_writes_it(tmp_path):
    study = study_of(tmp_path, 0.1)
    side_by_side(study, {"sa": [1.0]}, version=2)
    with pytest.raises(
        ValueError, match="holds no throughput of version 1: `python -m benchmarks.throughput .*` writes it again"
    ):
        load(study)


def test_a_best_value_over_common_rates_alone_says_so(tmp_path):
    """attentionx has no result at sa's best rate."""
    gap = {("attentionx", 1e-2, seed): ("failed", "lost") for seed in range(3)}
    folder = write_study(tmp_path, mechanisms=("sa", "attentionx"), lrs=LRS, seeds=3, statuses=gap)
    claims = {claim.subject: claim for claim in judge(load(folder))}
    assert "sa's at their 2 common rates" in claims["best NLL attentionx"].text
    whole = {claim.subject: claim for claim in judge(load(study_of(tmp_path / "whole", 0.1)))}
    assert "common rate" not in whole["best NLL attentionx"].text
