"""What is printed of made-up studies and of command lines is word for word what `tests.golden_texts` wrote."""

from __future__ import annotations

import pytest

from tests import golden_texts as golden
from tests.faults.fuzz_command_lines import Sandbox

EVERY = 12  # of the drawn lines one in so many is asked for, unless slow tests are


def kept(name):
    return (golden.FOLDER / name).read_text()


@pytest.mark.parametrize("study", golden.STUDIES)
def test_a_sweep_ends_with_the_words_that_are_kept(study, tmp_path):
    assert golden.ended(study, tmp_path) == kept(f"{study}_end.txt")


@pytest.mark.parametrize("study", golden.STUDIES)
def test_a_sweep_prints_the_tables_that_are_kept(study, tmp_path):
    assert golden.printed(study, tmp_path) == kept(f"{study}.txt")


@pytest.mark.slow
@pytest.mark.parametrize("study", golden.STUDIES)
def test_a_report_has_the_tables_and_captions_that_are_kept(study, tmp_path):
    assert golden.reported(study, tmp_path) == kept(f"{study}_report.txt")


def differing(tmp_path, messages):
    sandbox = Sandbox(tmp_path.resolve())
    with sandbox.entered():
        answers = [golden.answer(sandbox, message.entry, message.words) for message in messages]
    return [(old, new) for old, new in zip(messages, answers, strict=True) if old != new]


def test_command_lines_are_answered_with_the_messages_that_are_kept(tmp_path):
    messages = golden.messages()
    messages = messages[: golden.FOUND] + messages[golden.FOUND :: EVERY]
    assert len(messages) > golden.FOUND + 20
    assert differing(tmp_path, messages) == []


@pytest.mark.slow
def test_every_command_line_is_answered_with_the_message_that_is_kept(tmp_path):
    assert differing(tmp_path, golden.messages()) == []
