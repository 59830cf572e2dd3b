"""A model that is known by its size in GPT-2's tokens, on text that is read as bytes: the sweep says so."""

import pytest

from stability.plan.plan import note_bytes
from tests.reading import read_spec

TEXT = ["data=text", "data.path=README.md"]


@pytest.mark.parametrize(
    ("words", "model"),
    [
        (["objective=ar", "model=nanogpt_l", *TEXT], "nanogpt_l"),
        (["model=text_54m", *TEXT], "text_54m"),
        (["study=nanogpt", *TEXT], "nanogpt_s"),  # its own data are in GPT-2's tokens, the user's are not
        (["model=sedd_small", "data=hf", "data.dataset=a/b"], "sedd_small"),
    ],
)
def test_bytes_for_a_size_in_tokens_are_said(words, model):
    spec = read_spec("sweep", ["mechanism=sa", *words])
    assert note_bytes(spec) == (
        f"data={spec.data.name} trains on bytes, a vocabulary of 256, and model={model} is a size for GPT-2's tokens: "
        "add data.tokenizer=gpt2 for these"
    )


@pytest.mark.parametrize(
    "words", [["model=nano", *TEXT], ["model=text_54m", *TEXT, "data.tokenizer=gpt2"], ["study=text_54m"], []]
)
def test_nothing_is_said_of_a_laptops_size_or_of_tokens(words):
    assert note_bytes(read_spec("sweep", words)) == ""


def test_the_plan_names_the_tokens(tmp_path):
    from stability.corpora.cache import prepare
    from stability.plan.plan import data_line

    (tmp_path / "own.txt").write_text("the window of a stable step is wide\n" * 400)
    spec = read_spec("sweep", ["mechanism=sa", "data=text", f"data.path={tmp_path / 'own.txt'}", "model.positions=16"])
    line = data_line(spec, prepare(spec.data, tmp_path / "cache"))
    assert line.startswith("data: text of own.txt: ") and "; tokens: bytes; fingerprint " in line
