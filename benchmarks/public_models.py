"""Compare public architectures' curvature with float64: ``python -m benchmarks.public_models [NAME …]``.

Each is built by transformers from a tiny config with random weights. u is −g/(|g| + ε) with the loss's own gradient g,
like Adam's first step. The error is |uᵀHu in float32 by ``method="auto"`` − uᵀHu in float64 by double backward| / |the
latter|. Mixtures of experts compute their experts one by one (torch's grouped product has no float64). Prints one line
for each architecture, then the table in docs/curvature.md.
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks._machine import machine
from benchmarks.coverage import ENDS, GATED, HUGGING_FACE, SIZES, VOCABULARY
from stability.curvature import directional

Tensors = dict[str, Tensor]
EPSILON = 1e-3  # u's ε, relative to the root mean square of a tensor's gradient
MOE = {**GATED, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERTS = {**MOE, "num_experts": 4, "n_routed_experts": 4, "shared_expert_intermediate_size": 24}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
RECURRENT = {**GATED, "state_size": 4, "mamba_d_state": 4, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}
ENCODER = {**SIZES, "intermediate_size": 48, "pad_token_id": 0}
BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 32}
BART |= {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1, "forced_eos_token_id": None}
IMAGE = {"image_size": 32, "num_channels": 3, "num_labels": 5}
PATCHES = {**SIZES, "intermediate_size": 48, "patch_size": 8, **IMAGE}
PYRAMID = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 4, **IMAGE}
STAGES = {**IMAGE, "num_stages": 4, "depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16]}
CONVOLUTIONS = {**STAGES, "embedding_size": 8}

# class with the loss -> model_type -> sizes
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "CausalLM": {
        **HUGGING_FACE,
        "mixtral": MOE,
        **dict.fromkeys(("nemotron", "cohere2", "glm", "persimmon"), GATED),
        **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "phimoe"), EXPERTS),
        "deepseek_v3": {**EXPERTS, **LATENT, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "rotary_dim": 4},
        "mamba2": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 4,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
        },
        "falcon_mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        "bamba": {**RECURRENT, "attn_layer_indices": [1]},
        "recurrent_gemma": {**GATED, "lru_width": 32, "attention_window_size": 8},
    },
    "MaskedLM": {
        **dict.fromkeys(("bert", "roberta", "electra", "mpnet", "convbert", "roformer", "fnet"), ENCODER),
        "albert": {**ENCODER, "embedding_size": 16},
        "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 32},
        "esm": {**ENCODER, "mask_token_id": 4},
        "modernbert": {**ENCODER, "cls_token_id": 1, "sep_token_id": 2},
        "deberta-v2": {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        "big_bird": {**ENCODER, "attention_type": "original_full"},
    },
    "Seq2SeqLM": {
        "t5": {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 1,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
        },
        **dict.fromkeys(("bart", "marian", "pegasus", "mbart"), BART),
    },
    "SpeechSeq2Seq": {"whisper": {**BART, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16}},
    "ImageClassification": {
        **dict.fromkeys(("vit", "beit", "dinov2"), PATCHES),
        "deit": {**PATCHES, "architectures": ["DeiTForImageClassification"]},
        **dict.fromkeys(("swin", "swinv2"), PYRAMID),
        **dict.fromkeys(("convnext", "convnextv2"), STAGES),
        **dict.fromkeys(("resnet", "regnet"), CONVOLUTIONS),
        "mobilenet_v2": {**IMAGE, "depth_multiplier": 0.35},
        "segformer": {**STAGES, "num_encoder_blocks": 4, "num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 8},
        "poolformer": {**STAGES, "num_encoder_blocks": 4},
        "pvt": {**STAGES, "num_encoder_blocks": 4, "num_attention_heads": [1, 1, 2, 2]},
    },
}


def build(kind: str, name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a tiny model in evaluation mode, and its loss's inputs."""
    import transformers

    torch.manual_seed(0)
    sizes = MODELS[kind][name]
    words = ENDS if kind == "CausalLM" else {"vocab_size": VOCABULARY}
    config = transformers.AutoConfig.for_model(name, **{**words, **sizes})
    if "num_experts_per_tok" in sizes:
        config._experts_implementation = "eager"
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config).eval()
    tokens = torch.randint(2, VOCABULARY, (2, 12))
    inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
    if kind == "ImageClassification":
        inputs = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 3])}
    elif kind == "SpeechSeq2Seq":
        inputs = {"input_features": torch.randn(2, 8, 24), "labels": tokens}
    elif kind == "CausalLM":
        inputs["use_cache"] = False
    return model, inputs


def measure(kind: str, name: str) -> tuple[str, float]:
    """Return auto's method in float32, and its error."""
    model, inputs = build(kind, name)
    wide = copy.deepcopy(model).double()
    params, loss = _problem(model, inputs)
    gradients = torch.autograd.grad(loss(params), list(params.values()), allow_unused=True)
    used = {key: g for key, g in zip(params, gradients, strict=True) if g is not None}
    u = {key: -g / (g.abs() + EPSILON * g.square().mean().sqrt() + 1e-12) for key, g in used.items()}
    params = {key: params[key] for key in used}
    found = directional(loss, params, u)
    exact_params, exact_loss = _problem(wide, inputs)
    exact = directional(
        exact_loss,
        {key: exact_params[key] for key in used},
        {key: part.double() for key, part in u.items()},
        "double_backward",
    )
    return found.method, abs(found.curvature - exact.curvature) / abs(exact.curvature)


def _problem(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensors, Callable[[Tensors], Tensor]]:
    params: Tensors = {name: param for name, param in model.named_parameters() if param.requires_grad}
    dtype = next(iter(params.values())).dtype
    is_real = {key: isinstance(item, Tensor) and item.is_floating_point() for key, item in inputs.items()}
    own = {key: item.to(dtype) if is_real[key] else item for key, item in inputs.items()}
    return params, lambda at: functional_call(model, at, (), own).loss


def main(names: list[str]) -> None:
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    print(" ".join(["$ python -m benchmarks.public_models", *names]))
    print(f"{machine()}, transformers {transformers.__version__}")
    rows: dict[str, list[tuple[str, float]]] = {}
    for kind, name in (
        (kind, name) for kind, models in MODELS.items() for name in models if not names or name in names
    ):
        start = time.perf_counter()
        try:
            method, error = measure(kind, name)
        except Exception as failure:  # noqa: BLE001  it is named, and the others go on
            print(
                f"{name:18} {'not measured':18} {type(failure).__name__}: {str(failure).splitlines()[0][:120]}",
                flush=True,
            )
            continue
        rows.setdefault(method, []).append((name, error))
        print(f"{name:18} {method:18} {error:.0e}  {time.perf_counter() - start:.1f} s", flush=True)
    total = sum(map(len, rows.values()))
    print(f"\n| method | architectures (n = {total}), relative error of uᵀHu in float32 |\n|---|---|")
    for method, found in rows.items():
        print(f"| `{method}` | {', '.join(f'{name} {error:.0e}' for name, error in found)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
