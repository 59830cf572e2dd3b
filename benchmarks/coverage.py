"""Compare `method="auto"` with double backward for all our parts and Hugging Face's models.

Run ``python -m benchmarks.coverage``. One row for each mechanism in each supported direction, each cross mechanism,
residual, norm and objective in the registries (float64, weights moved off their initial values). One row for each
causal language model of Hugging Face made from a tiny config and each attention implementation (float64 weights except
in mixtures of experts, though most cast to float32 inside; causal LM loss, one padded row).

"missing" names the operation without a rule in taylor. "off by" is |taylor − double backward| for uᵀHu along one random
u, relative to its terms' summed sizes, Σ_b |u_b·(Hu)_b|.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks import _examples
from benchmarks._machine import machine
from stability.curvature import directional
from stability.curvature.taylor import missing_rule
from stability.mechanisms import build as build_mechanism
from stability.norms import build as build_norm
from stability.registry import Registry
from stability.residuals import build as build_residual

Tensors = dict[str, Tensor]
SHAPE = (2, 12, 16)  # batch, positions, width
VOCABULARY = 50
ENDS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
GATED = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
LOCAL = {**GATED, "head_dim": 8, "sliding_window": 6}  # shorter than the sequence, longer than the padding
OLDER = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
HUGGING_FACE: dict[str, dict[str, Any]] = {  # transformers' model_type: its sizes
    "gpt2": OLDER,
    "gptj": {**OLDER, "rotary_dim": 4},
    "gpt_bigcode": OLDER,
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
    },
    "gpt_neox": {**SIZES, "intermediate_size": 48},
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": SIZES,
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32},
    **dict.fromkeys(
        (
            "llama",
            "qwen2",
            "phi",
            "phi3",
            "gemma",
            "olmo",
            "olmo2",
            "stablelm",
            "starcoder2",
            "cohere",
            "granite",
            "smollm3",
        ),
        GATED,
    ),
    **dict.fromkeys(("mistral", "qwen3", "gemma2", "gemma3_text"), LOCAL),
    "mixtral": {**GATED, "num_local_experts": 4},
    "qwen3_moe": {**GATED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}


class Case(NamedTuple):
    """A part to measure, as a loss: ``loss(params)``, or ``loss(params, batch)`` with ``batches``.

    ``params`` is empty for a part without parameters.
    """

    family: str
    name: str
    loss: Callable[..., Any]
    params: Tensors
    batches: list[Any] | None = None


class Verdict(NamedTuple):
    """The result of one case; ``off`` is None if auto does not use taylor."""

    method: str
    missing: str | None
    off: float | None


def cases() -> Iterator[Case]:
    yield from parts()
    yield from hugging_face()


def parts() -> Iterator[Case]:
    """Yield a case for each part of the project."""
    yield from mechanisms()
    yield from cross_mechanisms()
    yield from residuals()
    yield from norms()
    yield from objectives()


def verdict(case: Case) -> Verdict:
    """Return auto's method, missing rule and error for one case."""
    generator = torch.Generator().manual_seed(1)
    direction = {
        name: torch.randn(param.shape, generator=generator).to(param.dtype) for name, param in case.params.items()
    }
    with warnings.catch_warnings():
        # warnings of a fallback to differences, or of a missing rule: the table reports both
        warnings.simplefilter("ignore", RuntimeWarning)
        ours = directional(case.loss, case.params, direction, batches=case.batches)
        missing = missing_rule(case.loss, case.params, batches=case.batches) if ours.method != "taylor" else None
    if ours.method != "taylor":
        return Verdict(ours.method, missing, None)
    exact = directional(case.loss, case.params, direction, "double_backward", batches=case.batches)
    # at least the smallest float, so that 0 of 0 is 0: every term is 0 for a loss linear in u
    scale = max(sum(abs(share) for share in (exact.shares or {}).values()), torch.finfo(torch.float64).tiny)
    return Verdict(ours.method, missing, abs(ours.curvature - exact.curvature) / scale)


def mechanisms() -> Iterator[Case]:
    _, positions, width = SHAPE
    x = signal()
    mask = torch.arange(positions) < torch.tensor([positions, positions - 4])[:, None]
    for name in Registry("mechanisms").names(cross=False):
        mechanism = Registry("mechanisms").load(name)
        for direction in sorted(mechanism.supported_directions(mechanism.Config())):
            module = shaken(build_mechanism(name, width=width, heads=2, direction=direction, num_layers=2))
            yield Case("mechanism", f"{name}, {direction}", output_loss(module, x, mask_BN=mask), parameters(module))


def cross_mechanisms() -> Iterator[Case]:
    """Yield a case for each cross mechanism; its context is padded and shorter."""
    _, positions, width = SHAPE
    x, context = signal(), signal()[:, : positions - 4].flip(0)
    mask = torch.arange(positions - 4) < torch.tensor([positions - 4, 3])[:, None]
    for name in Registry("mechanisms").names(cross=True):
        module = shaken(build_mechanism(name, width=width, heads=2))
        yield Case(
            "cross mechanism",
            name,
            output_loss(module, x, context_BJD=context, context_mask_BJ=mask),
            parameters(module),
        )


class Connected(nn.Module):
    """A residual scheme around a branch with a second derivative, from entering to leaving."""

    def __init__(self, connection: Any, norm: nn.Module):
        super().__init__()
        self.connection: Any = connection
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        state = self.connection(self.connection.enter(x), lambda y: torch.tanh(y) * y)
        return self.connection.leave(state, self.norm)


def residuals() -> Iterator[Case]:
    for name in Registry("residuals").names():
        module = shaken(
            Connected(build_residual(name, width=SHAPE[-1], layer=1), build_norm("layernorm", width=SHAPE[-1]))
        )
        yield Case("residual", name, *with_input(module))


def norms() -> Iterator[Case]:
    for name in Registry("norms").names():
        yield Case("norm", name, *with_input(shaken(build_norm(name, width=SHAPE[-1]))))


def objectives() -> Iterator[Case]:
    """Yield a case for each objective, its loss as a function of the logits."""
    for name in _examples.objectives():
        objective_class = Registry("objectives").load(name)
        data_format = _examples.format_of(name, VOCABULARY, SHAPE[1])
        objective = objective_class(objective_class.Config(), data_format)
        data = _examples.drawn(
            name, data_format, objective.tokens_needed(SHAPE[1]), SHAPE[0], torch.Generator().manual_seed(0)
        )
        examples = objective.examples(data, torch.Generator().manual_seed(1))
        logits = torch.randn(
            *examples.targets_BN.shape,
            _examples.outputs_of(objective),
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(2),
        )

        def loss(params: Tensors, batch: Any, objective: Any = objective) -> tuple[Tensor, Tensor]:
            return objective.loss_sum(params["x"] * params["x"], batch)

        yield Case("objective", name, loss, {"x": logits}, [examples])


def hugging_face(names: Iterable[str] = HUGGING_FACE) -> Iterator[Case]:
    """Yield a case for each named model of `HUGGING_FACE` and attention implementation; none without transformers."""
    try:
        import transformers
    except ModuleNotFoundError:
        return
    transformers.logging.set_verbosity_error()
    tokens = torch.randint(VOCABULARY, SHAPE[:2], generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    # padding on the right: with padding on the left, some query would attend to padding only, and its output would not
    # depend on its scores
    mask[1, -4:] = 0
    inputs = {
        "input_ids": tokens,
        "labels": tokens.masked_fill(mask == 0, -100),
        "attention_mask": mask,
        "use_cache": False,
    }
    for name in names:
        sizes = HUGGING_FACE[name]
        config = transformers.AutoConfig.for_model(name, **ENDS, **sizes)
        model_class = transformers.AutoModelForCausalLM._model_mapping[type(config)]
        # torch's grouped product has no float64
        dtype = torch.float32 if any("experts" in size for size in sizes) else torch.float64
        for attention in ("sdpa", "eager") if model_class._supports_sdpa else ("eager",):
            torch.manual_seed(0)
            model = shaken(
                transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval(), dtype
            )

            def loss(params: Tensors, model: nn.Module = model) -> Tensor:
                return functional_call(model, params, (), inputs).loss

            yield Case("Hugging Face", f"{name}, {attention}", loss, parameters(model))


def signal() -> Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def shaken(module: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return the module with every parameter moved: initial zeros and ones hide derivatives."""
    module, generator = module.to(dtype), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in module.parameters():
            param.add_(0.2 * torch.randn(param.shape, generator=generator, dtype=torch.float64).to(dtype))
    return module


def parameters(module: nn.Module) -> Tensors:
    return {name: param.detach() for name, param in module.named_parameters()}


def output_loss(module: nn.Module, x: Tensor, **options: Any) -> Callable[[Tensors], Tensor]:
    """Return a loss of the module's output without symmetries; ``params["x"]``, if given, is the input."""

    def loss(params: Tensors) -> Tensor:
        own = {name: param for name, param in params.items() if name != "x"}
        out = functional_call(module, own, (params.get("x", x),), options)
        return (
            out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
        ).sum() + out.square().mean()

    return loss


def with_input(module: nn.Module) -> tuple[Callable[[Tensors], Tensor], Tensors]:
    """Take the input as a parameter, for modules with few or no parameters."""
    return output_loss(module, signal()), {**parameters(module), "x": signal()}


def main() -> None:
    torch.set_num_threads(1)
    table = Table("part", "name", "auto uses", "missing in taylor", "off by", title="What measures the curvature")
    for case in cases():
        if not case.params:
            table.add_row(case.family, case.name, "–", "no parameters", "–")
            continue
        found = verdict(case)
        table.add_row(
            case.family, case.name, found.method, found.missing or "", "–" if found.off is None else f"{found.off:.0e}"
        )
    print("$ python -m benchmarks.coverage")
    print(machine())
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
