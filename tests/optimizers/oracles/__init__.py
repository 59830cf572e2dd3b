"""The steps of each optimizer by its paper's formula, in code that shares nothing with the optimizers'."""

from __future__ import annotations

from tests.optimizers.oracles import by_entry, by_tensor, by_tensor_a, special

# of each entry by itself, in plain Python numbers
LOOPS = by_entry.LOOPS | special.LOOPS
# of a tensor, in float64
TENSOR_LOOPS = by_tensor.LOOPS | by_tensor_a.LOOPS | special.TENSOR_LOOPS
# of all tensors of a model together, in float64
MODEL_LOOPS = special.MODEL_LOOPS
