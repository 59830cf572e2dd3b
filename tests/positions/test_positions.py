"""Every registered position scheme keeps the contract, within every mechanism and in whole models; each is held to what
shares no code with it."""

from __future__ import annotations

import json
import math

import pytest
import torch

from stability.build import build_model
from stability.config.identity import essence
from stability.config.parse import parse_run
from stability.config.parts import validate_settings
from stability.curvature import directional
from stability.mechanisms._base import MixerShape
from stability.models.position import Decays, Rope, decayed_products
from stability.positions import AbstractPosition
from stability.registry import Registry
from tests.changes import other_values, settings_of_family
from tests.identity.golden_ids import BASE
from tests.mechanisms.names import RECURRENT
from tests.mechanisms.oracles import cross_consensus, rotated
from tests.reading import read_spec

NAMES = Registry("positions").names()
# what mechanisms need that turn nothing of themselves
TURNED: dict[str, dict[str, str]] = {"fox": {"rope": "absolute"}, "titans": {"form": "gated_attention"}}
TURN_NOTHING = ("mix", *(name for name in RECURRENT if name not in ("retnet", *TURNED)))
MECHANISMS = [name for name in Registry("mechanisms").names(cross=False, trainable=True) if name not in TURN_NOTHING]
WIDTH, HEADS, LENGTH = 16, 2, 9


def model_of(lab, position, **changes):
    model = build_model(lab.spec(position=position, **changes), 8).double()
    with torch.no_grad():  # a bias-free first layer hides nothing: every parameter is moved
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def tokens(length: int, rows: int = 2) -> torch.Tensor:
    return torch.randint(8, (rows, length), generator=torch.Generator().manual_seed(2))


def layer_of(name: str, turn: Rope | None, **settings) -> torch.nn.Module:
    torch.manual_seed(0)
    mechanism = Registry("mechanisms").load(name)
    direction = "bidirectional" if mechanism.cross or "bidirectional" in mechanism.directions else "causal"
    shape = MixerShape(WIDTH, HEADS, direction, rope=turn)
    return mechanism.build(validate_settings("mechanisms", name, settings), shape).double()


@pytest.mark.parametrize("name", NAMES)
def test_it_is_of_the_family_and_keeps_shape_and_dtype(lab, name):
    assert issubclass(Registry("positions").load(name), AbstractPosition)
    model = model_of(lab, name)
    logits = model(tokens(12))
    assert (logits.shape[:2], logits.dtype) == ((2, 12), torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_builds_the_same_model_and_saved_parameters_are_all_there_is(lab, name):
    one, two = model_of(lab, name), build_model(lab.spec(position=name, seed=1), 8).double()
    again = build_model(lab.spec(position=name, seed=1), 8).double()
    assert torch.equal(two(tokens(12)), again(tokens(12)))
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(tokens(12)), two(tokens(12)))


@pytest.mark.parametrize("name", NAMES)
def test_taylor_and_double_backward_agree_along_a_direction(lab, name):
    model = model_of(lab, name)
    params = {key: value.detach() for key, value in model.named_parameters()}
    generator = torch.Generator().manual_seed(3)
    direction = {key: torch.randn(p.shape, generator=generator, dtype=p.dtype) for key, p in params.items()}

    def loss(p):
        return torch.func.functional_call(model, p, (tokens(12),)).square().mean()

    exact = directional(loss, params, direction, "double_backward")
    ours = directional(loss, params, direction, "taylor")
    assert ours.method == "taylor"
    assert ours.curvature == pytest.approx(exact.curvature, rel=1e-9)


@pytest.mark.parametrize(("name", "key"), settings_of_family("positions"))
def test_every_setting_changes_what_the_model_gives(lab, name, key):
    usual = build_model(lab.spec(position=name), 8).double()(tokens(12))
    for value in other_values("positions", name, key):
        changed = build_model(lab.spec(position={"name": name, key: value}), 8).double()(tokens(12))
        assert not torch.allclose(changed, usual, rtol=0, atol=1e-9), (key, value)


@pytest.mark.parametrize("base", [10_000.0, 100.0])
def test_a_rotation_of_any_base_multiplies_complex_numbers(base):
    u_NK = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = Registry("positions").load("rope").rope(validate_settings("positions", "rope", {"base": base}))(u_NK)
    torch.testing.assert_close(turned, rotated(u_NK, base=base), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_rotates_by_the_base_that_it_is_given(name):
    x_BND = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    settings = TURNED.get(name, {})
    usual, other, unturned = (layer_of(name, rope, **settings)(x_BND) for rope in (Rope(), Rope(50.0), None))
    assert torch.equal(usual, layer_of(name, Rope(10_000.0), **settings)(x_BND))
    for one, two in ((usual, other), (usual, unturned), (other, unturned)):
        assert not torch.allclose(one, two, rtol=0, atol=1e-9)


@pytest.mark.parametrize("base", [10_000.0, 50.0, None])
@pytest.mark.parametrize("name", ["sa", "ca"])
def test_attention_compares_queries_and_keys_turned_as_complex_numbers(name, base):
    x_ND, context_JD = (
        torch.randn(length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
        for length in (6, 6 if name == "sa" else 4)
    )
    context_JD = x_ND if name == "sa" else context_JD
    layer = layer_of(name, None if base is None else Rope(base))
    if name == "sa":
        q, k, v = layer.qkv(x_ND).chunk(3, -1)
    else:
        q, (k, v) = layer.q(x_ND), layer.kv(context_JD).chunk(2, -1)
    heads = []
    for head in range(HEADS):
        part = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
        turned = [each[:, part] if base is None else rotated(each[:, part], base=base) for each in (q, k)]
        heads.append((turned[0] @ turned[1].T / (WIDTH // HEADS) ** 0.5).softmax(-1) @ v[:, part])
    found = layer(x_ND[None], *([] if name == "sa" else [context_JD[None]]))[0]
    torch.testing.assert_close(found, layer.out(torch.cat(heads, -1)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("graph", ["complete", "cycle"])
def test_self_consensus_without_rotation_is_that_of_its_own_setting(graph):
    x_BND = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = layer_of("sc", Rope(), graph=graph, rope="none")(x_BND)
    for own in ("absolute", "relative", "none"):
        layer = layer_of("sc", None, graph=graph, rope=own)
        assert torch.equal(layer(x_BND), expected)
        assert layer.rotation == "none"


@pytest.mark.parametrize("name", ["ca", "cc"])
def test_a_cross_mechanism_without_rotation_is_that_of_its_own_setting(name):
    x_BND, context_BJD = (
        torch.randn(2, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
        for length in (6, 4)
    )

    def given(rope: Rope | None, own: str) -> torch.Tensor:
        torch.manual_seed(0)
        config = validate_settings("mechanisms", name, {"rope": own})
        return (
            Registry("mechanisms")
            .load(name)
            .build(config, MixerShape(WIDTH, HEADS, rope=rope))
            .double()(x_BND, context_BJD)
        )

    assert torch.equal(given(None, "absolute"), given(Rope(), "none"))
    assert not torch.allclose(given(Rope(), "absolute"), given(Rope(50.0), "absolute"), rtol=0, atol=1e-9)


def test_cross_consensus_turns_both_sides_by_the_base_that_it_is_given():
    x_BND, context_BJD = (
        torch.randn(2, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
        for length in (5, 4)
    )
    layer = layer_of("cc", Rope(50.0), graph="complete")
    edges = {(i, j) for i in range(5) for j in range(4)}
    expected = cross_consensus(layer, x_BND, context_BJD, [edges] * 2, base=50.0)
    torch.testing.assert_close(layer(x_BND, context_BJD), expected, rtol=0, atol=1e-10)


def test_without_positions_a_bidirectional_model_is_equivariant_to_their_order(lab):
    order = torch.randperm(12, generator=torch.Generator().manual_seed(4))
    for name in NAMES:
        model = model_of(lab, name, mechanism="sa", objective="mlm")
        one, two = model(tokens(12))[:, order], model(tokens(12)[:, order])
        assert torch.allclose(one, two, rtol=0, atol=1e-10) is (name == "none"), name


def test_learned_positions_add_the_row_of_a_table_to_each_embedding(lab):
    model = model_of(lab, "learned")
    table, words = model.embedding.positions_ND.tolist(), model.embedding.embedding.weight.tolist()
    found = model.embedding(tokens(5))
    assert len(table) == lab.spec().model.positions
    for row, ids in enumerate(tokens(5).tolist()):
        for position, token in enumerate(ids):
            expected = [a + b for a, b in zip(words[token], table[position], strict=True)]
            assert found[row, position].tolist() == pytest.approx(expected, rel=1e-15)
    with pytest.raises(ValueError, match=r"table of \d+ positions, and a sequence has"):
        model(tokens(lab.spec().model.positions + 1))


def test_the_table_starts_small_whatever_the_embedding_does(lab):
    spec = lab.spec(position={"name": "learned", "std": 0.5})
    wide = spec.model_copy(update={"model": spec.model.model_copy(update={"embedding_std": 0.01, "positions": 512})})
    table = build_model(wide, 8).embedding.positions_ND
    assert float(table.std()) == pytest.approx(0.5, rel=0.05)


def test_a_context_before_the_sequence_has_places_of_its_own(lab):
    """Without rotations a cross mechanism tells the order of its context by the table alone."""
    objective = {"name": "mlm", "context": 7}
    context, places = tokens(7), torch.randperm(7, generator=torch.Generator().manual_seed(4))
    for name, reads_order in (("learned", True), ("none", False)):
        model = model_of(lab, name, objective=objective, cross="ca")
        one, two = (model(tokens(6), context_BJ=each) for each in (context, context[:, places]))
        assert torch.allclose(one, two, rtol=0, atol=1e-10) is not reads_order
    longer = build_model(lab.spec(position="learned", objective={"name": "mlm", "context": 99}, cross="ca"), 8)
    assert len(longer.embedding.positions_ND) == 99


def test_images_that_learn_a_vector_of_each_patch_are_given_no_second_one():
    words = ["study=attentionx_vit_mini", "position=learned"]
    with pytest.raises(ValueError, match="objective=classify adds a learned vector of each position itself") as caught:
        read_spec("sweep", words)
    assert len(str(caught.value).splitlines()) == 1
    assert read_spec("sweep", [words[0], "position=none"]).position.name == "none"


def test_it_is_chosen_on_the_command_line_and_today_s_is_not_in_an_id():
    spec = read_spec("sweep", ["position=rope", "position.base=500"])
    assert (spec.position.name, spec.position.settings.base) == ("rope", 500.0)

    def written(**changes):
        return json.loads(essence(parse_run(BASE | changes)))

    assert "position" not in written() and "position" not in written(position={"name": "rope", "base": 10_000.0})
    assert written(position={"name": "rope", "base": 500.0})["position"] == {"name": "rope", "base": 500.0}
    assert written(position="none")["position"] == "none"
    assert written(position="learned")["position"] == {"name": "learned", "std": 0.02}


# --- hope ---------------------------------------------------------------------------------------------------------


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def literal(q_K, k_K, m: int, n: int, base: float, damping: float) -> float:
    """The paper's product of e^(−mθ′) B(θ, m) q and e^(nθ′) B(θ, −n) k, pair by pair."""
    total, half = 0.0, len(q_K) // 2
    for pair in range(half):
        theta = base ** (-2 * pair / len(q_K))
        sides = []
        for (one, two), angle, size in (
            ((q_K[pair], q_K[pair + half]), m * theta, math.exp(-m * damping * theta)),
            ((k_K[pair], k_K[pair + half]), -n * theta, math.exp(n * damping * theta)),
        ):
            c, s = math.cosh(angle), math.sinh(angle)
            sides.append((size * (c * one + s * two), size * (s * one + c * two)))
        total += sides[0][0] * sides[1][0] + sides[0][1] * sides[1][1]
    return total


@pytest.mark.parametrize(("base", "damping"), [(10_000.0, 1.0), (10.0, 1.5)])
def test_hope_is_the_paper_s_product_where_its_exponentials_are_still_small(base, damping):
    q_NK, k_NK = numbers(6, 8), numbers(6, 8, seed=1)
    found_NN = Decays(base, damping)(q_NK, k_NK)
    for m in range(6):
        for n in range(m + 1):
            expected = literal(q_NK[m].tolist(), k_NK[n].tolist(), m, n, base, damping)
            assert found_NN[m, n].item() == pytest.approx(expected, rel=1e-10, abs=1e-11), (m, n)
    assert torch.allclose(found_NN, Decays(base, damping)(k_NK, q_NK).mT, rtol=0, atol=1e-12), "of |m − n|"


def test_hope_in_blocks_is_the_sum_over_entries_of_whole_matrices_of_decays():
    """More positions than two blocks, by distances of all pairs at once; in float32, too."""
    q_NK, k_NK = numbers(75, 6), numbers(75, 6, seed=1)
    rate_K = torch.tensor([0.0, 1e-3, 0.05, 0.7, 3.0, 40.0], dtype=torch.float64)
    distance_NN = (torch.arange(75)[:, None] - torch.arange(75)).abs()
    expected_NN = sum(torch.outer(q_NK[:, c], k_NK[:, c]) * torch.exp(-rate_K[c] * distance_NN) for c in range(6))
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        found_NN = decayed_products(*(each.to(dtype) for each in (q_NK, k_NK, rate_K)))
        torch.testing.assert_close(found_NN.double(), expected_NN, rtol=0, atol=limit)
    assert torch.allclose(decayed_products(q_NK, k_NK, 0 * rate_K), q_NK @ k_NK.T, rtol=0, atol=1e-12)


def test_hope_is_the_same_at_every_shift():
    q_NK, k_NK = numbers(40, 8), numbers(40, 8, seed=1)
    whole_NN = Decays()(torch.cat([numbers(57, 8, seed=2), q_NK]), torch.cat([numbers(57, 8, seed=3), k_NK]))
    torch.testing.assert_close(whole_NN[57:, 57:], Decays()(q_NK, k_NK), rtol=0, atol=1e-10)


def test_hope_is_finite_over_8192_positions_and_so_is_its_gradient():
    q_NK, k_NK = (numbers(8192, 2, seed=seed).float().requires_grad_() for seed in (0, 1))
    found_NN = Decays(damping=2.0)(q_NK, k_NK)
    assert found_NN.isfinite().all() and found_NN[0, 100:].abs().max() < 1e-6 < found_NN.diagonal().abs().max()
    assert all(each.isfinite().all() for each in torch.autograd.grad(found_NN.sum(), (q_NK, k_NK)))


@pytest.mark.parametrize(
    "settings", [{}, {"mask_diagonal": True, "softcap": 3.0}, {"kv_heads": 1, "qk_norm": "rmsnorm"}]
)
@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_attention_with_hope_is_the_softmax_of_its_logits(direction, settings):
    torch.manual_seed(0)
    mechanism, decays = Registry("mechanisms").load("sa"), Decays(100.0, 1.25)
    config = validate_settings("mechanisms", "sa", settings)
    layer = mechanism.build(config, MixerShape(WIDTH, HEADS, direction, rope=None, decays=decays)).double()
    x_BND = numbers(2, LENGTH, WIDTH).requires_grad_()
    mask_BN = torch.arange(LENGTH) < torch.tensor([LENGTH, 5])[:, None]
    y_BND = layer(x_BND, mask_BN=mask_BN)
    a_BHNN = layer.weights(x_BND, mask_BN=mask_BN)
    expected_BND = layer.joined(layer.mixed(a_BHNN, layer.values(x_BND)), x_BND)
    torch.testing.assert_close(y_BND[mask_BN], expected_BND[mask_BN], rtol=0, atol=1e-12)
    q_BHNK, k_BHNK, _ = layer.split(layer.qkv(x_BND))
    z = literal(q_BHNK[0, 1, 4].tolist(), k_BHNK[0, 1, 2].tolist(), 4, 2, 100.0, 1.25) / math.sqrt(WIDTH // HEADS)
    cap = settings.get("softcap")
    assert layer.logits(q_BHNK, k_BHNK)[0, 1, 4, 2].item() == pytest.approx(cap * math.tanh(z / cap) if cap else z)
    (gradient_BND,) = torch.autograd.grad(layer(x_BND)[:, 4].sum(), x_BND)
    reached_N = [bool(each) for each in gradient_BND[0].abs().sum(-1) > 0]
    assert reached_N == [other <= 4 or direction == "bidirectional" for other in range(LENGTH)]


@pytest.mark.parametrize(
    ("changes", "at"),
    [
        ({"mechanism": "sw"}, "mechanism=sw"),
        ({"mechanism": "mix"}, "mechanism=mix"),
        ({"objective": {"name": "mlm", "context": 16}, "cross": "ca"}, "cross=ca"),
    ],
)
def test_what_reads_no_decays_is_refused_beside_hope_in_a_line(changes, at):
    with pytest.raises(
        ValueError, match=f"position=hope decays the logits of mechanism=sa.*and {at} does not"
    ) as caught:
        parse_run(BASE | {"position": "hope"} | changes)
    assert len(str(caught.value).splitlines()) == 1
    whole = {"name": "mix", "pattern": ["sa", "sa"]}
    assert parse_run(BASE | {"position": "hope", "mechanism": whole}).position.name == "hope"


PLUGIN = """
import torch
from torch import nn
from stability.config import Settings
from stability.positions import AbstractPosition

class Ramp(nn.Module):
    def __init__(self, embedding, slope):
        super().__init__()
        self.embedding, self.slope = embedding, slope

    def forward(self, inputs):
        x_BND = self.embedding(inputs)
        return x_BND + self.slope * torch.arange(x_BND.shape[1], dtype=x_BND.dtype)[:, None]

class RampPosition(AbstractPosition):
    class Config(Settings):
        slope: float = 0.125
    adds = True

    @classmethod
    def placed(cls, config, embedding, width, num_positions):
        return Ramp(embedding, config.slope)

EXPORT = RampPosition
"""


def test_a_position_scheme_of_one_s_own_is_a_plugin(tmp_path, monkeypatch, lab):
    (tmp_path / "ramp.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("stability.registry._plugins", {})
    spec = read_spec("sweep", ["plugins=[ramp]", "position=ramp", "position.slope=0.5"])
    assert (spec.position.name, spec.position.settings.slope) == ("ramp", 0.5)
    run = lab.spec(plugins=["ramp"], position={"name": "ramp", "slope": 0.5})
    embedding = build_model(run, 8).embedding
    difference = embedding(tokens(4)) - embedding.embedding(tokens(4))
    assert torch.allclose(difference[0, :, 0], torch.tensor([0.0, 0.5, 1.0, 1.5]), atol=1e-6)
    assert lab.train(run).status()["state"] in ("stable", "plateaued")
