"""α_max of Hugging Face models through the command's own probe: tiny random models from configurations, nothing
fetched."""

from __future__ import annotations

import math
import sys

import pandas as pd
import pytest

from stability import hessian
from stability.probes.pretrained import loading
from stability.probes.pretrained.loading import load_tokenizer
from stability.probes.pretrained.probe import COLUMNS, HuggingFaceProbe, answer, quantile
from tests.reading import read_spec

transformers = pytest.importorskip("transformers")
MODELS = ("gpt2", "llama", "qwen2")
SHORT = ["warmup_batches=2", "warmup_steps=1", "recorded_steps=2", "batch=2", "positions=12", "device=cpu"]


def save(folder, name="gpt2", vocabulary=260):
    import torch

    small = {
        "vocab_size": vocabulary,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=vocabulary, n_positions=32, n_embd=16, n_layer=2, n_head=4, **ends)
        transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    elif name == "llama":
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**small, num_key_value_heads=2, max_position_embeddings=32, **ends)
        ).save_pretrained(folder)
    else:
        transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(**small, num_key_value_heads=2, max_position_embeddings=32, **ends)
        ).save_pretrained(folder)
    return folder


def save_words(folder, lab, size=60):
    """A word-level tokenizer of the lab's page beside the model."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted(set(lab.text.read_text().split()))[: size - 2]
    inner = Tokenizer(
        models.WordLevel(
            {word: index for index, word in enumerate(["<end>", "<unknown>", *words])}, unk_token="<unknown>"
        )
    )
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<end>", unk_token="<unknown>"
    ).save_pretrained(folder)


def words_of(lab, folder, *more):
    return [f"hf={folder}", "data=text", f"data.path={lab.text}", "lr=1e-2", *SHORT, *more]


def probe_of(lab, folder, *more):
    return HuggingFaceProbe(read_spec("hessian", words_of(lab, folder, *more)))


def rows_of(probe, lr=1e-2):
    for _ in probe.measure(lr):
        pass
    return probe.table()


@pytest.mark.parametrize("name", MODELS)
def test_taylor_agrees_with_double_backward_to_1e_6(lab, tmp_path, name):
    tables = {}
    for method in ("taylor", "double_backward"):
        probe = probe_of(lab, save(tmp_path / name, name), f"method={method}")
        probe.model.double()  # in place: the probe's parameters are the model's
        tables[method] = rows_of(probe)
        assert set(tables[method].method) == {method}
    for column in ("loss_before", "slope", "curvature", "alpha_max"):
        assert tables["taylor"][column].to_numpy() == pytest.approx(
            tables["double_backward"][column].to_numpy(), rel=1e-6
        ), column
    assert set(tables["taylor"].state) == {"paper", "plain"}


def test_the_command_prints_table_and_answer_and_leaves_the_model_as_it_was(lab, tmp_path, capsys):
    folder = save(tmp_path / "model")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*")}
    assert hessian.main(words_of(lab, folder, "lr=[1e-3,1e-2]", "microbatch=1")) == 0
    printed = capsys.readouterr().out
    assert "GPT2LMHeadModel" in printed
    assert "bytes: no tokenizer was found beside the model" in printed
    for lr in ("lr=0.001: ", "lr=0.01: "):
        assert lr in printed
    assert printed.count("paper  ") == printed.count("plain  ") == 2
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*")} == before


def test_every_rate_and_state_starts_from_the_models_own_weights(lab, tmp_path):
    probe = probe_of(lab, save(tmp_path / "model"))
    rows_of(probe, lr=0.3)
    alone = rows_of(probe_of(lab, tmp_path / "model"))
    after = rows_of(probe).iloc[-len(alone) :].reset_index(drop=True)
    pd.testing.assert_frame_equal(after, alone)


def test_the_models_own_tokenizer_is_used_where_there_is_one(lab, tmp_path):
    folder = save(tmp_path / "model", vocabulary=60)
    save_words(folder, lab)
    probe = probe_of(lab, folder)
    assert "(PreTrainedTokenizerFast)" in probe.description or "(TokenizersBackend)" in probe.description
    text = load_tokenizer(str(folder)).decode(probe.tokens[:12].tolist())
    assert set(text.split()) <= {*lab.text.read_text().split(), "<end>"}
    windows = probe._examples(0)
    assert windows.inputs_BN.shape == windows.targets_BN.shape == (2, 12)
    assert windows.inputs_BN[:, 1:].equal(windows.targets_BN[:, :-1])


def refused(lab, folder, *more):
    with pytest.raises(ValueError) as error:
        probe_of(lab, folder, *more)
    assert len(str(error.value).splitlines()) <= 2
    return str(error.value)


def test_what_cannot_be_measured_is_refused_in_two_lines(lab, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "hub_answers", lambda: False)
    assert "too small for bytes" in refused(lab, save(tmp_path / "small", vocabulary=60))
    assert "positions=64: the model has 32" in refused(lab, tmp_path / "small", "positions=64")
    assert "no such folder" in refused(lab, tmp_path / "nowhere")
    assert "no such folder, not in the cache, and no network" in refused(lab, "nobody/no-such-model")
    (tmp_path / "empty").mkdir()
    assert "the folder must hold config.json" in refused(lab, tmp_path / "empty")
    save_words(tmp_path / "small", lab, size=10_000)
    transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=8, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    ).save_pretrained(tmp_path / "small")
    assert "do not belong together" in refused(lab, tmp_path / "small")
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=256, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    )
    model.transformer.wte.weight.data[3, 5] = math.nan
    model.save_pretrained(tmp_path / "broken")
    assert "its weight transformer.wte.weight holds numbers that are not finite" in refused(lab, tmp_path / "broken")


def test_a_model_that_reads_its_targets_or_lacks_its_head_is_refused(lab, tmp_path):
    import torch

    torch.manual_seed(0)
    small = {
        "vocab_size": 260,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    }
    transformers.BertForMaskedLM(transformers.BertConfig(**small)).save_pretrained(tmp_path / "encoder")
    assert "reads the tokens that it would have to predict" in refused(lab, tmp_path / "encoder")
    transformers.LlamaModel(transformers.LlamaConfig(**small)).save_pretrained(tmp_path / "headless")
    assert "has no weights for lm_head.weight" in refused(lab, tmp_path / "headless")
    transformers.BertLMHeadModel(transformers.BertConfig(is_decoder=True, **small)).save_pretrained(
        tmp_path / "decoder"
    )
    # the one made up from the config knows no word
    assert "bytes: no tokenizer was found" in probe_of(lab, tmp_path / "decoder").description


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either ckpt=FOLDER or hf=NAME_OR_PATH (neither given)"),
        (["ckpt=a", "hf=b"], "(both given)"),
        (["hf=b"], "data: a value is missing; hf=b needs data=text"),
        (["hf=b", "data=text", "data.path=c"], "lr: a value is missing"),
        (["hf=b", "data=text", "data.path=c", "lr=1e-3", "phase=all"], "phase=all belongs to ckpt"),
        (["hf=b", "data=text", "lr=1e-3"], "data.path: a value is missing"),
        (["ckpt=b", "data=stdlib"], "data belongs to hf=…"),
    ],
)
def test_the_command_says_what_it_needs(words, message):
    with pytest.raises(ValueError) as error:
        read_spec("hessian", words)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) <= 2


def steps(alpha_max, lr=1e-3, state="plain"):
    extra = {"loss_before": 2.0, "loss_after": 1.0, "rel_error": None, "method": "taylor"}
    return pd.DataFrame([{"state": state, "lr": lr, "alpha_max": value, **extra} for value in alpha_max])


def test_the_answer_goes_by_the_tenth_lowest_and_the_median():
    said = answer(steps([2e-3] * 5 + [math.inf] * 16))
    assert "lr=0.001: its curvature allows it. Half of the steps allow any rate, nine in ten 0.002 (2 times" in said
    assert "Along nine steps in ten the curvature is not positive and limits no rate" in answer(steps([math.inf] * 4))
    assert "at the edge" in answer(steps([5e-4] * 5 + [2e-3] * 16))
    assert "too high" in answer(steps([5e-4] * 15 + [2e-3] * 5))
    both = answer(pd.concat([steps([2e-3]), steps([9.0], state="paper")]))
    assert both.count("lr=0.001: ") == 2, "a verdict from the plain state and the two states' ratio"
    assert "has a median α_max 4.5e+03 times that of state plain" in both


def test_the_two_states_are_compared_by_what_was_measured():
    paper = steps([8e-3, 1e-2, 1.2e-2, math.inf, -1.0, math.nan], state="paper")
    text = answer(pd.concat([paper, steps([2e-3, 3e-3, math.inf])]))
    assert "median α_max 4 times that of state plain (finite positive steps, n=3 and 2)" in text
    for nothing in (steps([math.inf, 0.0]), steps([2e-3], state="paper")):
        assert "times that of state plain" not in answer(pd.concat([paper, nothing]))


def test_a_rate_that_diverges_gives_rows_of_nan_and_a_sentence(lab, tmp_path, capsys):
    words = [word for word in words_of(lab, save(tmp_path / "model")) if not word.startswith("lr=")]
    assert hessian.main([*words, "lr=1e30"]) == 0
    printed = capsys.readouterr().out
    assert (
        "lr=1e+30: it diverged. 2 of 2 recorded steps were lost to a loss or a gradient that is not finite" in printed
    )
    assert "lr=1e+30, state paper: it diverged. 2 of 2" in printed
    rows = rows_of(probe_of(lab, tmp_path / "model"), lr=1e30)
    assert list(rows.columns[: len(COLUMNS)]) == list(COLUMNS) and len(rows) == 4
    assert rows[["slope", "curvature", "alpha_max", "loss_before", "loss_after"]].isna().to_numpy().all()


def test_quantiles_are_recorded_values_and_a_lost_step_counts_as_zero():
    values = pd.Series([math.inf, 3.0, math.nan, 2.0, 1.0])
    assert quantile(values, 0.0) == 0.0
    assert quantile(values, 0.5) == 2.0
    assert quantile(values, 1.0) == math.inf


def test_without_transformers_it_is_named(lab, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RuntimeError, match="hf=… needs transformers, which is not installed; pip install transformers"):
        probe_of(lab, tmp_path)
