"""``log.activations``: the statistics are those of the step, and nothing of the run changes."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from stability.build import build_model
from stability.corpora.cache import load
from stability.models.backbone import block_of
from stability.objectives import training_examples
from stability.runs.directory import read_jsonl
from stability.training import checkpoint
from tests.training.test_compile import trained
from tests.training.test_loop import final_weights, same

SIZE = {"name": "tiny", "layers": 2, "width": 16, "heads": 2, "positions": 16}
LAYERS, STEP = ("blocks.0", "blocks.1"), "model"
VARIANTS = {
    "plain": {},
    "dropout": {"model": SIZE | {"dropout": 0.3}, "batch": 5, "microbatch": 2},
    "dropped maps": {"model": SIZE | {"dropout": 0.3, "dropout_at": "maps"}},
    "bf16": {"precision": "bf16", "mechanism": {"name": "sw"}},
    "streams": {"residual": {"name": "mhc_lite"}, "mechanism": {"name": "mix"}, "log": {"gradients": 1}},
    "several passes": {"residual": {"name": "ode"}, "ffn": "glu"},
    "loops": {"model": SIZE | {"loops": 2, "tied": True}, "objective": {"name": "mlm", "loss_chunk": 7}},
    "recurrent": {"objective": {"name": "ar"}, "mechanism": {"name": "gla"}, "optimizer": {"name": "muon"}},
    "noise": {"objective": {"name": "score_entropy"}, "optimizer": {"name": "sophia"}},
}


DROPPED = {"model": SIZE | {"dropout": 0.4}, "log": {"activations": 1}}


def rows(directory):
    return list(read_jsonl(directory.activations_file))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_run_is_the_same_byte_for_byte(lab, name):
    changes = VARIANTS[name]
    log = changes.get("log", {}) | {"activations": 1}
    plain, watched = lab.train(lab.spec(**changes)), lab.train(lab.spec(**changes | {"log": log}))
    assert plain.metrics_file.read_bytes() == watched.metrics_file.read_bytes()
    assert same(final_weights(plain), final_weights(watched))
    assert {row["step"] for row in rows(watched)} == set(range(1, 13))
    assert not plain.activations_file.exists()


@pytest.mark.parametrize("name", ["plain", "dropout"])
def test_a_resumed_run_logs_the_same_bytes(lab, tmp_path, name):
    spec = lab.spec(**VARIANTS[name], log={"activations": 2})
    whole = lab.train(spec)
    expected = whole.metrics_file.read_bytes(), whole.activations_file.read_bytes()
    whole.status_file.unlink()
    checkpoint.remove(whole.checkpoints()[-1])
    with open(whole.activations_file, "a") as file:
        file.write('{"step": 14, "block": "blocks.0"}\n{"step": 16, "bl')
    lab.train(spec)
    assert (whole.metrics_file.read_bytes(), whole.activations_file.read_bytes()) == expected


@pytest.mark.slow
def test_a_compiled_run_is_the_same_byte_for_byte(lab, tmp_path):
    """No hook is in a compiled call; with microbatches, dropout and the log of curvature as well."""
    changes = {"steps": 6, "compile": True, "batch": 5, "microbatch": 2, "model": SIZE | {"dropout": 0.2}}
    plain, watched = (
        trained(lab, tmp_path / str(bool(log)), lab.spec(**changes, log=log))
        for log in ({}, {"activations": 2, "curvature": 3})
    )
    assert plain.metrics_file.read_bytes() == watched.metrics_file.read_bytes()
    assert len(rows(watched)) == 3 * len({row["block"] for row in rows(watched)})
    assert len(list(read_jsonl(watched.edge_file))) == 2


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_numbers_are_those_of_a_walk_through_the_blocks_in_float64(lab, optimizer):
    spec = lab.spec(
        steps=1, batch=12, microbatch=7, log={"activations": 1}, optimizer={"name": optimizer}, clip_norm=1e-2
    )
    corpus = load(lab.cache, spec.data_fingerprint)
    replica, model = lab.replica(spec), build_model(spec, corpus.vocab_size).double()
    examples = training_examples(spec, corpus, replica.objective, "train", 1, seed=0, batch=spec.batch).split(2)[0]
    # two sequences: a quarter of the first microbatch's seven, rounded up
    directory = lab.train(spec)
    found = {row["block"]: row for row in rows(directory)}
    x_BND = model.embedding(examples.inputs_BN)
    for name, block in zip(LAYERS, model.blocks, strict=True):
        row = {"stream_rms": rms(x_BND)}
        mixed_BND, logits_BHNN = attend(block.mixer, block.mixer_norm(x_BND))
        x_BND = x_BND + mixed_BND
        hidden_BNH = block.ffn.hidden(block.ffn_norm(x_BND))
        out_BND = block.ffn.out(torch.nn.functional.gelu(hidden_BNH))
        x_BND = x_BND + out_BND
        p_BHNN = logits_BHNN.exp() / logits_BHNN.exp().sum(-1, keepdim=True)
        row |= {"mixer_rms": rms(mixed_BND), "ffn_rms": rms(out_BND), "attention_logit_max": logits_BHNN.max().item()}
        row |= {"attention_entropy_min": (-p_BHNN * p_BHNN.log()).sum(-1).mean((0, 2)).min().item()}
        row |= {"dead_share": (gelu_slope(hidden_BNH).abs().amax((0, 1)) < 1e-3).double().mean().item()}
        assert {key: found[name][key] for key in row} == pytest.approx(row, rel=1e-5)
        assert found[name].keys() == {"step", "block", *row}
    logits_RV = model.head(model.final_norm(x_BND))[examples.weights_BN > 0]
    assert 0 < len(logits_RV) < examples.weights_BN.numel()
    (norm,) = [row["grad_norm"] for row in read_jsonl(directory.metrics_file) if row["step"] == 1]
    step = {
        "logit_rms": rms(logits_RV),
        "logit_max": logits_RV.max().item(),
        "log_z": logits_RV.exp().sum(-1).log().mean().item(),
        "clipped_share": 1 - 1e-2 / norm,
    }
    assert {key: found[STEP][key] for key in step} == pytest.approx(step, rel=1e-5)
    assert found[STEP].keys() == {"step", "block", *step}
    assert ("head" in found) is (optimizer == "adamw")


def rms(x):
    return x.square().mean().sqrt().item()


def gelu_slope(x):
    return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def attend(mixer, x_BND):
    """Attention with rotary positions, written out with complex numbers; its output and logits."""
    batch, positions, width = x_BND.shape
    q, k, v = mixer.qkv(x_BND).reshape(batch, positions, 3, mixer.heads, -1).permute(2, 0, 3, 1, 4)
    half = q.shape[-1] // 2
    angles = torch.arange(positions)[:, None] * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)

    def turn(part):
        pairs = torch.complex(part[..., :half], part[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([pairs.real, pairs.imag], -1)

    logits = turn(q) @ turn(k).mT / math.sqrt(2 * half)
    out = (logits.softmax(-1) @ v).transpose(1, 2).reshape(batch, positions, width)
    return mixer.out(out), logits


@pytest.mark.parametrize("mechanism", ["sa", "sc", "gated_softmax"])
def test_padding_is_in_no_number(lab, mechanism):
    """As of the sequences cut before it, whatever stands there."""
    replica = lab.replica(lab.spec(mechanism={"name": mechanism}))
    tokens_BN = torch.randint(20, (3, 16), generator=torch.Generator().manual_seed(0))
    whole = replica.objective.examples(tokens_BN, torch.Generator().manual_seed(1))
    kept = whole.map_tensors(lambda tensor: tensor[:, :10])
    assert kept.weights_BN.any()
    padded = whole._replace(
        weights_BN=torch.where(torch.arange(16) < 10, whole.weights_BN, 0.0),
        mask_BN=(torch.arange(16) < 10).expand(3, 16),
    )
    other = padded._replace(inputs_BN=torch.where(torch.arange(16) < 10, padded.inputs_BN, 1))
    expected, *found = (replica.activations.measure(each) for each in (kept, padded, other))
    for each in found:
        assert each.keys() == expected.keys()
        assert all(each[block] == pytest.approx(row, rel=1e-5) for block, row in expected.items())


def test_a_step_is_measured_with_dropout_seeded_by_the_step(lab):
    """And on two sequences, a quarter of five rounded up: as a training forward whose microbatches are those two."""
    found = []
    for microbatch in (5, 2):
        replica, seen = lab.replica(lab.spec(**DROPPED, batch=10, microbatch=microbatch)), []
        norm = replica.model.final_norm
        handle = norm.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output.detach()))
        replica.train_step(1)
        handle.remove()
        found.append(seen)
    (pass_BND, *_), (_, first_BND, second_BND, *_) = found
    assert len(found[0]) == 3 and len(found[1]) == 6
    assert torch.equal(pass_BND, first_BND) and not torch.equal(pass_BND, second_BND)


@pytest.mark.parametrize("optimizer", ["adamw", "cautious_adamw", "lamb", "radam"])
def test_rms_t_is_that_of_a_second_moment_kept_by_hand(lab, monkeypatch, optimizer):
    """In float64 from the gradients that the optimizer receives; ε is large enough to matter."""
    spec = lab.spec(steps=4, clip_norm=0.5, optimizer={"name": optimizer, "epsilon": 1e-4}, log={"activations": 1})
    replica = lab.replica(spec)
    names = {parameter: name for name, parameter in replica.model.named_parameters()}
    moments = {name: torch.zeros(1, dtype=torch.float64) for name in names.values()}
    clamped, beta2 = 0, 0.999
    for step in range(1, 5):
        gradients, real = {}, type(replica.optimizer).step

        def record(self, *args, gradients=gradients, real=real, **given):
            gradients.update({name: parameter.grad.double().clone() for parameter, name in names.items()})
            return real(self, *args, **given)

        with monkeypatch.context() as patch:
            patch.setattr(type(replica.optimizer), "step", record)
            replica.train_step(step)
        found = {row["block"]: row for row in replica.signals["activations"] if "rms_t" in row}
        assert set(found) == {block_of(name) for name in moments}
        parts = {block: [[], []] for block in found}
        for name, gradient in gradients.items():
            moments[name] = beta2 * moments[name] + (1 - beta2) * gradient**2
            corrected = moments[name] / (1 - beta2**step)
            ratios, tiny = parts[block_of(name)]
            ratios.append((gradient**2 / corrected.clamp(min=1e-8)).flatten())
            tiny.append((corrected.sqrt() < 1e-3).double().flatten())
        for block, (ratios, tiny) in parts.items():
            assert found[block]["rms_t"] == pytest.approx(torch.cat(ratios).mean().sqrt().item(), rel=1e-4)
            assert found[block]["tiny_share"] == pytest.approx(torch.cat(tiny).mean().item(), abs=2e-3)
            clamped += 0 < found[block]["tiny_share"] < 1
    assert clamped


def test_a_step_that_is_left_out_has_no_rms_t_and_infinity_is_null(lab, monkeypatch):
    replica = lab.replica(lab.spec(guards={"post_clip_norm": 1e-6}, log={"activations": 1}))
    replica.train_step(1)
    assert {row["block"] for row in replica.signals["activations"]} == {*LAYERS, STEP}
    replica.model.head.weight.data.fill_(math.inf)
    replica.train_step(2)
    (row,) = [row for row in replica.signals["activations"] if row["block"] == STEP]
    assert [row[key] for key in ("logit_rms", "logit_max", "log_z", "clipped_share")] == [None] * 4


@pytest.mark.parametrize(
    ("ffn", "activation"),
    [*product(("mlp", "glu"), ("relu", "gelu", "silu")), ("mlp", "relu2"), ("mlp", "gelu_tanh")],
)
def test_units_that_no_position_reaches_are_dead(lab, ffn, activation):
    replica = lab.replica(lab.spec(ffn={"name": ffn, "activation": activation, "bias": True}))
    layer = replica.model.blocks[1].ffn.get_submodule("gate" if ffn == "glu" else "hidden")
    # far below 0, and barely above: the square's slope of 2e-5 is small, but it is active
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.constant_(layer.bias, 1e-5 if activation == "relu2" else 0.5)
    layer.bias.data[:3] = -50.0
    layer.weight.data[3] = torch.linspace(-40, 40, layer.in_features)  # flat at some positions only: not dead
    found = replica.activations.measure(training_examples_of(replica))
    assert found["blocks.1"]["dead_share"] == pytest.approx(3 / layer.out_features)
    assert found["blocks.0"]["dead_share"] == 0


@pytest.mark.parametrize("mechanism", ["gla", "fox", "hgrn2", "gated_softmax"])
def test_gates_far_from_0_are_saturated(lab, mechanism):
    """σ′ falls below 0.01 at |x| = 4.585."""
    replica = lab.replica(lab.spec(mechanism={"name": mechanism}, objective={"name": "ar"}))
    mixer = replica.model.blocks[0].mixer
    gate = mixer.get_submodule("gate" if mechanism == "gated_softmax" else "forget")
    torch.nn.init.zeros_(gate.weight)
    torch.nn.init.constant_(gate.bias, 4.58)
    assert replica.activations.measure(training_examples_of(replica))["blocks.0"]["saturated_share"] == 0
    gate.bias.data[0] = -4.59
    found = replica.activations.measure(training_examples_of(replica))["blocks.0"]["saturated_share"]
    assert found == pytest.approx(1 / gate.out_features)


def test_a_mamba_step_is_saturated_where_its_decay_hardly_moves(lab):
    """By hand: d e^(−Δ)/dx = e^(−Δ) (1 − e^(−Δ)) in size, of Δ = softplus(x): below 0.01 at both ends."""
    replica = lab.replica(lab.spec(mechanism={"name": "mamba"}, objective={"name": "ar"}))
    steps = replica.model.blocks[0].mixer.dt_proj
    torch.nn.init.zeros_(steps.weight)
    delta = torch.full((steps.out_features,), 0.0102)  # 0.98985 · 0.01015 = 0.010047
    delta[:3] = torch.tensor([0.0100, 4.61, 4.58])  # 0.009851, 0.009853, 0.010149
    steps.bias.data = delta.double().expm1().log().float()
    found = replica.activations.measure(training_examples_of(replica))
    assert found["blocks.0"]["saturated_share"] == pytest.approx(2 / steps.out_features)


def test_a_router_that_sends_every_position_to_two_of_eight_experts_has_six_dead_ones(lab):
    replica = lab.replica(lab.spec(ffn="moe"))
    router, norm = replica.model.blocks[1].ffn.router, replica.model.blocks[1].ffn_norm
    torch.nn.init.zeros_(router.weight)
    torch.nn.init.zeros_(norm.weight)
    torch.nn.init.ones_(norm.bias)
    router.weight.data[:2] = 0.1  # logits of 1.6 wherever the input is 1, over 0
    found = replica.activations.measure(training_examples_of(replica))
    assert (found["blocks.1"]["expert_load_max"], found["blocks.1"]["dead_experts"]) == (4.0, 6)
    assert isinstance(found["blocks.1"]["dead_experts"], int)
    p = [math.exp(logit) / (2 * math.exp(1.6) + 6) for logit in (1.6,) * 2 + (0.0,) * 6]
    assert found["blocks.1"]["router_entropy"] == pytest.approx(-sum(each * math.log(each) for each in p), rel=1e-5)
    assert found["blocks.0"]["dead_experts"] < 6 and found["blocks.0"]["expert_load_max"] < 4


def training_examples_of(replica):
    spec = replica.spec
    return training_examples(spec, replica.corpus, replica.objective, "train", 1, seed=0, batch=spec.batch)


def test_the_interval_is_at_least_1(lab):
    with pytest.raises(ValueError, match=r"log.activations"):
        lab.spec(log={"activations": 0})


def test_capped_logits_are_logged_as_the_loss_sees_them(lab):
    capped = lab.spec(model=SIZE | {"logit_softcap": 0.05}, log={"activations": 4})
    plain = lab.spec(model=SIZE, log={"activations": 4})
    largest = {
        name: max(row["logit_max"] for row in rows(lab.train(spec)) if row["block"] == STEP)
        for name, spec in (("capped", capped), ("plain", plain))
    }
    assert 0 < largest["capped"] < 0.0501 < largest["plain"]
