"""A window, a block or a chunk far wider than the sequence gives what one as wide gives, and takes no more memory.

Memory is counted in elements: the largest tensor of a forward pass and the sum of all.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stability.mechanisms._base import MixerShape
from stability.mechanisms._recurrent import ShortConvolution
from stability.registry import Registry

NUM, WIDE = 24, 5000
CASES = [
    ("sw", "window", {}),
    ("longformer", "window", {}),
    ("longformer", "window", {"global_tokens": 0, "dilation": 3}),
    ("bigbird", "window", {}),
    ("nsa", "window", {}),
    ("nsa", "selected_block", {}),
    ("nsa", "selected", {}),
    ("sparsek", "window", {}),
    ("sparsek", "k", {}),
    ("sparge", "query_block", {}),
    ("sparge", "key_block", {}),
    ("fasa", "tokens", {}),
    ("titans", "window", {"form": "gated_attention"}),
    ("gla", "chunk", {}),
    ("hgrn2", "chunk", {}),
    ("retnet", "chunk", {}),
    ("mamba", "chunk", {}),
    ("mamba2", "chunk", {}),
    ("sc", "window", {}),
    ("sc", "window", {"graph": "cycle"}),
    ("sc", "window", {"graph": "top_w"}),
    ("sc", "window", {"rope": "relative"}),
]


class Elements(TorchDispatchMode):
    """Counts the elements of what operations return: of the largest tensor, and of all."""

    def __init__(self):
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.largest, self.total = max(self.largest, *sizes, 0), self.total + sum(sizes)
        return out


def passed(name, direction, settings, num=NUM):
    """The outputs of a mixer on ``num`` positions, the elements that it took, and its cost."""
    mechanism = Registry("mechanisms").load(name)
    config, shape = mechanism.Config(**settings), MixerShape(16, 2, direction, num_positions=num)
    torch.manual_seed(0)
    mixer = mechanism(config, shape)
    x_BND = torch.randn(2, 128, 16)[:, :num]
    mask_BN = torch.ones(2, num, dtype=torch.bool)
    mask_BN[1, num // 2 :] = False
    with Elements() as elements:
        outputs = [mixer(x_BND), mixer(x_BND, mask_BN=mask_BN)[mask_BN]]
    return outputs, elements, mechanism.cost(config, shape, num)


@pytest.mark.parametrize(
    ("name", "key", "settings", "direction"),
    [(*case, direction) for case in CASES for direction in sorted(Registry("mechanisms").load(case[0]).directions)],
)
def test_a_setting_far_wider_than_the_sequence_is_as_one_as_wide(name, key, settings, direction):
    found, elements, cost = passed(name, direction, settings | {key: WIDE})
    known, of_known, known_cost = passed(name, direction, settings | {key: NUM})
    assert all(map(torch.equal, found, known))
    assert (elements.largest, elements.total, cost) == (of_known.largest, of_known.total, known_cost)


@pytest.mark.parametrize("settings", [{}, {"memory": "mlp"}, {"form": "gated_attention"}, {"momentum": 0.0}])
def test_a_chunk_of_titans_that_the_sequence_does_not_fill_is_the_beginning_of_one_that_it_does(settings):
    """A chunk's length is in the rates, so that only another sequence can be compared: a causal one goes on."""
    found, elements, cost = passed("titans", "causal", settings | {"chunk": 128})
    known, of_known, _ = passed("titans", "causal", settings | {"chunk": 128}, num=128)
    torch.testing.assert_close(found[0], known[0][:, :NUM])
    wide, of_wide, wide_cost = passed("titans", "causal", settings | {"chunk": WIDE})
    assert (of_wide.largest, of_wide.total, wide_cost) == (elements.largest, elements.total, cost)
    assert elements.total < of_known.total / 2 and wide[0].isfinite().all()


def test_a_convolution_longer_than_the_sequence_reads_no_zeros():
    torch.manual_seed(0)
    wide, fitting = ShortConvolution(3, WIDE), ShortConvolution(3, NUM)
    with torch.no_grad():
        fitting.weight.copy_(wide.weight[..., -NUM:])
    x_BND = torch.randn(2, NUM, 3)
    with Elements() as elements:
        found = wide(x_BND)
    with Elements() as of_fitting:
        known = fitting(x_BND)
    assert torch.equal(found, known) and elements.total - of_fitting.total <= 2 * wide.weight.numel()
    found.sum().backward()
    assert wide.weight.grad is not None and wide.weight.grad.shape == wide.weight.shape
    assert not wide.weight.grad[..., :-NUM].any()
