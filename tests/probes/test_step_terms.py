"""What is to be known of an optimizer's step travels from its class to the files of recorded steps, to a study's tables
and to the lines that are printed; files of adamw and sgd stay what they were."""

from __future__ import annotations

import json

import pytest

from analysis.study.load import load
from analysis.study.protocol import step_terms
from stability import hessian
from stability.config.curvature import CurvatureSpec
from stability.optimizers import AbstractOptimizer
from stability.probes.curvature import alpha_max
from stability.registry import Registry
from stability.runs.parquet import read_metadata, read_table
from stability.runs.results import collect, write
from stability.runs.run_files import OPTIMIZER
from stability.runs.schema import COLLECTED_CURVATURE_COLUMNS, CURVATURE_COLUMNS
from stability.runs.study import StudyFolder

SHORT = CurvatureSpec(recorded_steps=2, warmup_steps=0, warmup_batches=1, parity_steps=0)
WORDS = ["recorded_steps=2", "warmup_steps=0", "warmup_batches=1", "parity_steps=0", "device=cpu"]
RATES = {"adamw": 1e-3, "prodigy": 1.0, "schedulefree_adamw": 1e-2, "sophia": 1e-3}


@pytest.fixture
def study(lab):
    """A study of a run by each of these optimizers, measured at its end."""
    runs = [lab.train(lab.spec(optimizer={"name": name}, lr_peak=rate, steps=4)) for name, rate in RATES.items()]
    for each in runs:
        list(alpha_max.measure(each, SHORT, cache_dir=lab.cache, device="cpu"))
    folder = StudyFolder.of(lab.pool, "terms")
    folder.write([each.run_id for each in runs])
    return folder, dict(zip(RATES, runs, strict=True))


def test_files_hold_the_flags_of_the_class_and_those_of_adamw_nothing_new(study):
    _, runs = study
    for name, directory in runs.items():
        path, part = directory.curvature_file("terminal"), Registry("optimizers").load(name)
        known, columns = read_metadata(path), read_table(path).column_names
        assert ("rate_found" in columns) == (name == "prodigy")
        if name == "adamw":
            assert OPTIMIZER not in known and columns == CURVATURE_COLUMNS
            continue
        told = json.loads(known[OPTIMIZER])
        assert told.pop("name") == name and told
        for flag in ("linear_in_lr", "is_multiplier", "first_step_zero", "frozen"):
            assert told.get(flag, getattr(AbstractOptimizer, flag)) == getattr(part, flag)


def test_a_studys_tables_and_a_runs_lines_say_it(study, capsys):
    folder, runs = study
    write(collect(folder.path), folder.results)
    found = load(folder.path)
    told = step_terms(found)
    assert told == (
        " The LR of prodigy multiplies a rate that it finds by itself, and so does its α_max; α_max over the LR is a "
        "multiplier of the step that was taken."
        " The step of schedulefree_adamw is not proportional to its LR: its α_max holds at the run's own LR only, where "
        "α_max over the LR is a multiplier of the step that was taken."
        " α_max of sophia holds its average h of the Hessian's diagonal where the checkpoint has it."
    )
    rows = found.curvature
    rates = rows["rate_found"][rows["run_id"] == runs["prodigy"].run_id]
    assert rates.notna().all() and (rates >= 1e-6).all()
    assert rows["rate_found"].notna().sum() == len(rates) > 0
    for name, directory in runs.items():
        capsys.readouterr()
        assert hessian.main([f"ckpt={directory.path}", *WORDS]) == 0
        printed = capsys.readouterr().out
        assert (f"The LR of {name} multiplies a rate" in printed) == (name == "prodigy")
        assert (f"rate found, lr times what the optimizer makes of it: median {rates.median():.3g}" in printed) == (
            name == "prodigy"
        )
        assert (f"The step of {name} is not proportional to its LR" in printed) == (name == "schedulefree_adamw")
        assert (f"α_max of {name} holds its average h" in printed) == (name == "sophia")


def test_a_study_of_adamw_has_no_column_more(lab):
    directory = lab.train(lab.spec(steps=4))
    list(alpha_max.measure(directory, SHORT, cache_dir=lab.cache, device="cpu"))
    folder = StudyFolder.of(lab.pool, "plain")
    folder.write([directory.run_id])
    found = collect(folder.path)
    assert list(found.curvature.columns) == COLLECTED_CURVATURE_COLUMNS
    assert all("optimizer" not in json.loads(text) for text in found.curvature["protocol"])
