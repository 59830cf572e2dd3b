"""Models on the meta device: the shapes of the real ones, without values and without sympy."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn

from stability.models.init import without_memory


def parts():
    return nn.ModuleList([nn.Embedding(5, 3), nn.Linear(3, 2), nn.LayerNorm(2)])


def test_modules_without_memory_have_the_shapes_and_types_of_real_ones():
    with without_memory():
        found = parts()
        drawn = nn.init.normal_(torch.empty(4), std=2.0)
    assert all(parameter.is_meta for parameter in found.parameters()) and drawn.is_meta
    for (name, one), (other_name, other) in zip(found.named_parameters(), parts().named_parameters(), strict=True):
        assert (name, one.shape, one.dtype, one.requires_grad) == (
            other_name, other.shape, other.dtype, other.requires_grad
        )  # fmt: skip


def test_afterwards_tensors_are_drawn_again():
    torch.manual_seed(0)
    expected = nn.Embedding(5, 3).weight
    with without_memory():
        parts()
    torch.manual_seed(0)
    assert torch.equal(nn.Embedding(5, 3).weight, expected)


def test_an_embedding_without_memory_does_not_import_sympy():
    code = (
        "import sys, torch\nfrom stability.models.init import without_memory\n"
        "with without_memory():\n    torch.nn.Embedding(5, 3)\n"
        "assert 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
