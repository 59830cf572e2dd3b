"""Write a model's tensors in a format of few bits, and read them back as float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from stability.linears.bitnet import BitLinear
from stability.models.rounding import Rounded, find_matrices, find_routers, round_matrix

Format = Literal["fp32", "bf16", "int8", "ternary"]
SCALE = ".scale"  # ends the name of a tensor's scales
PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Choices(NamedTuple):
    """How tensors are stored.

    Attributes:
        format: of the linear maps of mixers and feed-forward networks.
        rest: "fp32" or "bf16", of all other tensors of two or more axes; vectors and routers of experts stay float32.
        head: "int8" stores the tables of the embedding and the head as int8, too.
        pack: of ternary weights.
    """

    format: Format
    rest: Literal["fp32", "bf16"] = "bf16"
    head: Literal["rest", "int8"] = "rest"
    pack: Pack = "2bit"


def encode(model: nn.Module, choices: Choices) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return the stored tensors by name, and by parameter its kind and shape.

    Kinds: "float32", "bfloat16" or another dtype as it is; "int8", codes with one scale a row under ``NAME.scale``;
    "2bit" and "base3", packed signs with one scale.
    """
    matrices = find_matrices(model)
    routers = {f"{name}.weight" for name in find_routers(model)}
    tables = _find_tables(model) if choices.head == "int8" else frozenset()
    stored: dict[str, Tensor] = {}
    layout: dict[str, dict[str, Any]] = {}
    for name, tensor in model.state_dict().items():
        owner = matrices.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if name in routers:  # rounded logits would choose other experts
            kind, parts = _name_dtype(tensor), {"": tensor.detach().cpu()}
        else:
            kind, parts = _encode_one(tensor.detach().cpu(), owner, name in tables, choices)
        stored |= {name + suffix: part.contiguous() for suffix, part in parts.items()}
        layout[name] = {"kind": kind, "shape": list(tensor.shape)}
    return stored, layout


def _encode_one(
    tensor: Tensor, owner: nn.Linear | None, is_table: bool, choices: Choices
) -> tuple[str, dict[str, Tensor]]:
    """Return a tensor's kind, and its parts by the suffix of their names."""
    if owner is not None and choices.format == "ternary":
        scale = BitLinear.scale_of(tensor)
        signs = (tensor / scale).round().clamp(-1, 1).to(torch.int8)  # signs * scale equals `BitLinear.ternary`
        return choices.pack, {"": pack_signs(signs, choices.pack), SCALE: scale}
    if choices.format == "int8" and (owner is not None or (is_table and tensor.ndim == 2)):
        rounded = round_matrix(tensor, 8)
        return "int8", {"": rounded.codes_OI, SCALE: rounded.scales_OG.squeeze(1)}
    if not tensor.is_floating_point() or tensor.ndim < 2:
        return _name_dtype(tensor), {"": tensor}
    part = tensor.to(PLAIN[choices.format if choices.format in PLAIN else choices.rest])
    return _name_dtype(part), {"": part}


def decode(stored: Mapping[str, Tensor], layout: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return a state dict in float32 from stored tensors.

    Raises:
        ValueError: a tensor is missing, has another shape, or is of an unknown kind.
    """
    return {
        name: _decode_one(stored, name, entry["kind"], tuple(entry["shape"])).reshape(entry["shape"])
        for name, entry in layout.items()
    }


def _decode_one(stored: Mapping[str, Tensor], name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
    try:
        tensor = stored[name]
        if kind == "int8":
            return Rounded(tensor, stored[name + SCALE][:, None], shape[1]).restore()
        if kind in DIGITS:
            return unpack_signs(tensor, shape, cast(Pack, kind)).float() * stored[name + SCALE]
    except KeyError as error:
        raise ValueError(f"tensor {error.args[0]} is missing") from None
    if kind != _name_dtype(tensor):
        raise ValueError(f"tensor {name} has the kind {kind} and the dtype {_name_dtype(tensor)}")
    return tensor.float() if tensor.is_floating_point() else tensor


def freeze_ternary(model: nn.Module) -> None:
    """Let a model's `BitLinear` maps use their weights as they are: signs times γ already."""
    for module in model.modules():
        if isinstance(module, BitLinear):
            module.is_ternary = True


def _find_tables(model: nn.Module) -> frozenset[str]:
    """Return the names of the weights of embeddings and of the head."""
    return frozenset(
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) or (name == "head" and isinstance(module, nn.Linear))
    )


def _name_dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


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
