"""The words of a command line are taken apart once, and put together again as they were typed."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from stability.cli import conf, mistakes, source
from stability.cli.words import Invocation, Word
from tests.reading import compose, read_spec


@pytest.mark.parametrize(
    ("typed", "sign", "key", "value"),
    [
        ("steps=4", "", "steps", "4"),
        ("++mechanism.sc.window=4", "++", "mechanism.sc.window", "4"),
        ("~lr", "~", "lr", None),
        ("data.path=a=b", "", "data.path", "a=b"),
        ("name=", "", "name", ""),
        ("+~x=+y", "+~", "x", "+y"),
        ("~", "~", "", None),
        ("=3", "", "", "3"),
        ("quickstart", "", "quickstart", None),
    ],
)
def test_a_word_has_a_sign_a_key_and_a_value_and_reads_as_it_was_typed(typed, sign, key, value):
    assert Word.of(typed) == Word(sign, key, value)
    assert str(Word.of(typed)) == typed


def test_what_is_given_is_what_words_without_a_sign_set():
    words = ["lr=1e-3", "mechanism=[sa,sc]", "+steps=3", "~seeds", "++batch=2", "data.path=a b"]
    assert Invocation.of(words).given == {
        "lr": "values",
        "lr.values": "[1e-3]",
        "mechanism": "[sa,sc]",
        "data.path": "'a b'",
    }


def test_a_first_word_alone_is_the_value_of_the_key_that_it_stands_for():
    assert Invocation.of(["quickstart", "watch=2"], first="name") == Invocation.of(["name=quickstart", "watch=2"])
    assert Invocation.of(["watch=2", "quickstart"], first="name") == Invocation.of(["watch=2", "quickstart"])
    assert read_spec("status", ["name=a/b"]).name == "a/b"


def test_a_place_is_taken_away_by_its_key_alone():
    assert "reports_dir" in compose("sweep", [])
    assert "reports_dir" not in compose("sweep", ["~reports_dir"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["state=paper"], "state=paper: must be a list, written in brackets, e.g. state=[paper]"),
        (["seed=x"], "seed='x': input should be a valid integer, unable to parse string as an integer"),
        (["+spectra.foo=1"], "spectra.foo: unknown key; choices: "),
        (["+foo=1"], "foo: unknown key; choices: phase, state, "),
        (["+curvature.batch=3"], "curvature: unknown key; did you mean 'measure'?"),
        (
            ["positions=x", "seed=y"],
            "positions='x': input should be a valid integer, unable to parse string as an integer\nseed='y': ",
        ),
    ],
)
def test_the_protocols_keys_are_written_flat_and_named_so(words, message):
    with pytest.raises(ValueError) as error:
        read_spec("hessian", ["ckpt=x", *words])
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("entry", "words", "message"),
    [
        ("probe", ["ckpt=x"], "what: a value is missing; give what=…; choices: spectra, qk, pdmm, streams, "),
        ("probe", ["spectra"], "'spectra' is not of the form key=value; e.g. what=spectra (-h"),
        ("probe", ["runs/x"], "'runs/x' is not of the form key=value; e.g. ckpt=runs/x (-h"),
        ("report", ["nc2"], "'nc2' is not of the form key=value; e.g. name=nc2 (-h"),
        (
            "report",
            ["name=a", "format=[pdf,png]"],
            "format=png: format=files writes figures as PDF, SVG and PNG; give format=files",
        ),
        (
            "report",
            ["name=a", "format=tex"],
            "format=tex: format=files writes tables as CSV, Markdown, LaTeX and parquet; give format=files",
        ),
        ("hessian", ["runs/x"], "'runs/x' is not of the form key=value; e.g. ckpt=runs/x (-h"),
        ("train_tokenizer", ["x"], "'x' is not of the form key=value; e.g. data=protein data.path=FOLDER (-h"),
        ("sweep", ["x"], "'x' is not of the form key=value; e.g. mechanism=sc lr=range (-h"),
        (
            "sweep",
            ["name=a/b"],
            "name='a/b': a name consists of letters a to z, digits and . _ = + - only, the first of them a ",
        ),
        (
            "report",
            ["name=a", "together=a/b"],
            "together='a/b': a name consists of letters a to z, digits and . _ = + - only, ",
        ),
    ],
)
def test_a_message_has_an_example_or_the_choices_of_its_own_entry(entry, words, message):
    with pytest.raises(ValueError) as error:
        read_spec(entry, words)
    assert str(error.value).startswith(message)


def test_what_hessian_was_asked_for_survives_being_written_down():
    spec = read_spec("hessian", ["ckpt=x", "batch=3", "spectra.noise_parts=2", "device=cpu"])
    assert (spec.curvature.batch, spec.curvature.spectra.noise_parts, spec.device) == (3, 2, "cpu")
    assert type(spec).model_validate(spec.model_dump()) == spec


WRONG_NUMBERS = {
    "SweepSpec": ["seeds=three", "steps=0", "threads=many", "clip_norm=-1"],
    "TokenizerSpec": ["warmup_steps=many"],
}


def test_a_wrong_number_is_refused_before_torch_is_imported():
    code = f"""
import sys
from stability.cli.compose import ROOTS, compose_values
from stability.cli.words import Invocation
for kind in ROOTS:
    for word in {WRONG_NUMBERS}.get(kind.__name__, ()):
        try:
            compose_values(kind, Invocation.of([word]))
        except ValueError as error:
            print(error)
assert "torch" not in sys.modules
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (out.returncode, out.stderr) == (0, "")
    assert [line.partition(":")[0] for line in out.stdout.splitlines()] == [
        "seeds='three'",
        "steps=0",
        "threads='many'",
        "clip_norm=-1",
        "warmup_steps='many'",
    ]


@pytest.mark.parametrize("key", ["lr", "mechanism.sc.window", "mechanism", "plugins", "data.path", "++steps"])
def test_a_list_that_hydra_would_parse_for_minutes_is_refused_unread(key):
    begun = f"{key}=[1,1"
    with pytest.raises(ValueError, match=r"^.*: has 10,000 elements; a list may have at most 2,000$") as caught:
        compose("sweep", [begun + ",1" * 9998 + "]"])
    assert str(caught.value).startswith(begun) and len(str(caught.value)) < 200


def test_a_key_longer_than_a_files_name_is_refused_as_one_that_cannot_be_read():
    with pytest.raises(ValueError, match=r"^'a\.a\.a.* \(1,003 characters\)' has no valid key; ") as caught:
        compose("sweep", ["a." * 500 + "b=1"])
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("words", [[], ["steps=4", "lr=1e-3"]])
def test_a_configuration_that_fails_without_any_word_blames_no_word(tmp_path, monkeypatch, words):
    shutil.copytree(conf.conf_dir(), tmp_path / "conf")
    with (tmp_path / "conf" / "sweep.yaml").open("a") as file:
        file.write("\nnowhere: ${not.there}\n")
    for module in (conf, source):
        monkeypatch.setattr(module, "conf_dir", lambda: tmp_path / "conf")
    mistakes._groups.cache_clear()
    with pytest.raises(ValueError, match="^conf/sweep.yaml cannot be read, even without any word: .*not.there"):
        compose("sweep", words)
