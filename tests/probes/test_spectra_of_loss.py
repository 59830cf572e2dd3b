"""`measure=`: what lands beside α_max on disk, that it is what the library says at that θ, and that nothing is measured
twice."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch.func import functional_call

from stability.config.base import validate
from stability.config.curvature import CurvatureSpec, SpectraSpec
from stability.config.entries import HessianSpec
from stability.curvature.critical import loss_along
from stability.curvature.products import hvp
from stability.curvature.spectrum import top_eigenvalue
from stability.probes.checkpoints import Loaded
from stability.probes.curvature.alpha_max import is_measured, measure, measure_checkpoint
from stability.probes.curvature.checkpoint_descent import Probe
from stability.probes.curvature.spectra import READS, list_missing_tables
from stability.runs.parquet import read_metadata, write_parquet
from stability.runs.results import collect, read_steps, write
from stability.runs.schema import COLLECTED_CURVATURE_COLUMNS, CURVATURE_COLUMNS, PROTOCOL, SPECTRA, SPECTRA_COLUMNS
from tests.within import assert_within

EVERYTHING = ("alpha_max", "critical_lr", *SPECTRA)
SHORT = CurvatureSpec(warmup_batches=2, warmup_steps=1, recorded_steps=3, measure=EVERYTHING)


def run(directory, lab, curvature):
    return len(list(measure(directory, curvature, cache_dir=lab.cache, device="cpu")))


def table(directory, name):
    return pd.read_parquet(directory.curvature_file(name))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    from tests.conftest import Lab

    lab = Lab(tmp_path_factory.mktemp("lab"))
    directory = lab.train(lab.spec(lr_peak=3e-3))
    run(directory, lab, SHORT)
    return lab, directory


def first_step(lab, directory, state="checkpoint"):
    """(probe, step) of the first recorded step, taken once more."""
    folder = directory.checkpoints()[-1]
    steps = []
    loaded = Loaded.read(folder, lab.cache)
    probe = Probe(loaded, SHORT, torch.device("cpu"), lambda step: steps.append(step) or {})
    next(row for row in probe.rows(state) if row is not None)
    return probe, steps[0]


def test_every_table_has_its_columns_and_both_states(measured):
    _, directory = measured
    steps = table(directory, "terminal")
    assert list(steps.columns) == CURVATURE_COLUMNS
    for name in SPECTRA:
        found = table(directory, f"terminal_{name}")
        assert list(found.columns) == SPECTRA_COLUMNS[name]
        assert set(found.state) == {"paper", "checkpoint"}
        assert set(found.run_id) == {directory.run_id}
    assert len(read_steps(directory)[0]) == 1  # the spectra beside it are no tables of steps


def test_below_the_critical_rate_the_step_lowers_its_loss_and_above_it_does_not(measured):
    lab, directory = measured
    rows = table(directory, "terminal")
    assert rows.critical_lr.notna().all()
    finite = rows[np.isfinite(rows.critical_lr) & (rows.critical_lr > 0)]
    assert len(finite)
    _, step = first_step(lab, directory)
    value = rows[(rows.state == "checkpoint") & (rows.step == 0)].critical_lr.item()
    here, below, above = loss_along(
        step.loss, step.params, step.direction, [0.0, 0.97 * value, 1.03 * value], batches=step.batches
    )
    assert below < here < above


def test_the_profile_runs_through_the_loss_and_holds_what_the_quadratic_needs(measured):
    lab, directory = measured
    profile, steps = table(directory, "terminal_profile"), table(directory, "terminal")
    for state, rows in profile.groupby("state"):
        first = steps[(steps.state == state) & (steps.step == 0)].iloc[0]
        here = rows[rows.alpha == 0].iloc[0]
        assert here.loss == pytest.approx(first.loss_before, rel=1e-5)
        assert rows.alpha.is_monotonic_increasing
        assert rows.alpha.min() < 0
        assert rows.alpha.max() > first.critical_lr
        assert here.alpha_max / here.slope == pytest.approx(first.alpha_max / first.slope, rel=1e-3)
        # in state paper the recorded step's is the slope of the clipped gradient, which is no slope of the loss
        if state == "checkpoint":
            assert here.slope == pytest.approx(first.slope, rel=1e-4)
        else:
            assert here.slope < first.slope < 0
        near = rows[(rows.alpha > 0) & (rows.alpha < 0.1 * first.alpha_max)]
        model = here.loss_before + near.alpha * here.slope + near.alpha**2 * here.curvature / 2
        assert np.allclose(near.loss, model, rtol=1e-3)


def test_sharpness_is_the_librarys_at_the_first_recorded_step(measured):
    lab, directory = measured
    row = table(directory, "terminal_sharpness").set_index("state").loc["checkpoint"]
    _, step = first_step(lab, directory)
    assert row.sharpness == pytest.approx(
        top_eigenvalue(step.loss, step.params, batches=step.batches, tolerance=1e-4).value, rel=0.02
    )
    assert_within(row.sharpness_residual, 0.01 * row.sharpness)
    assert row.adam_threshold == pytest.approx(38 / 3e-3)
    assert row.adam_ratio == pytest.approx(row.adam_sharpness / row.adam_threshold)
    assert row.trace_error < abs(row.trace)
    assert math.isfinite(row.gauss_newton_share)
    assert row.noise_scale > 0
    assert 0 < row.attention_entropy <= math.log(16)
    assert math.isfinite(row.attention_logit_max)


def test_the_gauss_newton_share_is_what_the_models_bend_leaves(measured):
    """H − G = Σ (∂L/∂z) ∇²z: the second derivative of the logits along u, by central differences, under the loss's
    gradient."""
    lab, directory = measured
    probe, step = first_step(lab, directory)
    batch = probe.descent.examples(SHORT.warmup_batches + SHORT.warmup_steps)
    model = probe.model.double()

    def logits(alpha):
        moved = {
            name: param.detach().double() + alpha * step.direction[name].double() for name, param in step.params.items()
        }
        return functional_call(model, moved, (batch.inputs_BN,))

    length = math.sqrt(sum(float(part.double().square().sum()) for part in step.direction.values()))
    h = 1e-3 / length
    with torch.no_grad():
        bend = (logits(h) - 2 * logits(0.0) + logits(-h)) / h**2
        z = logits(0.0)
    z.requires_grad_()
    total, count = probe.objective.loss_sum(z, batch)
    rest = float((torch.autograd.grad(total / count, z)[0] * bend).sum())
    share = table(directory, "terminal_sharpness").set_index("state").loc["checkpoint"].gauss_newton_share
    assert share == pytest.approx(1 - rest / step.result.curvature, abs=1e-3)


def test_block_shares_add_up_and_the_densitys_weights_to_one(measured):
    _, directory = measured
    for _, rows in table(directory, "terminal_blocks").groupby("state"):
        assert rows.share.sum() == pytest.approx(rows.curvature.iloc[0], rel=1e-3)
        assert {"embedding", "blocks.0.mixer", "blocks.1.ffn", "blocks.1.ffn_norm", "final_norm", "head"} <= set(
            rows.block
        )
    density = table(directory, "terminal_density")
    assert density.groupby("state").weight.sum().tolist() == pytest.approx([1, 1])


def test_nothing_is_measured_twice_and_only_what_is_missing_is(measured):
    lab, directory = measured
    before = {path: path.stat().st_mtime_ns for path in (directory.path / "curvature").iterdir()}
    assert is_measured(directory, SHORT)
    assert run(directory, lab, SHORT) == 0
    assert is_measured(directory, SHORT.model_copy(update={"measure": ("alpha_max",)})), "a column more does no harm"
    directory.curvature_file("terminal_blocks").unlink()
    assert not is_measured(directory, SHORT)
    assert run(directory, lab, SHORT) == 4, "one warm-up and one recorded step for each state"
    after = {path: path.stat().st_mtime_ns for path in (directory.path / "curvature").iterdir()}
    assert {path for path in before if after[path] != before[path]} == {directory.curvature_file("terminal_blocks")}


def test_without_alpha_max_only_the_tables_are_written(lab):
    directory = lab.train(lab.spec(optimizer={"name": "sgd"}, mechanism={"name": "sc"}))
    only = SHORT.model_copy(update={"measure": ("sharpness",), "state": ("checkpoint",)})
    run(directory, lab, only)
    assert [path.name for path in (directory.path / "curvature").iterdir()] == ["terminal_sharpness.parquet"]
    row = table(directory, "terminal_sharpness").iloc[0]
    assert pd.isna(row.adam_sharpness), "SGD has no preconditioner"
    assert pd.isna(row.attention_entropy), "consensus has no softmax"
    assert math.isfinite(row.gauss_newton_share)
    folder = directory.checkpoints()[0]
    for _ in measure_checkpoint(
        folder, folder.name, only.model_copy(update={"measure": ("blocks",)}), cache_dir=lab.cache, device="cpu"
    ):
        pass
    assert len(table(directory, f"{folder.name}_blocks"))
    assert not directory.curvature_file(folder.name).exists()


def test_microbatches_give_the_same_sharpness_and_profile(measured):
    lab, directory = measured
    whole = table(directory, "terminal_sharpness").set_index("state").loc["checkpoint"]
    some = SHORT.model_copy(
        update={"measure": ("sharpness",), "state": ("checkpoint",), "microbatch": 1, "phase": "terminal"}
    )
    for _ in measure_checkpoint(directory.checkpoints()[-1], "again", some, cache_dir=lab.cache, device="cpu"):
        pass
    parts = table(directory, "again_sharpness").iloc[0]
    directory.curvature_file("again_sharpness").unlink()
    for column in (
        "loss",
        "sharpness",
        "adam_sharpness",
        "trace",
        "gauss_newton_share",
        "noise_scale",
        "attention_entropy",
    ):
        assert parts[column] == pytest.approx(whole[column], rel=1e-3), column


def test_a_run_without_a_checkpoint_leaves_empty_tables(lab):
    directory = lab.train(lab.spec(lr_peak=1e30, optimizer={"name": "sgd"}))
    run(directory, lab, SHORT)
    assert all(len(table(directory, f"terminal_{name}")) == 0 for name in SPECTRA)
    assert is_measured(directory, SHORT)


def test_a_hugging_face_model_is_refused_what_it_cannot_be_asked():
    with pytest.raises(ValueError, match=r"measure=\[density\] belongs to ckpt="):
        values = {
            "hf": "gpt2",
            "data": {"name": "stdlib"},
            "lr": {"values": [1e-3]},
            "curvature": {"measure": ["density"]},
        }
        validate(HessianSpec, values)


def test_a_study_collects_what_its_runs_have_and_forgets_what_they_lost(measured, capsys):
    from stability.hessian import main
    from stability.runs.study import StudyFolder

    lab, directory = measured
    study = StudyFolder.of(lab.pool, "one")
    study.write([directory.run_id])
    given = [
        f"ckpt={study.path}",
        "warmup_batches=2",
        "warmup_steps=1",
        "recorded_steps=3",
        f"measure=[{','.join(EVERYTHING)}]",
        "device=cpu",
    ]
    assert main(given) == 0
    assert "skips 1 of 1: measured already" in capsys.readouterr().out
    assert {path.stem for path in study.results.iterdir()} == {"runs", "curvature", "curves", *SPECTRA}
    steps = pd.read_parquet(study.results / "curvature.parquet")
    assert list(steps.columns) == COLLECTED_CURVATURE_COLUMNS
    assert len(steps) == 6, "no row of another table among them"
    kept = {path: path.read_bytes() for path in (directory.path / "curvature").glob("*_density.parquet")}
    for path in kept:
        path.unlink()
    write(collect(study.path), study.results)
    assert not (study.results / "density.parquet").exists()
    for path, content in kept.items():
        path.write_bytes(content)


def test_steps_measured_before_there_was_a_critical_rate_are_collected_with_it_empty(lab):
    from stability.runs.study import StudyFolder

    directory = lab.train(lab.spec())
    run(directory, lab, SHORT.model_copy(update={"measure": ("alpha_max",)}))
    old = table(directory, "terminal").drop(columns="critical_lr")
    write_parquet(old, directory.curvature_file("terminal"), {})
    study = StudyFolder.of(lab.pool, "old")
    study.write([directory.run_id])
    found = collect(study.path)
    assert found.spectra == {}
    assert found.curvature.critical_lr.isna().all()
    assert list(found.curvature.columns) == COLLECTED_CURVATURE_COLUMNS
    assert found.curvature.protocol.isna().all()


@pytest.mark.parametrize(
    "changes",
    [{"mechanism": {"name": "sw"}, "norm": "rmsnorm"}, {"mechanism": {"name": "mix"}}, {"objective": {"name": "ar"}}],
)
def test_every_softmax_mechanism_norm_and_objective_has_every_number(lab, changes):
    directory = lab.train(lab.spec(**changes))
    run(directory, lab, SHORT.model_copy(update={"measure": ("sharpness",), "state": ("checkpoint",)}))
    row = table(directory, "terminal_sharpness").iloc[0]
    finite = set(SPECTRA_COLUMNS["sharpness"]) - {"run_id", "phase", "state", "noise_scale"}
    assert all(math.isfinite(row[name]) for name in finite)
    assert row.noise_scale > 0


CHANGES = {
    "profile": {"critical_resolution": 0.3, "profile_points": 5},
    "sharpness": {
        "eigenvalue_tolerance": 0.9,
        "eigenvalue_products": 2,
        "trace_products": 9,
        "noise_batches": 2,
        "noise_parts": 2,
    },
    "density": {"density_probes": 1, "density_products": 3},
}


def test_every_setting_of_the_spectra_is_tried_below():
    assert {name: tuple(each) for name, each in CHANGES.items()} | {"blocks": ()} == READS
    assert {field for each in CHANGES.values() for field in each} == set(SpectraSpec.model_fields)


@pytest.mark.parametrize(
    ("name", "field", "value"), [(name, *pair) for name, each in CHANGES.items() for pair in each.items()]
)
def test_a_setting_changes_its_table_and_only_that_tables_protocol(measured, name, field, value):
    lab, directory = measured
    changed = SHORT.model_copy(update={"spectra": SpectraSpec(**{field: value})})
    assert list_missing_tables(directory, changed) == [("terminal", (name,))]
    some = changed.model_copy(update={"measure": (name,), "state": ("checkpoint",)})
    for _ in measure_checkpoint(directory.checkpoints()[-1], "other", some, cache_dir=lab.cache, device="cpu"):
        pass
    path = directory.curvature_file(f"other_{name}")
    found, before = pd.read_parquet(path), table(directory, f"terminal_{name}").query("state == 'checkpoint'")
    assert json.loads(read_metadata(path)[PROTOCOL])["spectra"][field] == value
    path.unlink()
    assert not np.array_equal(found.drop(columns="phase").to_numpy(), before.drop(columns="phase").to_numpy())


def test_a_blocks_own_curvature_is_that_of_its_part_of_u_by_double_backward(measured):
    lab, directory = measured
    _, step = first_step(lab, directory)
    rows = table(directory, "terminal_blocks").query("state == 'checkpoint'").set_index("block")
    for block in ("embedding", "blocks.1.mixer"):
        alone = {
            name: part if name.startswith(f"{block}.") else torch.zeros_like(part)
            for name, part in step.direction.items()
        }
        product = hvp(step.loss, step.params, alone, batches=step.batches)
        assert rows.loc[block, "own"] == pytest.approx(
            sum(float((product[name] * alone[name]).sum()) for name in alone), rel=1e-3
        )


def test_a_table_older_than_one_of_its_columns_is_measured_again(measured):
    _, directory = measured
    path = directory.curvature_file("terminal_blocks")
    kept, metadata = path.read_bytes(), {PROTOCOL: read_metadata(path)[PROTOCOL]}
    write_parquet(pd.read_parquet(path).drop(columns="own"), path, metadata)
    assert list_missing_tables(directory, SHORT) == [("terminal", ("blocks",))]
    path.write_bytes(kept)
