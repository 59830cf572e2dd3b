"""What optimizers of matrices take of real models: matrices of mixers and feed-forward networks, one by one, and never an
embedding, a head, a norm or a convolution."""

from __future__ import annotations

import re

import pytest
from torch import nn

from stability.build import build_optimizer
from stability.mechanisms import MixerShape
from stability.optimizers import kinds
from stability.registry import Registry
from tests.optimizers.test_roles import MECHANISMS, MODALITIES, RESIDUALS, built, by_name, spec_of

CROSS = Registry("mechanisms").names(cross=True)


def taken(model: nn.Module) -> set[str]:
    """Return what an optimizer of matrices has in its groups of those, by the name of each parameter."""
    spec = spec_of("mlm", {}, optimizer={"name": "muon"})
    names = {id(value): key for key, value in model.named_parameters()}
    groups = build_optimizer(spec, model).param_groups
    held = [(names[id(value)], group["kind"]) for group in groups for value in group["params"]]
    assert sorted(key for key, _ in held) == sorted(names.values()), "groups do not hold every parameter once"
    return {key for key, kind in held if kind == "matrices"}


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize(("objective", "settings"), MODALITIES, ids=lambda value: str(value)[:40])
def test_of_every_model_matrices_of_mixers_and_feed_forward_networks_alone_are_taken(objective, settings, residual):
    position = "rope" if objective == "classify" else "learned"  # which has a learned vector of each already
    model = built(spec_of(objective, settings, residual={"name": residual}, position={"name": position}))
    by_role: dict[str, set[bool]] = {}
    found = taken(model)
    for name, value in model.named_parameters():
        expected = value.ndim == 2 and by_name(name) in ("mixer", "cross", "ffn")
        assert (name in found) == expected, name
        by_role.setdefault(by_name(name), set()).add(name in found)
    assert by_role["mixer"] == by_role["ffn"] == {True, False}
    others = set(by_role) - {"mixer", "ffn", "cross"}
    has_head = Registry("objectives").load(objective).has_head
    assert {"embedding", "norm", *(["head"] if has_head else [])} <= others and all(
        by_role[role] == {False} for role in others
    )
    assert has_head == any(value.ndim == 2 for name, value in model.named_parameters() if by_name(name) == "head")


def test_of_plain_attention_these_four_of_a_block_are_taken():
    names = ("mixer.qkv", "mixer.out", "ffn.hidden", "ffn.out")
    assert taken(built(spec_of("mlm", {}))) == {f"blocks.{block}.{name}.weight" for block in (0, 1) for name in names}


def test_a_convolution_in_a_mixer_and_a_table_of_a_foreign_model_are_not_taken():
    model = built(spec_of("mlm", {}))
    model.get_submodule("blocks.0.mixer").convolution = nn.Conv1d(4, 4, 3)
    assert "blocks.0.mixer.convolution.weight" not in taken(model)
    foreign = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4))
    assert kinds(foreign) == {"0.weight": "rest", "1.weight": "matrices", "1.bias": "rest"}


def test_of_a_stack_of_blocks_the_maps_before_and_behind_them_are_not_taken():
    """So a tokenizer's encoder is made, of which nothing says roles but its blocks."""
    blocks = built(spec_of("mlm", {})).get_submodule("blocks")
    found = kinds(nn.ModuleList([nn.Linear(9, 16), blocks, nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))]))
    taken = {name for name, kind in found.items() if kind == "matrices"}
    assert taken and all(name.startswith("1.") and re.search(r"\.(mixer|ffn)\.", name) for name in taken)


@pytest.mark.parametrize("name", (*MECHANISMS, *CROSS))
def test_a_mixer_says_of_every_weight_of_several_widths_what_matrices_it_holds(name):
    """Rows that are a multiple of the width are most likely several matrices, one above the other; a mechanism that has
    one of as many rows says so: ``own_splits = {"name": (rows,)}``."""
    part = Registry("mechanisms").load(name)
    is_causal_only = not part.cross and "bidirectional" not in part.supported_directions(part.Config())
    direction = "causal" if is_causal_only else "bidirectional"
    model = part.build(part.Config(), MixerShape(width=12, heads=2, direction=direction, num_layers=4))
    told = {
        id(module.get_submodule(child).weight)
        for module in model.modules()
        for child in getattr(module, "own_splits", {})
    }
    for key, value in model.named_parameters():
        if value.ndim == 2 and value.shape[1] == 12 and len(value) in (24, 36, 48, 60, 72):
            assert id(value) in told, f"{name}: {key} has {len(value)} rows of 12: own_splits"


@pytest.mark.parametrize("name", ("sa", "sw", "attentionx", "sparse_transformer", "longformer", "bigbird"))
def test_queries_keys_and_values_are_a_matrix_each(name):
    model = built(spec_of("mlm", {}, mechanism={"name": name}))
    optimizer = build_optimizer(spec_of("mlm", {}, optimizer={"name": "muon"}), model)
    (matrices,) = (group for group in optimizer.param_groups if group["kind"] == "matrices")
    names = {id(value): key for key, value in model.named_parameters()}
    rows = {names[id(value)]: own for value, own in zip(matrices["params"], matrices["splits"], strict=True)}
    assert rows["blocks.1.mixer.qkv.weight"] == (16, 16, 16) and rows["blocks.1.mixer.out.weight"] == (16,)


def test_keys_and_values_of_cross_attention_are_a_matrix_each():
    model = built(spec_of("mlm", {"context": 3}, cross={"name": "ca"}))
    optimizer = build_optimizer(spec_of("mlm", {}, optimizer={"name": "muon"}), model)
    names = {id(value): key for key, value in model.named_parameters()}
    rows = {
        names[id(value)]: own
        for group in optimizer.param_groups
        for value, own in zip(group["params"], group.get("splits", ()), strict=False)
    }
    assert {own for key, own in rows.items() if ".kv." in key} == {(16, 16)}
    assert {own for key, own in rows.items() if ".q." in key} == {(16,)}


def test_splits_that_are_not_the_rows_of_the_weight_are_named(monkeypatch):
    model = built(spec_of("mlm", {}))
    monkeypatch.setattr(model.get_submodule("blocks.0.ffn"), "own_splits", {"hidden": (1, 2)}, raising=False)
    with pytest.raises(AssertionError, match="own_splits of hidden"):
        taken(model)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            {"head": {"momentum": 0.5}},
            "optimizer.groups.head.momentum: no parameter of that role is a matrix; AdamW steps them",
        ),
        ({"norm": {"iterations": 4}}, "optimizer.groups.norm.iterations: no parameter of that role is a matrix; AdamW"),
        ({"ffn": {"rest_beta1": 0.5}}, "groups.ffn.rest_beta1: no parameter of that role is AdamW's; all are matrices"),
    ],
)
def test_a_setting_that_nothing_of_its_role_has_is_refused_in_a_line(groups, message):
    model = built(spec_of("mlm", {}, ffn={"name": "mlp", "bias": False}))
    with pytest.raises(ValueError, match=message):
        build_optimizer(spec_of("mlm", {}, optimizer={"name": "muon", "groups": groups}), model)
    for fine in (
        {"head": {"rest_beta1": 0.5, "weight_decay": 0.1}},
        {"ffn": {"momentum": 0.5}},
        {"norm": {"lr_scale": 2}},
    ):
        build_optimizer(spec_of("mlm", {}, optimizer={"name": "muon", "groups": fine}), model)


PLUGINS = "[tests.optimizers.plugins.shifting,tests.optimizers.plugins.scaling]"


def test_a_sweep_of_a_model_without_matrices_is_refused_in_a_line_before_anything_runs(entered, lab):
    words = ["data=text", f"data.path={lab.text}", f"runs_dir={lab.pool}", "launcher=serial", "steps=2", "lr=1e-2"]
    words += [f"plugins={PLUGINS}", "ffn=scaling", "seeds=1"]
    for more in ("optimizer=[adamw,muon]", "optimizer=shampoo"):
        result = entered("stability.sweep", *words, "mechanism=shifting", more)
        assert result.returncode == 2
        (line,) = result.stderr.strip().splitlines()
        assert "the optimizer takes matrices, and this model has none" in line and "adamw" in line
        assert {path.name for path in lab.pool.iterdir()} <= {"cache"}, "nothing was begun"
    for fine in (["mechanism=shifting", "optimizer=adamw"], ["mechanism=sa", "optimizer=muon"]):
        assert entered("stability.sweep", *words, *fine, "dry_run=true").returncode == 0
