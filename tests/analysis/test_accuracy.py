"""The report of classifiers: accuracies as they were stored, and no word about tokens."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from pypdf import PdfReader

from analysis import report
from analysis.sections import accuracy
from analysis.study.load import load
from tests.analysis.synthetic import quickstart_alpha, write_study, write_table

LRS = (1e-3, 1e-2)


@pytest.fixture
def study_dir(tmp_path):
    """sa and attentionx, two rates, three seeds; one run diverged. Accuracies: 0.30, 0.32, 0.37 at the first rate, 0.1
    more at the second."""
    provenance = {
        "data_description": "images of cifar10_train.npz: 50,000 training and 10,000 held-out images",
        "data_fingerprint": "f" * 64,
    }
    folder = write_study(
        tmp_path,
        mechanisms=("sa", "attentionx"),
        lrs=LRS,
        seeds=3,
        nll=lambda mechanism, lr, seed: np.inf if (mechanism, lr, seed) == ("sa", 1e-2, 0) else 1.7 + 0.01 * seed,
        unigram=2.303,
        alpha=quickstart_alpha,
        settings=({"objective": "classify", "data": "images"},),
        provenance=provenance,
    )
    file = folder / "results" / "runs.parquet"
    runs = pd.read_parquet(file)
    runs["val_accuracy"] = [
        (0.30, 0.32, 0.37)[seed] + 0.1 * (lr == 1e-2) for lr, seed in zip(runs["lr"], runs["seed"], strict=True)
    ]
    runs.loc[runs["status"] == "diverged", "val_accuracy"] = None
    write_table(file, "runs", runs.to_dict("records"))
    return folder


def test_cells_hold_the_median_over_the_seeds_that_finished_in_per_cent(study_dir):
    [table] = accuracy.accuracy_tables(load(study_dir))
    assert table.header == ("LR", "sa", "attentionx")
    (_, sa_low, x_low), (_, sa_high, x_high) = table.rows
    assert (x_low.text, x_high.text, sa_low.text, sa_high.text) == ("32.0", "42.0", "32.0", "44.5")
    assert x_high.bold and not x_low.bold
    assert "n=2" in sa_high.detail and "diverged 1/3" in sa_high.detail and "42.0–47.0" in sa_high.detail


def test_the_figure_draws_every_finished_run_and_their_medians(study_dir):
    figure = accuracy.figures(load(study_dir))["accuracy"].figure
    [ax] = figure.axes
    points = [line for line in ax.lines if line.get_marker() != "None"]
    assert sorted(len(line.get_xdata()) for line in points) == [5, 6]
    medians = [line for line in ax.lines if line.get_marker() == "None"]
    assert sorted(round(float(value), 3) for line in medians for value in line.get_ydata()) == [0.32, 0.32, 0.42, 0.445]


def test_a_study_of_tokens_has_no_accuracy(tmp_path):
    study = load(write_study(tmp_path, lrs=LRS))
    assert accuracy.accuracy_tables(study) == [] and accuracy.figures(study) == {} and not accuracy.applies(study)


def test_tables_and_pdf_of_images_speak_of_images(study_dir, tmp_path):
    pdf = report.build(study_dir, tmp_path / "reports")
    printed = " ".join("".join(page.extract_text() for page in PdfReader(pdf).pages).split())
    told = " ".join(report.summary(study_dir).split())
    for text in (printed, told):
        assert "Accuracy against learning rate" in text
        assert "Cross entropy, nats per image" in text and "patches per run" in text
        assert "unigram" not in text and "token" not in text
