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
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from kernels.roofline import Device, Traffic
from stability.config.training import Precision
from stability.models.passes import autocast_dtype, computing_in

aten = torch.ops.aten
# operations that read as many bytes as they return, not the whole table
LOOKUPS = frozenset({aten.embedding, aten.index, aten.gather, aten.index_select})
# operations that only allocate memory
ALLOCATIONS = frozenset({aten.empty, aten.new_empty, aten.empty_like, aten.empty_strided, aten.new_empty_strided})
# CUDA's autocast (ATen/autocast_mode.h and Python's spellings), function names by dtype: narrow, autocast's; wide,
# float32 by a cast of the arguments; summed, float32 by their argument dtype; widest, that of their widest argument
AUTOCAST_LISTS = {
    "narrow": """_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
    convolution prelu addmm addmv addr matmul rmatmul linalg_matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
    chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention""",
    "wide": """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rdiv rsqrt sinh tan pow rpow square
    softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity
    poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d cross_entropy hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp interpolate upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa""",
    "summed": """prod softmax softmin log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm linalg_norm norm
    sum""",
    "widest": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
}
POLICIES = {name: policy for policy, names in AUTOCAST_LISTS.items() for name in names.split()}


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
        # under autocast some products remain in float32
        is_wide = self.precision == "bf16" and all(tensor.dtype != torch.bfloat16 for tensor in given)
        self.seconds += self.device.seconds(Traffic(read, written, flops), "float32" if is_wide else self.precision)


class FusedAttention(TorchFunctionMode):
    """A mode that traces `scaled_dot_product_attention` as one fused operation.

    CUDA uses the memory-efficient kernel in float32; the meta device would decompose it into products and a softmax.
    The kernel needs four axes. With more, torch uses products on CUDA, too.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention and args[0].ndim == 4:
            return _efficient_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class EmulatedAutocast(TorchFunctionMode):
    """A mode that casts arguments of meta tensors like CUDA's autocast, within `computing_in`."""

    def __init__(self) -> None:
        super().__init__()
        self._casts: dict[Tensor, Tensor] | None = None  # of weights during a forward pass, as torch caches them

    def run(self, loss: Callable[[], Tensor], precision: Precision) -> Tensor:
        """Return the loss of a forward pass in a precision; each weight is cast at most once."""
        self._casts = {}
        try:
            with computing_in(precision, "meta"):
                return loss()
        finally:
            self._casts = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, narrow, name = kwargs or {}, autocast_dtype("meta"), getattr(func, "__name__", "")
        if narrow is None:
            return func(*args, **kwargs)
        policy = POLICIES.get(name.strip("_") if name.startswith("__") else name)  # __matmul__
        if func is nn.functional.normalize:  # torch's own code would run without this mode
            with self:
                return _normalize(*args, **kwargs)
        if policy == "summed" and any(map(_is_cast, args[:1])) and not _names_dtype(args, kwargs):
            kwargs = {**kwargs, "dtype": torch.float32}
        if policy is None or policy == "summed":
            return func(*args, **kwargs)
        is_wide = policy == "wide" or policy == "widest" and any(map(_is_float32, tree_leaves((args, kwargs))))
        dtype = torch.float32 if is_wide else narrow
        args, kwargs = tree_map_only(Tensor, lambda tensor: self._cast(tensor, dtype), (args, kwargs))
        return func(*args, **kwargs)

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if not _is_cast(tensor) or tensor.dtype == dtype:
            return tensor
        if self._casts is None or not (tensor.is_leaf and tensor.requires_grad) or dtype == torch.float32:
            return tensor.to(dtype)
        if tensor not in self._casts:
            self._casts[tensor] = tensor.to(dtype)
        return self._casts[tensor]


def _is_cast(value: Any) -> bool:
    """Return whether autocast may cast a value."""
    return _is_meta(value) and value.is_floating_point() and value.dtype != torch.float64


def _is_float32(value: Any) -> bool:
    return _is_cast(value) and value.dtype == torch.float32


def _names_dtype(args: Any, kwargs: Any) -> bool:
    return any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))


def _normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Tensor:
    """Return `torch.nn.functional.normalize` of a tensor."""
    return input / input.norm(p, dim, keepdim=True).clamp_min(eps).expand_as(input)


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
    model: nn.Module, loss: Callable[[], Tensor], *, device: Device, precision: Precision, num_counted: int, times: int
) -> Traced:
    """Return the cost of forward and backward passes of one microbatch.

    Gradients accumulate as over a batch's microbatches.

    Args:
        model: the model on the meta device.
        loss: runs a forward pass and returns a scalar.
        device: the device to estimate for.
        precision: precision of the matrix products; bf16 by an emulation of CUDA's autocast.
        num_counted: number of positions that count in the loss.
        times: number of forward and backward passes.

    Raises:
        NotImplementedError: an operation depends on values (raised by torch).
        RuntimeError: likewise.
    """
    tracer = Tracer(device, precision, num_counted)
    for parameter in model.parameters():
        tracer.count_storage(parameter)
    with tracer, FusedAttention(), EmulatedAutocast() as autocast:
        for _ in range(times):
            _run_backward(autocast.run(loss, precision))
    return Traced(tracer.seconds, tracer.flops, tracer.peak)


def _run_backward(total: Tensor) -> None:
    """Run the backward pass of a scalar within the active modes; `Tensor.backward` would recompute without them."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (total,), (torch.ones_like(total),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


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
