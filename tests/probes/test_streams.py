"""`python -m stability.probe what=streams`: numbers against loops over tokens, what lands on disk, and what a mistake
is told."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from stability.probe import main
from stability.probes.layers.measuring import read_held_out
from stability.probes.layers.streams import QUANTILES, connections, stream_statistics
from stability.runs.schema import PROBE_COLUMNS
from stability.runs.study import StudyFolder
from stability.training import checkpoint
from tests.conftest import Lab
from tests.within import assert_within


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of each scheme, and the study of them."""
    lab = Lab(tmp_path_factory.mktemp("lab"))
    changes = {"lr_peak": 3e-2, "objective": {"name": "ar"}}
    runs = {
        name: lab.train(lab.spec(residual={"name": name}, **changes)) for name in ("identity", "hc", "mhc", "mhc_lite")
    }
    study = StudyFolder.of(lab.pool, "four")
    study.write([directory.run_id for directory in runs.values()])
    return lab, runs, study


def measured(lab, directory):
    """The rows of two held-out sequences, and each connection's matrices and states of every token, in float64."""
    spec, model = checkpoint.load(directory.checkpoints()[-1])
    model, examples = model.double(), read_held_out(spec, lab.cache, 2)
    rows = list(stream_statistics(model, examples.split(1)))[-1]
    chain, states = connections(model), []
    hooks = [
        each.module.register_forward_pre_hook(lambda module, args: states.append(args[0].detach())) for each in chain
    ]
    examples.logits(model)
    for hook in hooks:
        hook.remove()
    mixes = [
        each.module.coefficients(state).mix_BNST.detach().flatten(0, 1).numpy()
        for each, state in zip(chain, states, strict=True)
    ]
    return pd.DataFrame(rows), mixes, chain, states


def quantiles(rows, matrix, quantity, connection):
    place = rows.connection.isna() if connection is None else rows.connection == connection
    return rows[(rows.matrix == matrix) & (rows.quantity == quantity) & place].sort_values("quantile").value.to_numpy()


@pytest.mark.parametrize("name", ["hc", "mhc", "mhc_lite"])
def test_numbers_are_those_of_a_loop_over_tokens(trained, name):
    lab, runs, _ = trained
    rows, mixes, chain, _ = measured(lab, runs[name])
    assert [each.branch for each in chain] == ["mixer", "ffn"] * 2
    expected = {
        key: [] for key in ("columns", "rows", "norm", "forward", "backward", "product columns", "product norm")
    }
    for token in range(2 * 16):
        whole, last = np.eye(4), np.eye(4)
        for number in range(4):
            whole = whole @ mixes[number][token]
        for number in (2, 3):
            last = last @ mixes[number][token]
        first = mixes[1][token]
        expected["columns"] += [sum(first[s][t] for s in range(4)) for t in range(4)]
        expected["rows"] += [sum(first[s]) for s in range(4)]
        expected["norm"].append(np.sqrt(np.linalg.eigvalsh(first.T @ first).max()))
        expected["product columns"] += [whole[:, t].sum() for t in range(4)]
        expected["product norm"].append(np.sqrt(np.linalg.eigvalsh(whole.T @ whole).max()))
        expected["forward"].append(max(sum(abs(whole[s][t]) for s in range(4)) for t in range(4)))
        expected["backward"].append(max(sum(abs(last[s][t]) for t in range(4)) for s in range(4)))
    places = {
        "columns": ("single", "column_sum", 1), "rows": ("single", "row_sum", 1), "norm": ("single", "spectral_norm", 1),
        "product columns": ("product", "column_sum", 3), "product norm": ("product", "spectral_norm", 3), "forward": ("product", "forward_gain", 3),
        "backward": ("rest", "backward_gain", 2),
    }  # fmt: skip
    for key, place in places.items():
        np.testing.assert_allclose(
            quantiles(rows, *place), np.quantile(expected[key], QUANTILES), rtol=1e-6, atol=1e-12, err_msg=key
        )
    pooled = np.concatenate([matrix.sum(-2).ravel() for matrix in mixes])
    np.testing.assert_allclose(quantiles(rows, "single", "column_sum", None), np.quantile(pooled, QUANTILES), rtol=1e-9)


def test_relative_range_is_that_of_what_sinkhorn_is_given(trained):
    lab, runs, _ = trained
    rows, _, chain, states = measured(lab, runs["mhc"])
    module, state = chain[2].module, states[2]
    with torch.no_grad():
        flat = state.flatten(-2)
        normed = flat / flat.square().mean(-1, keepdim=True).sqrt() * (1 + module.gain)
        logits = module.scale[2] * (normed @ module.weight[:, 8:]).unflatten(-1, (4, 4)) + module.bias_mix
        entries = logits.exp().flatten(-2)
    ranges = (entries.amax(-1) / entries.amin(-1)).log().flatten().numpy()
    np.testing.assert_allclose(quantiles(rows, "single", "log_range", 2), np.quantile(ranges, QUANTILES), rtol=1e-9)
    assert np.all(ranges >= 0), "ν is the smallest over the largest entry: its inverse is at least 1"
    assert (
        quantiles(rows, "single", "beyond", 2) == [np.mean(ranges > 30)]
        and list(rows[rows.quantity == "threshold"].value) == [30.0] * 4
    )
    middle = float(np.median(ranges))
    spec, model = checkpoint.load(runs["mhc"].checkpoints()[-1])
    model, examples = model.double(), read_held_out(spec, lab.cache, 2)
    lower = pd.DataFrame(list(stream_statistics(model, examples.split(1), outlier_log_range=middle))[-1])
    assert quantiles(lower, "single", "beyond", 2) == [np.mean(ranges > middle)] and 0 < np.mean(ranges > middle) < 1
    assert set(lower[lower.quantity == "threshold"].value) == {middle}
    assert list(rows[rows.quantity == "iterations"].value) == [20.0] * 4
    for name in ("hc", "mhc_lite"):
        assert not len(quantiles(measured(lab, runs[name])[0], "single", "log_range", None))


def test_trained_mhc_lite_is_doubly_stochastic_at_every_depth(trained):
    lab, runs, _ = trained
    rows, _, _, _ = measured(lab, runs["mhc_lite"])
    sums = rows[rows.quantity.isin(["column_sum", "row_sum"])].value
    assert_within((sums - 1).abs().max(), 1e-13)
    assert_within(
        (rows[rows.quantity.isin(["spectral_norm", "forward_gain", "backward_gain"])].value - 1).abs().max(), 1e-12
    )


def test_a_study_is_measured_collected_printed_and_skipped_the_second_time(trained, capsys):
    lab, runs, study = trained
    assert main(["what=streams", f"ckpt={study.path}", "sequences=2", "device=cpu"]) == 0
    said = capsys.readouterr().out
    assert "leaves out identity: a single residual stream" in said
    assert "Mixing of residual streams, terminal checkpoint" in said and "sa mhc_lite" in said
    table = pd.read_parquet(study.results / "streams.parquet")
    assert list(table.columns) == PROBE_COLUMNS["streams"]
    assert set(table.run_id) == {runs[name].run_id for name in ("hc", "mhc", "mhc_lite")}
    assert table[table.connection.notna()].groupby("run_id").connection.nunique().eq(4).all()
    assert "outliers: the share of tokens and connections where that exceeds 30." in said.replace("\n", " ")
    assert main(["what=streams", f"ckpt={study.path}", "sequences=2", "device=cpu"]) == 0
    assert "skips 3 of 3: measured already" in capsys.readouterr().out
    assert main(["what=streams", f"ckpt={study.path}", "sequences=2", "device=cpu", "outlier_log_range=5"]) == 0
    again = capsys.readouterr().out.replace("\n", " ")
    assert "skips" not in again and "where that exceeds 5." in again


def test_a_run_and_a_checkpoint_are_measured_alone(trained, capsys):
    lab, runs, _ = trained
    assert main(["what=streams", f"ckpt={runs['hc'].path}", "sequences=1", "device=cpu"]) == 0
    assert main(["what=streams", f"ckpt={runs['mhc'].checkpoints()[0]}", "sequences=1", "device=cpu"]) == 0
    assert "Mixing of residual streams, earliest checkpoint" in capsys.readouterr().out


def test_a_threshold_that_cannot_be_is_told_in_a_line():
    with pytest.raises(ValueError, match="outlier_log_range=0: input should be greater than 0"):
        main(["what=streams", "ckpt=runs/any", "outlier_log_range=0"])


def test_a_run_with_a_plain_residual_has_nothing_to_measure(trained):
    _, runs, _ = trained
    with pytest.raises(
        ValueError, match="residual=identity has a single stream; what=streams looks at hc, mhc, mhc_lite"
    ):
        main(["what=streams", f"ckpt={runs['identity'].path}", "device=cpu"])
