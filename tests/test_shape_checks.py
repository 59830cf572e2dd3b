"""Functions with axes in their annotations and those without are checked, whichever of the two checks they get."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from stability.mechanisms import build
from tests.shape_checks import names_shapes


@pytest.mark.parametrize(
    "hint",
    [
        Float[Tensor, "N"],
        Float[Tensor, "N"] | None,
        tuple[int, Float[Tensor, "N N"]],
        Callable[[Float[Tensor, "N"]], int],
        dict[str, list[Float[Tensor, "N"]]],
    ],
)
def test_axes_are_found_anywhere_in_an_annotation(hint):
    assert names_shapes(hint) and not any(map(names_shapes, (int, Tensor, Tensor | None, Callable[..., Tensor])))


def test_a_mechanism_refuses_shapes_that_do_not_fit_and_what_is_no_tensor():
    layer = build("sa", width=8, heads=2)
    with pytest.raises(TypeCheckError, match="x_BND"):
        layer(torch.zeros(3, 8))
    with pytest.raises(BeartypeCallHintViolation, match="qkv_BND"):  # which names no axis
        layer.split([torch.zeros(1, 3, 24)])
