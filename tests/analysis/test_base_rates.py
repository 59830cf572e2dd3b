"""Captions say that LR and α_max are base rates where roles of parameters train at multiples of them."""

from __future__ import annotations

import json

import pytest

from analysis.drawing.pieces import typst
from analysis.sections.alpha import body, tables
from analysis.sections.alpha_tables import alpha_tables
from analysis.study.load import load
from analysis.study.protocol import base_rates
from tests.analysis.synthetic import write_study


def study_of(tmp_path, **spec):
    folder = write_study(tmp_path, alpha=lambda *_: [1e-2, 2e-2])
    manifest = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps({**manifest, "spec": {**manifest.get("spec", {}), **spec}}))
    return load(folder)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"optimizer": [{"name": "adamw", "groups": {"mixer": {"lr_scale": 0.5}}}]}, "mixer at 0.5 times it"),
        (
            {
                "optimizer": [
                    {"name": "adamw", "groups": {"mixer": {"lr_scale": 0.5}, "head": {"lr_scale": 0.0, "beta1": 0.5}}},
                    {"name": "sgd", "groups": {"mixer": {"lr_scale": 2.0}}},
                ]
            },
            "mixer at 0.5 or 2 times it and head at 0 times it",
        ),
        (
            {"optimizer": [{"name": "adamw"}], "ablate": [
                {"part": "adamw", "setting": "groups.ffn.lr_scale", "values": [1, 3]},
                {"part": "adamw", "setting": "groups.norm.weight_decay", "values": [0.5]},
                {"part": "sc", "setting": "window", "values": [2]},
            ]},
            "ffn at 1 or 3 times it",
        ),
    ],
)  # fmt: skip
def test_the_text_and_every_table_of_alpha_max_say_it(tmp_path, spec, told):
    study = study_of(tmp_path, **spec)
    sentence = f" LR and α_max are the base rate: of the parameters' roles {told}."
    assert base_rates(study) == sentence
    assert told in typst(body(study, {}))
    found = alpha_tables(study)
    assert found and all(sentence in table.caption and sentence in table.brief for table in found)
    assert sentence in " ".join("".join(map(str, tables(study, ("terminal",)))).split())


@pytest.mark.parametrize(
    "spec",
    [{}, {"optimizer": [{"name": "adamw", "groups": {"norm": {"weight_decay": 0.0}}}]}, {"optimizer": ["adamw"]}],
)
def test_where_all_train_at_one_rate_nothing_is_said(tmp_path, spec):
    study = study_of(tmp_path, **spec)
    assert base_rates(study) == ""
    assert not any("base rate" in table.caption for table in alpha_tables(study))
