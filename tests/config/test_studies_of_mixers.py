"""Presets that set mechanisms beside softmax attention hold the runs that they speak of."""

from __future__ import annotations

import itertools

import pytest
import torch

from analysis.claims.recall import RIVALS
from stability.build import sequence_state_bytes
from stability.config.identity import run_id
from stability.mechanisms import build
from tests.reading import read_spec

FINGERPRINT = "f" * 64
TEXT = ("model=nano", "objective=ar", "data=text", "data.path=README.md")


@pytest.mark.parametrize(("words", "direction"), [((), "bidirectional"), (TEXT, "causal")])
def test_attentionx_2x2_is_four_mechanisms_that_differ_in_mask_and_in_what_is_subtracted(words, direction):
    points = read_spec("sweep", ["study=attentionx_2x2", *words]).points(FINGERPRINT)
    runs = [run for _, run in points]
    assert len(runs) == len({run_id(run) for run in runs}) == 4 * 4 * 3, "cells × rates × seeds"
    cells = {(run.mechanism.name, run.mechanism.settings.mask_diagonal): run.mechanism for run in runs}
    assert set(cells) == set(itertools.product(("sa", "attentionx"), (False, True)))
    assert {part.settings.temperature for part in cells.values()} == {"learned"}
    x_BND = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    outputs, modules = {}, {}
    for cell, part in cells.items():
        settings = part.settings.model_dump()
        torch.manual_seed(0)
        modules[cell] = build(part.name, width=16, heads=2, direction=direction, **settings)
        outputs[cell] = modules[cell](x_BND)
    for one, other in itertools.combinations(outputs, 2):
        assert (outputs[one] - outputs[other]).abs().max() > 1e-3, (one, other)
    assert {cell: module.gamma for cell, module in modules.items() if cell[0] == "attentionx"} == {
        ("attentionx", False): 3.0,
        ("attentionx", True): 1.0,
    }, "the paper's recipe, by the mask"
    assert {cell: module.log_temperature is not None for cell, module in modules.items()} == dict.fromkeys(cells, True)


def test_attentionx_2x2_has_a_curve_for_each_cell_and_no_more():
    curves = read_spec("sweep", ["study=attentionx_2x2"]).curves()
    assert [(choice["mechanism"].name, label) for label, choice in curves] == [
        ("sa", ""),
        ("sa", "mask_diagonal=true"),
        ("attentionx", ""),
        ("attentionx", "mask_diagonal=true"),
    ]


@pytest.mark.parametrize(
    ("study", "objective", "causal_only"),
    [("mixers_softmax", "mlm", set()), ("mixers_softmax_ar", "ar", {"fox", "nsa"})],
)
def test_mixers_stand_beside_sa_at_the_same_rates_and_seeds(study, objective, causal_only):
    spec = read_spec("sweep", [f"study={study}"])
    runs = spec.expand(FINGERPRINT)
    assert {run.objective.name for run in runs} == {objective}
    kinds = {}
    for label, choice in spec.curves():
        kinds.setdefault(choice["mechanism"].name, set()).add(label)
    varied = {"sigmoid": {"", "norm=after"}, "gated_softmax": {"", "gate=headwise"}}
    others = {"sa", "sparse_transformer", "longformer", "bigbird", "sparsek"} | causal_only
    assert kinds == {name: {""} for name in others} | varied
    points = {(run.lr_peak, run.seed) for run in runs}
    assert len({seed for _, seed in points}) == 3 and len({lr for lr, _ in points}) == 7
    assert len(runs) == len({run_id(run) for run in runs}) == len(points) * sum(map(len, kinds.values())) <= 250


RECURRENT = {"retnet", "gla", "hgrn2", "mamba", "mamba2", "deltanet", "gated_deltanet", "kda", "titans"}


@pytest.mark.parametrize(
    ("study", "objective", "expected"),
    [
        ("mixers_recurrent", "ar", {"sa", "fox", "sw"} | RECURRENT),
        ("mixers_recurrent_mlm", "mlm", {"sa", "sc"} | {f"two_way {name}" for name in RECURRENT}),
        ("hybrids", "ar", {"sa", "gla", "gated_deltanet"} | {f"mix {name}" for name in ("gla", "gated_deltanet")}),
    ],
)
def test_recurrent_mixers_stand_beside_sa_at_the_same_rates_and_seeds(study, objective, expected):
    spec = read_spec("sweep", [f"study={study}"])
    runs = spec.expand(FINGERPRINT)
    assert {run.objective.name for run in runs} == {objective} and not spec.lr.scaled
    kinds = set()
    for run in runs:
        settings = run.mechanism.settings
        if run.mechanism.name == "mix":
            assert settings.order == "cycled" and settings.pattern == (settings.pattern[0],) * 3 + ("sa",)
            assert run.model.layers % 4 == 0, "one layer of four"
        inner = {"two_way": lambda: settings.of.name, "mix": lambda: settings.pattern[0]}.get(run.mechanism.name)  # noqa: B023
        kinds.add(run.mechanism.name if inner is None else f"{run.mechanism.name} {inner()}")
    assert kinds == expected
    points = {(run.lr_peak, run.seed) for run in runs}
    assert len({seed for _, seed in points}) == 3 and len({lr for lr, _ in points}) == 7
    assert len(runs) == len({run_id(run) for run in runs}) == len(points) * len(expected)


def test_studies_of_recurrent_mixers_share_the_runs_that_they_have_in_common():
    runs = {
        study: {run_id(run): run.mechanism.name for run in read_spec("sweep", [f"study={study}"]).expand(FINGERPRINT)}
        for study in ("mixers_softmax_ar", "mixers_recurrent", "hybrids")
    }
    recurrent = runs["mixers_recurrent"]
    assert {recurrent[each] for each in recurrent.keys() & runs["mixers_softmax_ar"].keys()} == {"sa", "fox"}
    assert {recurrent[each] for each in recurrent.keys() & runs["hybrids"].keys()} == {"sa", "gla", "gated_deltanet"}


def test_who_recalls_is_asked_at_one_size_of_the_state_and_by_the_pairs_that_are_judged():
    spec = read_spec("sweep", ["study=recall_recurrent"])
    kinds = {(choice["mechanism"].name, label): choice["mechanism"] for label, choice in spec.curves()}
    judged = [pair[:2] for pair in RIVALS if pair[0] in kinds]
    assert {kind for pair in judged for kind in pair} == set(kinds), "each stands in a statement"
    runs = spec.expand(FINGERPRINT)
    assert len(runs) == len({run_id(run) for run in runs}) == 2 * 6 * len(kinds)
    states = {run.mechanism.name: sequence_state_bytes(run, "causal") for run in runs}
    matrices, convolutions = 8 * 8 * 8, 3 * 3 * 64  # heads of K × V; three positions before, of q, k and v
    assert states == dict.fromkeys(("gla", "deltanet", "gated_deltanet"), 2 * 4 * (matrices + convolutions))


def test_what_a_memory_is_worth_is_asked_by_the_pair_that_is_judged():
    spec = read_spec("sweep", ["study=recall_memory"])
    kinds = {(choice["mechanism"].name, label) for label, choice in spec.curves()}
    assert kinds == {kind for pair in RIVALS for kind in pair[:2] if kind[0] == "titans"}
    assert len({run_id(run) for run in spec.expand(FINGERPRINT)}) == 3 * 3 * 2
