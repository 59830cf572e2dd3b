"""Normed queries and keys against the attention of Qwen 3 and Gemma 3, a loop over pairs, and older runs' ids."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stability.config.identity import essence, run_id
from stability.config.parse import parse_run
from stability.config.parts import validate_settings
from stability.mechanisms import build
from stability.probe import main as probe
from stability.runs.study import StudyFolder
from tests.identity.golden_ids import BASE
from tests.mechanisms.checks import check_taylor_is_double_backward, inputs, moved, padding
from tests.mechanisms.names import SOFTMAX, listed
from tests.mechanisms.oracles import rotated

WIDTH, HEADS = 16, 2
HEAD_WIDTH = WIDTH // HEADS
SHARED = ("attentionx", "bigbird", "fox", "gated_softmax", "sa", "sigmoid", "sparse_transformer", "sw")


class InDouble:
    """The module ``torch``, in which float32 is float64: the public classes norm and weigh in float32 by name."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def public_attention(monkeypatch, name: str, layer: Any, **settings: Any) -> Any:
    """Return a public attention in float64 with the weights of a layer of `sa`."""
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    monkeypatch.setattr(modeling, "torch", InDouble())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    size = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": layer.kv_heads}
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")(
        **size, head_dim=HEAD_WIDTH, num_hidden_layers=1, attention_bias=True, rms_norm_eps=1e-5, **settings
    )
    config._attn_implementation = "eager"
    attention = getattr(modeling, f"{name}Attention")(config, 0).double().eval()
    rows = (WIDTH, layer.kv_heads * HEAD_WIDTH, layer.kv_heads * HEAD_WIDTH)
    with torch.no_grad():
        for key, weight, bias in zip("qkv", layer.qkv.weight.split(rows), layer.qkv.bias.split(rows), strict=True):
            projection = getattr(attention, f"{key}_proj")
            projection.weight.copy_(weight)
            projection.bias.copy_(bias)
        attention.o_proj.load_state_dict(layer.out.state_dict())
        for key in ("q_norm", "k_norm") if layer.q_norm is not None else ():
            getattr(attention, key).weight.copy_(getattr(layer, key).weight - (1 if name == "Gemma3" else 0))
    return attention


def of_public(attention: Any, x_BND: torch.Tensor) -> torch.Tensor:
    """Return a public causal attention's output, its rotation by angles in float64."""
    num_positions = x_BND.shape[1]
    rate_J = 10_000.0 ** (-torch.arange(0, HEAD_WIDTH, 2, dtype=torch.float64) / HEAD_WIDTH)
    angle_1NK = (torch.arange(num_positions, dtype=torch.float64)[:, None] * rate_J).repeat(1, 2)[None]
    mask_NN = torch.full((num_positions, num_positions), -math.inf, dtype=torch.float64).triu(1)
    return attention(x_BND, (angle_1NK.cos(), angle_1NK.sin()), mask_NN[None, None])[0]


@pytest.mark.parametrize("kv_heads", [None, 1])
@pytest.mark.parametrize(
    ("name", "settings"), [("Qwen3", {}), ("Gemma3", {"query_pre_attn_scalar": HEAD_WIDTH, "sliding_window": 99})]
)
def test_rmsnorm_is_that_of_qwen_3_and_gemma_3(monkeypatch, name, settings, kv_heads):
    layer, x_BND = moved("sa", qk_norm="rmsnorm", kv_heads=kv_heads), inputs()
    with torch.no_grad():
        expected_BND = of_public(public_attention(monkeypatch, name, layer, **settings), x_BND)
        torch.testing.assert_close(layer(x_BND), expected_BND, rtol=1e-10, atol=1e-10)


def normed(u_K: torch.Tensor, norm: Any, kind: str) -> torch.Tensor:
    mean = sum(u_K.tolist()) / len(u_K) if kind == "layernorm" else 0.0
    size = math.sqrt(sum((value - mean) ** 2 for value in u_K.tolist()) / len(u_K) + 1e-5)
    bias_K = norm.bias if kind == "layernorm" else torch.zeros(len(u_K), dtype=u_K.dtype)
    return torch.stack([g * (value - mean) / size + b for value, g, b in zip(u_K, norm.weight, bias_K, strict=True)])


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
def test_equals_a_loop_over_pairs(kind, direction):
    layer, x_BND = moved("sa", direction, qk_norm=kind), inputs()
    expected_BND = torch.zeros_like(x_BND)
    with torch.no_grad():
        for b, x_ND in enumerate(x_BND):
            q_ND, k_ND, v_ND = (x_ND @ layer.qkv.weight.T + layer.qkv.bias).split(WIDTH, 1)
            for start in range(0, WIDTH, HEAD_WIDTH):
                part = slice(start, start + HEAD_WIDTH)
                q_NK, k_NK = (
                    rotated(torch.stack([normed(u_K, norm, kind) for u_K in u_ND[:, part]]))
                    for u_ND, norm in ((q_ND, layer.q_norm), (k_ND, layer.k_norm))
                )
                for i in range(len(x_ND)):
                    seen = range(i + 1 if direction == "causal" else len(x_ND))
                    weights = [math.exp(float(q_NK[i] @ k_NK[j]) / math.sqrt(HEAD_WIDTH)) for j in seen]
                    for j, weight in zip(seen, weights, strict=True):
                        expected_BND[b, i, part] += weight / sum(weights) * v_ND[j, part]
        expected_BND = expected_BND @ layer.out.weight.T + layer.out.bias
        torch.testing.assert_close(layer(x_BND), expected_BND, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", SHARED)
def test_the_size_of_queries_and_keys_has_no_effect(name):
    """What qk-norm is for: much larger W_q and W_k give the same output, which they do not without."""
    for qk_norm, is_same in (("rmsnorm", True), ("layernorm", True), ("none", False)):
        layer = moved(name, "causal", qk_norm=qk_norm)
        before_BND = layer(inputs())
        with torch.no_grad():
            layer.qkv.weight[: 2 * WIDTH] *= 1e4
            layer.qkv.bias[: 2 * WIDTH] *= 1e4
        assert torch.allclose(layer(inputs()), before_BND, rtol=1e-3, atol=1e-3) is is_same


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("name", SHARED)
def test_curvature_by_taylor_terms_is_that_of_double_backward(name, kind):
    check_taylor_is_double_backward(moved(name, qk_norm=kind), inputs(), padding())


# settings with which each sees all that `sa` sees
OTHERS: dict[str, dict[str, Any]] = {
    "longformer": {"window": 99, "global_tokens": 0},
    "sparsek": {"k": 99},
    "nsa": {"window": 99},
    "ca": {},
}


def as_sa(name: str, kind: str, direction: str) -> tuple[Any, Any]:
    """A layer of another mechanism and one of `sa` with its queries, keys, values, norms and output."""
    layer = moved(name, direction, qk_norm=kind, **OTHERS[name])
    plain = moved("sa", direction, qk_norm=kind, mask_diagonal=False)
    with torch.no_grad():
        for part in ("weight", "bias"):
            if name == "ca":
                rows = torch.cat([getattr(layer.q, part), getattr(layer.kv, part)])
            else:  # nsa has keys and values of three branches, the window's last
                split = getattr(layer.qkv, part).split(layer.own_splits["qkv"])
                rows = torch.cat([split[0], split[len(split) // 2], split[-1]])
            getattr(plain.qkv, part).copy_(rows)
        if name == "nsa":
            layer.gate.weight.zero_()
            layer.gate.bias.copy_(torch.tensor([-1e3] * 2 * HEADS + [1e3] * HEADS))  # the window's branch alone
        for part in ("out", "q_norm", "k_norm"):
            getattr(plain, part).load_state_dict(getattr(layer, part).state_dict())
    return layer, plain


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_mechanism_that_sees_everything_is_sa_with_the_same_norms(name, kind):
    layer, plain = as_sa(name, kind, "bidirectional" if name == "ca" else "causal")
    x_BND = inputs()
    found_BND = layer(x_BND, x_BND) if name == "ca" else layer(x_BND)
    torch.testing.assert_close(found_BND, plain(x_BND), rtol=1e-10, atol=1e-12)


def test_global_rows_of_longformer_are_normed_as_the_others():
    """With projections like the others', and a window over all, every row is `sa`'s."""
    whole = moved("longformer", "bidirectional", qk_norm="rmsnorm", window=99, global_tokens=2)
    plain = moved("sa", "bidirectional", qk_norm="rmsnorm", mask_diagonal=False)
    with torch.no_grad():
        for copy, rows in ((whole.q_global, slice(WIDTH)), (whole.kv_global, slice(WIDTH, None))):
            copy.weight.copy_(whole.qkv.weight[rows])
            copy.bias.copy_(whole.qkv.bias[rows])
        for part in ("qkv", "out", "q_norm", "k_norm"):
            getattr(plain, part).load_state_dict(getattr(whole, part).state_dict())
    torch.testing.assert_close(whole(inputs()), plain(inputs()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["longformer", "sparsek", "nsa"])
def test_compression_and_weights_have_the_norms_too(name):
    """Much larger W_q and W_k change neither the output nor the observed weights."""
    few = {"block": 2, "stride": 1, "selected_block": 2, "selected": 3, "window": 3, "compression": "mean"}
    layer, x_BND = moved(name, "causal", qk_norm="rmsnorm", **(few if name == "nsa" else {})), inputs()
    before_BND, weights_BHNN = layer(x_BND), layer.weights(x_BND)
    with torch.no_grad():
        rows = layer.own_splits["qkv"]
        of_keys = sum(rows[: 1 + (len(rows) - 1) // 2])
        layer.qkv.weight[:of_keys] *= 1e4
        layer.qkv.bias[:of_keys] *= 1e4
    torch.testing.assert_close(layer(x_BND), before_BND, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(layer.weights(x_BND), weights_BHNN, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["longformer", "sparsek"])
def test_their_curvature_by_taylor_terms_is_that_of_double_backward(name):
    check_taylor_is_double_backward(moved(name, qk_norm="rmsnorm"), inputs(), padding())


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_in_bfloat16_values_and_logits_keep_their_dtype(kind):
    layer = moved("sa", qk_norm=kind).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert {part.dtype for part in layer.split(layer.qkv(inputs(torch.float32)))} == {torch.bfloat16}
        y_BND = layer(inputs(torch.float32))
    exact_BND = layer(inputs(torch.float32))
    assert (y_BND - exact_BND).square().mean().sqrt() <= 1e-2 * exact_BND.square().mean().sqrt()


def test_gains_begin_at_one_and_are_shared_by_heads():
    layer = build("sa", width=WIDTH, heads=HEADS, qk_norm="rmsnorm")
    shapes = {name: tuple(value.shape) for name, value in layer.named_parameters() if "norm" in name}
    assert shapes == {"q_norm.weight": (HEAD_WIDTH,), "k_norm.weight": (HEAD_WIDTH,)}
    assert torch.equal(layer.q_norm.weight, torch.ones(HEAD_WIDTH))


def test_older_runs_of_sigmoid_keep_their_ids():
    """They say true or false, and their ids contain that; a spec of a word is the same run."""
    for older, word in ((False, "none"), (True, "layernorm")):
        runs: list[Any] = [
            parse_run(BASE | {"mechanism": {"name": "sigmoid", "qk_norm": value}}) for value in (older, word)
        ]
        assert [run.mechanism.settings.qk_norm for run in runs] == [word, word]
        assert [json.loads(essence(run))["mechanism"]["qk_norm"] for run in runs] == [older, older]
        assert run_id(runs[0]) == run_id(runs[1])
    order = [name for name, _ in build("sigmoid", width=16, heads=2, norm="after", qk_norm=True).named_parameters()]
    assert order[4:] == ["norm.weight", "q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias"]
    new = parse_run(BASE | {"mechanism": {"name": "sigmoid", "qk_norm": "rmsnorm"}})
    assert parse_run(new.model_dump(mode="json")) == new
    assert json.loads(essence(new))["mechanism"]["qk_norm"] == "rmsnorm"


@pytest.mark.parametrize("name", ["sa", "attentionx", "gated_softmax"])
def test_a_learned_temperature_beside_it_is_refused(name):
    with pytest.raises(ValueError) as caught:
        validate_settings("mechanisms", name, {"qk_norm": "rmsnorm", "temperature": "learned"})
    assert str(caught.value) == (
        "qk_norm=rmsnorm learns the size of q·k by its gains, and so does temperature=learned; leave one of the two out"
    )


def test_what_qk_leaves_normed_layers_out_and_says_why(lab, capsys):
    mixed = {"name": "mix", "pattern": ["sa", "sw"], "parts": [{"name": "sa", "qk_norm": "rmsnorm"}]}
    runs = [lab.train(lab.spec(mechanism={"name": "sa", "qk_norm": "layernorm"})), lab.train(lab.spec(mechanism=mixed))]
    study = StudyFolder.of(lab.pool, "normed")
    study.write([run.run_id for run in runs])
    assert probe(["what=qk", f"ckpt={study.path}"]) == 0
    looked = f"what=qk looks at {listed(*SOFTMAX)} without qk_norm, whose logits are bilinear in W_q and W_k"
    assert f"not observed: sa with qk_norm; {looked}\n" in capsys.readouterr().out
    rows = [SimpleNamespace(**row) for run in runs for row in _read_rows(run)]
    assert {(row.run_id, row.mixer) for row in rows} == {(runs[1].run_id, "sw")}


def _read_rows(run: Any) -> list[dict[str, Any]]:
    import pandas as pd

    return [row for file in run.path.glob("probes/*_qk.parquet") for row in pd.read_parquet(file).to_dict("records")]
