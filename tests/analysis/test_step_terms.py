"""Every text and caption about α_max says of an optimizer what is to be known of its step, as the files have it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from analysis.drawing import pieces
from analysis.sections import alpha, curvature
from analysis.sections.alpha_tables import alpha_tables
from analysis.sections.steps import make_fallen_tables
from analysis.study.load import load
from analysis.study.protocol import explain, sentence, step_terms
from stability.config.curvature import CurvatureSpec
from stability.probes.curvature.protocol import protocol_of
from tests.analysis.synthetic import write_study

MULTIPLIER = (
    "The LR of prodigy multiplies a rate that it finds by itself, and so does its α_max; α_max over the LR is a "
    "multiplier of the step that was taken."
)
OWN_RATE = (
    "The step of adafactor is not proportional to its LR: its α_max holds at the run's own LR only, where α_max over "
    "the LR is a multiplier of the step that was taken."
)


def study_of(tmp_path, **terms):
    study = load(write_study(tmp_path, mechanisms=["sa", "sc"], lrs=[1e-3, 1e-2], alpha=lambda *_: [1e-2, 2e-2]))
    protocol = json.loads(protocol_of(CurvatureSpec())) | {"batch": 8, "clip_norm": 1.0}
    text = json.dumps(protocol | ({"optimizer": terms} if terms else {}))
    return replace(study, curvature=study.curvature.assign(protocol=text))


def read(body):
    """The text of a section as a reader sees it."""
    return pieces.typst(body).replace('"α#sub[max]#"', "α_max").replace("’", "'")


@pytest.mark.parametrize(
    ("terms", "told"),
    [
        ({"name": "prodigy", "is_multiplier": True, "linear_in_lr": False}, MULTIPLIER),
        ({"name": "adafactor", "linear_in_lr": False}, OWN_RATE),
        ({"name": "sophia", "frozen": "its h"}, "α_max of sophia holds its h where the checkpoint has it."),
        (
            {"name": "soap", "first_step_zero": True},
            "The first step of soap only sets up its state: no α_max there is its own.",
        ),
    ],
)
def test_the_text_every_table_and_every_figure_of_alpha_max_say_it(tmp_path, terms, told):
    study = study_of(tmp_path, **terms)
    assert step_terms(study) == f" {told}"
    assert told in read(alpha.body(study, {}))
    tables = alpha_tables(study)
    assert tables and all(told in table.caption and told in table.brief for table in tables)
    assert all(told in table.caption for table in make_fallen_tables(study)) and make_fallen_tables(study)
    for figures in (
        alpha.figures(study),
        {name: each for name, each in curvature.figures(study).items() if "steps" in name},
    ):
        assert figures and all(told in each.caption for each in figures.values())
    assert told in " ".join("".join(map(str, alpha.tables(study, ("terminal",)))).split())


def test_the_protocol_itself_is_said_once_for_all_optimizers(tmp_path):
    plain, other = study_of(tmp_path / "plain"), study_of(tmp_path / "other", name="sophia", frozen="its h")
    half = len(plain.curvature) // 2
    texts = [*plain.curvature["protocol"][:half], *other.curvature["protocol"][half:]]
    mixed = replace(plain, curvature=plain.curvature.assign(protocol=texts))
    protocol = json.loads(texts[0])
    for table in alpha_tables(mixed):
        assert table.caption.count(sentence(protocol).split(";")[0]) == 1
    assert len(explain(texts)) == 1


def test_where_alpha_max_is_a_rate_like_any_other_nothing_is_said(tmp_path):
    study = study_of(tmp_path)
    assert step_terms(study) == "" and explain(["", json.dumps({"batch": 2})]) == []


def test_where_many_are_to_be_explained_captions_name_them_and_the_text_explains(tmp_path):
    study = study_of(tmp_path)
    terms = [{"name": name, "frozen": "its h"} for name in ("sophia", "galore_adamw", "soap")]
    texts = [json.dumps(json.loads(study.curvature["protocol"].iloc[0]) | {"optimizer": each}) for each in terms]
    told = [texts[index % 3] for index in range(len(study.curvature))]
    many = replace(study, curvature=study.curvature.assign(protocol=told))
    brief = "What α_max means of galore_adamw, soap and sophia: see the section on α_max."
    assert all(brief in table.caption and "its h" not in table.caption for table in alpha_tables(many))
    assert all(brief in each.caption for each in alpha.figures(many).values())
    assert read(alpha.body(many, {})).count("holds its h where the checkpoint has it") == 3
    assert read(alpha.brief(many, {alpha.NAME: ()})).count("holds its h where the checkpoint has it") == 3
    short = alpha.brief(replace(many, curvature=study.curvature), {alpha.NAME: ()})
    assert "holds its h" not in read(short)


@pytest.mark.parametrize(("rates", "words"), [([1e-3, 1e-2], "two"), ([1e-3, 1e-2, 1e-1], "three")])
def test_the_caption_counts_the_steps_that_are_drawn(rates, words, tmp_path):
    def nll(_mechanism, lr, seed):
        return 2.0 + abs(math.log10(lr) + 2) + 0.001 * seed

    study = load(write_study(tmp_path, mechanisms=["sa"], lrs=rates, nll=nll, alpha=lambda *_: [1e-2, 2e-2]))
    drawn = alpha.figures(study)[alpha.NAME]
    assert f"at {words} rates of training" in drawn.caption and len(drawn.figure.axes) == len(rates)
