"""Protein language models of Hugging Face as oracles of the letters, against loops over single letters: tiny random
models from configurations, nothing fetched."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import torch

from stability.generate import main
from stability.probes.generation import protein_letters_oracle, protein_oracle
from stability.probes.generation.protein_letters_oracle import load_letters_oracle
from stability.probes.generation.protein_source import ProteinSample
from tests.probes.proteins import ProteinLab, generate_spec

transformers = pytest.importorskip("transformers")
ESM = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]
TEXTS = ["MKVLAAGIRSTWYDE", "ACDJFGHJ", "M"]  # ESM-2 has no token for J


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return ProteinLab(tmp_path_factory.mktemp("proteins"))


@pytest.fixture(scope="module")
def esm(tmp_path_factory):
    """As ESM-2: rotary positions, masked letters scaled away, and here no more than six residues at a time."""
    folder = tmp_path_factory.mktemp("esm")
    (folder / "vocab.txt").write_text("\n".join(ESM))
    torch.manual_seed(0)
    config = transformers.EsmConfig(
        vocab_size=len(ESM), mask_token_id=32, pad_token_id=1, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=8, position_embedding_type="rotary", token_dropout=True,
        initializer_range=0.5,
    )  # fmt: skip
    transformers.EsmForMaskedLM(config).save_pretrained(folder)
    transformers.EsmTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    """A causal model on bytes: no tokenizer stands beside it."""
    folder = tmp_path_factory.mktemp("causal")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=32, n_embd=16, n_layer=2, n_head=4, initializer_range=0.5,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def forgotten():
    yield
    protein_oracle.forget()


def samples():
    return [ProteinSample(text, None, "p") for text in TEXTS]


def by_hand(folder, text: str, masks) -> float:
    """Under each mask, of each masked letter that has a token, −log of its probability in float64, piece by piece."""
    model = transformers.EsmForMaskedLM.from_pretrained(folder).double().eval()
    means = []
    for mask in masks.tolist():
        nats = []
        for start in range(0, len(text), 6):
            letters, hidden = text[start : start + 6], mask[start : start + 6]
            shown = ["<mask>" if is_hidden else letter for letter, is_hidden in zip(letters, hidden, strict=True)]
            tokens = [ESM.index(word if word in ESM else "<unk>") for word in ["<cls>", *shown, "<eos>"]]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens))).logits[0]
            for place, (letter, is_hidden) in enumerate(zip(letters, hidden, strict=True)):
                if is_hidden and letter in ESM:
                    row = logits[place + 1].tolist()
                    nats.append(math.log(sum(math.exp(each) for each in row)) - row[ESM.index(letter)])
        means += [sum(nats) / len(nats)] if nats else []
    return sum(means) / len(means)


def test_a_masked_protein_model_gives_the_mean_nll_of_masked_letters_under_each_mask(lab, esm, monkeypatch):
    drawn, real = [], protein_letters_oracle.random_mask

    def recorded(*args):
        drawn.append(real(*args))
        return drawn[-1]

    monkeypatch.setattr(protein_letters_oracle, "random_mask", recorded)
    oracle = load_letters_oracle(lab.spec(), generate_spec(batch=3), str(esm), "cpu")
    rows = list(oracle.scores(samples()))
    assert oracle.name == f"hf:{esm.name} (letters)"
    assert [mask.shape for mask in drawn] == [(8, len(text)) for text in TEXTS]
    assert [row["nll"] for row in rows] == pytest.approx(
        [by_hand(esm, text, masks) for text, masks in zip(TEXTS, drawn, strict=True)], rel=1e-5
    )
    for row, text in zip(rows, TEXTS, strict=True):
        assert row["nll_sequence"] == row["nll"] and row["num_tokens"] == len(text)
        assert math.isnan(row["nll_structure"])


def test_masks_depend_on_a_samples_number_and_length_alone(lab, esm):
    scored = [
        [
            row["nll"]
            for row in load_letters_oracle(lab.spec(), generate_spec(batch=batch), str(esm), "cpu").scores(samples())
        ]
        for batch in (1, 5)
    ]
    assert scored[0] == pytest.approx(scored[1], rel=1e-6)


def test_a_causal_protein_model_gives_the_nll_per_letter_after_the_first(lab, causal):
    oracle = load_letters_oracle(lab.spec(), generate_spec(), str(causal), "cpu")
    rows = list(oracle.scores(samples()))
    model = transformers.GPT2LMHeadModel.from_pretrained(causal).double().eval()
    for row, text in zip(rows, TEXTS, strict=True):
        tokens = list(text.encode())
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        nats = [-float(logits[at, token]) for at, token in enumerate(tokens[1:])]
        assert row["nll"] == pytest.approx(sum(nats) / len(nats), rel=1e-5) if nats else math.isnan(row["nll"])
        assert row["num_tokens"] == len(nats)


def test_generate_scores_the_letters_of_a_runs_proteins_and_leaves_structure_out(lab, esm, capsys):
    directory = lab.train(lab.spec())
    assert main([f"ckpt={directory.path}", "num=3", f"oracle=hf:{esm}", "device=cpu"]) == 0
    table = pd.read_parquet(directory.generation_file("terminal"))
    assert set(table.oracle) == {f"hf:{esm.name} (letters)"} and len(table) == 3
    assert table.nll.notna().all() and table.nll_structure.isna().all() and (table.nll == table.nll_sequence).all()
    assert f"hf:{esm.name} (letters)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sources", "what", "message"),
    [
        (
            ("structure",),
            "esm",
            "reads letters, and these samples are structure tokens alone;\ngive oracle=ckpt:FOLDER",
        ),
        (("sequence",), "/nothing/there", "oracle: hf=/nothing/there: no such folder"),
        (("sequence",), "deaf", "no token of its own for each amino acid, and a mask\ngive a protein language model"),
    ],
)
def test_what_cannot_score_letters_is_refused(lab, esm, tmp_path, sources, what, message):
    if what == "deaf":  # a masked model, and no tokenizer
        transformers.EsmForMaskedLM.from_pretrained(esm).save_pretrained(tmp_path / "deaf")
    place = {"esm": str(esm), "deaf": str(tmp_path / "deaf")}.get(what, what)
    with pytest.raises(ValueError) as caught:
        load_letters_oracle(lab.spec(sources=sources), generate_spec(), place, "cpu")
    assert message in str(caught.value)


def test_evo_2_is_refused_for_proteins(lab):
    with pytest.raises(ValueError, match="oracle=evo2:evo2_1b_base reads nucleotides, and these samples are proteins"):
        protein_oracle.load_protein_oracle(lab.spec(), generate_spec(oracle="evo2:evo2_1b_base"), lab.corpus, "cpu")
