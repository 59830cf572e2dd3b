"""A GPT-2 of transformers as weights that a run starts from: the same function, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from stability import sweep
from stability.build import build_model, shapes
from stability.config.training import WeightsSpec
from stability.corpora.cache import load
from stability.runs.directory import read_jsonl
from stability.runs.study import StudyFolder
from stability.training import hugging_face
from stability.training.weights import Weights

transformers = pytest.importorskip("transformers")

OWN = {"objective": {"name": "ar"}, "position": {"name": "learned"}}
SIZE = {"vocab_size": 256, "n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 2, "activation_function": "gelu"}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}


def saved(folder: Path, **changes):
    """A GPT-2 whose every weight counts, and the folder that it is saved to."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**{**SIZE, **NO_TOKENS, **changes})
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return model, folder


def started(lab, folder, scratch, **changes):
    """Our model with a folder's weights."""
    spec = lab.spec(**{**OWN, **changes})
    own = shapes(spec, 256)
    scratch.mkdir(exist_ok=True)
    weights = Weights.find(WeightsSpec(source=f"hf:{folder}"), own, scratch)
    weights.fit(own).require(weights.spec)
    model = build_model(spec, 256)
    model.load_state_dict(weights.state(model.state_dict()))
    return model.eval()


@pytest.mark.parametrize("tied", [True, False])
def test_it_computes_what_transformers_does_on_as_many_positions(lab, tmp_path, tied):
    theirs, folder = saved(tmp_path / "gpt2", tie_word_embeddings=tied)
    ours = started(lab, folder, tmp_path / "scratch")
    tokens_BN = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected_BNV, found_BNV = theirs(input_ids=tokens_BN).logits, ours(tokens_BN)
    assert expected_BNV.std() > 0.2
    torch.testing.assert_close(found_BNV, expected_BNV, rtol=1e-5, atol=1e-5)


def test_a_sweep_from_it_begins_at_transformers_own_loss(lab, tmp_path, capsys):
    theirs, folder = saved(tmp_path / "gpt2")
    words = [
        *(f"runs_dir={lab.pool}", f"data.path={lab.text}", f"init=hf:{folder}", "name=tuned"),
        *("data=text", "objective=ar", "position=learned", "mechanism=sa", "lr=[1e-4,1e-3]", "seeds=1", "steps=4"),
        *("batch=4", "evaluation.every_steps=2", "evaluation.sequences=8", "launcher=serial", "device=cpu"),
        *("model.layers=2", "model.width=16", "model.heads=2", "model.positions=16", "hessian=false", "report=false"),
    ]
    assert sweep.main(words) == 0
    assert capsys.readouterr().out.startswith("init: every run starts from the weights of gpt2 (sha256 ")
    runs = StudyFolder.of(lab.pool, "tuned").runs()
    spec = json.loads(runs[0].spec_file.read_text())
    corpus = load(lab.cache, spec["data_fingerprint"])
    windows = torch.stack([torch.as_tensor(window).long() for window in corpus.windows("val", 8, 17)])
    with torch.no_grad():
        logits_BNV = theirs(input_ids=windows[:, :-1]).logits
    expected = F.cross_entropy(logits_BNV.double().flatten(0, 1), windows[:, 1:].flatten()).item()
    firsts = [next(read_jsonl(run.metrics_file))["val_nll"] for run in runs]
    assert firsts == [pytest.approx(expected, rel=1e-5)] * 2
    shutil.move(folder, tmp_path / "moved")
    assert sweep.main([word.replace(str(folder), str(tmp_path / "moved")) for word in words]) == 0
    assert "skips 2 finished runs" in capsys.readouterr().out


def test_what_would_compute_something_else_is_refused_with_what_to_add(lab, tmp_path):
    _, folder = saved(tmp_path / "gpt2", activation_function="gelu_new", n_head=4, layer_norm_epsilon=1e-6)
    config = hugging_face.read_config(str(folder))
    with pytest.raises(ValueError) as caught:
        hugging_face.require(config, lab.spec(mechanism={"name": "sc"}), "init=hf:x")
    assert str(caught.value) == (
        "init=hf:x is a GPT-2, and this run would compute something else with its weights;\n"
        "add objective=ar mechanism=sa position=learned norm.layernorm.epsilon=1e-06 ffn.activation=gelu_tanh "
        "model.heads=4 (or init.partial=true, which compares only names and shapes)"
    )
    _, plain = saved(tmp_path / "plain")
    hugging_face.require(hugging_face.read_config(str(plain)), lab.spec(**OWN), "init=hf:x")
    own_keys, grouped = (lab.spec(**OWN, mechanism={"name": "sa", "kv_heads": number}) for number in (2, 1))
    hugging_face.require(hugging_face.read_config(str(plain)), own_keys, "init=hf:x")
    with pytest.raises(ValueError, match="add mechanism.sa.kv_heads=null"):
        hugging_face.require(hugging_face.read_config(str(plain)), grouped, "init=hf:x")


def test_a_folder_that_holds_no_gpt2_says_why(lab, tmp_path):
    _, folder = saved(tmp_path / "gpt2")
    config = json.loads((folder / "config.json").read_text())

    def refusal(changes):
        (folder / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ValueError) as caught:
            hugging_face.read_config(str(folder))
        return str(caught.value).removeprefix(f"init=hf:{folder}")

    assert refusal({"model_type": "llama"}) == " is a model of the type llama; only gpt2 is supported"
    for name in ("n_head", "layer_norm_epsilon"):
        assert refusal({name: "two"}) == f": its config.json says {name}=two, which is no number"
    assert refusal({"n_head": None}) == ": its config.json says n_head=None, which is no number"
    for changes in ({"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}):
        assert refusal(changes).startswith(": its attention is scaled otherwise")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:1000])
    with pytest.raises(ValueError, match=f"init=hf:{folder}: .*model.safetensors cannot be read"):
        hugging_face.tensors(str(folder), {})
    save_file({"h.0.ln_1.weight": torch.ones(16)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"init=hf:{folder}: its model.safetensors holds no wte.weight, the tokens'"):
        hugging_face.tensors(str(folder), {"head.weight": (256, 16)})
    (folder / "model.safetensors").unlink()
    assert refusal({}).startswith(": no model.safetensors there; give a folder that save_pretrained wrote")
    with pytest.raises(ValueError, match="does not fit the model: .*; of another shape: embedding.embedding.weight"):
        started(lab, saved(tmp_path / "small", vocab_size=200, n_layer=1)[1], tmp_path / "scratch")
    with pytest.raises(ValueError, match="h.0.crossattention.c_attn.bias is no tensor of a GPT-2"):
        started(lab, saved(tmp_path / "crossed", add_cross_attention=True)[1], tmp_path / "scratch")
