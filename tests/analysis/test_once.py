"""What is computed from a study is computed once, and a caller that changes it changes its own."""

from __future__ import annotations

import gc
import weakref

from analysis.numbers.windows import outcomes
from analysis.study.load import load
from analysis.study.once import once_per_study
from tests.analysis.synthetic import write_study


def test_each_study_and_each_argument_is_computed_once(tmp_path):
    asked = []

    @once_per_study
    def computed(study, series, column="val_nll"):
        asked.append((study.name, series, column))
        return [series]

    first, second = (load(write_study(tmp_path / name, name=name, mechanisms=["sa"])) for name in ("one", "two"))
    for study in (first, second, first):
        assert computed(study, "sa") == computed(study, "sa") == ["sa"]
        assert computed(study, "sa", column="gen_nll") == ["sa"]
    assert asked == [(name, "sa", column) for name in ("one", "two") for column in ("val_nll", "gen_nll")]


def test_what_a_caller_changes_is_its_own(tmp_path):
    study = load(write_study(tmp_path, mechanisms=["sa"]))
    table = outcomes(study, "sa")
    before = table.copy()
    table.loc[:, :] = -1.0
    assert outcomes(study, "sa").equals(before)


def test_nothing_is_kept_of_a_study_that_is_gone(tmp_path):
    study = load(write_study(tmp_path, mechanisms=["sa"]))
    outcomes(study, "sa")
    gone = weakref.ref(study)
    del study
    gc.collect()
    assert gone() is None
