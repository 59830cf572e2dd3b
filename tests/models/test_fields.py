"""Fields of the model: each changes what it says and nothing else, against sums, derivatives and files that know nothing
of how it is done."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from stability.config.identity import run_id
from stability.probes.layers.measuring import layer_inputs, read_held_out
from stability.probes.layers.streams import stream_statistics
from stability.runs.directory import read_jsonl
from stability.training.checkpoint import load
from tests.models.parity import SIZE, TOKENS, model_of, ours, refused, shaken, spec_of

# --- biases -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["sa", "sc", "sw", "attentionx", {"name": "two_way", "of": "sa"}])
@pytest.mark.parametrize(("which", "left"), [("all", ("inner", "out")), ("out", ("out",)), ("none", ())])
def test_mixers_have_the_biases_that_are_asked_for(mechanism, which, left):
    model = ours(29, model=SIZE | {"mixer_bias": which}, mechanism=mechanism)
    maps = [(name, m) for name, m in model.blocks.named_modules() if isinstance(m, nn.Linear) and ".mixer." in name]
    assert {"out" if name.endswith("out") else "inner" for name, m in maps if m.bias is not None} == set(left)
    assert all(m.bias is not None for name, m in model.blocks.named_modules() if name.endswith(("ffn.out", "hidden")))
    assert model(TOKENS).isfinite().all()


def test_cross_mechanisms_lose_theirs_too():
    model = ours(
        29, model=SIZE | {"mixer_bias": "none"}, cross="auto", objective={"name": "mlm", "context": 4}, mechanism="sc"
    )
    assert not [name for name, _ in model.named_parameters() if ".cross.mechanism." in name and name.endswith(".bias")]
    assert [name for name, _ in model.named_parameters() if ".cross.mechanism." in name]


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_without_a_bias_is_one_whose_bias_is_zero(tied):
    plain, without = shaken(model_of(tied=tied)), model_of(tied=tied, head_bias=False).double()
    with torch.no_grad():
        plain.head.bias.zero_()
    without.load_state_dict({name: value for name, value in plain.state_dict().items() if name != "head.bias"})
    assert torch.equal(plain(TOKENS), without(TOKENS))
    assert sum(value.numel() for value in plain.parameters()) == 29 + sum(v.numel() for v in without.parameters())


def test_biases_that_are_not_there_cannot_start_anywhere():
    refused("model.qk_bias=2 sets biases that", model=SIZE | {"qk_bias": 2.0, "mixer_bias": "out"})


# --- init ---------------------------------------------------------------------------------------------------------


def test_torchs_own_start_is_what_the_constructors_drew():
    """U(±1/√inputs) for weights and biases alike, N(0, 1) for the table."""
    model = ours(200, model=SIZE | {"width": 64, "init": "torch", "layers": 1})
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.in_features)
            for value in (module.weight, module.bias):
                assert value.abs().max() <= bound, name
                assert value.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15), name
    assert model.embedding.weight.std().item() == pytest.approx(1, rel=0.05)


def test_a_size_that_a_rule_does_not_read_is_refused():
    for rule in ("torch", "nanogpt", "sedd"):
        refused("model.embedding_std=0.5 belongs to model.init=ours", model=SIZE | {"embedding_std": 0.5, "init": rule})


# --- factorised embedding -----------------------------------------------------------------------------------------


def untangled(model, inner, **own):
    """A model of one plain table that holds what the two factors make: row by row, and with b in each."""
    plain = model_of(**own).double()
    state = {name: value for name, value in model.state_dict().items() if not name.startswith("embedding.")}
    factors = model.embedding
    rows = [factors.projection(factors.table.weight[token]) for token in range(30)]
    plain.load_state_dict(state | {"embedding.weight": torch.stack(rows).detach()})
    return plain


def test_a_factorised_embedding_is_the_table_of_its_products():
    model = shaken(model_of(embedding_width=4))
    assert model.embedding.table.weight.shape == (30, 4)
    assert model.embedding.projection.weight.shape == (16, 4)
    torch.testing.assert_close(model(TOKENS), untangled(model, 4)(TOKENS), rtol=0, atol=1e-12)


def test_a_head_that_is_tied_to_it_reads_with_both_factors():
    """h·(P e_v) + c for every token v, by a loop."""
    model = shaken(model_of(embedding_width=4, tied=True))
    hidden = model(TOKENS, readout=lambda hidden_BND, weight, bias: hidden_BND)
    factors = model.embedding
    logits = [hidden @ (factors.projection.weight @ factors.table.weight[v]) + model.head.bias[v] for v in range(29)]
    torch.testing.assert_close(model(TOKENS), torch.stack(logits, -1), rtol=0, atol=1e-12)
    assert model.head.bias.shape == (29,)


def test_its_parameters_are_as_many_as_it_promises():
    """V·E + E·D + D where there were V·D."""
    plain, model = (sum(p.numel() for p in m.parameters()) for m in (model_of(), model_of(embedding_width=4)))
    assert plain - model == 30 * 16 - (30 * 4 + 4 * 16 + 16)


def test_what_embeds_no_tokens_is_not_factorised():
    refused(
        "model.embedding_width=4 needs an objective that predicts the tokens that it embeds",
        objective="classify",
        data="images",
        model=SIZE | {"positions": 64, "embedding_width": 4},
    )


# --- convolution of the embedding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("objective", "size"), [("ar", 1), ("ar", 2), ("ar", 11), ("mlm", 3), ("mlm", 11)])
def test_an_embedding_is_convolved_as_torchs_conv1d_does_before_dropout(objective, size, residual):
    """Also with more positions than the sequence has."""
    model = shaken(model_of(objective, embedding_conv=size, embedding_conv_residual=residual))
    weight_DDW = model.convolution.linear.weight.unflatten(1, (size, -1)).transpose(1, 2)
    x_BND = model.embedding(TOKENS)
    sides = (size - 1, 0) if objective == "ar" else (size // 2, size // 2)
    expected_BND = nn.functional.conv1d(nn.functional.pad(x_BND.mT, sides), weight_DDW).mT + residual * x_BND
    entered = []
    model.dropout.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    model(TOKENS)
    torch.testing.assert_close(entered[0], expected_BND, rtol=0, atol=1e-12)


def test_a_causal_convolution_has_no_derivative_from_the_future():
    model = shaken(model_of("ar", embedding_conv=4))
    x_BND = torch.randn(1, 8, 16, dtype=torch.float64, requires_grad=True)
    for position in range(8):
        (gradient_BND,) = torch.autograd.grad(model.convolution(x_BND)[0, position].sum(), x_BND)
        reached_N = gradient_BND[0].abs().amin(-1) > 0
        assert reached_N.tolist() == [position - 3 <= other <= position for other in range(8)]
        assert gradient_BND[0, position + 1 :].count_nonzero() == 0


def test_padding_is_in_no_convolution():
    """A padded sequence is the short one, whatever stands at the padding."""
    model = shaken(model_of(embedding_conv=5))
    mask_BN = torch.arange(8) < torch.tensor([8, 5, 3])[:, None]
    for row, num in enumerate((8, 5, 3)):
        short = model(TOKENS[row : row + 1, :num])[0]
        torch.testing.assert_close(model(TOKENS, mask_BN)[row, :num], short, rtol=0, atol=1e-12)
    nowhere_BND = torch.where(mask_BN[..., None], model.embedding(TOKENS), math.nan)
    assert model.convolution(nowhere_BND, mask_BN)[mask_BN].isfinite().all()


def test_a_convolution_that_cannot_be_is_refused():
    refused("model.embedding_conv=4: objective=mlm reads both sides", model=SIZE | {"embedding_conv": 4})
    refused("changes nothing without a convolution", model=SIZE | {"embedding_conv_residual": True})
    images = SIZE | {"positions": 64, "embedding_conv": 3}
    refused("objective=classify embeds no plain sequence", objective="classify", data="images", model=images)


# --- loops --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("residual", ["identity", "hc", "mhc_lite"])
def test_a_looped_stack_is_a_deeper_one_whose_blocks_hold_the_same_weights(residual):
    looped = shaken(ours(29, model=SIZE | {"loops": 3}, residual=residual))
    deep = ours(29, model=SIZE | {"layers": 6}, residual=residual).double()
    state = looped.state_dict()
    for name in [name for name in state if name.startswith("blocks.")]:
        for loop in (1, 2):
            _, layer, rest = name.split(".", 2)
            state[f"blocks.{int(layer) + 2 * loop}.{rest}"] = state[name]
    deep.load_state_dict(state)
    torch.testing.assert_close(looped(TOKENS), deep(TOKENS), rtol=0, atol=1e-12)
    assert len(looped.blocks) == 2


def test_gradients_of_the_loops_add_up():
    looped = shaken(model_of(loops=2))
    deep = model_of(layers=4).double()
    state = looped.state_dict()
    state |= {
        f"blocks.{int(name.split('.')[1]) + 2}.{name.split('.', 2)[2]}": value
        for name, value in state.items()
        if name.startswith("blocks.")
    }
    deep.load_state_dict(state)

    def gradients(model):
        nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
        return {name: value.grad for name, value in model.named_parameters()}

    of_deep = gradients(deep)
    for name, found in gradients(looped).items():
        expected = of_deep[name]
        if name.startswith("blocks."):
            _, layer, rest = name.split(".", 2)
            expected = expected + of_deep[f"blocks.{int(layer) + 2}.{rest}"]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_branches_start_scaled_by_the_depth_that_the_state_passes():
    wide = SIZE | {"width": 64}
    once, thrice = (ours(29, model=wide | {"loops": loops}) for loops in (1, 3))
    for one, three in zip(once.blocks, thrice.blocks, strict=True):
        torch.testing.assert_close(three.mixer.out.weight, one.mixer.out.weight / math.sqrt(3))
        assert torch.equal(three.mixer.qkv.weight, one.mixer.qkv.weight)


def test_a_looped_model_is_trained_saved_and_probed_by_passes(lab):
    size = {"name": "tiny", "layers": 2, "width": 16, "heads": 2, "positions": 16, "loops": 3}
    spec = lab.spec(model=size, residual="mhc")
    directory = lab.train(spec)
    _, model = load(sorted(directory.path.glob("checkpoints/step_*"))[-1])
    assert {name.split(".")[1] for name, _ in model.named_parameters() if name.startswith("blocks.")} == {"0", "1"}
    examples = read_held_out(spec, lab.cache, 2)
    inputs = layer_inputs(model, examples)
    assert len(inputs) == 6
    state = model.blocks[0].mixer_residual.enter(model.embedding(examples.inputs_BN))
    for number, given in enumerate(inputs):
        block = model.blocks[number % 2]
        pre_BNS = block.mixer_residual.coefficients(state).pre_BNS
        torch.testing.assert_close(block.mixer_norm((pre_BNS[..., None] * state).sum(2)), given, rtol=1e-4, atol=1e-5)
        state = block(state, None)
    rows = list(stream_statistics(model, examples.split(1)))[-1]
    assert {row["connection"] for row in rows} == {None, *range(12)}
    depth = [row["value"] for row in rows if (row["matrix"], row["quantity"]) == ("product", "forward_gain")]
    assert all(math.isfinite(value) for value in depth)


# --- ids ----------------------------------------------------------------------------------------------------------

OTHERS = {
    "init": "nanogpt",
    "tied": True,
    "head_bias": False,
    "mixer_bias": "none",
    "embedding_width": 4,
    "embedding_conv": 3,
    "loops": 2,
}


@pytest.mark.parametrize("field", OTHERS)
def test_a_field_left_alone_is_in_no_id_and_any_other_value_is(field):
    plain = spec_of(model=SIZE)
    neutral = getattr(plain.model, field)
    assert run_id(spec_of(model=SIZE | {field: neutral})) == run_id(plain)
    assert run_id(spec_of(model=SIZE | {field: OTHERS[field]})) != run_id(plain)


# --- capped outputs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_capped_outputs_are_a_bounded_tangent_of_the_uncapped(tied):
    plain, capped = shaken(model_of(tied=tied)), shaken(model_of(tied=tied, logit_softcap=0.5))
    expected = [[[0.5 * math.tanh(value / 0.5) for value in row] for row in rows] for rows in plain(TOKENS).tolist()]
    torch.testing.assert_close(capped(TOKENS), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)


def test_capped_outputs_are_those_of_gemma_2():
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 8}
    outputs = []
    for cap in (None, 0.05):
        torch.manual_seed(0)
        config = transformers.Gemma2Config(
            **size, vocab_size=29, num_hidden_layers=1, pad_token_id=0, final_logit_softcapping=cap
        )
        with torch.no_grad():
            outputs.append(transformers.Gemma2ForCausalLM(config).double().eval()(torch.arange(1, 9)[None]).logits)
    model = model_of(logit_softcap=0.05).double()
    model.head = nn.Linear(29, 29, bias=False).double()
    nn.init.eye_(model.head.weight)
    torch.testing.assert_close(model._read_out(outputs[0], None), outputs[1], rtol=1e-10, atol=1e-12)
    assert not torch.allclose(*outputs, rtol=1e-2)


def test_a_run_trains_validates_and_loads_with_capped_outputs(lab):
    """No token is likelier than 1 / (1 + (V − 1) e^(−2c)), so no NLL is below that of it."""
    least = math.log(1 + 255 * math.exp(-0.1))
    found = []
    for softcap in (0.05, None):
        run = lab.train(lab.spec(objective="ar", model=SIZE | {"logit_softcap": softcap}, lr_peak=0.03))
        rows = list(read_jsonl(run.metrics_file))
        found.append(min(row[key] for row in rows for key in ("loss", "val_nll") if row.get(key) is not None) > least)
        if softcap:
            spec, model = load(run.checkpoints()[-1])
            assert model.logit_softcap == 0.05 and model(TOKENS).abs().max() <= 0.05
    assert found == [True, False]
    assert run_id(spec) != run_id(lab.spec(objective="ar", model=SIZE))


@pytest.mark.parametrize(("key", "value"), [("loss_chunk", 8), ("impl", "triton")])
def test_capped_outputs_are_refused_beside_a_loss_that_has_none(key, value):
    refused(
        f"model.logit_softcap=30 caps the model's logits, and objective.{key}={value} does not make them; leave one of "
        "the two out",
        model=SIZE | {"logit_softcap": 30.0},
        objective={"name": "ar", key: value},
    )
