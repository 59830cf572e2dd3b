"""The columns of a study's runs that follow from their specs: unusual settings of the mechanism, and its blindness."""

from __future__ import annotations

import json

import pytest

from stability.cli import publish
from stability.cli.publish import _parsed_columns, collect_and_load
from stability.config.parts import part, unusual_settings
from stability.runs.study import StudyFolder

CONTEXT = {"objective": {"name": "mlm", "context": 8}}


def listed(lab, **changes):
    """The row of a run that has not been trained."""
    spec = lab.spec(**changes)
    directory = lab.directory(spec)
    directory.write_spec(spec.model_dump(mode="json"), type(spec))
    directory.set_status("queued", step=0)
    study = StudyFolder.of(lab.pool, "settings")
    study.write([directory.run_id])
    return directory, collect_and_load(study).runs.iloc[0]


@pytest.mark.parametrize(
    ("mechanism", "expected"),
    [
        ({"name": "sa"}, {}),
        ({"name": "sc", "rope": "gradient", "window": 2}, {}),
        ({"name": "sc", "rope": "absolute", "rank": 8}, {"rope": "absolute", "rank": 8}),
        (
            {"name": "mix", "pattern": ["sw", "sc"], "sc": {"rope": "none"}},
            {"pattern": ("sw", "sc"), "sc.rope": "none"},
        ),
        ({"name": "two_way", "of": "gla", "gla": {"gate_rank": 8}}, {"of": "gla", "gla.gate_rank": 8}),
    ],
)
def test_unusual_settings_are_those_that_differ_from_the_parts_own_defaults(mechanism, expected):
    usual = unusual_settings(part("mechanisms", {"name": mechanism["name"]}))
    assert usual == {}
    assert unusual_settings(part("mechanisms", mechanism)) == expected


@pytest.mark.parametrize(
    ("changes", "settings", "blind"),
    [
        ({"mechanism": {"name": "sc"}}, "", 0),
        ({"mechanism": {"name": "sc", "rope": "absolute", "step": "learned"}}, "step=learned rope=absolute", 1),
        ({"mechanism": {"name": "mix", "pattern": ["sc", "sa"], "sc": {"rope": "none"}}}, "pattern=[sc,sa] sc.rope=none", 0),
        ({"mechanism": {"name": "sc", "rope": "none"}, "cross": {"name": "cc", "rank": 1}, **CONTEXT}, "rope=none cc.rank=1", 0),
        # without rotations positions are known only where they are added, or by a recurrence
        ({"mechanism": {"name": "sc"}, "position": "none"}, "", 1),
        ({"mechanism": {"name": "sa"}, "position": "none"}, "", 1),
        ({"mechanism": {"name": "two_way", "of": "gla"}, "position": "none"}, "of=gla", 0),
        ({"mechanism": {"name": "sc", "rope": "none"}, "position": "learned"}, "rope=none", 0),
    ],
)  # fmt: skip
def test_a_study_records_the_unusual_settings_and_the_blindness_of_each_run(lab, changes, settings, blind):
    _, row = listed(lab, **changes)
    assert (row["settings"], row["blind_to_order"]) == (settings, blind)


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({"mechanism": {"name": "sa"}}, ""),
        ({"mechanism": {"name": "sc"}}, "rope=gradient, the energy of the rotated embeddings"),
        ({"mechanism": {"name": "sc", "rope": "absolute"}}, "rope=absolute, C.3's formula"),
        ({"mechanism": {"name": "mix", "sc": {"rope": "none"}}}, "its sc rope=none, nothing is rotated"),
        ({"mechanism": {"name": "sc"}, "position": "none"}, "nothing is rotated (position=none)"),
        ({"mechanism": {"name": "sa"}, "position": "none"}, ""),
        (
            {"mechanism": {"name": "sa"}, "cross": {"name": "cc", "rope": "relative"}, **CONTEXT},
            "cc rope=relative, dis",
        ),
    ],
)
def test_a_study_records_which_reading_of_its_formula_a_mechanism_computes(lab, changes, begins):
    _, row = listed(lab, **changes)
    assert row["reading"].startswith(begins) and bool(row["reading"]) == bool(begins)


@pytest.mark.parametrize(
    ("changes", "piecewise", "idle"),
    [
        ({}, None, None),
        ({"mechanism": {"name": "mix", "pattern": ["sa", "sparsek"]}, "objective": {"name": "mlm"}}, 1, None),
        ({"mechanism": {"name": "two_way", "of": "nsa"}, "objective": {"name": "mlm"}}, 1, None),
        # two layers, six of eight experts of three maps between 16 and round(16 · 4 · ⅔ / 2) = 21
        ({"ffn": {"name": "moe"}}, 1, 2 * 6 * 3 * 16 * 21),
        ({"ffn": {"name": "moe", "experts": 2}}, 1, None),
    ],
)
def test_a_study_records_which_losses_are_piecewise_smooth_and_the_parameters_that_a_position_does_not_meet(
    lab, changes, piecewise, idle
):
    _, row = listed(lab, **changes)
    assert (row.get("piecewise_smooth"), row.get("idle_params")) == (piecewise, idle)


def test_a_run_of_a_plugin_that_is_gone_is_listed_without_them(lab):
    directory, _ = listed(lab, mechanism={"name": "sc", "rope": "absolute"})
    spec = json.loads(directory.spec_file.read_text())
    directory.spec_file.write_text(json.dumps({**spec, "plugins": ["package_of_somebody_else.mechanism"]}))
    row = collect_and_load(StudyFolder.of(lab.pool, "settings")).runs.iloc[0]
    assert row["settings"] == row["reading"] == "" and row["blind_to_order"] != row["blind_to_order"]  # NaN


def test_runs_of_several_sizes_are_series_of_their_own(lab):
    sizes = {}
    for width, heads in ((8, 1), (16, 2)):
        spec = lab.spec(model={"name": "tiny", "layers": 1, "width": width, "heads": heads, "positions": 16})
        directory = lab.directory(spec)
        directory.write_spec(spec.model_dump(mode="json"), type(spec))
        directory.set_status("queued", step=0)
        sizes[directory.run_id] = f"width={width}"
    study = StudyFolder.of(lab.pool, "sizes")
    study.write(list(sizes), spec={"vary": [{"field": "model.width", "values": [8, 16]}]})
    runs = collect_and_load(study).runs
    assert {run: f"sa {size}" for run, size in sizes.items()} == dict(zip(runs["run_id"], runs["series"], strict=True))
    study.write(list(sizes), spec={"vary": [{"field": "model.width", "values": [8]}]})
    assert set(collect_and_load(study).runs["model"]) == {"tiny"}, "one value makes no difference"


def test_the_columns_of_a_curve_are_computed_once_for_its_rates_and_seeds(lab, monkeypatch):
    """A model is built for them: of 20,000 runs, minutes."""
    curves = [{"name": "sc", "rope": rope} for rope in ("gradient", "absolute")]
    specs = [
        lab.spec(mechanism=each, lr_peak=lr, seed=seed) for each in curves for lr in (1e-3, 1e-2) for seed in (0, 1)
    ]
    study, directories = StudyFolder.of(lab.pool, "curves"), [lab.directory(spec) for spec in specs]
    for directory, spec in zip(directories, specs, strict=True):
        directory.write_spec(spec.model_dump(mode="json"), type(spec))
        directory.set_status("queued", step=0)
    study.write([directory.run_id for directory in directories])
    computed = []
    monkeypatch.setattr(publish, "_parsed_columns", lambda spec: computed.append(spec) or _parsed_columns(spec))
    runs = collect_and_load(study).runs.set_index("run_id")
    assert [each["mechanism"]["rope"] for each in computed] == ["gradient", "absolute"]
    assert [runs["settings"][directory.run_id] for directory in directories] == [""] * 4 + ["rope=absolute"] * 4
