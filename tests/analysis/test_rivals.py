"""What a study says that compares a mechanism or a residual scheme with its plain one."""

from __future__ import annotations

import math

import pandas as pd
import pypdf
import pytest

from analysis.claims import judge
from analysis.load import load
from analysis.report import build
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


def test_throughput_is_that_of_the_runs_clocks_and_its_ratio_to_the_plain_one(tmp_path):
    study = study_of(tmp_path, 0.1)
    table = throughput_table(load(study))
    assert [[cell.text for cell in row] for row in table.rows] == [["sa", "10,000", "1.00"], ["attentionx", "8,000", "0.80"]]
    assert "Throughput as trained" in " ".join("".join(page.extract_text() for page in pypdf.PdfReader(build(study, tmp_path)).pages).split())
    assert throughput_table(load(write_study(tmp_path / "other"))) is None
