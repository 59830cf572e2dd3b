from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from stability import hessian
from stability.cli.compose import add_listed_plugins, find_name, study_name
from stability.cli.entry import _run as run_checked
from stability.cli.mistakes import check_repetitions
from stability.cli.subjects import follow
from stability.cli.words import Invocation
from stability.config.parse import parse
from stability.config.sweep import SweepSpec
from stability.norms import AbstractNorm
from stability.runs.study import StudyFolder
from tests.mechanisms.names import CAUSAL, listed
from tests.reading import compose, read_spec

ROOT = Path(__file__).resolve().parents[2]


def sweep(*argv):
    return read_spec("sweep", argv)


def entry(module, *argv, cwd=ROOT):
    return subprocess.run([sys.executable, "-m", module, *argv], capture_output=True, text=True, cwd=cwd)


def test_nothing_is_the_quickstart():
    spec = sweep()
    assert spec.name == "quickstart"
    assert [part.name for part in spec.mechanism] == ["sa", "sc", "mix", "sw"]
    assert (len(spec.lr.rates()), spec.seeds, spec.steps, spec.batch) == (6, 2, 200, 8)
    assert len(spec.expand("f" * 64)) == 48
    sc = spec.mechanism[1].settings
    assert (sc.window, sc.rank, sc.edge_hidden, sc.step_size) == (2, 4, 16, 0.1)
    model = spec.model
    assert (model.layers, model.width, model.heads, model.positions) == (4, 64, 4, 64)
    adamw = spec.optimizer[0].settings
    assert (adamw.weight_decay, adamw.beta1, adamw.beta2) == (1e-2, 0.9, 0.999)
    assert (spec.clip_norm, spec.schedule.name, spec.objective.settings.mask_rate, spec.threads) == (
        1.0,
        "constant",
        "uniform",
        1,
    )


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ([], "quickstart"),
        (["launcher=serial", "runs_dir=elsewhere"], "quickstart"),
        (["mechanism=sc", "lr=range"], "sc-range"),
        (["mechanism=[sa,sc]", "lr=[1e-4,1e-3]", "seeds=3"], "sa+sc-1e-4+1e-3-seeds3"),
        (["study=quickstart", "steps=20"], "quickstart-steps20"),
        (["mechanism.sc.window=4"], "mechanism.sc.window4"),
        (["hessian=false"], "hessianfalse"),
        (["lr=[1e-4, 1e+3]", "search=halving"], "1e-4+1e+3-halving"),
    ],
)
def test_a_users_sweep_is_named_after_its_words_and_never_after_the_quickstart(argv, name):
    assert study_name(Invocation.of(argv)) == name


@pytest.mark.parametrize(
    ("argv", "begins"),
    [
        (["data=text", "data.path=/home/me/my book (2).txt"], "text-mybook2"),
        (["data=text", "data.path=战争与和平.jsonl"], "text"),
        (["data.path=*"], "sweep"),
        (["mechanism=[[sa,sc],sw]"], "sa+sc+sw"),
        ([f"optimizer.adamw.weight_decay={'1' * 200}"], "optimizer.adamw.weight_decay" + "1" * 5),
        (["position=none"], "none"),
        (
            ["lr=[1e-3,1e-2,1e-1]", "seeds=2", "steps=60", "data=text", "data.path=wiki_valid.txt", "objective=ar",
             "curvature.recorded_steps=8", "mechanism=[sa,echo]"],
            "sa+echo-ar-text-wiki_valid-seeds2",
        ),
        (
            ["mechanism=[sa,sc,mix,sw,gla,deltanet,mamba2]", "optimizer=[adamw,sgd]", "objective=ar", "data=text",
             "lr=[1e-3,1e-2]"],
            "sa+sc+mix+4more-ar-text-adamw+sgd",
        ),
        (["lr=[1e-4,2e-4,4e-4,1e-3]", "model.width=[64,128,256]", "seeds=3", "steps=4000"], "width64+128+256-seeds3-steps4000"),
    ],
)  # fmt: skip
def test_a_name_that_does_not_hold_every_word_ends_in_their_sum(argv, begins):
    name = study_name(Invocation.of(argv))
    assert re.fullmatch(re.escape(begins) + "-[0-9a-f]{6}", name) and len(name) <= 40


def test_a_command_finds_the_study_that_an_older_version_named(tmp_path):
    words = ["lr=[1e-3,1e-2,1e-1]", "seeds=2", "steps=60", "objective=ar", "mechanism=[sa,echo]"]
    words = [*words, "curvature.recorded_steps=8", f"runs_dir={tmp_path}"]
    older, invocation = "1e-3+1e-2+1e-1-seeds2-steps60-ar-224713", Invocation.of(words)
    name = study_name(invocation)
    assert name.startswith("sa+echo-ar-") and compose("sweep", words[:4] + words[6:])["name"] != older
    assert find_name(invocation, str(tmp_path)) == name
    StudyFolder.of(tmp_path, older).write([])
    assert find_name(invocation, str(tmp_path)) == older
    StudyFolder.of(tmp_path, name).write([])
    assert find_name(invocation, str(tmp_path)) == name


def test_a_text_of_ones_own_trains_the_next_token_unless_the_command_says_otherwise():
    own = ("data=text", "data.path=X")
    spec = sweep(*own)
    assert (spec.objective.name, [part.name for part in spec.mechanism]) == ("ar", ["sa", "sw"])
    assert [part.name for part in sweep(*own, "mechanism=gla").mechanism] == ["gla"]
    hub = sweep("data=hf", "data.dataset=a/b")
    assert (hub.objective.name, sweep(*own, "lr=1e-3").objective.name) == ("ar", "ar")
    for words in (["objective=mlm"], ["objective.mask_rate=cosine"], ["study=quickstart"]):
        spec = sweep(*own, *words)
        assert (spec.objective.name, len(spec.mechanism)) == ("mlm", 4)
    assert sweep().objective.name == sweep("data=dna", "data.path=X").objective.name == "mlm"
    assert sweep("study=text_54m", *own).objective.name == sweep("study=text_54m").objective.name


def test_a_name_of_40_characters_is_taken_and_a_longer_one_refused():
    assert sweep(f"name={'x' * 40}").name == "x" * 40
    with pytest.raises(ValueError, match=r"^name='x{41}': has 41 characters, at most 40 are possible$"):
        sweep(f"name={'x' * 41}")


LONG = [f"model.{name}={value}" for name, value in dict.fromkeys(("positions", "layers", "width"), 10**20).items()]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["data.path=a/train.jsonl"], ["data.path=b/train.jsonl"]),
        (["data.path=战争与和平.jsonl"], ["data.path=红楼梦.jsonl"]),
        (["data.path=wiki.2019.txt"], ["data.path=wiki.2024.txt"]),
        (["data.path=GCF_000.1.fa.gz"], ["data.path=GCF_000.2.fa.gz"]),
        (["data.path=book"], ["data.annotations=book"]),
        (["data.dataset=me/set"], ["data.dataset=you/set"]),
        (["init=ckpt:r/aaaa/checkpoints/step_000200"], ["init=ckpt:r/bbbb/checkpoints/step_000200"]),
        ([*LONG, "optimizer.adamw.weight_decay=0.1"], [*LONG, "optimizer.adamw.weight_decay=0.0"]),
        (["mechanism=[[sa,sc],sw]"], ["mechanism=[sa,[sc,sw]]"]),
        (["search.space.lr_peak={low:1,high:2}"], ["search.space.lr_peak={low:12,high:}"]),
        (["position=none"], ["search=none"]),
        (["study=recall"], ["objective=recall"]),
        (["data.field=x", "steps=3"], ["data.field=x-steps3"]),
        (["data.field=a b"], ["data.field=ab"]),
        (["~lr"], ["~seeds"]),
    ],
)
def test_two_commands_never_share_a_name(one, other):
    assert study_name(Invocation.of(one)) != study_name(Invocation.of(other))


def test_a_file_named_from_two_folders_is_two_files_and_a_file_named_twice_is_one(tmp_path, monkeypatch):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(folder)
    monkeypatch.chdir(tmp_path / "a")
    near, whole = (study_name(Invocation.of([f"data.path={path}"])) for path in ("x.txt", tmp_path / "a" / "x.txt"))
    monkeypatch.chdir(tmp_path / "b")
    assert near == whole != study_name(Invocation.of(["data.path=x.txt"]))
    assert study_name(Invocation.of(["init=ckpt:./x.txt"])) == study_name(
        Invocation.of([f"init=ckpt:{tmp_path}/b/x.txt"])
    )


def test_a_presets_settings_of_a_group_hold_only_while_its_choice_is_kept():
    assert sweep("study=dna_mini", "data=dna").data.settings.hold_out == "region"
    assert sweep("study=dna_mini", "objective=ar", "mechanism=sa").objective.name == "ar"
    text = sweep("study=text_54m", "data=text", "data.path=X").data.settings
    assert (text.path, text.tokenizer) == ("X", "bytes")
    assert sweep("study=dna_51m", "data=dna", "data.hold_out=region").data.settings.hold_out == "region"
    assert sweep("study=text_mini", "data=stdlib").data.name == "stdlib"
    assert sweep("study=curvature", "lr=range").lr.values is None
    with pytest.raises(ValueError, match="data.hold_out"):
        # a setting that the user gave is never dropped
        sweep("study=dna_mini", "data=text", "data.path=X", "data.hold_out=region")


def test_of_a_presets_mechanisms_those_still_chosen_keep_its_settings_and_the_others_are_not_run():
    (sc,) = sweep("study=text_54m", "mechanism=sc", "mechanism.sc.window=4").mechanism
    assert (sc.name, sc.settings.edge_hidden, sc.settings.window) == ("sc", 256, 4)
    only_sa = sweep("study=text_54m", "mechanism=sa")
    assert [part.name for part in only_sa.mechanism] == ["sa"]
    # the preset's claim is on sc; without sc it has no subject, and a typed one is refused
    assert sweep("study=text_54m").primary == "sc.window" and only_sa.primary is None
    # a preset without settings of its mechanisms
    assert sweep("study=flagship").primary == "sc.window" and sweep("study=flagship", "mechanism=sa").primary is None
    assert sweep("study=consensus_widths").primary == "sc width=256.window"
    assert sweep("study=consensus_widths", "mechanism=sa").primary is None
    with pytest.raises(ValueError, match="primary=sc.window: sc is no part of this sweep"):
        sweep("study=text_54m", "mechanism=sa", "primary=sc.window")
    built_on_another = sweep("study=vit_small_cifar100", "data.path=X", "optimizer=sgd")
    assert [part.name for part in built_on_another.optimizer] == ["sgd"]


@pytest.mark.parametrize("name", ["text_54m", "text_193m", "text_385m", "text_385m_mix"])
def test_the_papers_text_is_sampled_and_scored_as_the_paper_does_and_read_as_parquet(name):
    spec = sweep(f"study={name}")
    assert (spec.generate.num, spec.generate.oracle) == (1000, "hf:gpt2-large")
    assert spec.data.settings.revision == "refs/convert/parquet"


def test_the_users_words_work_exactly():
    assert sweep("mechanism=sc", "lr=range").lr.rates()[0] == 3e-4
    assert [part.name for part in sweep("mechanism=[sa,sc]").mechanism] == ["sa", "sc"]
    assert sweep("mechanism=[sa,sc]", "mechanism.sc.window=4").mechanism[1].settings.window == 4
    assert sweep("mechanism=mix", "mechanism.mix.sc.window=4").mechanism[0].settings.parts[1].settings.window == 4
    assert sweep("lr=1e-3").lr.rates() == (1e-3,)
    assert sweep("lr=[1e-4,1e-3]").lr.rates() == (1e-4, 1e-3)
    assert sweep("lr=.001").lr.rates() == (1e-3,)
    assert sweep("seeds=3").seeds == 3
    assert sweep("data=text", "data.path=a/b.txt").data.settings.path == "a/b.txt"


@pytest.mark.parametrize(
    "path", ["a,b (c).txt", "it's.txt", "x=y.txt", "[z].txt", "wide space.jsonl.gz", "{q}:r.txt", "back\\slash.txt"]
)
def test_paths_with_hydras_own_characters_arrive_whole(path):
    assert sweep("data=text", f"data.path={path}").data.settings.path == path


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The data that tests of this file prepare, once for all: the standard library's docstrings take seconds."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def runs(cache, tmp_path):
    """A folder for runs that holds nothing but the shared cache."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "cache").symlink_to(cache)
    return tmp_path / "runs"


def test_the_shim_touches_nothing_else():
    words = ["mechanism=[sa,sc]", "+x=1", "lr=range", "lr.num=9", "~lr", "hessian=false"]
    assert [str(word) for word in Invocation.of(words).overrides] == words


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["mechanism=scc"], "mechanism=scc: no such choice; did you mean 'sc'?"),
        (["lr=abc"], "lr=abc: no such choice and no rate like 1e-3; choices: edge"),
        (["lr="], "lr=: takes a rate like 1e-3, a list like [1e-4,1e-3], or one name; choices: edge"),
        (
            ["data.path=x.txt"],
            "data=dna, images, pairs, protein and text have this setting, the chosen one has not; add data=text",
        ),
        (["optimizer=adam"], "optimizer=adam: no such choice; did you mean 'adamw'?"),
        (["mechanism=[sa,", "sc]"], "the list is cut at a space; write it without spaces: mechanism=[a,b]"),
        (["mechanism=sa,sc"], "mechanism=sa,sc: a list is written in brackets: mechanism=[sa,sc]"),
        (
            ["curvature.state=paper"],
            "curvature.state=paper: must be a list, written in brackets, e.g. curvature.state=[paper]",
        ),
        (["lr=1e-400"], "lr.values=[0.0] must be positive and distinct"),
        (["steps=abc"], "steps='abc': input should be a valid integer"),
        (["steps=1.5"], "steps=1.5: input should be a valid integer"),
        (["stepz=3"], "stepz: unknown key; did you mean 'steps'?"),
        (["+foo=1"], "foo: unknown key"),
        (["cross=cc", "cross.cc.window=4"], "cross.cc.window: unknown key; did you mean 'cross.window'?"),
        (["cross=auto", "cross.window=4"], "cross.window: unknown key; did you mean 'cross.cc.window'?"),
        (["cross=ca", "cross.window=4"], "cross.window: cross=cc has this setting, cross=ca has not"),
        (
            ["cross=auto", "objective=ar", "objective.context=16"],
            "objective.context: objective=mlm has this setting, objective=ar has not",
        ),
        (
            ["lr=edge", "lr.edge.resolution=0.1"],
            "lr.edge.resolution: unknown key; did you mean 'lr.edge.resolution_decades'?",
        ),
        (
            ["mechanism=sc", "mechanism.sc.windw=3"],
            "mechanism.sc.windw: unknown key; did you mean 'mechanism.sc.window'?",
        ),
        (["+mechanism.sc.windw=3"], "mechanism.sc.windw: unknown key; did you mean 'window'?"),
        (
            ["objective=score_entropy", "objective.context=8"],
            "objective.context: objective=mlm has this setting, objective=score_entropy has not",
        ),
        (
            ["mechanism=sa", "mechanism.sc.window=3"],
            "this command does not select mechanism.sc; add mechanism=[…,sc]",
        ),
        (
            ["mechanism=sc", "objective=ar"],
            f"objective=ar needs a causal mechanism and sc is none; these are: {listed(*CAUSAL)}, and mix of these; sc goes with "
            "objective=mlm or score_entropy",
        ),
        (["residual=[hc,hc]"], "residual=[hc,hc]: hc is named 2 times; give each once"),
        (["data=text"], "data.path: a value is missing"),
        (["data=text", "data.path=/no/such,file"], "data.path=/no/such,file: no such file or folder"),
        (["foo"], "'foo' is not of the form key=value"),
        (["name=../up"], "name='../up'"),
        (["lr=[1e-3,"], "lr=[1e-3,: this value cannot be read"),
        (["lr=-1e-3"], "must be positive"),
        (["lr=nan"], "lr=nan: input should be a finite number"),
        (["lr=1e-3x"], "error: lr='1e-3x': input should be a valid number"),
        (["lr=[1e-3,x]"], "error: lr='x': input should be a valid number"),
        (["model.layers=1"], "mechanism.mix.pattern has 2 entries for 1 layer; give model.layers=2 or more, a pattern"),
        (["lr=[]"], "lr.values"),
        (
            ["reports_dir=/dev/null/x", "dry_run=false"],
            "error: reports_dir=/dev/null/x: nothing can be written there (Not a directory)",
        ),
        (["ray.address=foo"], "ray.address=foo: must be auto, or HOST:PORT of a cluster's head"),
        (["ray.address=foo:70000"], "ray.address=foo:70000: must be auto, or HOST:PORT of a cluster's head"),
        (["model.heads=3"], "model.heads=3 must divide model.width=64"),
        (["runs_dir=/proc/nowhere"], "error: runs_dir=/proc/nowhere: nothing can be written there ("),
        (["model.positions=1000000"], "the held-out 1 % has"),
    ],
)
def test_bad_input_is_two_lines_and_exit_code_2_and_leaves_nothing(argv, message, runs, tmp_path, entered):
    given = {word.partition("=")[0] for word in argv}
    usual = {"dry_run": "true", "runs_dir": runs}
    words = [f"{key}={value}" for key, value in usual.items() if key not in given]
    is_refused(entered("stability.sweep", *words, *argv), message, tmp_path)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["mechanism=sa", "mechanism=sc"], "mechanism is given twice (sa, sc); several: mechanism=[sa,sc]"),
        (
            ["mechanism=[sa,sw]", "++mechanism=sc"],
            "mechanism is given twice ([sa,sw], sc); several: mechanism=[sa,sw,sc]",
        ),
        (["lr=1e-3", "lr=1e-2", "lr=[1e-1]"], "lr is given 3 times (1e-3, 1e-2, [1e-1]); several: lr=[1e-3,1e-2,1e-1]"),
        (["lr=range", "lr=1e-2"], "lr is given twice (range, 1e-2); give it once"),
        (["lr=1e-3", "lr.values=[1e-2]"], "lr=1e-3 and lr.values=[1e-2] both set lr.values; give one of them"),
        (
            ["mechanism=sc", "mechanism.sc.window=2", "mechanism.sc.window=4"],
            "mechanism.sc.window is given twice (2, 4); give it once",
        ),
        (["init=ckpt:a", "init.source=ckpt:b"], "init=ckpt:a and init.source=ckpt:b both set init.source; give one of"),
    ],
)
def test_a_key_with_two_values_is_refused_in_one_line(argv, message, runs, tmp_path, entered):
    out = entered("stability.sweep", "dry_run=true", f"runs_dir={runs}", *argv)
    is_refused(out, f"error: {message}", tmp_path)
    assert len(out.stderr.splitlines()) == 1


def test_a_word_may_stand_twice_and_a_preset_may_be_taken_away():
    check_repetitions(Invocation.of(["steps=3", "steps=3", "lr=1e-3", "lr=1e-3"]))
    check_repetitions(Invocation.of(["~optimizer", "optimizer=sgd", "~lr", "lr=range", "lr.num=3"]))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["mechanism=scc"], "mechanism=scc: no such choice; did you mean 'sc'?"),  # before torch is imported
        (["model.positions=1000000"], "the held-out 1 % has"),  # after it
    ],
)
def test_a_process_of_its_own_says_no_more_than_that(argv, message, runs, tmp_path):
    is_refused(entry("stability.sweep", "dry_run=true", f"runs_dir={runs}", *argv), message, tmp_path)


def is_refused(out, message, tmp_path):
    assert out.returncode == 2, out.stderr
    assert message in out.stderr
    assert "Traceback" not in out.stderr
    assert 1 <= len(out.stderr.strip().splitlines()) <= 2
    assert not list(tmp_path.glob("runs/studies/*"))


WAITS = """
import signal, time
from stability.cli.entry import run_entry

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell starts with it ignored

def main(argv):
    print("works", flush=True)
    time.sleep(60)

run_entry(main, "status", "")
"""


def test_an_error_without_a_text_shows_its_traceback(entered, monkeypatch):
    def unfinished(argv):
        AbstractNorm().forward(None)  # raised by this project's code

    monkeypatch.setattr("stability.sweep.main", unfinished)
    with pytest.raises(NotImplementedError):
        entered("stability.sweep", "dry_run=true")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_entry_that_is_killed_says_what_one_stopped_by_ctrl_c_does(number):
    with subprocess.Popen(
        [sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout.readline() == "works\n"
        process.send_signal(number)
        assert process.communicate(timeout=30)[1] == "stopped; the same command goes on from here\n"
    assert process.returncode == 128 + number


@pytest.mark.parametrize(
    "module",
    [
        "generate",
        "hessian",
        "probe",
        "report",
        "status",
        "sweep",
        "train_tokenizer",
        "dashboard",
        "transfer",
        "deploy",
        "infer",
        "embed",
        "describe",
        "web",
    ],
)
def test_help_is_printed_for_h(module):
    out = entry(f"stability.{module}", "-h")
    assert out.returncode == 0
    assert f"python -m stability.{module}" in out.stdout


def test_hessian_of_what_is_no_checkpoint_says_what_one_looks_like(tmp_path, entered):
    out = entered("stability.hessian", f"ckpt={tmp_path}/nothing")
    assert out.returncode == 2
    assert "no checkpoint at" in out.stderr
    assert "Traceback" not in out.stderr


def test_a_plugin_is_chosen_like_a_mechanism_of_ours(tmp_path, monkeypatch):
    (tmp_path / "my_mixer.py").write_text((ROOT / "stability" / "mechanisms" / "sw.py").read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("stability.registry._plugins", {})
    argv = ["plugins=[my_mixer]", "mechanism=[sa,my_mixer]", "mechanism.my_mixer.window=3"]
    add_listed_plugins(Invocation.of(argv))
    spec = parse(SweepSpec, {**compose("sweep", argv), "name": "x"})
    assert spec.mechanism[1].name == "my_mixer"
    assert spec.mechanism[1].settings.window == 3


def three_steps(done):
    for step in range(3):
        done.append(step)
        yield


def test_a_plugin_that_is_no_python_is_named_with_its_line(tmp_path, monkeypatch, entered):
    (tmp_path / "lab_of_errors").mkdir()
    (tmp_path / "lab_of_errors" / "unclosed.py").write_text("class Unclosed(\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    out = entered("stability.sweep", "plugins=[lab_of_errors.unclosed]", "mechanism=unclosed", "dry_run=true")
    assert out.returncode == 2
    assert re.fullmatch(r"error: plugins: \S*unclosed\.py:1: .*: class Unclosed\(\n", out.stderr)


def test_a_plugins_own_import_that_fails_is_named_with_its_line(tmp_path, monkeypatch, entered):
    (tmp_path / "lab_of_imports").mkdir()
    (tmp_path / "lab_of_imports" / "lacking.py").write_text("import math\nfrom math import cosine\n")
    (tmp_path / "lab_of_imports" / "absent.py").write_text("import nunpy\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, said in (
        ("lacking", r":2: cannot import name 'cosine' .*: from"),
        ("absent", ":1: No module .*: import"),
    ):
        out = entered("stability.sweep", f"plugins=[lab_of_imports.{name}]", f"mechanism={name}", "dry_run=true")
        assert out.returncode == 2
        assert re.fullmatch(rf"error: plugins: \S*{name}\.py{said} .*\n", out.stderr)


OWN = """
from torch import nn

from stability.config import Settings
from stability.mechanisms import AbstractMechanism


class Own(AbstractMechanism):
    class Config(Settings):
        pass

    directions = frozenset({"bidirectional", "causal"})

    def __init__(self, config, shape):
        super().__init__()
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x_BND, *, mask_BN=None):
        return self.out(x_BND)


EXPORT = Own
"""
IN_INIT, IN_FORWARD = "super().__init__()", "return self.out(x_BND)"


@pytest.mark.parametrize(
    ("name", "right", "wrong", "line", "said", "code"),
    [
        ("own_headz", IN_FORWARD, "return self.headz(x_BND)", "19, in forward", "AttributeError: 'Own' object", 1),
        ("own_shape", IN_FORWARD, "return self.out(x_BND[..., 1:])", "19, in forward", "RuntimeError: mat1", 2),
        ("own_init", IN_INIT, "self.k = config.k", "15, in __init__", "AttributeError: 'Config' object", 1),
        ("own_key", IN_INIT, "{}['k']", "15, in __init__", "KeyError: 'k'", 1),
    ],
)
def test_a_plan_names_the_line_of_an_own_mechanism_that_fails(
    lab, tmp_path, monkeypatch, entered, name, right, wrong, line, said, code
):
    (tmp_path / f"{name}.py").write_text(OWN.replace(right, wrong))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    words = [
        f"plugins=[{name}]",
        f"mechanism={name}",
        "dry_run=true",
        f"runs_dir={tmp_path / 'runs'}",
        "launcher=serial",
    ]
    small = ["model.width=16", "model.heads=2", "model.positions=16", "model.layers=1", "lr=1e-3", "data=stdlib"]
    out = entered("stability.sweep", *words, *small)
    first, place, traceback = out.stderr.splitlines()[-3:]
    assert out.returncode == code and first.startswith(f"error: {said}")
    assert place == f"  at {tmp_path / name}.py:{line}: {wrong}"
    file = Path(traceback.removeprefix("  traceback: "))
    assert file.read_text().startswith("Traceback") and said in file.read_text()


def test_a_refusal_of_an_own_mechanism_is_its_message_alone(tmp_path, monkeypatch, entered):
    wrong = "raise ValueError('own: needs an even width')"
    (tmp_path / "own_refusal.py").write_text(OWN.replace(IN_INIT, wrong))
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["plugins=[own_refusal]", "mechanism=own_refusal", "dry_run=true", f"runs_dir={tmp_path / 'runs'}"]
    out = entered("stability.sweep", *words, "lr=1e-3", "data=stdlib", "launcher=serial")
    assert (out.returncode, out.stderr) == (2, "error: own: needs an even width\n")


def test_an_error_in_this_projects_own_code_keeps_its_traceback():
    with pytest.raises((AttributeError, TypeError)):
        run_checked(lambda argv: 0, [None])  # no word, which the command line cannot have


def test_without_a_terminal_each_finished_task_has_a_line_at_once(capsys):
    done, seen = [], []

    def second():
        seen.append(capsys.readouterr().out)
        yield

    follow(iter([three_steps(done), second()]), ["first", "second"], [3, 1])
    assert done == [0, 1, 2]
    assert re.fullmatch(r"1/2 first, \d+ s\n", seen[0])
    assert re.fullmatch(r"2/2 second, \d+ s\n", capsys.readouterr().out)


def test_on_a_terminal_there_is_a_bar(capsys, monkeypatch):
    monkeypatch.setattr("rich._console", Console(force_terminal=True, width=120))
    follow(iter([three_steps([])]), ["first"], [3])
    printed = capsys.readouterr().out
    assert "1/1 first" in printed and "3/3 steps" in printed
    assert " s\n" not in printed


def test_runs_with_one_checkpoint_only_are_told_where_both_ends_are_asked_for(lab, capsys):
    run = lab.train(lab.spec())
    words = [
        f"ckpt={run.path}",
        "measure=[alpha_max]",
        "state=[checkpoint]",
        "warmup_batches=1",
        "warmup_steps=1",
        "recorded_steps=1",
        "device=cpu",
    ]
    told = (
        "1 run has one checkpoint only, which is measured under one name: terminal where the run came to its end, "
        "else earliest"
    )
    assert len(run.checkpoints()) > 1
    hessian.main([*words, "phase=all"])
    assert told not in capsys.readouterr().out
    for extra in run.checkpoints()[:-1]:
        shutil.rmtree(extra)
    hessian.main([*words, "phase=terminal"])
    assert told not in capsys.readouterr().out
    hessian.main([*words, "phase=all"])
    assert told in capsys.readouterr().out.splitlines()
