"""A part of our own is its .py alone; where there is a yaml and no code, the message names both."""

import shutil
from pathlib import Path

import pytest

from stability.cli.conf import FAMILY_OF
from tests.reading import compose

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def conf(tmp_path, monkeypatch):
    """A copy of conf/, which a user may add to."""
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    for module in ("conf", "source"):
        monkeypatch.setattr(f"stability.cli.{module}.conf_dir", lambda: tmp_path / "conf")
    return tmp_path / "conf"


@pytest.mark.parametrize("group", FAMILY_OF)
def test_a_yaml_without_its_code_is_told_by_both_names(group, conf):
    (conf / group).mkdir()
    (conf / group / "novel.yaml").write_text("name: novel")
    with pytest.raises(ValueError, match=f"conf/{group}/novel.yaml is there, stability/{FAMILY_OF[group]}/novel.py is"):
        compose("sweep", [f"{group}=novel"])


def test_a_users_own_yaml_of_a_part_has_precedence(conf):
    (conf / "mechanism").mkdir()
    (conf / "mechanism" / "sw.yaml").write_text("# @package mechanism.sw\nwindow: 7\nimpl: reference\n")
    (conf / "mechanism" / "two_way.yaml").write_text(
        "# @package mechanism.two_way\ndefaults:\n  - sw@sw\n  - sc@sc\n  - _self_\nof: sw\nweights: shared\n"
    )
    (conf / "ffn").mkdir()
    (conf / "ffn" / "mlp.yaml").write_text("name: mlp\nbias: false\n")
    (conf / "curvature").mkdir()
    (conf / "curvature" / "short.yaml").write_text("recorded_steps: 3\n")
    composed = compose("sweep", ["mechanism=[sw,sc,two_way]", "mechanism.sc.window=3", "curvature=short"])
    assert composed["mechanism"]["sw"] == {"window": 7, "impl": "reference"}
    assert composed["mechanism"]["sc"]["window"] == 3
    assert composed["mechanism"]["two_way"]["sw"]["window"] == 7
    assert composed["mechanism"]["two_way"]["sc"]["rank"] == 4, "of a class, by a user's yaml"
    assert composed["ffn"] == {"name": "mlp", "bias": False}
    assert composed["curvature"]["recorded_steps"] == 3


def test_a_mistyped_name_is_still_told_its_neighbour():
    with pytest.raises(ValueError, match="mechanism=retnt: no such choice; did you mean 'retnet'?"):
        compose("sweep", ["mechanism=retnt"])
    with pytest.raises(ValueError, match="cross=sa: no such choice"):
        compose("sweep", ["cross=sa"])
