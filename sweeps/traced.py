"""Count what a training step does without doing it: every operation of a microbatch is traced on torch's meta device,
which keeps shapes and no numbers, so that a model of any size costs seconds and no memory."""

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
# what reads as much of a table as it gives, not the whole of it
LOOKUPS = frozenset({aten.embedding, aten.index, aten.gather, aten.index_select})
# what only sets memory aside
ALLOCATIONS = frozenset({aten.empty, aten.new_empty, aten.empty_like, aten.empty_strided, aten.new_empty_strided})


@dataclass(frozen=True)
class Traced:
    """A summary of a trace: ``seconds``, the sum of each operation's least time on a device (its bytes or its matrix
    products, whichever take longer); ``flops`` of matrix products and attention, a multiply-add being two;
    ``peak_bytes``, the most that the tensors alive at a time took."""

    seconds: float
    flops: int
    peak_bytes: int


class Tracer(TorchDispatchMode):
    """A mode in which operations on meta tensors are added up; those on others pass uncounted.

    ``num_counted``: how many positions count in the loss, which no meta tensor knows: what `Tensor.nonzero` gives.
    """

    def __init__(self, device: Device, precision: str, num_counted: int):
        super().__init__()
        self.device, self.precision, self.num_counted = device, precision, num_counted
        self.seconds, self.flops, self.live, self.peak = 0.0, 0, 0, 0
        self._storages: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass an operation on, and count what it took and what it left."""
        kwargs = kwargs or {}
        if func is aten.nonzero.default and args[0].is_meta:
            found = torch.empty(self.num_counted, args[0].ndim, dtype=torch.int64, device="meta")
        else:
            found = func(*args, **kwargs)
        given = [tensor for tensor in tree_leaves((args, kwargs)) if _is_meta(tensor)]
        made = [tensor for tensor in tree_leaves(found) if _is_meta(tensor)]
        for tensor in made:
            self.holds(tensor)
        if made and not _costs_nothing(func, given, made):
            self._add(func, args, kwargs, found, given, made)
        return found

    def holds(self, tensor: Tensor) -> None:
        """Count a tensor's memory, once however many views it has, for as long as any of them lives."""
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
    """A mode in which `scaled_dot_product_attention` is the one operation that it is in float32 on CUDA (the
    memory-efficient kernel), and not the products and the softmax that it falls into on the meta device. That kernel
    takes four axes; of more torch falls into products on CUDA, too."""

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
    """Return what the arguments of `scaled_dot_product_attention` give by the one operation of the memory-efficient
    kernel."""
    shape = (*query.shape[:-1], key.shape[-2])
    bias = None if attn_mask is None else torch.zeros_like(attn_mask, dtype=query.dtype).expand(shape)
    return aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, dropout_p, is_causal, **options)[
        0
    ]


def trace(
    model: nn.Module, loss: Callable[[], Tensor], *, device: Device, precision: str, num_counted: int, times: int
) -> Traced:
    """Return what ``times`` forward and backward passes of one microbatch take, of ``model`` on the meta device.
    ``loss``: a forward pass, to a scalar. Gradients stay and are added up, as those of a batch's microbatches are.

    Errors: those of torch (``NotImplementedError``, ``RuntimeError``) where an operation needs numbers.
    """
    tracer = Tracer(device, precision, num_counted)
    for parameter in model.parameters():
        tracer.holds(parameter)
    with tracer, FusedAttention():
        for _ in range(times):
            loss().backward()
    return Traced(tracer.seconds, tracer.flops, tracer.peak)


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that reading (or writing) a tensor takes: what is expanded is not there as often as it says."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _costs_nothing(func: Any, given: list[Tensor], made: list[Tensor]) -> bool:
    """Return whether an operation only looks at memory in another way, or sets some aside."""
    if func._overloadpacket in ALLOCATIONS or func.is_view:
        return True
    there = {tensor.untyped_storage()._cdata for tensor in given}
    return not func._schema.is_mutable and all(tensor.untyped_storage()._cdata in there for tensor in made)
