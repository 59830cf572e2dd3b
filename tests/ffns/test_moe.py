"""`ffn=moe` against published blocks, slow loops and formulas by hand; its loss however a batch is cut; its choice."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stability.build import build_model, build_objective
from stability.ffns import build
from stability.ffns.moe import MixtureOfExperts
from stability.models.passes import computing_in
from stability.optimizers import kinds
from tests.mechanisms.checks import check_second_derivatives
from tests.reading import read_spec

WIDTH, HIDDEN, EXPERTS = 8, 12, 5
NO_LOSS = {"balance": 0.0, "z_loss": 0.0}


def mixture(*, scale: float = 1.0, width: int = WIDTH, **settings: Any) -> MixtureOfExperts:
    torch.manual_seed(3)
    ffn = build("moe", width=width, **{"experts": EXPERTS, "multiple": HIDDEN / WIDTH} | settings).double()
    with torch.no_grad():
        ffn.router.weight.mul_(scale)
    return ffn


def inputs(batch: int = 3, positions: int = 7) -> Tensor:
    return torch.randn(batch, positions, WIDTH, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def by_loops(ffn: MixtureOfExperts, x_D: Tensor) -> tuple[Tensor, list[float], list[int], float]:
    """(output, p, chosen experts, log Z) of one position, by Python floats and one call of an expert at a time."""
    config = ffn.config
    r = [math.fsum(w * x for w, x in zip(row, x_D.tolist(), strict=True)) for row in ffn.router.weight.tolist()]
    z = math.fsum(math.exp(each) for each in r)
    p = [math.exp(each) / z for each in r]
    chosen = sorted(range(len(p)), key=lambda index: -p[index])[: config.top_k]
    total = math.fsum(p[index] for index in chosen) if config.normalise else 1.0
    y_D = sum(p[index] / total * ffn.experts[index](x_D) for index in chosen) + sum(each(x_D) for each in ffn.shared)
    return y_D, p, chosen, math.log(z)


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 3, "normalise": False, "expert": "mlp"}, {"top_k": 1, "normalise": False, "shared": 2}]
)
def test_output_and_loss_are_those_of_loops_over_positions(settings, is_dense):
    ffn, x_BND = mixture(balance=0.3, z_loss=0.2, **settings), inputs()
    ffn.is_dense = is_dense
    found = ffn(x_BND)
    for x_ND, y_ND, loss in zip(x_BND, found.output, found.loss_B, strict=True):
        rows = [by_loops(ffn, x_D) for x_D in x_ND]
        torch.testing.assert_close(y_ND, torch.stack([row[0] for row in rows]), rtol=0, atol=1e-12)
        num, k = len(rows), ffn.config.top_k
        f = [EXPERTS / (k * num) * sum(index in row[2] for row in rows) for index in range(EXPERTS)]
        share = [math.fsum(row[1][index] for row in rows) / num for index in range(EXPERTS)]
        balance = math.fsum(one * two for one, two in zip(f, share, strict=True))
        z_loss = math.fsum(row[3] ** 2 for row in rows) / num
        assert loss.item() == pytest.approx(0.3 * balance + 0.2 * z_loss, rel=1e-12)


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize(("name", "normalise"), [("mixtral", True), ("olmoe", False)])
def test_it_is_the_published_block(name, normalise, is_dense):
    """With Mixtral's and OLMoE's blocks of transformers, weights copied; gradients to the input, too."""
    pytest.importorskip("transformers")
    from transformers import MixtralConfig, OlmoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

    size = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_experts_per_tok": 2}
    block: Any = (
        MixtralSparseMoeBlock(MixtralConfig(num_local_experts=EXPERTS, **size))
        if name == "mixtral"
        else OlmoeSparseMoeBlock(OlmoeConfig(num_experts=EXPERTS, norm_topk_prob=False, **size))
    )
    ffn, x_BND = mixture(normalise=normalise).float(), inputs().float().requires_grad_()
    ffn.is_dense = is_dense
    with torch.no_grad():
        block.gate.weight.copy_(ffn.router.weight)
        for index, expert in enumerate(ffn.experts):
            block.experts.gate_up_proj[index] = torch.cat([expert.gate.weight, expert.hidden.weight])
            block.experts.down_proj[index] = expert.out.weight
    found_BND, expected_BND = ffn(x_BND).output, block(x_BND)
    torch.testing.assert_close(found_BND, expected_BND, rtol=0, atol=1e-6)
    gradients = [torch.autograd.grad(each.sin().sum(), x_BND)[0] for each in (found_BND, expected_BND)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)


def test_the_balance_loss_is_transformers_over_k_for_each_sequence_with_its_padding():
    pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    ffn, x_BND = mixture(balance=1.0, z_loss=0.0), inputs()
    mask_BN = torch.arange(7) < torch.tensor([7, 4, 1])[:, None]
    for mask in (None, mask_BN):
        for index, loss in enumerate(ffn(x_BND, mask_BN=mask).loss_B):
            valid = None if mask is None else mask[index : index + 1].long()
            theirs: Any = load_balancing_loss_func((ffn.router(x_BND[index]),), EXPERTS, 2, valid)
            assert loss.item() == pytest.approx(theirs.item() / 2, rel=1e-5), index
    moved_BND = torch.where(mask_BN[..., None], x_BND, 7.0)
    assert torch.equal(ffn(moved_BND, mask_BN=mask_BN).loss_B, ffn(x_BND, mask_BN=mask_BN).loss_B)


def test_a_model_hands_its_padding_to_the_experts(lab):
    spec = lab.spec(ffn={"name": "moe", "balance": 1.0})
    model = build_model(spec, 8).double()
    tokens_BN, mask_BN = torch.randint(8, (2, 6)), torch.arange(6) < torch.tensor([6, 3])[:, None]
    cut = model(tokens_BN[1:, :3], losses=True).loss_B
    torch.testing.assert_close(model(tokens_BN, mask_BN, losses=True).loss_B[1:], cut, rtol=1e-10, atol=0)


def test_the_balance_loss_is_least_at_uniform_probabilities():
    """At its weight there; its gradient pulls a busy expert's logit down and an idle one's up."""
    ffn = mixture(balance=0.5, z_loss=0.0, top_k=2)
    with torch.no_grad():
        ffn.router.weight.zero_()
    assert ffn(inputs()).loss_B.tolist() == pytest.approx([0.5] * 3)
    crowded = mixture(balance=0.5, z_loss=0.0, top_k=2, scale=0.0)
    with torch.no_grad():
        crowded.router.weight[:2] = 0.1  # both wherever the sum of x is positive
    x_BND = inputs().abs()
    loss = crowded(x_BND).loss_B.sum()
    assert loss > 1.5
    (slope_ED,) = torch.autograd.grad(loss, crowded.router.weight)
    assert (slope_ED[:2] > 0).all() and (slope_ED[2:] < 0).all()


@pytest.mark.parametrize("expert", ["mlp", "glu"])
def test_one_expert_is_the_plain_network_to_the_bit(expert):
    one, plain = ({"experts": 1, "top_k": 1, "expert": expert}, {})
    modules = []
    for name, settings in (("moe", one), (expert, plain)):
        torch.manual_seed(0)
        modules.append(build(name, width=WIDTH, **settings))
    x_BND = inputs().float()
    for is_dense in (True, False):
        modules[0].is_dense = is_dense
        assert torch.equal(modules[0](x_BND).output, modules[1](x_BND))


def test_every_position_meets_its_experts_however_crowded_they_are():
    """All rows choose the same two experts of five: none is dropped, and three experts learn nothing."""
    ffn, x_BND = mixture(**NO_LOSS, scale=0.0), inputs().abs()
    with torch.no_grad():
        ffn.router.weight[1:3] = torch.tensor([[2.0], [1.0]], dtype=torch.float64)
    chosen_BNE = ffn.choose(ffn.router(x_BND))
    assert chosen_BNE.sum((0, 1)).tolist() == [0, 21, 21, 0, 0]
    for is_dense in (True, False):
        ffn.is_dense = is_dense
        y_BND = ffn(x_BND).output
        assert (y_BND.abs().amax(-1) > 0).all()
        ffn.zero_grad()
        y_BND.square().sum().backward()
        assert [bool(each.out.weight.grad.any()) for each in ffn.experts] == [False, True, True, False, False]
    routing = ffn.describe_routing(ffn.router(x_BND).flatten(0, 1))
    assert (routing["expert_load_max"].item(), routing["dead_experts"].item()) == (2.5, 3)
    p_BNE = ffn.router(x_BND).softmax(-1)
    assert routing["router_entropy"].item() == pytest.approx(-(p_BNE * p_BNE.log()).sum(-1).mean().item())


def test_the_experts_have_draws_of_their_own_and_as_many_active_weights_as_one_network():
    ffn, plain = build("moe", width=24, experts=6, top_k=2, shared=2), build("glu", width=24)
    drawn = [each.out.weight for each in (*ffn.experts, *ffn.shared)]
    assert not any(torch.equal(one, two) for index, one in enumerate(drawn) for two in drawn[:index])
    whole, router = (sum(each.numel() for each in module.parameters()) for module in (ffn, ffn.router))
    assert whole - ffn.num_idle - router == sum(each.numel() for each in plain.parameters())
    assert whole - router == 2 * (whole - ffn.num_idle - router)


def test_the_margin_is_the_least_change_of_a_logit_that_changes_the_choice():
    ffn, x_BND = mixture(), inputs()
    margin, chosen_BNE = float(ffn.margin(x_BND)), ffn.choose(r_BNE := ffn.router(x_BND))
    assert 0 < margin < 1
    for share, changes in ((0.999, False), (1.001, True)):
        moved = [r_BNE + share * margin * torch.eye(EXPERTS, dtype=r_BNE.dtype)[index] for index in range(EXPERTS)]
        assert any(not torch.equal(ffn.choose(each), chosen_BNE) for each in moved) == changes
    assert math.isinf(mixture(top_k=EXPERTS).margin(x_BND))
    near_BND = inputs()
    near_BND[1, 2] = 0.0  # all logits equal, at a position that is padding
    mask_BN = torch.ones(3, 7, dtype=torch.bool)
    mask_BN[1, 2] = False
    assert float(ffn.margin(near_BND)) == 0 < margin <= float(ffn.margin(near_BND, mask_BN=mask_BN))


class WithItsLoss(nn.Module):
    """A mixture with its loss added to the output, in the form that the checks of mechanisms take."""

    piecewise_smooth = MixtureOfExperts.piecewise_smooth

    def __init__(self, ffn: MixtureOfExperts):
        super().__init__()
        self.ffn, self.margin = ffn, ffn.margin

    def forward(self, x_BND: Tensor, mask_BN: Tensor | None = None) -> Tensor:
        found = self.ffn(x_BND, mask_BN=mask_BN)
        return found.output + found.loss_B[:, None, None]


@pytest.mark.parametrize("settings", [{}, {"top_k": 1, "normalise": False, "shared": 1}])
def test_second_derivatives_are_those_of_the_piece(settings):
    check_second_derivatives(WithItsLoss(mixture(width=16, balance=0.3, z_loss=0.2, **settings)))


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_microbatches_add_up_to_the_batch(lab, rows):
    spec = lab.spec(ffn={"name": "moe", "balance": 0.5, "z_loss": 0.1}, objective={"name": "ar"}, batch=6)
    model, objective = build_model(spec, 8).double(), build_objective(spec, 8)
    tokens_BN = torch.randint(8, (6, 17), generator=torch.Generator().manual_seed(1))
    examples = objective.examples(tokens_BN, torch.Generator().manual_seed(2))
    count, found = objective.count(examples, torch.float64), []
    for parts in ([examples], examples.split(rows)):
        total = sum(objective.training_loss(model, part).total for part in parts) / count
        found.append(torch.autograd.grad(total, list(model.parameters())))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-10)


def test_the_router_stays_in_float32_in_a_bfloat16_run():
    ffn, x_BND = mixture(**NO_LOSS).float(), inputs().float()
    exact_BNE = ffn.router(x_BND)
    with computing_in("bf16", "cpu"):
        assert torch.equal(ffn.router(x_BND), exact_BNE)
        assert ffn(x_BND).output.dtype == torch.bfloat16


def test_an_optimizer_of_matrices_has_the_experts_and_not_the_router(lab):
    found = kinds(build_model(lab.spec(ffn="moe"), 8))
    assert found["blocks.0.ffn.router.weight"] == "rest"
    assert {found[f"blocks.0.ffn.experts.{index}.{name}.weight"] for index in range(8) for name in ("gate", "out")} == {
        "matrices"
    }


def test_two_experts_part_data_of_two_modes():
    """y = x in one mode and −x in the other: one expert for each is the best routing, and training finds it."""
    torch.manual_seed(0)
    ffn = build("moe", width=4, experts=2, top_k=1, normalise=False, expert="mlp", multiple=2.0, balance=0.1)
    with torch.no_grad():
        ffn.router.weight[:, 0] = 0.0  # blind to the mode, as no random start is
    optimizer = torch.optim.Adam(ffn.parameters(), 0.02)
    mode_BN = torch.arange(64).remainder(2)[None]
    x_BND = torch.randn(1, 64, 4)
    x_BND[..., 0] = 4.0 * (2 * mode_BN - 1)
    target_BND = torch.where(mode_BN[..., None] == 1, x_BND, -x_BND)
    assert 0.3 < (ffn.choose(ffn.router(x_BND)).argmax(-1) == mode_BN).float().mean() < 0.7
    for _ in range(200):
        optimizer.zero_grad()
        found = ffn(x_BND)
        ((found.output - target_BND).square().mean() + found.loss_B.mean()).backward()
        optimizer.step()
    chosen_BN = ffn.choose(ffn.router(x_BND)).argmax(-1)
    assert (chosen_BN == mode_BN).float().mean().item() in (0.0, 1.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ffn.top_k=1"], r"ffn.top_k=1 makes every weight 1 where ffn.normalise=true.*add ffn.normalise=false"),
        (["ffn.top_k=9"], r"ffn.top_k=9 chooses among ffn.experts=8; give at most as many"),
        (["ffn.expert=moe"], r"ffn.expert='moe': input should be 'glu' or 'mlp'"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(words, message):
    with pytest.raises(ValueError, match=message):
        read_spec("sweep", ["ffn=moe", *words])
    with pytest.raises(ValueError, match="ffn=moe has a loss of its own, which a tokenizer does not add; use ffn=mlp"):
        read_spec("train_tokenizer", ["ffn=moe"])
