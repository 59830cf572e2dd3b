"""Count a training step's FLOPs, bytes and live memory without computing it.

Every operation of a microbatch is traced on torch's meta device, with shapes but without numbers. A model of any size
then costs seconds and no memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from kernels.roofline import Device, Traffic

aten = torch.ops.aten
# operations that read as many bytes as they return, not the whole table
LOOKUPS = frozenset({aten.embedding, aten.index, aten.gather, aten.index_select})
# operations that only allocate memory
ALLOCATIONS = frozenset({aten.empty, aten.new_empty, aten.empty_like, aten.empty_strided, aten.new_empty_strided})


@dataclass(frozen=True)
class Traced:
    """The summary of a trace.

    Attributes:
        seconds: sum over operations of the least time on a device, by bytes or by matrix products, whichever takes
            longer.
        flops: FLOPs of matrix products and attention; a multiply-add counts as two.
        peak_bytes: maximum bytes of simultaneously live tensors.
    """

    seconds: float
    flops: int
    peak_bytes: int


class Tracer(TorchDispatchMode):
    """A dispatch mode that adds up operations on meta tensors.

    Other tensors are not counted. ``num_counted``: number of positions counted by the loss, as the length of
    `Tensor.nonzero`'s result: a meta tensor has no values.
    """

    def __init__(self, device: Device, precision: str, num_counted: int):
        super().__init__()
        self.device, self.precision, self.num_counted = device, precision, num_counted
        self.seconds, self.flops, self.live, self.peak = 0.0, 0, 0, 0
        self._storages: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and add its FLOPs, bytes and live memory."""
        kwargs = kwargs or {}
        if func is aten.nonzero.default and args[0].is_meta:
            found = torch.empty(self.num_counted, args[0].ndim, dtype=torch.int64, device="meta")
        else:
            found = func(*args, **kwargs)
        given = [tensor for tensor in tree_leaves((args, kwargs)) if _is_meta(tensor)]
        made = [tensor for tensor in tree_leaves(found) if _is_meta(tensor)]
        for tensor in made:
            self.count_storage(tensor)
        if made and not _costs_nothing(func, given, made):
            self._add(func, args, kwargs, found, given, made)
        return found

    def count_storage(self, tensor: Tensor) -> None:
        """Count a tensor's storage while any of its views lives, once for all views."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return
        self._storages[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._storages.pop(key)

    def _add(self, func: Any, args: Any, kwargs: Any, found: Any, given: list[Tensor], made: list[Tensor]) -> None:
        packet, written = func._overloadpacket, sum(map(_bytes, made))
        read = written if packet in LOOKUPS else sum(map(_bytes, given))
        flops = flop_registry[packet](*args, **kwargs, out_val=found) if packet in flop_registry else 0
        self.flops += flops
        self.seconds += self.device.seconds(Traffic(read, written, flops), self.precision)


class FusedAttention(TorchFunctionMode):
    """A mode that traces `scaled_dot_product_attention` as one fused operation.

    CUDA uses the memory-efficient kernel in float32; the meta device would decompose it into products and a softmax.
    The kernel needs four axes. With more, torch uses products on CUDA, too.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention and args[0].ndim == 4:
            return _efficient_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Return the result of `scaled_dot_product_attention` by the memory-efficient kernel's single operation."""
    shape = (*query.shape[:-1], key.shape[-2])
    bias = None if attn_mask is None else torch.zeros_like(attn_mask, dtype=query.dtype).expand(shape)
    return aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, dropout_p, is_causal, **options)[
        0
    ]


def trace(
    model: nn.Module, loss: Callable[[], Tensor], *, device: Device, precision: str, num_counted: int, times: int
) -> Traced:
    """Return the cost of forward and backward passes of one microbatch.

    Gradients accumulate as over a batch's microbatches.

    Args:
        model: the model on the meta device.
        loss: runs a forward pass and returns a scalar.
        device: the device to estimate for.
        precision: precision of the matrix products.
        num_counted: number of positions that count in the loss.
        times: number of forward and backward passes.

    Raises:
        NotImplementedError: an operation depends on values (raised by torch).
        RuntimeError: likewise.
    """
    tracer = Tracer(device, precision, num_counted)
    for parameter in model.parameters():
        tracer.count_storage(parameter)
    with tracer, FusedAttention():
        for _ in range(times):
            loss().backward()
    return Traced(tracer.seconds, tracer.flops, tracer.peak)


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _bytes(tensor: Tensor) -> int:
    """Return the bytes to read or write a tensor; expanded axes count once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _costs_nothing(func: Any, given: list[Tensor], made: list[Tensor]) -> bool:
    """Return whether an operation only makes a view or allocates memory."""
    if func._overloadpacket in ALLOCATIONS:
        return True
    there = {tensor.untyped_storage()._cdata for tensor in given}
    return not func._schema.is_mutable and all(tensor.untyped_storage()._cdata in there for tensor in made)
