"""What the README and the documentation show is run as it stands there."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from analysis import sections
from analysis.report import summary
from analysis.sections import contents
from stability import sweep
from stability.cli.coordinates import read_recipe
from stability.cli.publish import _parsed_columns
from stability.cli.words import Invocation
from stability.mechanisms import build
from stability.runs.results import collect
from tests.analysis.figures import write_figures
from tests.analysis.synthetic import write_study
from tests.mechanisms import checks
from tests.reading import read_spec
from tests.within import assert_within

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    str(file.relative_to(ROOT)): file.read_text()
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
README = PAGES["README.md"]
BLOCKS = [(name, text) for page in PAGES.values() for name, text in re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL)]


def block(language: str, holding: str) -> str:
    return next(text for name, text in BLOCKS if name == language and holding in text)


@pytest.fixture
def mean(tmp_path, monkeypatch):
    """The README's own mechanism, as a plugin."""
    (tmp_path / "mean.py").write_text(block("python", "class RunningMean"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("stability.registry._plugins", {})
    return read_spec("sweep", ["plugins=[mean]", "mechanism=[sa,mean]", "mechanism.mean.window=2"])


def test_the_mechanism_of_the_docs_is_selected_with_its_setting(mean):
    assert [part.name for part in mean.mechanism] == ["sa", "mean"]
    assert mean.mechanism[1].settings.window == 2


def test_the_mechanism_of_the_docs_passes_the_contract_as_its_author_runs_it(tmp_path, monkeypatch):
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "mean.py").write_text(part_of_a_page("mean"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("stability.registry._plugins", {})
    names: dict[str, Any] = {}
    exec(block("python", "# test_mean.py"), names)
    assert len(names["OF_A_MODULE"]) == 6 and len(names["OF_A_BUILDER"]) == 4
    for check in names["OF_A_MODULE"]:
        names["test_mean_keeps"](check)
    for check in names["OF_A_BUILDER"]:
        names["test_mean_is_reproducible"](check)
    names["test_mean_is_as_blind_to_order_as_it_says"]()


def test_the_preset_of_roles_is_read_as_it_stands_and_its_groups_reach_the_optimizer(tmp_path, monkeypatch, lab):
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    (tmp_path / "conf/study/roles.yaml").write_text(block("yaml", "conf/study/roles.yaml"))
    monkeypatch.setattr("stability.cli.conf.conf_dir", lambda: tmp_path / "conf")
    monkeypatch.setattr("stability.cli.source.conf_dir", lambda: tmp_path / "conf")
    for words in (["study=roles"], ["study=roles", "optimizer=[adamw,sgd]", "optimizer.groups.mixer.lr_scale=0.5"]):
        spec = read_spec("sweep", words)
        assert spec.name == "roles" or len(words) > 1
        found = {group.role: group.dump() for group in spec.optimizer[0].groups}
        assert found["mixer"] == {"lr_scale": 0.5}
    assert {group.role: group.dump() for group in read_spec("sweep", ["study=roles"]).optimizer[0].groups} == {
        "mixer": {"lr_scale": 0.5},
        "norm": {"weight_decay": 0.0},
        "embedding": {"lr_scale": 0.0},
    }


def test_the_mechanism_of_the_docs_trains(mean, lab):
    spec = lab.spec(plugins=["mean"], mechanism={"name": "mean"})
    assert lab.train(spec).status()["state"] in ("stable", "plateaued")


def test_the_mechanism_of_the_docs_is_causal_where_the_objective_is(mean, lab):
    """A causal run is not blind to order, whatever the mechanism is of both sides."""
    causal = partial(build, "mean", width=checks.WIDTH, heads=checks.HEADS, direction="causal", num_layers=2)
    for check in (checks.check_future_is_unseen, checks.check_past_is_seen, checks.check_padding_is_unread):
        check(checks.build_seeded(causal))
    blind = {
        name: _parsed_columns(
            lab.spec(plugins=["mean"], mechanism={"name": "mean"}, objective={"name": name}).model_dump(mode="json")
        )
        for name in ("ar", "mlm")
    }
    assert {name: columns["blind_to_order"] for name, columns in blind.items()} == {"ar": 0, "mlm": 1}


BOX = 78  # columns of a code block beside the navigation


@pytest.mark.parametrize("page", [page for page in PAGES if page != "README.md"])
def test_no_line_of_code_on_a_page_is_wider_than_its_box(page):
    blocks = re.findall(r"```\w+\n(.*?)```", PAGES[page], re.DOTALL)
    assert [line for text in blocks for line in text.splitlines() if len(line) > BOX] == []


def test_the_landing_page_installs_shows_a_picture_and_leads_on():
    page, site = PAGES["docs/index.md"], (ROOT / "mkdocs.yml").read_text()
    code = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    assert code and "\nmake sweep\n" in code[0] and "python -m stability.sweep" in code[0]
    pictures = re.findall(r"!\[[^]]+\]\((images/\S+)\)", page)
    assert pictures and all((ROOT / "docs" / name).exists() for name in pictures)
    assert "navigation.footer" in site, "previous and next page"


# each once: many pages show the same command
COMMANDS = sorted(
    {
        command.strip(): page
        for page, text in PAGES.items()
        for command in re.findall(r"python -m (stability\.\w+ ?[^#`\n]*)", re.sub(r" \\\n\s*", " ", text))
    }.items()
)


def test_every_command_is_one_that_its_entry_takes(tmp_path, monkeypatch):
    """Composed and validated, not run. A page about a part of one's own shows it as a plugin, which is made here from
    the page itself."""
    (tmp_path / "my_package").mkdir()
    for name in OWN:
        (tmp_path / "my_package" / f"{name}.py").write_text(part_of_a_page(name))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("my_corpus.jsonl.gz", "my_corpus.jsonl", "my.csv"):
        (tmp_path / name).touch()
    assert len(COMMANDS) > 40 and {command.split()[0] for command, _ in COMMANDS} >= {
        f"stability.{entry}" for entry in ENTRIES
    }
    for command, page in COMMANDS:
        entry, *words = shlex.split(command)
        kind = entry.removeprefix("stability.")
        if kind == "describe" and words and "=" not in words[0]:
            words[0] = f"command={words[0]}"  # as the entry reads it
        if kind == "status" and words and "=" not in words[0]:
            words[0] = f"name={words[0]}"  # as the entry reads it
        monkeypatch.setattr("stability.registry._plugins", {})
        own = next(
            (
                name
                for name in OWN
                for word in words
                if re.match(
                    rf"(mechanism=\[sa,|optimizer=\[adamw,|norm=\[layernorm,|ffn=|objective=|data=){name}\b", word
                )
            ),
            None,
        )
        if own is not None and not any(word.startswith("plugins=") for word in words):
            words.append(f"plugins=[my_package.{own}]")  # the page shows it in its place in the repository
        if "what=coordinates" in words:  # a sweep's words
            assert read_recipe(Invocation.of(words)).kinds(), (page, command)
        elif words and words != ["-h"] and not words[0].startswith(("name=[", "STUDY")):
            spec = read_spec(kind, words)
            assert kind != "sweep" or spec.kinds(), (page, command)  # which refuses parts that do not fit each other


ENTRIES = (
    "sweep",
    "hessian",
    "probe",
    "generate",
    "report",
    "status",
    "train_tokenizer",
    "dashboard",
    "transfer",
    "deploy",
    "infer",
    "embed",
    "describe",
    "web",
)
OWN = ("mean", "signum", "denoise", "csv_column", "scalenorm", "bilinear", "mixture")


@pytest.fixture
def own_part(tmp_path, monkeypatch):
    """A page's own part as a plugin: called with its name, it gives the words that make it known."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("stability.registry._plugins", {})

    def known(name: str) -> list[str]:
        (tmp_path / f"{name}.py").write_text(part_of_a_page(name))
        return [f"plugins=[{name}]"]

    return known


TINY = (
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.positions=16",
    "steps=12",
    "batch=4",
    "evaluation.every_steps=6",
    "evaluation.sequences=16",
)
TINY += (
    "mechanism=sa",
    "lr=1e-3",
    "seeds=1",
    "launcher=serial",
    "report=false",
    "curvature.recorded_steps=3",
    "device=cpu",
)


@pytest.fixture
def swept(lab):
    """The results of a sweep of one small run, with its α_max, on the lab's page: the standard library's docstrings
    take longer to read than to train on."""

    def run(folder, *words: str):
        own = [f"runs_dir={folder}/runs", "name=own"]
        assert sweep.main([*TINY, "data=text", f"data.path={lab.text}", *words, *own]) == 0
        return collect(folder / "runs" / "studies" / "own")

    return run


def test_the_optimizer_of_the_docs_is_swept_and_measured(own_part, swept, tmp_path):
    results = swept(tmp_path, *own_part("signum"), "optimizer=signum", "optimizer.signum.weight_decay=0.1")
    assert set(results.runs["optimizer"]) == {"signum"} and results.runs["val_nll"].notna().all()
    assert set(results.curvature["state"]) == {"checkpoint"}, "the paper's state is Adam's"
    assert (results.curvature["curvature"] != 0).all() and len(results.curvature) == 3


def test_the_step_of_that_optimizer_is_the_formula_above_it(own_part):
    names: dict[str, Any] = {}
    exec(part_of_a_page("signum"), names)
    parameter = torch.nn.Parameter(torch.tensor([2.0, -1.0]))
    optimizer = names["Signum"].build(names["Signum"].Config(beta=0.5, weight_decay=0.1), [parameter], 0.01)
    for gradient in ([1.0, -1.0], [-4.0, 0.5]):  # means 0.5 and −0.5, then −1.75 and 0
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
    assert parameter.tolist() == pytest.approx([(2.0 * 0.999 - 0.01) * 0.999 + 0.01, (-0.999 + 0.01) * 0.999])


def test_the_norm_of_the_docs_is_swept_and_measured(own_part, swept, tmp_path):
    words = ["norm=[layernorm,scalenorm]", "norm.scalenorm.epsilon=1e-4"]
    results = swept(tmp_path, *own_part("scalenorm"), *words)
    assert sorted(results.runs["norm"]) == ["layernorm", "scalenorm"] and results.runs["val_nll"].notna().all()
    assert len(results.curvature) == 12 and set(results.curvature["method"]) == {"taylor"}


def test_that_norm_is_the_formula_above_it(own_part):
    names: dict[str, Any] = {}
    exec(part_of_a_page("scalenorm"), names)
    norm = names["ScaleNorm"].build(names["ScaleNorm"].Config(), 4)
    assert norm(torch.tensor([3.0, 0.0, -4.0, 0.0])).tolist() == pytest.approx([1.2, 0.0, -1.6, 0.0])
    assert norm(torch.zeros(4)).tolist() == [0.0] * 4


def test_the_feed_forward_network_of_the_docs_is_swept_and_measured(own_part, swept, tmp_path):
    known = own_part("bilinear")
    runs = {
        share: swept(tmp_path / share, *known, "ffn=bilinear", f"ffn.share={share}").runs for share in ("0.25", "0.5")
    }
    sizes = {share: run["num_params"].item() for share, run in runs.items()}
    assert sizes["0.5"] - sizes["0.25"] == 3 * 16 * 16 + 2 * 16  # three maps of 16 more, two biases
    usual = swept(tmp_path / "usual", *known)
    assert usual.runs["num_params"].item() not in sizes.values() and len(usual.curvature) == 6
    assert [run["model"].item() for run in (usual.runs, runs["0.5"])] == ["nano", "nano ffn=bilinear"]


def test_the_mixture_of_the_docs_is_trained_and_measured_with_its_own_loss(own_part, swept, tmp_path):
    words = [*own_part("mixture"), "ffn=mixture", "ffn.experts=3"]
    rows, losses = {}, {}
    for balance in ("0.0", "0.5"):
        results = swept(tmp_path / balance, *words, f"ffn.balance={balance}")
        run = tmp_path / balance / "runs" / results.runs["run_id"].item()
        rows[balance] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses[balance] = results.curvature["loss_before"]
        assert len(results.curvature) == 6 and set(results.curvature["method"]) == {"taylor"}
    assert rows["0.5"][0]["val_nll"] == rows["0.0"][0]["val_nll"]
    first, plain = rows["0.5"][1], rows["0.0"][1]
    assert 0.5 <= first["auxiliary_loss"] < 0.75 and plain["auxiliary_loss"] == 0
    assert first["loss"] == pytest.approx(plain["loss"] + first["auxiliary_loss"], rel=1e-6)
    assert (losses["0.5"] > losses["0.0"] + 0.4).all(), "of the loss that α_max looks at"


def test_the_objective_of_the_docs_is_swept_and_measured(own_part, swept, tmp_path):
    results = swept(tmp_path, *own_part("denoise"), "objective=denoise", "objective.rate=0.5")
    assert (
        set(results.runs["objective"]) == {"denoise"}
        and results.runs["val_nll"].notna().all()
        and len(results.curvature) == 6
    )


def test_the_data_source_of_the_docs_is_swept_and_known_by_its_content(own_part, swept, tmp_path, monkeypatch):
    rows = "".join(
        f'"a row about number {number} and its square, {number * number}, as text",{number}\n' for number in range(400)
    )
    (tmp_path / "my.csv").write_text(f"text,number\n{rows}")
    words = [*own_part("csv_column"), "data=csv_column"]
    first = swept(tmp_path, *words, f"data.path={tmp_path}/my.csv")
    (tmp_path / "my.csv").rename(tmp_path / "moved.csv")
    second = swept(tmp_path, *words, f"data.path={tmp_path}/moved.csv")
    assert set(first.runs["data"]) == {"csv_column"} and list(first.runs["run_id"]) == list(second.runs["run_id"])
    with pytest.raises(ValueError, match=r"data\.column=txt: .*moved\.csv has the columns text, number"):
        sweep.main(
            [
                *TINY,
                *words,
                f"data.path={tmp_path}/moved.csv",
                "data.column=txt",
                f"runs_dir={tmp_path}/runs",
                "name=wrong",
            ]
        )


def test_the_figure_of_the_docs_is_in_the_report(tmp_path, monkeypatch):
    """The file of the page, and the two words that the page names put where it says."""
    page = PAGES["docs/extending/figure.md"]
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    imported, listed = re.findall(
        r"the file's name, `(\w+)`, in the import.*?and `([\w.]+)` in `SECTIONS`", page, re.DOTALL
    )[0]
    assert code.startswith(f"# analysis/sections/{imported}.py")
    module = types.ModuleType(f"analysis.sections.{imported}")
    exec(code, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sections, imported, module, raising=False)
    source = Path(contents.__file__).read_text()
    with_it = source.replace("import (\n", f"import (\n    {imported},\n").replace(
        "...] = (\n", f"...] = (\n    {listed},\n", 1
    )
    assert with_it.count("steps_taken") == 2
    own: dict[str, Any] = {}
    exec(with_it, own)
    monkeypatch.setattr(contents, "SECTIONS", own["SECTIONS"])
    study = write_study(tmp_path, mechanisms=["sa"], lrs=[1e-3, 1e-2], seeds=2, curves=False)
    assert "Steps taken" in summary(study) and "0.01" in summary(study)
    drawn = {path.name: path.read_text() for path in write_figures(study, tmp_path / "figures")}
    assert "<svg" in drawn["steps-taken.svg"]


def part_of_a_page(name: str) -> str:
    """The file that a page shows: its first line says which."""
    return next(
        text for language, text in BLOCKS if language == "python" and re.match(rf"# stability/\w+/{name}\.py", text)
    )


def test_the_library_example_of_the_docs_runs():
    """As it stands, in README and docs alike. Its loss is a parabola along any line: at α_max it is what it was at 0."""
    found = [text for kind, text in BLOCKS if kind == "python" and "import directional" in text]
    one, other = (ast.dump(ast.parse(text)) for text in found)  # their lines break at different widths
    assert one == other
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(found[0], names)
    params, direction, loss_fn = names["params"], names["direction"], names["loss_fn"]
    start, end, half = (
        loss_fn({name: params[name] + part * names["result"].alpha_max * direction[name] for name in params})
        for part in (0.0, 1.0, 0.5)
    )
    assert end.item() == pytest.approx(start.item(), rel=1e-5) and half < start


def test_the_operators_of_the_docs_run_and_give_the_dense_numbers(capsys):
    """The example goes on with the one above it: least squares, with H = G = 2FᵀF/n of the features F = (x, 1)."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(block("python", "import directional"), names)
    exec(block("python", "gauss_newton_product,"), names)
    assert len(capsys.readouterr().out.splitlines()) == 7
    u, found, weights = (
        torch.cat([tree["weight"].flatten(), tree["bias"]]).detach().double()
        for tree in (names["direction"], names["product"], names["params"])
    )
    targets, inputs = names["y"].double(), names["x"].double()
    features = torch.cat([inputs, torch.ones(len(inputs), 1)], dim=1)
    hessian = 2 * features.T @ features / len(features)
    # a product of F and Fᵀ adds up 9 and then 64 numbers; 8 more for what comes between
    eps = (9 + 64 + 8) * torch.finfo(torch.float32).eps
    assert_within((found - hessian @ u).norm(), eps * 2 / 64 * features.norm() ** 2 * u.norm())
    pair, size = names["pair"], features.norm() ** 2 * 2 / 64
    assert pair.converged
    assert_within(abs(pair.value - torch.linalg.eigvalsh(hessian)[-2]), pair.residual + eps * size)
    # both estimates by their own standard errors, of 30 samples each
    assert 0 < abs(names["trace"].value - hessian.trace()) < 5 * names["trace"].standard_error
    diagonal = names["diagonal"]
    assert 0 < abs(float(diagonal.value["bias"]) - hessian[-1, -1]) < 5 * float(diagonal.standard_error["bias"])
    # McCandlish et al. 2018, A.1, of 8 microbatches of 8
    rest = features @ weights[:, None] - targets
    gradients = (2 * features * rest).reshape(8, 8, 9).mean(1)
    small, large = gradients.square().sum(1).mean(), gradients.mean(0).square().sum()
    rounding = 2 * eps * max(2 / 8 * features.norm() * rest.norm() * gradients.norm(dim=1))
    noise = names["noise"]
    assert noise.microbatches == 8
    assert_within(abs(noise.gradient_sq - (64 * large - 8 * small) / 56), rounding * 72 / 56)
    assert_within(abs(noise.trace - (small - large) / (1 / 8 - 1 / 64)), 2 * rounding / (1 / 8 - 1 / 64))


def test_the_monitor_of_the_docs_runs(capsys):
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
@pytest.mark.parametrize(
    ("library", "callback"), [("transformers", "hf_callback"), ("lightning", "lightning_callback")]
)
def test_the_callbacks_of_the_docs_run_as_they_stand(library, callback, monkeypatch, tmp_path, capsys):
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


def test_the_docs_are_finished_and_their_files_exist():
    for page, text in PAGES.items():
        assert "@@" not in text
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert (
                target.startswith("http")
                or (ROOT / page).parent.joinpath(target).exists()
                or target == "reference/settings.md"
            ), (page, target)
    assert len(README.splitlines()) <= 130


EXTRAS = {
    r"\bhf=(?!FOLDER)|oracle=hf:|\bdata=hf\b|study=text_54m\b|import hf_callback": "hf",
    r"import lightning_callback": "lightning",
    r"\bdata=protein\b|study=protein|stability\.train_tokenizer": "protein",
    r"launcher=slurm": "slurm",
}


def test_a_page_whose_commands_need_more_than_make_sweep_installs_says_what():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed = set()
    for page, text in PAGES.items():
        assert set(re.findall(r"pip install -e '\.\[(\w+)\]'", text)) <= set(project), page
        shown = "".join(code for _, code in re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL))
        for commands, extra in EXTRAS.items():
            if re.search(commands, shown):
                needed.add((page, extra))
                assert f"pip install -e '.[{extra}]'" in text, (page, extra)
    assert len(needed) > 8
    start = PAGES["docs/getting_started.md"]
    listed = dict(re.findall(r"^\| `(\w+)` \| ([\w, -]+) \|", start, re.MULTILINE))
    assert set(project) - set(listed) == {"images", "peers", "dev"}
    for extra, brings in listed.items():
        assert brings.split(", ") == [re.split(r"[<>=]", each)[0] for each in project[extra]]


def test_what_sweeps_and_examples_write_is_no_change_and_what_reports_keep_is_explained():
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    written = ["reports/quickstart.pdf", "example/runs/x", "runs/x", *example_figures()]
    kept = subprocess.run(["git", "ls-files", "reports"], cwd=ROOT, capture_output=True, text=True, check=True)
    words = ["git", "check-ignore", "--no-index", *written, *kept.stdout.split()]
    ignored = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    assert sorted(ignored) == sorted(written)
    explained = (ROOT / "reports" / "README.md").read_text()
    assert all(f"| `{Path(file).name}` |" in explained for file in kept.stdout.split() if not file.endswith(".md"))


def example_figures() -> list[str]:
    """Return the figures that the examples write where no other place is given."""
    sources = [file.read_text() for file in (ROOT / "examples").glob("*.py")]
    found = [name for source in sources for name in re.findall(r'"([\w/]+\.png)"', source)]
    assert len(found) == 2
    return found


def test_a_reading_of_consensus_stands_with_the_whole_key_that_chooses_it():
    """A reader who types `rope=gradient` is refused: "rope: unknown key"."""
    captions = {file.name: file.read_text() for file in (ROOT / "analysis").rglob("*.py")}
    written = {name: re.findall(r"([\w.]*)\brope=", text) for name, text in (PAGES | captions).items()}
    bare = {name: keys for name, keys in written.items() if "" in keys}
    assert bare == {} and sum(map(len, written.values())) > 7
    for cross, own in (("auto", "cross.cc."), ("cc", "cross.")):
        keys = ("mechanism.sc.", "mechanism.mix.sc.", own)
        chosen = [f"{key}{setting}" for key in keys for setting in ("rope=gradient", "step=bounded")]
        read_spec("sweep", ["mechanism=[sc,mix]", f"cross={cross}", *chosen])


def test_both_commands_of_the_docs_are_targets():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile
