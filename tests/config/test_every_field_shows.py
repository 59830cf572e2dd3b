"""Every field of a run changes what the run leaves, by real runs of eight steps; so does every setting of a mechanism, a
cross mechanism and a residual scheme, by runs of three. Settings of the other parts are shown by the contract tests of their families.

A field that is added is looked at by itself; where its other value is not found from its type, or needs another setting
to be read, the tests fail until `OTHERS` or `WITH` says so.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from stability.config.base import Settings
from stability.config.run import RunSpec
from stability.registry import Registry
from stability.runs.directory import RunDirectory, read_jsonl
from stability.training import checkpoint
from tests.conftest import Lab
from tests.mechanisms.names import RECURRENT
from tests.settings import other_value

GROUPS = ("model", "schedule", "evaluation", "checkpoint", "verdict", "guards", "log")
# by real runs, too, in the file that each names
ELSEWHERE = {
    "init": "tests/training/test_weights.py",
    "weights": "tests/training/test_weights.py",
    "compile": "tests/training/test_compile.py",
    "cuda_graphs": "tests/training/test_captured.py",
    "plugins": "tests/test_own_parts.py",
    "data": "tests/data/test_contract.py",
    "data_fingerprint": "tests/config/test_run_id.py",
    "behaviour": "tests/config/test_run_id.py",
}
CONTEXT = {"objective": {"name": "mlm", "context": 16}}  # as long as the model: windows over it exist
SMALL_STEP = {"guards": {"post_clip_norm": 0.01}}
OTHERS: dict[str, Any] = {
    "objective": "ar",
    "mechanism": "sw",
    "cross": "ca",
    "residual": "hc",
    "optimizer": "sgd",
    "norm": "rmsnorm",
    "ffn": "glu",
    "position": "none",
    "linear": "bitnet",
    "steps": 7,
    "batch": 3,
    "microbatch": 2,
    "clip_norm": 0.1,
    "lr_peak": 1e-3,
    "seed": 1,
    "threads": 2,
    "precision": "bf16",
    "model.layers": 1,
    "model.width": 24,
    "model.heads": 4,
    "model.positions": 15,
    "model.head_width": 4,
    "parametrization": {"name": "mup", "base_width": 8},
    "model.logit_softcap": 0.5,
    "model.qk_bias": 1.0,
    "model.ffn_multiple": 2.0,
    "model.dropout": 0.3,
    "model.dropout_at": "maps",
    "model.embedding_std": 0.5,
    "model.init": "nanogpt",
    "model.tied": True,
    "model.head_bias": False,
    "model.embedding_width": 8,
    "model.embedding_conv": 3,
    "model.loops": 2,
    "model.mixer_bias": "out",
    "schedule.name": "cosine",
    "schedule.warmup_share": 0.25,
    "verdict.noise_margin": 0.0,
    "checkpoint.every_steps": 3,
    "log.activations": 2,
    "log.curvature": 2,
    "checkpoint.keep_best": 2,
    "guards.on_nonfinite": "skip_step",
    "guards.retries": 3,
    "guards.check_every": 4,
    "mix.pattern": ["sc", "sa"],
    "mix.parts": [{"name": "sc", "window": 3}],
    "two_way.of": "sw",
    "attentionx.gamma": 0.5,
    "attentionx.mask_diagonal": False,
    "sigmoid.length": 4,
    "fox.decay_times": [2.0, 8.0],
    "sa.kv_heads": 1,
    "gated_softmax.kv_heads": 1,
    "cc.graph": "complete",
    "nsa.block": 2,
    "nsa.stride": 1,
    "nsa.selected_block": 8,
    "nsa.kv_heads": 1,
    "sc.graph": "cycle",
    "sparsek.k": 3,
    "sparsek.window": 0,
    "titans.memory": "mlp",
    "titans.chunk": 3,
    "titans.window": 2,
    "mhc_lite.permutations": 3,
    "mamba.dt_range": [0.01, 0.1],
    "mamba2.dt_range": [0.01, 0.1],
    "mamba2.a_range": [1.0, 4.0],
    **{
        f"{name}.chunk": 4 for name in ("deltanet", "gated_deltanet", "kda", "mamba", "mamba2", "retnet")
    },  # rounds otherwise
}
# of blocks so small that 16 positions have several
CAUSAL_NSA: dict[str, Any] = {
    "objective": "ar",
    "mechanism": {"block": 4, "stride": 2, "selected_block": 4, "selected": 3, "window": 3},
}
# what else a run has to be told, so that a field is read; of a group of settings the others of that group
WITH: dict[str, dict[str, Any]] = {
    "cross": {**CONTEXT, "cross": "cc"},
    "model.dropout_at": {"model": {"dropout": 0.3}},
    "model.embedding_conv_residual": {"model": {"embedding_conv": 3}},
    "model.embedding_std": {"model": {"tied": True}},
    "schedule.final_ratio": {"schedule": {"name": "cosine"}},
    "schedule.decay_share": {"schedule": {"name": "wsd"}},
    "checkpoint.keep_last": {"checkpoint": {"every_steps": 2}},
    "verdict.noise_margin": {"verdict": {"spike_nats": 1e-9, "smoothing_steps": 1}},
    "guards.check_every": SMALL_STEP,
    "guards.on_nonfinite": {"guards": {"post_clip_norm": 0.01, "retries": 0}},
    "guards.retries": {"guards": {"post_clip_norm": 0.01, "on_nonfinite": "skip_step", "retries": 2}},
    "mix.order": {"model": {"layers": 4}},
    **{f"fox.{name}": {"objective": "ar"} for name in ("rope", "qk_norm", "softcap")},
    "fox.decay_times": {"objective": "ar"},
    # with fewer blocks all are seen
    **{f"bigbird.{name}": {"mechanism": {"block": 2}} for name in ("window", "random", "link_seed")},
    "sparse_transformer.summary": {"mechanism": {"pattern": "fixed"}},
    "sparsek.window": {"mechanism": {"k": 3}},
    **{f"nsa.{name}": CAUSAL_NSA for name in CAUSAL_NSA["mechanism"]},
    **{f"nsa.{name}": CAUSAL_NSA for name in ("compression", "kv_heads", "qk_norm")},
    **{f"titans.{name}": {"objective": "ar"} for name in ("form", "memory", "momentum", "forgetting", "chunk", "conv")},
    **{f"titans.{name}": {"objective": "ar", "mechanism": {"memory": "mlp"}} for name in ("hidden", "activation")},
    "titans.window": {"objective": "ar", "mechanism": {"form": "gated_attention"}},
    "mhc_lite.permutation_seed": {"residual": {"permutations": 3}},
}
# of settings that only go together
TOGETHER: dict[str, dict[str, Any]] = {"guards.on_nonfinite": {"guards": {"retries": 3}}}


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Lab:
    return Lab(tmp_path_factory.mktemp("fields"))


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return settings with some of them changed, within groups, too."""
    both = {key: {**base[key], **changes[key]} for key in changes if isinstance(base.get(key), dict)}
    return {**base, **{key: value for key, value in changes.items() if key not in both}, **both}


def run_of(lab: Lab, *changes: dict[str, Any]) -> dict[str, Any]:
    """Return what a run leaves that says anything of its training. ``changes``: one after another."""
    values: dict[str, Any] = {
        "model": {"name": "tiny", "layers": 2, "width": 16, "heads": 2, "positions": 16},
        "schedule": {"name": "constant"},
        "steps": 8,
        "lr_peak": 0.1,
        "evaluation": {"every_steps": 4, "sequences": 8},
        **{name: {} for name in ("checkpoint", "verdict", "guards", "log")},
    }
    for each in changes:
        values = merged(values, each)
    threads = torch.get_num_threads()
    try:
        return left(lab.train(lab.spec(**values)))
    finally:
        torch.set_num_threads(threads)


_bases: dict[str, dict[str, Any]] = {}


def base_of(lab: Lab, *changes: dict[str, Any]) -> dict[str, Any]:
    """Return what `run_of` returns, trained once for all the settings that are compared with it."""
    key = json.dumps(changes, sort_keys=True)
    if key not in _bases:
        _bases[key] = run_of(lab, *changes)
    return _bases[key]


def left(directory: RunDirectory) -> dict[str, Any]:
    """Return the rows of a run's logs, its checkpoints with their weights and what they hold of verdict and guards, the
    number of threads and how it ended."""
    newest = directory.checkpoints()[-1:]
    states = [checkpoint.load_trainer(folder) for folder in newest]
    return {
        "rows": list(read_jsonl(directory.metrics_file)),
        "signals": {name: list(read_jsonl(path)) for name, path in directory.signal_files.items() if path.exists()},
        "checkpoints": [folder.name for folder in directory.checkpoints()],
        "weights": {
            name: value.tolist() for folder in newest for name, value in checkpoint.load(folder)[1].state_dict().items()
        },
        "judged": [{key: state[key] for key in ("watch", "guard", "best")} for state in states],
        "threads": torch.get_num_threads(),
        "verdict": directory.status()["state"],
    }


def config_of(group: str) -> type[Settings]:
    """Return the class of a group of a run's settings."""
    found: Any = RunSpec.model_fields[group].annotation
    return found


def fields() -> list[str]:
    own = [name for name in RunSpec.model_fields if name not in (*GROUPS, *ELSEWHERE)]
    grouped = [f"{group}.{name}" for group in GROUPS for name in config_of(group).model_fields]
    return [*own, *(path for path in grouped if path != "model.name")]  # what tables call a size


def changed(path: str) -> dict[str, Any]:
    """Return the change that gives a field its other value."""
    group, _, name = path.rpartition(".")
    value = OTHERS[path] if path in OTHERS else other_value(config_of(group) if group else RunSpec, name)
    return {group: {name: value}} if group else {path: value}


@pytest.mark.parametrize("path", fields())
def test_every_field_of_a_run_changes_what_it_leaves(lab, path):
    base = WITH.get(path, {})
    assert run_of(lab, base, changed(path), TOGETHER.get(path, {})) != base_of(lab, base)


# but "impl", whose kernels need CUDA: tests/mechanisms/test_fla.py, with slow references in their places
SETTINGS = [
    (axis, name, key)
    for axis, family, having in (
        ("mechanism", "mechanisms", {"cross": False, "trainable": True}),
        ("cross", "mechanisms", {"cross": True}),
        ("residual", "residuals", {}),
    )
    for name in Registry(family).names(**having)
    for key in Registry(family).load(name).Config.model_fields
    if key != "impl"
]


# what a layer computes shows in its first loss or, where what it changes begins at zero, in the next ones
SHORT = {"steps": 3, "evaluation": {"every_steps": 3, "sequences": 2}}


@pytest.mark.parametrize(("axis", "name", "key"), SETTINGS)
def test_every_setting_of_a_mechanism_or_residual_scheme_changes_what_a_run_leaves(lab, axis, name, key):
    path, config = f"{name}.{key}", Registry("mechanisms" if axis != "residual" else "residuals").load(name).Config
    value = OTHERS[path] if path in OTHERS else other_value(config, key)
    base = merged({axis: {"name": name}} | (CONTEXT if axis == "cross" else {}), WITH.get(path, {}))
    if name in RECURRENT:
        base["objective"] = "ar"
    base |= SHORT
    assert run_of(lab, base, {axis: {key: value}}) != base_of(lab, base)


def test_what_is_only_said_of_a_run_changes_nothing_of_that(lab, tmp_path):
    """Or the tests above could not fail: the same run under another name and in another folder."""
    elsewhere = Lab(tmp_path)
    elsewhere.text.write_bytes(lab.text.read_bytes())
    assert run_of(elsewhere, {"model": {"name": "other"}}) == run_of(lab)
