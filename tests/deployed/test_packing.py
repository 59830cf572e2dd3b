"""Ternary weights in two bits or five to a byte: every byte by hand, every shape back bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from stability.deployed.formats import DIGITS, pack_signs, unpack_signs


@pytest.mark.parametrize(("pack", "base", "digits"), [("2bit", 4, 4), ("base3", 3, 5)])
def test_each_byte_is_the_sum_of_its_digits(pack, base, digits):
    every = list(itertools.product((-1, 0, 1), repeat=digits))
    packed = pack_signs(torch.tensor(every), pack)
    assert packed.tolist() == [sum((sign + 1) * base**place for place, sign in enumerate(row)) for row in every]
    assert len(set(packed.tolist())) == 3**digits


@pytest.mark.parametrize("pack", DIGITS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (8, 64), (5, 5), (0, 4)])
def test_the_round_trip_is_exact(pack, shape):
    signs = torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(0)).to(torch.int8)
    packed = pack_signs(signs, pack)
    assert packed.dtype == torch.uint8 and len(packed) == -(-signs.numel() // DIGITS[pack][1])
    assert torch.equal(unpack_signs(packed, shape, pack), signs)


def test_damaged_bytes_are_refused():
    with pytest.raises(ValueError, match="do not hold 9 weights"):
        unpack_signs(torch.zeros(2, dtype=torch.uint8), (3, 3), "2bit")
    with pytest.raises(ValueError, match="code 3"):
        unpack_signs(torch.tensor([255], dtype=torch.uint8), (2, 2), "2bit")
