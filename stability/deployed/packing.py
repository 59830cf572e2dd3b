"""Pack ternary matrices: two bits a weight, or five weights a byte in base 3."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Pack = Literal["2bit", "base3"]
# base and digits of a byte: Σ_k c_k·base^k, c = w + 1
DIGITS: dict[str, tuple[int, int]] = {"2bit": (4, 4), "base3": (3, 5)}  # 4⁴ = 256; 3⁵ = 243: 1.6 bits a weight


def pack_signs(signs: Tensor, pack: Pack) -> Tensor:
    """Return the bytes (uint8, 1-D) of entries −1, 0 and 1, in row order; the last byte is filled up with zeros.

    Args:
        signs: any shape.
        pack: "2bit": 4 weights a byte; "base3": 5.
    """
    base, digits = DIGITS[pack]
    codes = signs.flatten().to(torch.int16) + 1
    assert bool(((codes >= 0) & (codes <= 2)).all()), "entries other than −1, 0 and 1"
    padded = torch.nn.functional.pad(codes, (0, -len(codes) % digits))
    return (padded.unflatten(0, (-1, digits)) * _powers(base, digits)).sum(1).to(torch.uint8)


def unpack_signs(packed: Tensor, shape: tuple[int, ...], pack: Pack) -> Tensor:
    """Return the entries −1, 0 and 1 (int8) of `pack_signs`.

    Args:
        packed: the bytes.
        shape: shape of the entries.
        pack: as they were packed.

    Raises:
        ValueError: there are too few or too many bytes, or a code is none of the three.
    """
    base, digits = DIGITS[pack]
    number = torch.Size(shape).numel()
    if packed.ndim != 1 or packed.dtype != torch.uint8 or len(packed) != -(-number // digits):
        raise ValueError(f"{tuple(packed.shape)} packed bytes do not hold {number} weights")
    codes = (packed.to(torch.int16)[:, None] // _powers(base, digits) % base).flatten()[:number]
    if bool((codes > 2).any()):
        raise ValueError("a packed weight has the code 3, which is none of −1, 0 and 1")
    return (codes - 1).to(torch.int8).reshape(shape)


def _powers(base: int, digits: int) -> Tensor:
    return torch.tensor([base**place for place in range(digits)], dtype=torch.int16)
