from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stability.mechanisms import build
from tests.mechanisms.checks import WIDTH, build_seeded, inputs
from tests.mechanisms.oracles import softmax_attention


def module(direction: str = "bidirectional", window: int = 2) -> torch.nn.Module:
    return build_seeded(lambda: build("sw", width=WIDTH, heads=2, direction=direction, window=window)).double()


def band(direction: str, window: int, num_positions: int) -> torch.Tensor:
    ahead = torch.arange(num_positions) - torch.arange(num_positions)[:, None]
    return (ahead >= -window) & (ahead <= (0 if direction == "causal" else window))


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [
            item.numel()
            for item in (result if isinstance(result, tuple | list) else (result,))
            if isinstance(item, torch.Tensor)
        ]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
@pytest.mark.parametrize("window", [1, 2, 5, 20])
@pytest.mark.parametrize("num_positions", [1, 5, 16, 37])
def test_equals_dense_softmax_over_the_band(direction, window, num_positions):
    x_BND, layer = inputs(num_positions=num_positions), module(direction, window)
    visible_BNN = band(direction, window, num_positions).expand(len(x_BND), -1, -1)
    torch.testing.assert_close(layer(x_BND), softmax_attention(layer, x_BND, visible_BNN), rtol=0, atol=1e-10)


@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
def test_equals_dense_softmax_over_the_bands_valid_keys(direction):
    x_BND, layer = inputs(num_positions=21), module(direction, 3)
    mask_BN = torch.rand(x_BND.shape[:2], generator=torch.Generator().manual_seed(4)) > 0.4
    visible_BNN = band(direction, 3, 21) & mask_BN[:, None]
    expected = softmax_attention(layer, x_BND, visible_BNN)
    torch.testing.assert_close(layer(x_BND, mask_BN=mask_BN)[mask_BN], expected[mask_BN], rtol=0, atol=1e-10)


@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
def test_no_query_is_left_without_a_key(direction):
    mask_BN = torch.zeros(2, 21, dtype=torch.bool)
    mask_BN[0, 3:5] = True
    assert module(direction)._visible(21, 16, mask_BN, mask_BN.device).any(-1).all()


def test_window_over_the_whole_sequence_is_softmax_attention():
    x_BND, layer = inputs(), module(window=50)
    whole = build("sa", width=WIDTH, heads=2).double()
    whole.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x_BND), whole(x_BND), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["sw", "sc", "longformer", "bigbird"])
def test_no_tensor_grows_with_the_square_of_the_length(name):
    largest = []
    layer = build_seeded(lambda: build(name, width=WIDTH, heads=2)).double()
    for num_positions in (512, 1024):
        x_BND = inputs(num_positions=num_positions).requires_grad_()
        with LargestTensor() as mode:
            layer(x_BND, mask_BN=torch.ones(x_BND.shape[:2], dtype=torch.bool)).sum().backward()
        largest.append(mode.elements)
    assert largest[1] <= 2.1 * largest[0]
    assert largest[1] < 1024**2


def test_dense_softmax_attention_does_grow_with_the_square_of_the_length():
    """The probe above sees a mask of N × N where there is one."""
    layer = build_seeded(lambda: build("sa", width=WIDTH, heads=2, direction="causal")).double()
    with LargestTensor() as mode:
        layer(inputs(num_positions=512), mask_BN=torch.ones(3, 512, dtype=torch.bool))
    assert mode.elements >= 512**2


def test_window_must_be_positive():
    with pytest.raises(ValueError, match="mechanism.sw.window=0: input should be greater than or equal to 1"):
        build("sw", width=16, heads=2, window=0)
