"""What ``study.json`` says that things are called, and the words that an upgrade adds to a record without them."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace

import pytest

from stability.runs.older import is_older_study, words_of_record
from stability.runs.upgrade import _upgrade_record
from stability.runs.words import Words
from sweeps.record import words_of
from tests.reading import read_spec

ASKED = {
    "ar": ["data=text", "data.path=page.txt", "data.tokenizer=gpt2", "data.keep=4096"],
    "mlm": ["data=stdlib", "objective.mask_rate=fixed", "objective.fixed_rate=0.2", "objective.corruption=bert"],
    "score_entropy": ["data=dna", "objective.graph=uniform", "objective.noise=loglinear"],
    "classify": ["data=images", "model=vit_nano"],
    "multitrack": ["data=protein", "data.path=chains", "objective.tokenizer=0123456789ab", "cross=auto"],
}


@pytest.fixture(params=ASKED)
def asked(request, tmp_path, monkeypatch):
    """A sweep of each of the objectives that records without words can be of."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.txt").touch()
    (tmp_path / "chains").mkdir()
    return read_spec("sweep", [f"objective={request.param}", *ASKED[request.param]])


@pytest.mark.parametrize("kept", [(), ("unit", "share")])
def test_a_record_without_all_words_gets_those_of_its_objective_and_data(asked, kept):
    words = asdict(words_of(asked))
    record = {"spec": asked.model_dump(mode="json")}
    if kept:
        record["words"] = json.loads(json.dumps({name: words[name] for name in kept}))
    assert is_older_study(record)
    newer = json.loads(json.dumps(_upgrade_record(record)))
    assert words_of_record(newer) == words_of(asked)
    assert not is_older_study(newer) and newer["spec"] == record["spec"]


def test_words_on_record_stay(asked):
    record = {"spec": asked.model_dump(mode="json"), "words": {"unit": "nats per move"}}
    assert words_of_record(_upgrade_record(record)) == replace(words_of(asked), unit="nats per move")


def test_a_record_of_a_plugin_that_is_not_here_gets_the_usual_words():
    record = {"spec": {"objective": {"name": "elsewhere"}, "data": {"name": "nowhere"}, "steps": 3}}
    assert words_of_record(_upgrade_record(record)) == Words()


def test_words_come_back_from_json_as_they_were(asked):
    words = replace(words_of(asked), baseline="what a plugin says")
    assert words_of_record(json.loads(json.dumps({"words": asdict(words)}))) == words


def test_a_word_that_is_not_known_is_passed_over():
    written = asdict(Words(unit="nats per move")) | {"of_tomorrow": "x"}
    assert words_of_record({"words": written}) == Words(unit="nats per move")
    assert len(fields(Words)) == len(written) - 1
