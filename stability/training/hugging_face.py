"""Hugging Face GPT-2 weights as weights of this project's transformer: the same function under our names.

Input: ``config.json`` and ``model.safetensors`` of a folder written by ``save_pretrained``; transformers is not
required. GPT-2 is sa, learned positions, LayerNorm before each branch, an mlp and a tied head (Radford et al. 2019). If
our model has a separate head, it starts as the embedding matrix without bias: the same function until the first step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stability.config.run import RunSpec
from stability.runs.directory import read_json

# GPT-2's name after h.<layer>. → our name after blocks.<layer>.
OF_A_BLOCK = {
    "ln_1": "mixer_norm",
    "attn.c_attn": "mixer.qkv",
    "attn.c_proj": "mixer.out",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn.hidden",
    "mlp.c_proj": "ffn.out",
}
# modules with a transposed matrix: (in, out); a Linear's is (out, in)
CONV1D = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
# the config's activation names → ours, if they differ
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
MASKS = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # buffers in older files
CONFIG, MODEL = "config.json", "model.safetensors"


def read_config(place: str) -> dict[str, Any]:
    """Return the ``config.json`` of a folder.

    Raises:
        ValueError: the folder holds no GPT-2; one line.
    """
    folder, word = Path(place).expanduser(), f"init=hf:{place}"
    for name in (CONFIG, MODEL):
        if not (folder / name).is_file():
            raise ValueError(
                f"{word}: no {name} there; give a folder that save_pretrained wrote, in one safetensors file"
            )
    config = read_json(folder / CONFIG)
    if config.get("model_type") != "gpt2":
        raise ValueError(f"{word} is a model of the type {config.get('model_type')}; only gpt2 is supported")
    for name in ("n_head", "layer_norm_epsilon"):
        value = {"layer_norm_epsilon": 1e-5, **config}.get(name)
        if not isinstance(value, int | float):
            raise ValueError(f"{word}: its {CONFIG} says {name}={value}, which is no number")
    scaled_otherwise = config.get("scale_attn_by_inverse_layer_idx") or not config.get("scale_attn_weights", True)
    if scaled_otherwise or config.get("add_cross_attention"):
        raise ValueError(f"{word}: its attention is scaled otherwise than GPT-2's, or reads a second sequence")
    return config


def require(config: Mapping[str, Any], run: RunSpec, word: str) -> None:
    """Check the settings of GPT-2 that no tensor's shape implies.

    Args:
        config: GPT-2's ``config.json``.
        run: the run to start from its weights.
        word: the command-line word, for the message.

    Raises:
        ValueError: a setting differs; two lines, with the words to add.
    """
    activation = str(config.get("activation_function", "gelu_new"))
    wanted = {
        "objective": "ar",
        "mechanism": "sa",
        "position": "learned",
        "norm": "layernorm",
        "ffn": "mlp",
        "residual": "identity",
        "linear": "dense",
        "cross": "none",
        "mechanism.sa.mask_diagonal": "false",
        "mechanism.sa.kv_heads": "null",
        "norm.layernorm.epsilon": f"{config.get('layer_norm_epsilon', 1e-5):g}",
        "ffn.activation": ACTIVATIONS.get(activation, activation),
        "model.heads": str(config["n_head"]),
        "model.loops": "1",
    }
    given = _list_words(run)
    differing = [f"{key}={value}" for key, value in wanted.items() if given.get(key, value) != value]
    if differing:
        raise ValueError(
            f"{word} is a GPT-2, and this run would compute something else with its weights;\n"
            f"add {' '.join(differing)} (or init.partial=true, which compares only names and shapes)"
        )


def _list_words(run: RunSpec) -> dict[str, str]:
    """Return a run's settings for these keys, as command-line words."""
    axes = ("objective", "mechanism", "position", "norm", "ffn", "residual", "linear", "cross")
    parts = {axis: getattr(run, axis) for axis in axes}
    told = {axis: "none" if part is None else part.name for axis, part in parts.items()}
    settings = {
        "mechanism.sa": parts["mechanism"].settings,
        "norm.layernorm": parts["norm"].settings,
        "ffn": parts["ffn"].settings,
        "model": run.model,
    }
    for prefix, each in settings.items():
        for key, value in each.model_dump(mode="json").items():
            told[f"{prefix}.{key}"] = str(value).lower() if isinstance(value, bool) else _number(value)
    if told.get("mechanism.sa.kv_heads") in ("None", told["model.heads"]):
        told["mechanism.sa.kv_heads"] = "null"  # both mean one key-value pair per head
    return told


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def tensors(place: str, own: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return a GPT-2's float32 tensors under our names.

    Position rows beyond our model's own are dropped.

    Args:
        place: folder of the GPT-2.
        own: tensor shapes of our model, by name.

    Raises:
        ValueError: the file is damaged or holds a foreign tensor; one line.
    """
    file = Path(place).expanduser() / MODEL
    try:
        given = {name.removeprefix("transformer."): tensor.float() for name, tensor in load_file(file).items()}
    except SafetensorError as error:
        raise ValueError(f"init=hf:{place}: {file} cannot be read ({error})") from None
    if "wte.weight" not in given:
        raise ValueError(f"init=hf:{place}: its {MODEL} holds no wte.weight, the tokens' table of a GPT-2")
    try:
        found = dict(_rename(given))
    except LookupError as error:
        raise ValueError(f"init=hf:{place}: {error.args[0]} is no tensor of a GPT-2") from None
    if (rows := own.get("embedding.positions_ND")) is not None and "embedding.positions_ND" in found:
        found["embedding.positions_ND"] = found["embedding.positions_ND"][: rows[0]].contiguous()
    if "head.weight" in own and "head.weight" not in found:
        found["head.weight"] = found["embedding.embedding.weight"].clone()
    if "head.bias" in own:
        found["head.bias"] = torch.zeros(len(found["embedding.embedding.weight"]))
    return found


def _rename(given: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (our name, tensor), matrices as (out, in), without masks and a tied head.

    ``LookupError`` names a foreign tensor.
    """
    whole = {"wte.weight": "embedding.embedding.weight", "wpe.weight": "embedding.positions_ND"}
    whole |= {"ln_f.weight": "final_norm.weight", "ln_f.bias": "final_norm.bias"}
    is_tied = "lm_head.weight" not in given or torch.equal(given["lm_head.weight"], given["wte.weight"])
    for name, tensor in given.items():
        if name in whole:
            yield whole[name], tensor
        elif name == "lm_head.weight":
            if not is_tied:
                yield "head.weight", tensor
        elif not MASKS.fullmatch(name):
            match = re.fullmatch(r"h\.(\d+)\.(.+)\.(weight|bias)", name)
            if match is None or match[2] not in OF_A_BLOCK:
                raise LookupError(name)
            is_transposed = match[2] in CONV1D and match[3] == "weight"
            yield (
                f"blocks.{match[1]}.{OF_A_BLOCK[match[2]]}.{match[3]}",
                tensor.T.contiguous() if is_transposed else tensor,
            )
