"""Round weight matrices to few bits: symmetric, to nearest, one scale a row or a group of its inputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

BRANCHES = ("mixer", "cross", "ffn")


class Rounded(NamedTuple):
    """A matrix in few bits.

    Attributes:
        codes_OI: int8, from −(2^(bits−1) − 1) to 2^(bits−1) − 1.
        scales_OG: float32, one step for each row (G = 1) or each group of its inputs.
        group: inputs in a group; the last group may be shorter.
    """

    codes_OI: Tensor
    scales_OG: Tensor
    group: int

    def restore(self) -> Tensor:
        """Return the matrix in float32, codes times scales."""
        return self.codes_OI.float() * _spread(self.scales_OG, self.group, self.codes_OI.shape[1])


def round_matrix(weight_OI: Tensor, bits: int, group: int | None = None) -> Rounded:
    """Return a matrix rounded to the nearest multiple of max |w| / (2^(bits−1) − 1).

    Halves round to even. A row or group of zeros has the scale 0.

    Args:
        weight_OI: the matrix, one row an output.
        bits: from 2 (codes −1, 0 and 1) to 8.
        group: inputs with one scale; None: the whole row.
    """
    assert 2 <= bits <= 8, bits
    num_inputs = weight_OI.shape[1]
    size, most = group or num_inputs, 2 ** (bits - 1) - 1
    weight = weight_OI.detach().float()
    parts = [part.abs().amax(1) for part in weight.split(size, 1)]
    scales_OG = torch.stack(parts, 1) / most
    steps_OI = _spread(torch.where(scales_OG > 0, scales_OG, 1.0), size, num_inputs)
    return Rounded((weight / steps_OI).round().clamp(-most, most).to(torch.int8), scales_OG, size)


def _spread(scales_OG: Tensor, group: int, num_inputs: int) -> Tensor:
    """Return each input's scale, (O, I)."""
    return scales_OG.repeat_interleave(group, 1)[:, :num_inputs]


def find_matrices(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear maps of mixers, cross mechanisms and feed-forward networks by name, without `find_routers`."""
    return {name: each for name, each in _find_maps(model).items() if not getattr(each, "is_table", False)}


def find_routers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the routers of experts by name; their rounded logits would change the choice."""
    return {name: each for name, each in _find_maps(model).items() if getattr(each, "is_table", False)}


def _find_maps(model: nn.Module) -> dict[str, nn.Linear]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and is_within_branch(name)
    }


def is_within_branch(name: str) -> bool:
    """Return whether a module or parameter belongs to a branch, e.g. ``blocks.0.mixer.qkv``."""
    parts = name.split(".")
    return parts[0] == "blocks" and len(parts) > 2 and parts[2] in BRANCHES
