"""A mixer's own start is there in the whole model, and where attention begins is asked of the mixer, not of a name."""

from __future__ import annotations

import pytest
import torch

from stability.build import build_model
from stability.registry import add_plugin

VOCAB = 32
MODEL = {"name": "x", "layers": 2, "width": 16, "heads": 2, "positions": 16}


def mixers(lab, **changes):
    plugin = "tests.mechanisms.plugins."
    for name in ("gated", "unseen_sigmoid"):
        add_plugin(plugin + name)
    return [block.mixer for block in build_model(lab.spec(**changes), VOCAB).blocks]


@pytest.mark.parametrize("qk_bias", [0.0, 2.0])
@pytest.mark.parametrize("linear", ["dense", "bitnet"])
def test_what_a_mixer_starts_itself_is_so_in_the_whole_model(lab, linear, qk_bias):
    model = MODEL | {"qk_bias": qk_bias}
    for mixer in mixers(lab, mechanism={"name": "gated"}, objective={"name": "ar"}, model=model, linear=linear):
        assert (mixer.gate.bias == 3.0).all()
        assert not mixer.rate.weight.any()
        rates = torch.nn.functional.softplus(mixer.rate.bias)
        torch.testing.assert_close(rates, torch.logspace(-3, -1, 16), rtol=1e-4, atol=0)
        assert mixer.gate.weight.any()
        assert not mixer.out.bias.any()


def test_within_another_mechanism_it_stays_too(lab):
    of_two = {"name": "two_way", "of": {"name": "gated"}}
    for mixer in mixers(lab, mechanism=of_two, model=MODEL | {"qk_bias": 2.0}):
        assert all((each.gate.bias == 3.0).all() for each in mixer.mixers)


def test_attention_begins_local_wherever_it_is_read(lab):
    for mechanism in ({"name": "attentionx"}, {"name": "two_way", "of": "sa"}):
        for mixer in mixers(lab, mechanism=mechanism, model=MODEL | {"qk_bias": 1.5}):
            for attention in getattr(mixer, "mixers", [mixer]):
                assert (attention.qkv.bias[:32] == 1.5).all()
                assert not attention.qkv.bias[32:].any()


def test_a_projection_that_happens_to_be_called_qkv_is_left_alone(lab):
    """Of somebody's own attention it is not known how queries and keys lie in it."""
    for mixer in mixers(lab, mechanism={"name": "unseen_sigmoid"}, model=MODEL | {"qk_bias": 2.0}):
        assert not mixer.qkv.bias.any()
