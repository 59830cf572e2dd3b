"""`stability.probe what=pdmm`: attention's discrepancy against loops over positions, what lands on disk, and what is
printed."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from stability.mechanisms import build
from stability.probe import main
from stability.probes.layers.attention import attention_statistics, discrepancies
from stability.probes.layers.consensus import low_pass
from stability.probes.layers.measuring import layer_inputs, read_held_out
from stability.runs.results import collect, write
from stability.runs.schema import GRAPH_COLUMNS, PROBE_COLUMNS
from stability.runs.study import StudyFolder
from stability.training import checkpoint
from tests.mechanisms.oracles import rotated
from tests.within import assert_within

N, WIDTH, HEADS = 7, 12, 2
K = WIDTH // HEADS
SEES = {
    ("sa", "bidirectional"): lambda i, j: True,
    ("sa", "causal"): lambda i, j: j <= i,
    ("sw", "causal"): lambda i, j: i - 2 <= j <= i,
    ("attentionx", "bidirectional"): lambda i, j: i != j,
    ("attentionx", "causal"): lambda i, j: j <= i,
}


def layer_of(name, direction, **settings):
    torch.manual_seed(0)
    return build(name, width=WIDTH, heads=HEADS, direction=direction, **settings).double(), torch.randn(
        1, N, WIDTH, dtype=torch.float64
    )


def by_loops(layer, x_BND, head, sees, gamma):
    """V and Φ of one head, (N, K), a query at a time."""
    rows = [slice(part * WIDTH + head * K, part * WIDTH + (head + 1) * K) for part in range(3)]
    with torch.no_grad():
        q, k, v = (x_BND[0] @ layer.qkv.weight[row].T + layer.qkv.bias[row] for row in rows)
    q, k, phi = rotated(q), rotated(k), v.clone()
    for i in range(N):
        seen = [j for j in range(N) if sees(i, j)]
        weights = [math.exp(float(q[i] @ k[j]) / math.sqrt(K)) for j in seen]
        phi[i] -= gamma * sum(
            (w / sum(weights) * v[j] for w, j in zip(weights, seen, strict=True)), torch.zeros(K, dtype=torch.float64)
        )
    return v, phi


def rms(x):
    return math.sqrt(sum(float(value) ** 2 for value in x.flatten()) / x.numel())


@pytest.mark.parametrize(("name", "direction"), SEES)
def test_the_three_root_mean_squares_are_those_of_values_written_out(name, direction):
    layer, x_BND = layer_of(name, direction)
    gamma = {"bidirectional": 1.0, "causal": 3.0}[direction] if name == "attentionx" else 1.0
    for head, found in enumerate(discrepancies(layer, x_BND)):
        (v, own), (_, unscaled) = (by_loops(layer, x_BND, head, SEES[name, direction], each) for each in (gamma, 1.0))
        assert found["value_rms"] == pytest.approx(rms(v), rel=1e-12)
        assert found["own_rms"] == pytest.approx(rms(own), rel=1e-10)
        assert found["unscaled_rms"] == pytest.approx(rms(unscaled), rel=1e-10)
        assert (found["gamma"], found["diagonal"], found["num_positions"]) == (
            gamma,
            int(SEES[name, direction](0, 0)),
            N,
        )


@pytest.mark.parametrize(("name", "settings", "gamma"), [("attentionx", {"gamma": 2.0}, 2.0), ("sa", {}, 1.0)])
def test_a_row_that_sees_nothing_keeps_its_value(name, settings, gamma):
    layer, x_BND = layer_of(name, "causal", mask_diagonal=True, **settings)
    for head, found in enumerate(discrepancies(layer, x_BND)):
        v, own = by_loops(layer, x_BND, head, lambda i, j: j < i, gamma)
        assert found["diagonal"] == 0 and found["gamma"] == gamma
        assert torch.equal(own[0], v[0]) and found["own_rms"] == pytest.approx(rms(own), rel=1e-10)


def test_the_layers_output_is_the_measured_discrepancy_projected():
    """The probe's Φ and the mechanism's forward share no code: with W_o = I, the output's root mean square is the
    heads' Φ."""
    layer, x_BND = layer_of("attentionx", "causal")
    nn.init.eye_(layer.out.weight)
    nn.init.zeros_(layer.out.bias)
    of_heads = layer(x_BND)[0].unflatten(-1, (HEADS, K)).square().mean((0, 2)).sqrt()
    assert [found["own_rms"] for found in discrepancies(layer, x_BND)] == pytest.approx(of_heads.tolist(), rel=1e-10)


def test_equal_values_are_in_consensus():
    layer, x_BND = layer_of("sa", "bidirectional")
    for found in discrepancies(layer, x_BND[:, :1].expand(-1, N, -1)):
        assert_within(found["unscaled_rms"], 1e-12)
        assert found["value_rms"] > 1e-12


@pytest.mark.parametrize("name", ["attentionx", "sa"])
@pytest.mark.parametrize("mask_diagonal", [False, True])
def test_entropy_and_logits_leave_out_what_the_layer_does_not_see(mask_diagonal, name):
    layer, x_BND = layer_of(name, "causal", mask_diagonal=mask_diagonal)
    found = attention_statistics(nn.ModuleList([layer]), lambda: layer(x_BND))["0"]
    entropies, largest = [], -math.inf
    for head in range(HEADS):
        q, k = (
            rotated((x_BND[0] @ layer.qkv.weight[r : r + K].T + layer.qkv.bias[r : r + K]).detach())
            for r in (head * K, WIDTH + head * K)
        )
        for i in range(N):
            logits = [float(q[i] @ k[j]) / math.sqrt(K) for j in range(i + 1 - mask_diagonal)]
            if logits:
                p = np.exp(logits) / np.exp(logits).sum()
                entropies.append(-(p * np.log(p)).sum())
                largest = max(largest, *logits)
    assert found.entropy == pytest.approx(np.mean(entropies), rel=1e-9) and found.logit_max == pytest.approx(
        largest, rel=1e-9
    )


def test_what_a_discrepancy_layer_leaves_of_the_variance_is_that_of_its_own_output():
    layer, x_BND = layer_of("attentionx", "bidirectional")
    for head, found in enumerate(low_pass(layer, x_BND)):
        v, phi = by_loops(layer, x_BND, head, lambda i, j: i != j, 1.0)
        assert found.numbers["variance_before"] == pytest.approx(float((v - v.mean(0)).square().sum()), rel=1e-10)
        assert found.numbers["variance_after"] == pytest.approx(float((phi - phi.mean(0)).square().sum()), rel=1e-10)


def test_what_attention_without_its_diagonal_leaves_of_the_variance_is_that_of_its_own_output():
    layer, x_BND = layer_of("sa", "bidirectional", mask_diagonal=True)
    for head, found in enumerate(low_pass(layer, x_BND)):
        v, phi = by_loops(layer, x_BND, head, lambda i, j: i != j, 1.0)
        attended = v - phi
        assert found.numbers["variance_after"] == pytest.approx(
            float((attended - attended.mean(0)).square().sum()), rel=1e-10
        )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    from tests.conftest import Lab

    lab = Lab(tmp_path_factory.mktemp("lab"))
    runs = {name: lab.train(lab.spec(mechanism={"name": name})) for name in ("attentionx", "sa", "sc")}
    study = StudyFolder.of(lab.pool, "three")
    study.write([directory.run_id for directory in runs.values()])
    return lab, runs, study


def test_a_study_gets_attentions_discrepancy_and_pdmms_beside_it(trained, capsys):
    lab, runs, study = trained
    assert main(["what=pdmm", f"ckpt={study.path}", "iterations=5", "device=cpu"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "leaves out sc: no softmax attention, so no attended values" in said
    assert (
        "Consensus discrepancy of softmax attention, terminal checkpoint" in said and "PDMM on small networks" in said
    )
    rows, solved = (pd.read_parquet(study.results / f"{name}.parquet") for name in ("discrepancy", "pdmm"))
    assert list(rows.columns) == PROBE_COLUMNS["discrepancy"] and list(solved.columns) == GRAPH_COLUMNS["pdmm"]
    assert len(rows) == 2 * 2 * 2 * 2, "runs, layers, heads, sequences"
    assert set(rows[rows.mixer == "attentionx"].diagonal) == {0} and set(rows[rows.mixer == "sa"].diagonal) == {1}
    write(collect(study.path), study.results)
    assert (study.results / "pdmm.parquet").exists(), "collecting leaves what no run wrote"
    assert main(["what=pdmm", f"ckpt={study.path}", "iterations=5", "device=cpu"]) == 0
    assert "skips 2 of 2: measured already" in capsys.readouterr().out
    assert main(["what=pdmm", f"ckpt={study.path}", "iterations=5", "device=cpu", "sequences=1"]) == 0
    assert len(pd.read_parquet(study.results / "discrepancy.parquet")) == 2 * 2 * 2


def test_rows_are_those_of_the_layer_on_its_own_input(trained):
    lab, runs, _ = trained
    directory = runs["attentionx"]
    assert main(["what=pdmm", f"ckpt={directory.path}", "device=cpu", "sequences=2", "phase=earliest"]) == 0
    spec, model = checkpoint.load(directory.checkpoints()[0])
    model = model.double()
    second = read_held_out(spec, lab.cache, 2).split(1)[1]
    expected = list(discrepancies(model.blocks[1].mixer, layer_inputs(model, second)[1]))[1]
    row = (
        pd.read_parquet(directory.probe_file("earliest", "discrepancy"))
        .query("sequence == 1 and layer == 1 and head == 1")
        .iloc[0]
    )
    assert all(row[column] == pytest.approx(value, rel=1e-6) for column, value in expected.items())


def test_a_checkpoint_prints_its_own_tables_and_the_networks(trained, capsys):
    assert main(["what=pdmm", f"ckpt={trained[1]['sa'].checkpoints()[-1]}", "device=cpu", "iterations=4"]) == 0
    said = capsys.readouterr().out
    assert (
        "Consensus discrepancy of softmax attention, terminal checkpoint" in said and "PDMM on small networks" in said
    )


def test_without_a_checkpoint_the_networks_are_drawn_alone(tmp_path, capsys):
    assert (
        main(
            [
                "what=pdmm",
                f"reports_dir={tmp_path}",
                "iterations=6",
                "nodes=4",
                "constraints=general",
                "rho=0.5",
                "averaging=0.5",
            ]
        )
        == 0
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "4 quadratic nodes, general constraints, ρ = 0.5, θ = 0.5; 6 iterations" in said
    assert (tmp_path / "pdmm.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rho=0", "rho=0: input should be greater than 0"),
        ("nodes=2", "nodes=2: input should be greater than or equal to 3"),
        ("averaging=1.5", "averaging=1.5: input should be less than or equal to 1"),
        ("constraints=some", "constraints='some': input should be 'consensus' or 'general'"),
    ],
)
def test_mistakes_are_told_in_a_line(word, message):
    with pytest.raises(ValueError, match=message) as caught:
        main(["what=pdmm", word])
    assert len(str(caught.value).splitlines()) == 1
