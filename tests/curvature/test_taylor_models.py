"""The Taylor pass through whole models: tied weights, large weights, masks, everything in the registries, Hugging
Face's models."""

import math
from typing import get_args

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

from benchmarks._examples import drawn, format_of, objectives, outputs_of
from stability.curvature import directional
from stability.ffns import build as build_ffn
from stability.mechanisms import build as build_mechanism
from stability.models.block import split_loss
from stability.norms import build as build_norm
from stability.objectives import Examples
from stability.registry import Registry
from stability.residuals import build as build_residual
from tests.sizes import with_slow

from .nets import dense_hessian, flatten, random_direction, tiny, token_loss


def assert_same(loss, params, direction, rel=1e-9, **options):
    """taylor and double backward agree relative to the sizes of the terms that make up the sums (a sum may cancel)."""
    exact = directional(loss, params, direction, "double_backward", **options)
    ours = directional(loss, params, direction, "taylor", **options)
    assert ours.method == "taylor"
    assert ours.loss == pytest.approx(exact.loss, rel=rel)
    assert math.isfinite(exact.curvature)
    scale = sum(abs(share) for share in exact.shares.values())
    assert ours.curvature == pytest.approx(exact.curvature, abs=rel * scale)
    assert ours.slope == pytest.approx(exact.slope, rel=max(rel, 1e-12) * 100)


@pytest.mark.parametrize(("scale", "causal"), with_slow([(1.0, True), (4.0, False)], [(1.0, False), (4.0, True)]))
def test_tied_transformer_equals_its_dense_hessian(scale, causal):
    net, params, tokens = tiny(scale=scale, causal=causal)
    loss, direction = token_loss(net, tokens), random_direction(params)
    u = flatten(direction)
    assert directional(loss, params, direction, "taylor").curvature == pytest.approx(
        float(u @ dense_hessian(loss, params) @ u), rel=1e-9
    )
    assert_same(loss, params, direction)


def test_dropout_draws_the_same_masks_as_double_backward():
    net, params, tokens = tiny(dropout=0.5)
    net.train()
    assert_same(token_loss(net, tokens), params, random_direction(params))


@pytest.mark.parametrize("method", ["taylor", "double_backward"])
def test_a_compiled_model_is_measured_as_written(method):
    net, params, tokens = tiny()
    direction = random_direction(params)
    expected = directional(token_loss(net, tokens), params, direction, method)
    assert (
        directional(
            token_loss(torch.compile(net, backend="eager"), tokens, "mean", "_orig_mod."), params, direction, method
        )
        == expected
    )


def test_microbatches_equal_the_whole():
    net, params, _ = tiny()
    tokens = torch.randint(0, 7, (9, 6), generator=torch.Generator().manual_seed(5))
    direction = random_direction(params)
    whole = directional(token_loss(net, tokens), params, direction, "taylor")

    def loss(p, rows):
        return token_loss(net, rows, "sum")(p), rows[:, 1:].numel()

    pieces = directional(loss, params, direction, "taylor", batches=[tokens[:1], tokens[1:5], tokens[5:]])
    for field in ("loss", "slope", "curvature", "alpha_max"):
        assert getattr(pieces, field) == pytest.approx(getattr(whole, field), rel=1e-12)


def qkv(seed=0, n=7, heads=2, keys=None):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (2, heads, n, 4), "k": (2, heads, keys or n, 4), "v": (2, heads, keys or n, 3)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def attention_loss(**options):
    def loss(p):
        moved = {name: x + 0.3 * x * x for name, x in p.items() if name in "qkv"}
        extra = {"attn_mask": p["bias"] * p["bias"]} if "bias" in p else {}
        return F.scaled_dot_product_attention(moved["q"], moved["k"], moved["v"], **options, **extra).square().sum()

    return loss


VISIBLE = torch.rand(7, 7, generator=torch.Generator().manual_seed(2)) > 0.4
VISIBLE.fill_diagonal_(True)
ONE_KEY = torch.eye(7, dtype=torch.bool)
# (2, 1, 1, 7): keys of the second sequence end at 4
PADDED = torch.arange(7) < torch.tensor([7, 4])[:, None, None, None]
HIDDEN = VISIBLE.clone()
HIDDEN[2] = False  # a row with no key at all


@pytest.mark.parametrize("form", ["boolean", "infinite", "lowest"])
@pytest.mark.parametrize(
    "mask", [VISIBLE, ONE_KEY, PADDED, HIDDEN], ids=["some", "one_key", "padded", "row_with_no_key"]
)
def test_masks_give_finite_and_equal_curvature(form, mask):
    low = {"infinite": -math.inf, "lowest": torch.finfo(torch.float64).min}.get(form)
    given = mask if low is None else torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, low)
    params = qkv()
    assert_same(attention_loss(attn_mask=given), params, random_direction(params, 3))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.7}])
def test_attention_in_blocks_equals_attention_whole(options, monkeypatch):
    monkeypatch.setattr("stability.curvature._rules_losses.SCORES", 1)
    monkeypatch.setattr("stability.curvature._rules_losses._MIN_ROWS", 3)
    for params in (qkv(), qkv(keys=5), qkv(n=5, keys=8)):
        assert_same(attention_loss(**options), params, random_direction(params, 3))
    masked = qkv()
    if "is_causal" not in options:
        assert_same(attention_loss(attn_mask=PADDED & VISIBLE, **options), masked, random_direction(masked, 3))
        learned = qkv() | {
            "bias": torch.randn(2, 1, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        }
        assert_same(attention_loss(**options), learned, random_direction(learned, 3))


def test_grouped_queries_and_attention_dropout():
    params = qkv(heads=4)
    params["k"], params["v"] = params["k"][:, :2], params["v"][:, :2]
    assert_same(attention_loss(enable_gqa=True, is_causal=True), params, random_direction(params, 3))
    dropped = qkv()
    assert_same(attention_loss(dropout_p=0.4), dropped, random_direction(dropped, 3))


def test_masked_softmax_written_out_by_hand():
    params = qkv()

    def loss(p):
        scores = (p["q"] * p["q"]) @ p["k"].mT
        return (scores.masked_fill(~VISIBLE, -math.inf).softmax(-1) @ p["v"]).square().sum()

    assert_same(loss, params, random_direction(params, 3))


def module_loss(module, data, **options):
    """A loss that is not symmetric in anything, of a module's output at float64 inputs, and its own loss if it has one."""

    def loss(params):
        losses = []
        out = split_loss(functional_call(module, params, (data,), options), losses)
        slant = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
        return (out * slant).sum() + out.square().mean() + sum(each.sum() for each in losses)

    return loss


def shaken(module, scale=1.0):
    """The module in float64 with every parameter moved off its initial value, and its parameters."""
    module = module.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in module.parameters():
            param.add_(0.2 * torch.randn(param.shape, generator=generator, dtype=torch.float64)).mul_(scale)
    return module, dict(module.named_parameters())


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("name", Registry("mechanisms").names(cross=False))
def test_every_mechanism_in_every_direction_it_can_do(name, scale):
    mechanism = Registry("mechanisms").load(name)
    for direction in sorted(mechanism.supported_directions(mechanism.Config())):
        module, params = shaken(build_mechanism(name, width=16, heads=2, direction=direction, num_layers=2), scale)
        if not params:
            continue
        x = torch.randn(2, 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        mask = torch.arange(12) < torch.tensor([12, 8])[:, None]
        for options in ({}, {"mask_BN": mask}):
            assert_same(module_loss(module, x, **options), params, random_direction(params))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", Registry("mechanisms").names(cross=True))
def test_every_cross_mechanism(name, padded):
    module, params = shaken(build_mechanism(name, width=16, heads=2))
    x, context = (
        torch.randn(3, length, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
        for length in (12, 9)
    )
    lengths = {"mask_BN": (12, [12, 8, 12]), "context_mask_BJ": (9, [9, 4, 0])} if padded else {}
    masks = {key: torch.arange(length) < torch.tensor(valid)[:, None] for key, (length, valid) in lengths.items()}
    assert_same(module_loss(module, x, context_BJD=context, **masks), params, random_direction(params))


@pytest.mark.parametrize("name", Registry("residuals").names())
def test_every_residual(name):
    module, params = shaken(build_residual(name, width=8, layer=1))
    params["x"] = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    norm = build_norm("layernorm", width=8).double()

    def loss(p):
        own = {key: value for key, value in p.items() if key != "x"}
        state = functional_call(
            Residual(module, norm), {f"connection.{key}": value for key, value in own.items()}, (p["x"],)
        )
        return (state * torch.linspace(-1, 2, state.numel(), dtype=state.dtype).reshape(state.shape)).sum()

    params = {key: param.detach() for key, param in params.items()}
    assert_same(loss, params, random_direction(params))


class Residual(torch.nn.Module):
    def __init__(self, connection, norm):
        super().__init__()
        self.connection, self.norm = connection, norm

    def forward(self, x):
        state = self.connection(self.connection.enter(x), lambda y: torch.tanh(y) * y)
        return self.connection.leave(state, self.norm)


@pytest.mark.parametrize("name", Registry("norms").names())
def test_every_norm(name):
    module, params = shaken(build_norm(name, width=8))
    params = {key: param.detach() for key, param in params.items()}
    params["input"] = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss(p):
        own = {key: value for key, value in p.items() if key != "input"}
        return functional_call(module, own, (p["input"] * p["input"],)).square().sum().sin()

    assert_same(loss, params, random_direction(params))


def settings_of_each_ffn() -> list[tuple[str, dict]]:
    """Every feed-forward network, with each of its activations where it has a choice of them."""
    cases = []
    for name in Registry("ffns").names():
        activation = Registry("ffns").load(name).Config.model_fields.get("activation")
        choices = get_args(activation.annotation) if activation else ()
        cases += [(name, {"activation": choice}) for choice in choices] or [(name, {})]
    return cases


@pytest.mark.parametrize(("name", "settings"), settings_of_each_ffn())
def test_every_feed_forward_network(name, settings):
    module, params = shaken(build_ffn(name, width=8, **settings))
    x = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert_same(module_loss(module, x), params, random_direction(params))


@pytest.mark.parametrize("name", objectives())
def test_every_objective(name):
    objective, data_format = Registry("objectives").load(name), format_of(name, 7, 5)
    objective = objective(objective.Config(), data_format)
    data = drawn(name, data_format, objective.tokens_needed(5), 3, torch.Generator().manual_seed(0))
    examples = objective.examples(data, torch.Generator().manual_seed(1))
    assert isinstance(examples, Examples)
    logits = {
        "x": torch.randn(
            *examples.targets_BN.shape,
            outputs_of(objective),
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(2),
        )
    }

    def loss(p, batch):
        return objective.loss_sum(p["x"] * p["x"], batch)

    assert_same(loss, logits, random_direction(logits), batches=[examples])


def huggingface(name):
    transformers = pytest.importorskip("transformers")
    small = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
    }
    torch.manual_seed(0)
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=50, n_positions=32, n_embd=32, n_layer=2, n_head=4)
        ).eval()
    config = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[name](
        **small, num_key_value_heads=2
    )
    return {"llama": transformers.LlamaForCausalLM, "qwen2": transformers.Qwen2ForCausalLM}[name](config).eval()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2"])
def test_hugging_face_models_agree_to_1e_6(name, padded):
    model, params = shaken(huggingface(name))
    params = {key: param.detach() for key, param in params.items()}
    tokens = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0

    def loss(p):
        return functional_call(
            model, p, (), {"input_ids": tokens, "labels": tokens, "attention_mask": mask if padded else None}
        ).loss

    assert_same(loss, params, random_direction(params), rel=1e-6)
