"""What several mechanisms have in common, one table each: refusals, costs, chunks, padding, Taylor terms, matrices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from stability.config.parts import validate_settings
from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from stability.registry import Registry
from tests.mechanisms.checks import HEADS, WIDTH, check_taylor_is_double_backward, inputs, moved, padding
from tests.mechanisms.sight_checks import scattered_padding
from tests.mechanisms.small import OTHER

DELTA = ("deltanet", "gated_deltanet", "kda")
CHUNKED = (*DELTA, "gla", "hgrn2", "mamba", "mamba2", "retnet")  # a chunk of titans is a setting of its own

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("attentionx", {"gamma": -1}, "gamma=-1: input should be greater than or equal to 0"),
    ("attentionx", {"gama": 1}, "gama: unknown key; did you mean 'gamma'"),
    ("attentionx", {"mask_diagonal": 3}, "mask_diagonal=3: "),
    ("bigbird", {"block": 0}, "block=0: input should be greater than or equal to 1"),
    ("bigbird", {"window": -1}, "window=-1: input should be greater than or equal to 0"),
    ("bigbird", {"random": -1}, "random=-1: input should be greater than or equal to 0"),
    ("bigbird", {"global_blocks": -1}, "global_blocks=-1: input should be greater than or equal to 0"),
    ("bigbird", {"link_seed": -1}, "link_seed=-1: input should be greater than or equal to 0"),
    ("fox", {"decay_times": (0, 4)}, "decay_times.0=0: input should be greater than 0"),
    ("fox", {"decay_times": (2, math.inf)}, "decay_times.1=inf: input should be a finite number"),
    ("fox", {"decay_times": (2, 3, 4)}, "decay_times"),
    ("fox", {"rope": "relative"}, "rope='relative': "),
    ("gated_softmax", {"gate": "tokenwise"}, "gate='tokenwise': "),
    ("gla", {"expand_k": 0}, "expand_k=0: input should be greater than 0"),
    ("gla", {"gate_rank": 0}, "gate_rank=0: input should be greater than or equal to 1"),
    ("gla", {"gate_divisor": -1}, "gate_divisor=-1: input should be greater than 0"),
    ("gla", {"conv": 0}, "conv=0: input should be greater than or equal to 1"),
    ("gla", {"chunk": 0}, "chunk=0: input should be greater than or equal to 1"),
    ("hgrn2", {"expand_k": 0}, "expand_k=0: input should be greater than 0"),
    ("hgrn2", {"bounds": "none"}, "bounds='none': "),
    ("hgrn2", {"chunk": 0}, "chunk=0: input should be greater than or equal to 1"),
    ("longformer", {"window": 0}, "window=0: input should be greater than or equal to 1"),
    ("longformer", {"dilation": 0}, "dilation=0: input should be greater than or equal to 1"),
    ("longformer", {"global_tokens": -1}, "global_tokens=-1: input should be greater than or equal to 0"),
    ("mamba", {"expand": 0}, "expand=0: input should be greater than or equal to 1"),
    ("mamba", {"dt_range": (0, 1)}, "dt_range.0=0: input should be greater than 0"),
    ("mamba", {"dt_range": (0.1, 0.01)}, "dt_range=[0.1, 0.01] must begin with the smaller number"),
    ("mamba", {"dt_rank": 0}, "dt_rank=0: input should be greater than or equal to 1"),
    ("mamba2", {"state": 0}, "state=0: input should be greater than or equal to 1"),
    ("mamba2", {"a_range": (0, 1)}, "a_range.0=0: input should be greater than 0"),
    ("mamba2", {"a_range": (3, 2)}, "a_range=[3.0, 2.0] must begin with the smaller number"),
    ("mamba2", {"dt_range": (0.1, 0.01)}, "dt_range=[0.1, 0.01] must begin with the smaller number"),
    ("retnet", {"expand_v": 0}, "expand_v=0: input should be greater than 0"),
    ("retnet", {"chunk": 0}, "chunk=0: input should be greater than or equal to 1"),
    ("sigmoid", {"length": 0}, "length=0: input should be greater than or equal to 1"),
    ("sigmoid", {"norm": "before"}, "norm='before': "),
    ("sparge", {"tau": 0.0}, "tau=0.0: input should be greater than 0"),
    ("sparge", {"tau": 1.5}, "tau=1.5: input should be less than or equal to 1"),
    ("sparge", {"skip": 0.0}, "skip=0.0: input should be less than 0"),
    ("sparge", {"key_block": 0}, "key_block=0: input should be greater than or equal to 1"),
    ("sparse_transformer", {"stride": 1}, "stride=1: input should be greater than or equal to 2"),
    ("titans", {"memory": "none"}, "memory=none leaves nothing of form=memory_only; use form=gated_attention"),
    ("titans", {"memory": "matrix"}, "memory='matrix': "),
    ("titans", {"chunk": 0}, "chunk=0: "),
    ("titans", {"conv": 0}, "conv=0: "),
    ("titans", {"hidden": 0}, "hidden=0: "),
    *((name, {"chunk": 24}, "chunk=24: input should be 1, 2, 4, 8, 16, 32, 64, 128 or 256") for name in DELTA),
    *((name, {"conv": 0}, "conv=0: input should be greater than or equal to 1") for name in DELTA),
    *((name, {"expand_v": 1.5}, "expand_v=1.5: ") for name in DELTA),
]

DENSE = ("gated_softmax", "sa")  # causal, these multiply what is masked, and their cost is of what is not
# (name, settings, heads): all that they multiply the flop counter sees, but for `UNSEEN`
COSTS = [
    ("sa", {}, 2),
    ("sa", {"kv_heads": 1}, 4),
    ("sa", {"kv_heads": 2}, 4),
    ("fox", {}, 2),
    ("gated_softmax", {"gate": "elementwise"}, 2),
    ("gated_softmax", {"gate": "headwise"}, 2),
    ("sigmoid", {}, 2),
    ("retnet", {"chunk": 8}, 2),
    ("gla", {"chunk": 8}, 2),
    ("hgrn2", {"chunk": 8}, 2),
    ("fasa", {}, 2),
    ("fasa", {"tokens": 5}, 2),
    ("sparge", {"query_block": 4, "key_block": 8}, 2),
    *(("bigbird", settings, 2) for settings in OTHER["bigbird"]),
    *(("longformer", settings, 2) for settings in OTHER["longformer"]),
    *(("sparse_transformer", settings, heads) for settings in OTHER["sparse_transformer"] for heads in (2, 3)),
    ("nsa", {}, 4),
    ("nsa", {"kv_heads": 1}, 4),
    ("nsa", {"block": 2, "stride": 1, "selected_block": 2, "selected": 4, "window": 3}, 4),
    ("nsa", {"block": 2, "stride": 1, "selected_block": 2, "selected": 4, "window": 3, "compression": "mean"}, 4),
]

# without a convolution, which counts positions
PLACELESS: list[tuple[str, dict[str, Any]]] = [
    ("fox", {}),
    ("gla", {"chunk": 4}),
    ("hgrn2", {"chunk": 4}),
    ("mamba", {"chunk": 4, "conv": 1}),
    ("mamba2", {"chunk": 4, "conv": 1}),
    ("titans", {"conv": 1}),
    ("titans", {"conv": 1, "memory": "mlp", "chunk": 1}),  # of more than one, S is not added to M at padding
    *((name, {"chunk": 4, "conv": 1}) for name in DELTA),
]

ALONG: list[tuple[str, dict[str, Any], str]] = [
    ("mamba", {"chunk": 4, "state": 3}, "causal"),
    ("mamba2", {"chunk": 4, "state": 3}, "causal"),
    ("titans", {}, "causal"),
    ("titans", {"memory": "mlp", "chunk": 4, "activation": "silu"}, "causal"),
    ("titans", {"form": "gated_attention", "window": 3, "chunk": 2}, "causal"),
    ("two_way", {"of": "sa"}, "bidirectional"),
    ("sa", {"kv_heads": 1}, "bidirectional"),
    ("sa", {"kv_heads": 1}, "causal"),
    *((name, {"chunk": 4}, "causal") for name in DELTA),
    *(
        (name, {"mask_diagonal": masked}, direction)
        for name in ("sa", "attentionx")
        for masked in (False, True)
        for direction in ("bidirectional", "causal")
    ),
]

# the widths of the matrices that a linear map holds beside each other
SPLITS: list[tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]] = [
    *((name, {"expand_v": 2}, {"qkv": (16, 16, 32)}) for name in DELTA),
    ("gla", {}, {"qkvg": (8, 8, 16, 16)}),
    ("hgrn2", {"expand_k": 0.5}, {"qi": (8, 16)}),
    ("mamba", {"dt_rank": 3}, {"in_proj": (32, 32), "x_proj": (3, 16, 16), "dt_proj": (32,)}),
    ("mamba2", {"state": 5}, {"in_proj": (32, 32, 5, 5), "dt_proj": (2,)}),
    ("retnet", {"expand_v": 2.0}, {"qkvg": (16, 16, 32, 32)}),
    ("titans", {"form": "gated_attention", "memory": "mlp"}, {"qkv": (16, 16, 16), "attention": (16, 16, 16)}),
]


def directions_of(name: str, settings: dict[str, Any]) -> list[str]:
    return sorted(
        Registry("mechanisms").load(name).supported_directions(validate_settings("mechanisms", name, settings))
    )


@pytest.mark.parametrize(("name", "settings", "message"), REFUSED)
def test_settings_that_cannot_be_are_refused_in_a_line(name, settings, message):
    direction = "causal" if "causal" in Registry("mechanisms").load(name).directions else "bidirectional"
    with pytest.raises(ValueError) as caught:
        build(name, width=16, heads=2, direction=direction, **settings)
    assert str(caught.value).startswith(f"mechanism.{name}.{message}") and "\n" not in str(caught.value)


def unseen(name: str, settings: dict[str, Any], direction: str, num: int) -> float:
    """Return the multiply-adds that are no matrix products, less the products that are counted and not used."""
    if name in ("gla", "hgrn2"):  # scores of each feature's own decay
        chunk = min(settings["chunk"], num)
        return math.ceil(num / chunk) * chunk * chunk * {"gla": 8, "hgrn2": 16}[name]
    if name == "longformer" and direction == "bidirectional":  # global rows have queries of another projection
        return -min(settings["global_tokens"], num) * WIDTH**2
    return 0


@pytest.mark.parametrize("num_positions", [3, 30, 64])
@pytest.mark.parametrize(("name", "settings", "heads"), COSTS)
def test_cost_is_what_the_flop_counter_counts(name, settings, heads, num_positions):
    width = 8 * heads if heads == 3 else WIDTH
    for direction in ("bidirectional",) if name in DENSE else directions_of(name, settings):
        layer = build(name, width=width, heads=heads, direction=direction, **settings)
        with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            layer(torch.randn(1, num_positions, width, generator=torch.Generator().manual_seed(1)))
        shape, config = MixerShape(width, heads, direction), validate_settings("mechanisms", name, settings)
        told = Registry("mechanisms").load(name).cost(config, shape, num_positions)
        counted = counter.get_total_flops() / 2 + unseen(name, settings, direction, num_positions)
        assert told == pytest.approx(counted, rel=1e-12), direction


class CountProducts(TorchDispatchMode):
    """Counts the numbers that elementwise multiplications give, squares too."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mul.Tensor, torch.ops.aten.pow.Tensor_Scalar):
            self.num += given.numel()
        return given


@pytest.mark.parametrize("num_positions", [1, 32, 50])
@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_cost_of_a_state_space_is_what_is_multiplied(name, num_positions):
    layer, config = moved(name, chunk=16).float(), validate_settings("mechanisms", name, {"chunk": 16})
    with FlopCounterMode(display=False) as counter, CountProducts() as products, torch.no_grad():
        layer(torch.zeros(1, num_positions, WIDTH))
    told = Registry("mechanisms").load(name).cost(config, MixerShape(WIDTH, HEADS, "causal"), num_positions)
    assert told == counter.get_total_flops() / 2 + products.num


@pytest.mark.parametrize("num_positions", [1, 27, 70])
@pytest.mark.parametrize("name", CHUNKED)
def test_the_chunk_changes_no_output(name, num_positions):
    x_BND, mask_BN = inputs(num_positions=num_positions), scattered_padding(num_positions)
    expected = moved(name, chunk=1)(x_BND, mask_BN=mask_BN)[mask_BN]
    for chunk in (2, 8, 64):
        found = moved(name, chunk=chunk)(x_BND, mask_BN=mask_BN)[mask_BN]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("name", "settings"), PLACELESS)
def test_padding_anywhere_is_as_if_it_were_not_there(name, settings):
    layer, x_BND = moved(name, **settings), inputs(num_positions=7)
    alone = layer(x_BND)
    for places in (range(7), range(5, 12), [0, 1, 5, 6, 7, 9, 10], [2, 3, 4, 8, 9, 10, 11]):
        padded, mask_BN = torch.full((3, 12, WIDTH), 9.0, dtype=torch.float64), torch.zeros(3, 12, dtype=torch.bool)
        padded[:, list(places)], mask_BN[:, list(places)] = x_BND, True
        found = layer(padded, mask_BN=mask_BN)[:, list(places)]
        torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("name", "settings", "direction"), ALONG)
def test_taylor_terms_are_those_of_double_backward(name, settings, direction, padded):
    layer = moved(name, direction, **settings)
    check_taylor_is_double_backward(layer, inputs(num_positions=11), padding(11) if padded else None)


@pytest.mark.parametrize(("name", "settings", "expected"), SPLITS)
def test_maps_that_hold_several_matrices_say_so(name, settings, expected):
    layer = build(name, width=WIDTH, heads=HEADS, direction="causal", **settings)
    assert layer.own_splits == expected
    for key, rows in expected.items():
        assert sum(rows) == layer.get_submodule(key).out_features
