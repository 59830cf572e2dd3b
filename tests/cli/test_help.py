"""``-h`` lists what Hydra composes: every key with its default, every choice, a plugin's too."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from stability.cli.help import WIDTH, help_text
from stability.cli.settings import command_rows
from stability.config.ablation import value_text
from stability.config.base import AXES
from stability.config.parse import SPECS
from tests.reading import compose

NEEDED = {
    "probe": ["what=qk"],
    "generate": ["ckpt=x", "num=1"],
    "report": ["name=x"],
    "transfer": ["name=x"],
    "deploy": ["ckpt=x", "format=int8"],
    "infer": ["dir=x"],
    "dashboard": ["name=x"],
    "hessian": ["hf=x"],
    "embed": ["mode=export", "ckpt=x", "out=y"],
}
# set by study=quickstart, a preset
OF_PRESET = ("mechanism", "seeds", "curvature.parity_steps")


def composed(root: str) -> dict[str, str]:
    """Every key that Hydra makes of a command without words, as it is typed."""
    found: dict[str, str] = {}

    def walk(node, prefix):
        for key, value in node.items():
            if isinstance(value, dict) and value:
                walk(value, f"{prefix}{key}.")
            elif value != {}:
                found[f"{prefix}{key}"] = value_text(value) or '""'

    walk(compose(root, NEEDED.get(root, [])), "")
    given = [word.partition("=")[0] for word in NEEDED.get(root, [])]
    return {key: value for key, value in found.items() if key not in given}


@pytest.mark.parametrize("root", SPECS)
def test_every_key_has_the_default_that_is_composed(root):
    rows = {row.key: row.default for row in command_rows(root)}
    expected = {
        key: value
        for key, value in composed(root).items()
        if key.partition(".")[0] not in AXES and not key.endswith(".name") and key not in OF_PRESET
    }
    of_parts = [key for key in expected if key not in rows]
    assert all(key.partition(".")[0] in ("objective", "data", "ffn", "position", "linear", "cross") for key in of_parts)
    assert {key: rows[key] for key in expected if key in rows} == {
        key: value for key, value in expected.items() if key in rows
    }


@pytest.mark.parametrize("root", SPECS)
def test_h_names_every_key_with_its_default_and_every_choice_in_lines_that_fit(root):
    text = help_text(root, "HEAD", [])
    assert text.startswith("HEAD\n") and max(map(len, text.splitlines())) <= WIDTH
    flat = re.sub(r"\s+", " ", text)
    for row in command_rows(root):
        if not row.needs and row.default:
            group, _, inner = row.key.partition(".")
            assert f"{row.key}={row.default}" in flat or f"{inner}={row.default}" in flat, row.key
        assert row.needs or row.meaning


def test_a_plugins_settings_are_in_h(tmp_path, monkeypatch):
    (tmp_path / "my_norm.py").write_text(
        "from pydantic import Field\nfrom stability.config import Settings\nfrom stability.norms import AbstractNorm\n"
        "class Mine(AbstractNorm):\n    class Config(Settings):\n"
        "        slope: float = Field(default=0.25, description='how steep it is')\n"
        "EXPORT = Mine\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("stability.registry._plugins", {})
    assert "my_norm" not in help_text("sweep", "", [])
    assert "derf, dyt, layernorm, my_norm, rmsnorm" in help_text("sweep", "", ["plugins=[my_norm]"])
    own = help_text("sweep", "", ["plugins=[my_norm]", "norm=[my_norm]"])
    assert re.fullmatch(r"norm=my_norm\n  norm\.my_norm\.slope=0\.25\s+how steep it is", own)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["mechanism=sc"], ["mechanism=sc\n", "mechanism.sc.window=2 ", "window | cycle | complete"]),
        (["mechanism=[sa,sw]"], ["mechanism=sa\n", "mechanism.sw.window=2 "]),
        (["guards"], ["guards.retries=0 ", "stop | skip_step | restore_last_good"]),
        (["schedule=wsd"], ["schedule.decay_share=0.2 "]),
        (["search=optuna"], ["search.num=40 "]),
        (["lr=edge"], ["lr.num=9 ", "lr.edge.extend_decades=2 "]),
        (["model=gpt_s"], ["model.layers=", "number of blocks"]),
        (["study=quickstart"], ["conf/study/quickstart.yaml", "seeds: 2"]),
        (["mechanism=mix"], ["mechanism.mix.<part>.<setting>"]),
    ],
)
def test_h_beside_a_word_explains_it_alone(words, shown):
    text = help_text("sweep", "HEAD", words)
    assert "HEAD" not in text and all(each in text for each in shown)


def test_h_imports_no_torch():
    code = "import sys, runpy\nsys.argv = ['sweep', '-h', 'mechanism=mix']\ntry:\n    runpy.run_module('stability.sweep', run_name='__main__')\nexcept SystemExit as end:\n    assert end.code == 0\nassert 'torch' not in sys.modules"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (out.returncode, out.stderr) == (0, "") and "mechanism.mix.pattern=[sa,sc]" in out.stdout


@pytest.mark.parametrize("words", [(), ("-h",), ("help",)])
def test_the_package_itself_lists_its_commands(words):
    command = [sys.executable, "-m", "stability", *words]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    listed = [line.split()[2].removeprefix("stability.") for line in out if line.startswith("python -m ")]
    assert listed == list(SPECS) and max(map(len, out)) <= WIDTH
    assert any(line.endswith(" measure α_max.") for line in out)


def test_a_command_typed_after_the_package_is_told_how_it_is_written():
    command = [sys.executable, "-m", "stability", "sweep", "lr=range"]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (out.returncode, out.stderr) == (2, "error: sweep: a command is written python -m stability.sweep\n")
