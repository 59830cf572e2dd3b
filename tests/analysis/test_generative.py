"""The generative NLL's figure and windows, as far as they stand on the runs' own column."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from analysis.sections import generation as generative
from analysis.sections.nll_figures import nll_figure
from analysis.study import wording as recipe
from analysis.study.load import load
from tests.analysis.synthetic import UNIGRAM, words_of, write_study

LRS = (1e-4, 1e-3, 1e-2, 1e-1)


def study_of(tmp_path, oracle=lambda run: "gpt2-large"):
    """Generations best at 1e-3, 0.4 nats worse a decade on either side: within 5 % of 4 nats for half a decade."""
    study = load(write_study(tmp_path, mechanisms=("sa", "sc"), lrs=LRS, seeds=1))
    frame = study.runs.copy()
    frame["gen_nll"] = [4.0 + 0.4 * abs(math.log10(lr / 1e-3)) for lr in frame["lr"]]
    frame["gen_oracle"] = [oracle(run) for run in frame.itertuples()]
    return replace(study, runs=frame)


def test_windows_and_figure_name_the_oracle_and_are_of_the_generations(tmp_path):
    study = study_of(tmp_path)
    (table,) = generative.generative_windows(study)
    assert table.caption.endswith("Oracle: gpt2-large.") and table.title == "Stable windows on the generative NLL"
    assert [row[2].text for row in table.rows] == ["4.000", "4.000"] and [row[1].text for row in table.rows] == [
        "1e-3",
        "1e-3",
    ]
    assert [row[3].text for row in table.rows] == ["1.00", "1.00"]
    figure = generative.figures(study)["generative-nll"].figure
    assert figure.axes[0].get_ylabel() == "generative NLL (nats)"
    assert not any("frequencies" in text.get_text() for text in figure.axes[0].texts), (
        "the token-frequency NLL is no measure of an oracle's tokens"
    )


def test_the_validation_figure_is_not_the_generative_one(tmp_path):
    figure = nll_figure(study_of(tmp_path))
    assert (
        figure is not None
        and figure.axes[0].get_ylabel() == "validation NLL (nats)"
        and figure.axes[0].get_ylim()[0] < UNIGRAM < 4.0
    )


@pytest.mark.parametrize("oracle", [lambda run: run.mechanism, lambda run: "a" if run.lr < 1e-3 else "b"])
def test_numbers_of_several_oracles_make_no_common_line(tmp_path, oracle):
    study = study_of(tmp_path, oracle)
    assert generative.figures(study) == {} and generative.generative_windows(study) == []


def test_without_generations_there_is_no_section(quickstart):
    assert not generative.applies(quickstart) and generative.figures(quickstart) == {}


def test_of_proteins_the_unit_is_a_residue(tmp_path):
    study = study_of(tmp_path)
    assert recipe.words(study).generative_unit == "nats per token of the oracle"
    assert (
        recipe.words(replace(study, study=study.study | {"words": words_of("multitrack")})).generative_unit
        == "nats per residue by the oracle's masked NLL"
    )
