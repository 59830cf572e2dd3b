"""`load`: what it reads, and the one line it says when it cannot."""

import json
import math

import pandas as pd
import pyarrow.parquet as pq
import pytest

from analysis.study import load as module
from analysis.study import wording
from analysis.study.load import COLUMNS, load
from tests.analysis.synthetic import FINGERPRINT, write_study, write_table


@pytest.fixture
def study_dir(tmp_path):
    return write_study(tmp_path, name="small", mechanisms=["sc", "sa"], lrs=[1e-3], seeds=1)


def test_control_characters_of_a_name_are_escapes_in_every_label(tmp_path):
    runs = load(write_study(tmp_path, mechanisms=("sa", "s\x1b[2Jw"), lrs=(1e-3,))).runs
    assert set(runs.mechanism) == {"sa", r"s\x1b[2Jw"} and not any("\x1b" in label for label in runs.label)


def test_a_study_holds_its_tables_and_its_name(study_dir):
    study = load(study_dir)
    assert study.name == "small" and len(study.runs) == 2 and study.fingerprint == FINGERPRINT[:12]
    assert study.curvature.empty and list(study.curvature.columns) == list(COLUMNS["curvature"])
    assert len(study.curves) == 400 and study.study["launcher"] == "serial"


def test_series_are_in_the_papers_order_then_by_name(tmp_path):
    study = load(write_study(tmp_path, mechanisms=["sw", "fox", "mix", "sc", "deltanet", "sa"], lrs=[1e-3], seeds=1))
    assert study.series == ("sa", "sc", "mix", "sw", "deltanet", "fox")


def test_runs_that_differ_in_another_axis_are_other_series(tmp_path):
    study = load(
        write_study(
            tmp_path, mechanisms=["sa"], lrs=[1e-3], seeds=1, settings=({"optimizer": "adamw"}, {"optimizer": "muon"})
        )
    )
    assert study.series == ("sa adamw", "sa muon")


def test_rates_that_differ_in_a_floats_last_digit_are_one(tmp_path):
    study = load(write_study(tmp_path, mechanisms=["sa"], lrs=[0.1 + 0.2, 0.3], seeds=1))
    assert set(study.runs["lr"]) == {0.3}


def test_null_columns_are_nan_and_empty_text(study_dir):
    runs = load(study_dir).runs
    assert runs["gen_nll"].isna().all() and runs["gen_nll"].dtype == "float64" and set(runs["reason"]) == {""}


@pytest.mark.parametrize("values", [["a", None, "b", "a"], [None, None], [1.0, math.nan, 2.5], [True, None, False], []])
def test_a_column_of_text_is_each_value_as_text_and_null_as_none(values):
    column = pd.Series(values, index=range(3, 3 + len(values)))
    slow = ["" if value is None or value != value else str(value) for value in column.tolist()]
    found = module._text(column)
    assert found.tolist() == slow and found.dtype == object and found.index.equals(column.index)


def test_infinite_zero_and_lost_alpha_survive(tmp_path):
    folder = write_study(
        tmp_path, mechanisms=["sa"], lrs=[1e-3], seeds=1, states=["paper"], alpha=lambda *_: [math.inf, 0.0, math.nan]
    )
    values = load(folder).curvature["alpha_max"].tolist()
    assert values[:2] == [math.inf, 0.0] and math.isnan(values[2])


def test_a_missing_study_names_the_sweep(tmp_path):
    with pytest.raises(ValueError, match=r"study\.json is missing: `python -m stability\.sweep name=nothing` makes it"):
        load(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["runs", "curves"])
def test_a_missing_table_names_the_studys_own_command(study_dir, name):
    (study_dir / "results" / f"{name}.parquet").unlink()
    with pytest.raises(
        ValueError, match=rf"{name}\.parquet is missing: `python -m stability\.sweep name=small` makes it"
    ):
        load(study_dir)


def test_missing_curvature_names_the_hessian_command(study_dir):
    (study_dir / "results" / "curvature.parquet").unlink()
    with pytest.raises(
        ValueError, match=r"curvature\.parquet is missing: `python -m stability\.hessian ckpt=.*small` makes it"
    ):
        load(study_dir)


@pytest.mark.parametrize(("version", "words"), [(2, "schema version 2"), (None, "no schema version")])
def test_another_schema_version_is_refused(study_dir, version, words):
    write_table(study_dir / "results" / "runs.parquet", "runs", [], version)
    with pytest.raises(ValueError, match=rf"has {words}, this analysis reads version 1: `python") as caught:
        load(study_dir)
    assert "\n" not in str(caught.value)


def test_the_version_may_stand_in_pandas_attributes(study_dir):
    path = study_dir / "results" / "runs.parquet"
    frame = pq.read_table(path).to_pandas()
    frame.attrs = {"schema_version": 1}
    frame.to_parquet(path)
    assert len(load(study_dir).runs) == 2


def test_a_missing_column_is_named(study_dir):
    path = study_dir / "results" / "runs.parquet"
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["norm"]), path)
    with pytest.raises(ValueError, match=r"lacks the column norm: `"):
        load(study_dir)


def test_files_that_are_neither_json_nor_parquet_are_named(study_dir):
    (study_dir / "results" / "curves.parquet").write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"curves\.parquet is no parquet file"):
        load(study_dir)
    (study_dir / "study.json").write_text("{")
    with pytest.raises(ValueError, match=r"study\.json is not JSON"):
        load(study_dir)
    (study_dir / "study.json").write_text("[]")
    with pytest.raises(ValueError, match=r"holds no JSON object"):
        load(study_dir)


def test_a_study_without_runs_is_refused(study_dir):
    write_table(study_dir / "results" / "runs.parquet", "runs", [])
    with pytest.raises(ValueError, match=r"lists no run"):
        load(study_dir)


def test_fingerprint_falls_back_to_the_provenance(study_dir):
    path = study_dir / "results" / "runs.parquet"
    rows = pq.read_table(path).to_pandas().assign(data_fingerprint=None)
    write_table(path, "runs", rows.to_dict("records"))
    assert load(study_dir).fingerprint == FINGERPRINT[:12]
    (study_dir / "study.json").write_text(json.dumps({"name": "small"}))
    assert load(study_dir).fingerprint == "not recorded"


def test_with_run_adds_the_training_rate(quickstart):
    rows = quickstart.with_run(quickstart.curvature)
    assert (rows["lr"] == rows["run_lr"]).all() and set(rows["series"]) == set(quickstart.series)
    assert isinstance(rows, pd.DataFrame) and len(rows) == len(quickstart.curvature)


def test_cross_mechanisms_are_part_of_a_name_where_each_mechanism_has_its_own_and_a_setting_where_one_has_several(
    tmp_path,
):
    auto = load(write_study(tmp_path, mechanisms=("sa",), lrs=(1e-3, 1e-2), seeds=1, settings=({"cross": "ca"},)))
    assert auto.series == ("sa+ca",) and set(auto.runs["setting"]) == {""}
    both = load(
        write_study(
            tmp_path / "both",
            mechanisms=("sa",),
            lrs=(1e-3, 1e-2),
            seeds=1,
            settings=({"cross": ""}, {"cross": "ca"}, {"cross": "cc"}),
        )
    )
    assert both.series == ("sa ca", "sa cc", "sa none") and both.runs["series"].value_counts().tolist() == [2] * 3


def test_checkpoints_names_are_in_the_order_of_their_steps_beyond_a_million():
    names = ["step_1000000", "earliest", "step_999999", "terminal", "step_000200"]
    assert sorted(names, key=module.phase_rank) == [
        "terminal",
        "earliest",
        "step_000200",
        "step_999999",
        "step_1000000",
    ]


READINGS = [
    {"settings": "rope=absolute rank=8", "reading": "rope=absolute, C.3's formula", "blind_to_order": 1},
    {"variant": "rope=relative", "settings": "rope=relative rank=8", "blind_to_order": 0},
]
OF_READINGS = {
    "axis": "mechanism", "part": "sc", "setting": "rope",
    "values": [{"value": "absolute", "variant": ""}, {"value": "relative", "variant": "rope=relative"}],
}  # fmt: skip


def test_a_mechanism_is_named_with_its_reading_and_with_its_blindness(tmp_path):
    alone = load(write_study(tmp_path, name="alone", mechanisms=["sc"], lrs=[1e-3], seeds=1, settings=READINGS[:1]))
    assert alone.series == ("sc rope=absolute (blind)",)
    folder = write_study(tmp_path, name="both", mechanisms=["sc"], lrs=[1e-3], seeds=1, settings=READINGS)
    manifest = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(manifest | {"ablations": [OF_READINGS]}))
    both = load(folder)
    assert both.series == ("sc rope=absolute (blind)", "sc rope=relative")
    assert set(both.runs["base"]) == {"sc rope=absolute (blind)"}
    assert dict(wording.facts(both))["Mechanisms"] == (
        "sc: rope=absolute rank=8; rope=absolute, C.3's formula; (blind): hardly or never distinguishes a text from its mirror image"
    )


def test_a_mechanism_with_the_usual_settings_is_named_alone(study_dir):
    study = load(study_dir)
    assert study.series == ("sa", "sc") and "Mechanisms" not in dict(wording.facts(study))
