"""What a study says that compares a mechanism or a residual scheme with its plain one."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pypdf
import pytest

from analysis.claims import judge
from analysis.load import load
from analysis.report import build
from analysis.side_by_side import ratio
from analysis.throughput import throughput_table
from stability.runs import results
from stability.runs.tables import write_parquet
from tests.analysis.synthetic import write_study

LRS = (1e-3, 1e-2, 1e-1)


def study_of(tmp_path, gain, mechanisms=("sa", "attentionx"), accuracy=None, seeds=3):
    """Around 1e-2 both rise by 0.2 nats a decade; attentionx's best NLL lies ``gain`` below sa's 2.0, and its runs take 1.25 times as long."""

    def nll(mechanism, lr, seed):
        return 2.0 + 0.2 * abs(math.log10(lr / 1e-2)) - gain * (mechanism == "attentionx") + 1e-3 * seed

    folder = write_study(tmp_path, mechanisms=mechanisms, lrs=LRS, seeds=seeds, nll=nll)
    path = folder / "results" / "runs.parquet"
    runs = pd.read_parquet(path)
    runs["num_tokens"], runs["wall_s"] = 10_000, runs["mechanism"].map(lambda name: 1.25 if name == "attentionx" else 1.0)
    if accuracy is not None:
        runs["val_accuracy"] = runs["mechanism"].map(accuracy) - 1e-3 * runs["seed"]
    write_parquet(runs, path, {"schema_version": str(results.SCHEMA_VERSION)})
    return folder


@pytest.mark.parametrize(("gain", "verdict", "word"), [(0.1, "holds", "a lower NLL"), (-0.1, "contradicted", "a higher NLL")])
def test_attentionx_is_compared_with_attention(tmp_path, gain, verdict, word):
    claims = {claim.subject: claim for claim in judge(load(study_of(tmp_path, gain)))}
    assert claims["best NLL attentionx"].verdict == verdict
    assert f"that attentionx reaches {word} than sa" in claims["best NLL attentionx"].text
    assert "medians: 1.901 against 2.001" in claims["best NLL attentionx"].text or gain < 0
    text = " ".join(claim.text for claim in claims.values())
    assert "no sc runs" not in text and "385 million" not in text and "ViT-small and GPT-2" in text


def test_accuracy_is_compared_where_there_is_one_and_higher_is_better(tmp_path):
    claims = {claim.subject: claim for claim in judge(load(study_of(tmp_path, 0.1, accuracy={"sa": 0.5, "attentionx": 0.4})))}
    assert claims["best accuracy attentionx"].verdict == "contradicted"
    assert (
        "reaches a lower accuracy than sa" in claims["best accuracy attentionx"].text and "paired difference −0.1000" in claims["best accuracy attentionx"].text
    )
    assert claims["best NLL attentionx"].verdict == "holds"


def test_with_consensus_in_the_study_its_own_question_stands_first(tmp_path):
    claims = [claim.subject for claim in judge(load(study_of(tmp_path, 0.1, mechanisms=("sa", "sc", "attentionx"))))]
    assert claims.index("window") < claims.index("best NLL attentionx")


def test_throughput_of_the_runs_own_clocks_makes_no_ratio(tmp_path):
    study = study_of(tmp_path, 0.1)
    table = throughput_table(load(study))
    assert table.header == ("mechanism", "per second") and [[cell.text for cell in row] for row in table.rows] == [["sa", "10,000"], ["attentionx", "8,000"]]
    assert "no ratio is made of it. python -m benchmarks.throughput runs/studies/synthetic measures" in table.caption and "AMD EPYC 7B13, 2 cores" in table.caption
    assert "Throughput as trained" in " ".join("".join(page.extract_text() for page in pypdf.PdfReader(build(study, tmp_path)).pages).split())
    assert throughput_table(load(write_study(tmp_path / "other"))) is None


def side_by_side(study, seconds, version=1):
    """What `benchmarks.throughput` leaves: 512 tokens a step."""
    rows = [{"run_id": name, "series": name, "num_params": 1, "tokens_per_step": 512, "seconds": list(values)} for name, values in seconds.items()]
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
    with pytest.raises(ValueError, match="holds no throughput of version 1: `python -m benchmarks.throughput .*` writes it again"):
        load(study)
