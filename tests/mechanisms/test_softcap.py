"""Capped attention logits against the attention of Gemma 2, and a written-out form for each mechanism."""

from __future__ import annotations

import pytest
import torch

from stability.config.identity import run_id
from stability.config.parse import parse_run
from tests.identity.golden_ids import BASE
from tests.mechanisms.checks import check_taylor_is_double_backward, inputs, moved, padding
from tests.mechanisms.test_qk_norm import HEAD_WIDTH, SHARED, of_public, public_attention
from tests.reading import read_spec

CAP = 0.3


@pytest.mark.parametrize("kv_heads", [None, 1])
def test_it_is_that_of_gemma_2(monkeypatch, kv_heads):
    layer, x_BND = moved("sa", softcap=CAP, kv_heads=kv_heads), inputs()
    settings = {"query_pre_attn_scalar": HEAD_WIDTH, "sliding_window": 99, "attn_logit_softcapping": CAP}
    with torch.no_grad():
        expected_BND = of_public(public_attention(monkeypatch, "Gemma2", layer, **settings), x_BND)
        torch.testing.assert_close(layer(x_BND), expected_BND, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", SHARED)
def test_every_mechanism_caps_the_logits_of_its_visible_pairs(name):
    """The capped layer's output, from the logits of the same layer without a cap."""
    plain, capped = moved(name), moved(name, softcap=CAP)
    x_BND = inputs()
    with torch.no_grad():
        q_BHNK, k_BHNK, v_BHNK = plain.split(plain.qkv(x_BND))
        logits_BHNN = CAP * torch.tanh(plain.logits(q_BHNK, k_BHNK) / CAP)
        if name == "sigmoid" or name == "fox":
            a_BHNN = plain.weigh(logits_BHNN, x_BND, None)
        else:
            part_BHNN = logits_BHNN.exp() * plain.visible(x_BND.shape[1], x_BND.device)
            a_BHNN = part_BHNN / part_BHNN.sum(-1, keepdim=True).clamp_min(1e-300)
        expected_BND = plain.joined(plain.mixed(a_BHNN, v_BHNK), x_BND)
        torch.testing.assert_close(capped(x_BND), expected_BND, rtol=1e-10, atol=1e-12)
        assert not torch.allclose(plain(x_BND), expected_BND, rtol=1e-3)


@pytest.mark.parametrize("name", SHARED)
def test_curvature_by_taylor_terms_is_that_of_double_backward(name):
    check_taylor_is_double_backward(moved(name, softcap=CAP), inputs(), padding())


def test_a_large_cap_changes_nothing():
    layer, x_BND = moved("sa", softcap=1e9), inputs()
    torch.testing.assert_close(layer(x_BND), moved("sa")(x_BND), rtol=1e-10, atol=1e-12)


def test_a_dropped_weight_is_dropped_beside_a_cap_too():
    layer, x_BND = moved("sa", softcap=CAP), inputs()
    layer.dropout = 0.5
    assert torch.equal(layer.eval()(x_BND), layer(x_BND))
    assert not torch.equal(layer.train()(x_BND), layer(x_BND))


def test_it_is_part_of_a_runs_id():
    ids = {run_id(parse_run(BASE | {"mechanism": {"name": "sa", "softcap": each}})) for each in (None, 50.0, 30.0)}
    assert len(ids) == 3 and run_id(parse_run(BASE | {"mechanism": "sa"})) in ids


def test_kernels_of_the_window_refuse_it():
    with pytest.raises(ValueError) as caught:
        parse_run(BASE | {"mechanism": {"name": "sw", "impl": "triton", "softcap": 50.0}})
    assert str(caught.value) == ("mechanism.sw.impl=triton has no kernel for softcap=50; impl=reference computes it")


@pytest.mark.parametrize("value", ["0", "-1"])
def test_a_cap_below_zero_is_refused(value):
    with pytest.raises(ValueError, match=r"mechanism\.sa\.softcap=.*: input should be greater than 0"):
        read_spec("sweep", ["mechanism=sa", f"mechanism.sa.softcap={value}", "launcher=serial"])


def test_logits_stay_within_the_cap():
    layer = moved("sa", softcap=CAP)
    with torch.no_grad():
        layer.qkv.weight *= 100
    q_BHNK, k_BHNK, _ = layer.split(layer.qkv(inputs()))
    assert layer.logits(q_BHNK, k_BHNK).abs().max() <= CAP and layer(inputs()).isfinite().all()
