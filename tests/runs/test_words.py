"""What ``study.json`` says that things are called, and how a record without that is read."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace

import pytest

from stability.registry import Registry
from stability.runs.older_words import OLDER
from stability.runs.recorded_words import recorded
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


def test_a_record_without_words_is_read_as_one_with_them(asked):
    words, spec = words_of(asked), asked.model_dump(mode="json")
    assert words.direction == Registry("objectives").load(asked.objective.name).direction
    assert words == recorded({"spec": spec}, {asked.objective.name})
    assert set(OLDER) == set(ASKED)


def test_words_come_back_from_json_as_they_were(asked):
    words = replace(words_of(asked), baseline="what a plugin says")
    assert recorded(json.loads(json.dumps({"words": asdict(words)})), {asked.objective.name}) == words


def test_a_word_that_a_record_lacks_is_the_default_and_one_that_is_not_known_is_passed_over():
    written = asdict(Words(unit="nats per move")) | {"of_tomorrow": "x"}
    del written["example"]
    assert recorded({"words": written}, {"moves"}) == Words(unit="nats per move")
    assert len(fields(Words)) == len(written)


def test_of_several_objectives_only_what_holds_for_any_is_said():
    assert recorded({}, {"classify", "ar"}) == Words()
