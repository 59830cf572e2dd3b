"""Evo 2 as an oracle, by a package of the same name and signatures that stands in for it: the real one needs CUDA."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from stability.corpora.tokens.augmentation import CODES, VOCABULARY
from stability.corpora.tokens.corpus import Corpus
from stability.corpora.tokens.vocabulary import Vocabulary
from stability.probes.generation import text_oracle
from stability.probes.generation.samples import Sample
from stability.probes.generation.text_oracle import key_of, load_oracle

TABLE = np.random.default_rng(0).normal(0, 3, (512, 512)).astype("float32")


class Bigrams(nn.Module):
    """As StripedHyena answers: (logits, cache). A token's logits follow from the token alone; an FP8 layer's extra state
    is no tensor."""

    def __init__(self, context: int):
        super().__init__()
        self.table = nn.Parameter(torch.from_numpy(TABLE))
        self.config = SimpleNamespace(max_seqlen=context)

    def get_extra_state(self):
        return {"recipe": "none of our business"}

    def set_extra_state(self, state):
        pass

    def forward(self, input_ids):
        assert input_ids.dtype == torch.int32 and input_ids.shape[1] <= self.config.max_seqlen
        return self.table[input_ids.long()].bfloat16(), None


class Evo2:
    """The signatures of evo2/models.py."""

    context = 8192

    def __init__(self, model_name: str = "evo2_7b", local_path: str | None = None):
        if not model_name.startswith("evo2_"):
            raise ValueError(f"Invalid model name {model_name}. Should be one of: evo2_7b.")
        self.model = Bigrams(self.context)
        self.tokenizer = SimpleNamespace(
            tokenize=lambda text: list(np.frombuffer(text.encode("utf-8"), dtype=np.uint8)), pad_id=1, eod_id=0
        )

    def __call__(self, input_ids, return_embeddings=False, layer_names=None):
        assert not return_embeddings
        return self.model.forward(input_ids), None


@pytest.fixture(autouse=True)
def package(monkeypatch):
    module = ModuleType("evo2")
    module.Evo2 = Evo2  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "evo2", module)
    yield
    text_oracle.forget()


def corpus(vocabulary: Vocabulary | None) -> Corpus:
    tokens = np.zeros(100, dtype=np.uint16)
    return Corpus.of(
        tokens,
        tokens,
        vocab_size=len(CODES),
        description="",
        num_train_documents=1,
        num_val_documents=1,
        vocabulary=vocabulary,
    )


def dna() -> Corpus:
    return corpus(VOCABULARY)


def nats_by_hand(text: str) -> float:
    """Of every byte after the first, −log softmax of the row of the one before it, one at a time in float64."""
    total = 0.0
    for before, byte in zip(text.encode(), text.encode()[1:], strict=False):
        row = torch.from_numpy(TABLE[before]).bfloat16().double().tolist()
        top = max(row)
        total += top + math.log(sum(math.exp(each - top) for each in row)) - row[byte]
    return total


def test_evo_2_scores_every_nucleotide_after_the_first_by_its_own_bytes():
    texts = ["ACGTNNRY", "A", "GGGATTACA" * 3]
    oracle = load_oracle("evo2:evo2_1b_base", dna(), "cpu")
    scores = [score for some in oracle.score([Sample([], text) for text in texts], 2) for score in some]
    assert oracle.name == "evo2:evo2_1b_base" and len(oracle.sha256) == 64
    assert [score.num_tokens for score in scores] == [7, 0, 26] == [score.num_bytes for score in scores]
    assert [score.nats for score in scores] == pytest.approx([nats_by_hand(text) for text in texts], rel=1e-6)


def test_samples_longer_than_evo_2_reads_are_scored_in_stretches(monkeypatch):
    monkeypatch.setattr(Evo2, "context", 10)
    text = "ACGTTGCA" * 4
    (scores,) = load_oracle("evo2:evo2_1b_base", dna(), "cpu").score([Sample([], text)], 3)
    assert scores[0].nats == pytest.approx(nats_by_hand(text), rel=1e-6) and scores[0].num_tokens == 31


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "evo2", None)
    with pytest.raises(RuntimeError) as caught:
        load_oracle("evo2:evo2_1b_base", dna(), "cpu")
    said = str(caught.value)
    assert said.startswith("oracle=evo2:evo2_1b_base needs the package evo2") and "\n" not in said
    assert "github.com/ArcInstitute/evo2" in said


def test_a_checkpoint_that_evo_2_does_not_have_is_refused_in_its_own_words():
    with pytest.raises(ValueError, match=r"cannot load it\n\(ValueError: Invalid model name evo3"):
        load_oracle("evo2:evo3", dna(), "cpu")


def test_evo_2_is_refused_where_samples_are_no_nucleotides():
    text = corpus(Vocabulary("bytes", tuple(bytes([number]) for number in range(len(CODES)))))
    with pytest.raises(ValueError, match="reads nucleotides, and these samples are none;\ngive oracle=hf:"):
        load_oracle("evo2:evo2_1b_base", text, "cpu")


def test_a_checkpoint_of_evo_2_is_told_from_others_by_its_name_even_beside_a_folder_of_that_name(tmp_path, monkeypatch):
    (tmp_path / "evo2_1b_base").mkdir()
    monkeypatch.chdir(tmp_path)
    assert key_of("evo2:evo2_1b_base") == "evo2:evo2_1b_base"
