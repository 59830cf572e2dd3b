"""What the README shows is run as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from stability.mechanisms import build
from tests.mechanisms import checks
from tests.reading import read_spec

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)


def block(language: str, holding: str) -> str:
    return next(text for name, text in BLOCKS if name == language and holding in text)


@pytest.fixture
def mean(tmp_path, monkeypatch):
    """The README's own mechanism, as a plugin."""
    (tmp_path / "mean.py").write_text(block("python", "class RunningMean"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("stability.registry._plugins", {})
    return read_spec("sweep", ["plugins=[mean]", "mechanism=[sa,mean]", "mechanism.mean.window=2"])


def test_the_mechanism_of_the_readme_is_selected_with_its_setting(mean):
    assert [part.name for part in mean.mechanism] == ["sa", "mean"]
    assert mean.mechanism[1].settings.window == 2


def test_the_mechanism_of_the_readme_passes_the_contract(mean):
    for check in (
        checks.check_shape_and_dtype,
        checks.check_padding_is_unread,
        checks.check_wholly_padded_is_finite,
        checks.check_second_derivatives,
        checks.check_degenerate_inputs,
    ):
        check(checks.build_seeded(lambda: build("mean", width=checks.WIDTH, heads=checks.HEADS)))


def test_the_mechanism_of_the_readme_trains(mean, lab):
    spec = lab.spec(plugins=["mean"], mechanism={"name": "mean"})
    assert lab.train(spec).status()["state"] in ("stable", "plateaued")


def test_the_yaml_of_the_readme_holds_the_defaults_of_its_file(mean):
    assert block("yaml", "mechanism.mean").splitlines()[-1] == "window: 3"
    from stability.registry import Registry

    assert Registry("mechanisms").load("mean").Config().window == 3


def test_every_sweep_command_of_the_readme_has_its_runs(tmp_path):
    commands = re.findall(r"^python -m stability\.sweep ([^#\n]*)", README, re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        if "-h" not in command.split():
            (tmp_path / "my_corpus.jsonl.gz").touch()
            assert read_spec("sweep", shlex.split(command)).expand("f" * 64), command


def test_the_library_example_of_the_readme_runs():
    params = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    names = {"loss_fn": lambda p: 2 * p["w"].square().sum(), "params": params, "direction": {"w": -params["w"]}}
    exec(block("python", "from stability.curvature import directional"), names)
    assert names["result"].alpha_max == pytest.approx(2.0)


def test_the_monitor_of_the_readme_runs(capsys):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(11)]
    names = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "loss_fn": lambda m, batch: torch.nn.functional.mse_loss(m(batch[0]), batch[1]),
        "batches": batches,
    }
    exec(block("python", "AlphaMaxMonitor"), names)
    assert "alpha_max" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")  # Lightning's, about the loader's workers
@pytest.mark.parametrize(("library", "callback"), [("transformers", "hf_callback"), ("lightning", "lightning_callback")])
def test_the_callbacks_of_the_readme_run_as_they_stand(library, callback, monkeypatch, tmp_path, capsys):
    pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(block("python", f"import {callback}"), names)
    rows = names["watch"].history
    assert [row.step for row in rows] == [0, 2]
    assert {(row.method, row.note) for row in rows} == {("taylor", None)}
    for row in rows:
        assert row.actual_change == pytest.approx(row.predicted_change, rel=0.2)
    assert capsys.readouterr().out.splitlines()[-1] == str(rows[-1])


def test_the_readme_is_finished_and_its_files_exist():
    assert "@@" not in README
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_both_commands_of_the_readme_are_targets():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile
