"""Ids of runs outlive new settings: a run that finished before a setting existed is the run that leaves it where it
was."""

from __future__ import annotations

import pytest

from stability.config.identity import drop_excluded, run_id
from stability.config.parse import parse_run
from stability.config.run import RunSpec
from stability.runs.directory import RunDirectory
from tests.identity.golden_ids import run_of

BASE = {
    "model": {"name": "nano", "layers": 4, "width": 64, "heads": 4, "positions": 128},
    "objective": "mlm",
    "data": "stdlib",
    "mechanism": "sa",
    "residual": "identity",
    "optimizer": "adamw",
    "norm": "layernorm",
    "schedule": {"name": "constant"},
    "steps": 200,
    "batch": 8,
    "clip_norm": 1.0,
    "lr_peak": 1e-3,
    "seed": 0,
    "data_fingerprint": "f" * 64,
}
# taken at the commit before `cross`, `objective.mlm.context` and sc's `graph`, `iterations`, `step`
OLD = [
    ("aab1217e1e95", {}),
    ("7a6621aff1b1", {"mechanism": "sw"}),
    ("3f799e45e451", {"mechanism": "sc"}),
    ("1e3cc58276f0", {"mechanism": {"name": "sc", "window": 4, "edge_hidden": 256}}),
    ("9f91935ea4bc", {"mechanism": "mix"}),
    ("229c3b1d56cf", {"mechanism": {"name": "mix", "pattern": ["sc", "sa"], "sc": {"rank": 2}}}),
    ("70dc967acccd", {"objective": "ar"}),
    ("8f3cc7ff8f53", {"objective": {"name": "mlm", "mask_rate": "cosine"}, "seed": 3}),
]
MODELS = (
    *({"init": rule} for rule in ("torch", "nanogpt", "sedd")),
    {"tied": True},
    {"head_bias": False},
    *({"mixer_bias": kept} for kept in ("out", "none")),
    *({"embedding_width": width} for width in (16, 64)),
    *({"embedding_conv": size} for size in (3, 5)),
    {"embedding_conv": 3, "embedding_conv_residual": True},
    *({"loops": loops} for loops in (2, 3)),
)


def id_of(**changes) -> str:
    return run_id(parse_run(BASE | changes))


@pytest.mark.parametrize(("known", "changes"), OLD)
def test_a_run_from_before_the_settings_keeps_its_id(known, changes):
    spec = run_of(BASE | changes)
    assert run_id(spec) == known
    assert run_id(parse_run(spec.model_dump(mode="json"))) == known


def test_every_other_value_of_a_younger_setting_is_another_run():
    context = {"objective": {"name": "mlm", "context": 16}}
    masking = (
        {"mask_rate": "fixed"},
        {"mask_rate": "fixed", "fixed_rate": 0.3},
        {"corruption": "bert"},
        {"loss_chunk": 64},
    )
    ids = [
        *(id_of(objective={"name": "mlm", **changed}) for changed in masking),
        id_of(objective="ar"),
        id_of(objective={"name": "ar", "loss_chunk": 64}),
        id_of(mechanism="sc"),
        *(
            id_of(mechanism={"name": "sc", **changed})
            for changed in ({"graph": "cycle"}, {"iterations": 2}, {"step": "learned"})
        ),
        id_of(mechanism={"name": "sa", "mask_diagonal": True}),
        id_of(mechanism={"name": "mix", "sa": {"mask_diagonal": True}}),
        id_of(mechanism="mix"),
        id_of(mechanism={"name": "mix", "order": "cycled"}),
        *(
            id_of(mechanism={"name": "mix", "sc": changed})
            for changed in ({"graph": "cycle"}, {"iterations": 2}, {"step": "learned"})
        ),
        id_of(),
        *(
            id_of(checkpoint=changed)
            for changed in ({"every_steps": 50}, {"every_steps": 50, "keep_last": 2}, {"keep_best": 1})
        ),
        *(
            id_of(guards=changed)
            for changed in ({"post_clip_norm": 0.5}, {"check_every": 2}, {"on_nonfinite": "skip_step", "retries": 3})
        ),
        *(id_of(guards={"on_nonfinite": "restore_last_good", "retries": number}) for number in (1, 2)),
        *(id_of(log=changed) for changed in ({"gradients": 10}, {"activations": 10}, {"curvature": 10})),
        *(id_of(model={**BASE["model"], **changed}) for changed in MODELS),
        id_of(mechanism={"name": "sa", "temperature": "learned"}),
        id_of(mechanism="attentionx"),
        id_of(mechanism={"name": "attentionx", "temperature": "learned"}),
        *(
            id_of(model={**BASE["model"], "positions": 64}, data="images", objective={"name": "classify", **changed})
            for changed in (
                {},
                {"pool": "cls"},
                {"patches": "shifted"},
                {"position_std": 1.0},
                {"rand_augment": 2},
                {"rand_augment": 2, "magnitude": 9.0},
            )
        ),
        id_of(optimizer={"name": "adamw", "decay": "matrices"}),
        *(id_of(optimizer={"name": "sgd", "momentum": 0.9, **changed}) for changed in ({}, {"nesterov": True})),
        id_of(**context, cross="ca"),
        id_of(objective={"name": "mlm", "context": 17}, cross="ca"),
        id_of(**context, cross={"name": "ca", "rope": "none"}),
    ]
    assert len(set(ids)) == len(ids)


def test_the_folder_of_a_run_from_before_a_setting_is_that_run_s(tmp_path):
    spec = parse_run(BASE)
    directory = RunDirectory(tmp_path, run_id(spec))
    whole = spec.model_dump(mode="json")
    old = drop_excluded(whole, RunSpec) | {part: whole[part] for part in ("norm", "ffn", "position", "linear")}
    assert "guards" not in old and "keep_best" not in old["checkpoint"]
    directory.write_spec(old)
    directory.write_spec(spec.model_dump(mode="json"))
    with pytest.raises(ValueError, match="is the spec of another run"):
        directory.write_spec(parse_run(BASE | {"log": {"gradients": 1}}).model_dump(mode="json"))
