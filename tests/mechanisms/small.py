"""What the contract needs to know of single mechanisms: settings that its short sequences reach beyond, and what each
leaves out of weight decay. A mechanism in neither table is held with its defaults, and leaves nothing out."""

from __future__ import annotations

from typing import Any

# Settings so small that 9 positions are more than a window, block or chunk, and 40 more than several of them.
SMALL: dict[str, dict[str, Any]] = {
    "bigbird": {"block": 2},
    "deltanet": {"chunk": 4},
    "gated_deltanet": {"chunk": 4},
    "gla": {"chunk": 4},
    "hgrn2": {"chunk": 4},
    "kda": {"chunk": 4},
    "longformer": {"window": 1, "global_tokens": 2},
    "mamba": {"chunk": 4, "state": 3},
    "mamba2": {"chunk": 4, "state": 3},
    "nsa": {"block": 2, "stride": 1, "selected_block": 2, "selected": 4, "window": 3},
    "retnet": {"chunk": 4},
    "sc": {"window": 1},
    "sparge": {"query_block": 4, "key_block": 2},
    "sparse_transformer": {"stride": 3},
    "sparsek": {"k": 2, "window": 1},
    "sw": {"window": 1},
    "titans": {"memory": "mlp", "chunk": 8, "form": "gated_attention", "window": 2},
}

# More settings, with which the whole contract is kept, in every direction.
OTHER: dict[str, list[dict[str, Any]]] = {
    "attentionx": [{"mask_diagonal": True}, {"qk_norm": "rmsnorm", "softcap": 0.2}],
    "bigbird": [
        {"block": 4},
        {"block": 2, "random": 2, "global_blocks": 2},
        {"block": 3, "window": 2, "random": 0, "global_blocks": 0},
        {"block": 3, "window": 0, "random": 3},
        {"block": 1, "random": 2, "global_blocks": 0},
        {"qk_norm": "rmsnorm", "softcap": 0.2},
    ],
    "fox": [{"rope": "absolute"}, {"decay_times": (2, 8)}, {"qk_norm": "layernorm", "softcap": 0.2}],
    "gated_softmax": [{"gate": "headwise"}, {"qk_norm": "layernorm"}],
    "gla": [{"chunk": 2, "expand_k": 1.0, "expand_v": 2.0, "gate_rank": 3, "gate_divisor": 2.0, "conv": 3}],
    "longformer": [
        {"window": 2, "global_tokens": 0},
        {"window": 3, "global_tokens": 2},
        {"window": 2, "dilation": 3, "global_tokens": 0},
        {"window": 2, "dilation": 2, "global_tokens": 3},
        {"window": 18, "global_tokens": 1},
    ],
    "retnet": [{"expand_v": 2.0, "chunk": 2}],
    "sa": [
        {"mask_diagonal": True},
        {"kv_heads": 1},
        {"qk_norm": "layernorm"},
        {"qk_norm": "rmsnorm", "kv_heads": 1},
        {"softcap": 0.2, "mask_diagonal": True},
        {"softcap": 0.2},
    ],
    "sigmoid": [{"norm": "after"}, {"qk_norm": "rmsnorm", "softcap": 0.2}, {"norm": "after", "qk_norm": "layernorm"}],
    "sparse_transformer": [
        {"stride": 2},
        {"stride": 4},
        {"stride": 19},
        {"pattern": "fixed", "stride": 4},
        {"pattern": "fixed", "stride": 5, "summary": 3},
        {"pattern": "fixed", "stride": 3, "summary": 3},
        {"stride": 3, "qk_norm": "layernorm", "softcap": 0.2},
    ],
    "sw": [{"window": 1, "qk_norm": "rmsnorm", "softcap": 0.2}],
    "titans": [
        {"chunk": 4},
        {"memory": "mlp", "chunk": 4},
        {"memory": "mlp", "chunk": 2, "momentum": 0.0},
        {"momentum": 0.0, "forgetting": False},
        {"form": "gated_attention", "window": 3, "memory": "none"},
        {"form": "gated_attention", "window": 3, "memory": "linear"},
    ],
    "two_way": [{"of": "sw", "weights": "shared"}, {"of": "attentionx"}],
    **{
        name: [{"expand_v": 2, "conv": 1}, {"negative_eigenvalues": True, "chunk": 2}]
        for name in ("deltanet", "gated_deltanet", "kda")
    },
}

# What a mechanism with those settings says itself of weight decay: whether it reaches the parameter.
OWN_DECAY: list[tuple[str, dict[str, Any], dict[str, bool]]] = [
    ("attentionx", {"temperature": "learned"}, {"log_temperature": False}),
    ("fox", {}, {"forget.bias": False}),
    ("gated_deltanet", {}, {"A_log": False, "dt_bias": False}),
    ("gated_softmax", {"temperature": "learned"}, {"gate.bias": False, "log_temperature": False}),
    ("gla", {}, {"forget.bias": False}),
    ("hgrn2", {}, {"forget.bias": False}),
    ("kda", {}, {"A_log": False, "dt_bias": False, "gate_up.bias": False}),
    ("mamba", {}, {"A_log": False, "D": False, "dt_proj.bias": False}),
    ("mamba2", {}, {"A_log": False, "D": False, "dt_proj.bias": False}),
    ("nsa", {}, {"compress_key.place_GLK": False, "compress_value.place_GLK": False}),
    ("sa", {}, {}),
    ("sa", {"temperature": "learned"}, {"log_temperature": False}),
    ("titans", {}, {"rate.bias": False, "momentum.bias": False, "forget.bias": False}),
    (
        "titans",
        {"memory": "mlp"},
        {"rate.bias": False, "momentum.bias": False, "forget.bias": False, "first_HFK": False},
    ),
    (
        "two_way",
        {"of": "sa", "sa": {"temperature": "learned"}},
        {"mixers.0.log_temperature": False, "mixers.1.log_temperature": False},
    ),
]
