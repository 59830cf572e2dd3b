"""The preset vit_small_spt is the ViT-small of the AttentionX paper: the same logits from the same weights, as many
parameters, the same start."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stability.build import build_optimizer
from stability.config.identity import run_id
from stability.mechanisms import build
from stability.models.images import ImageFormat
from tests.mechanisms import checks
from tests.models.parity import ours, renamed, shaken, spec_of, twice_in_training
from tests.models.public import vit_small
from tests.reading import read_spec
from tests.sizes import count_parameters

IMAGE = ImageFormat(8, 12, 3, 5, (100.0,) * 3, (50.0,) * 3)
CIFAR = ImageFormat(32, 32, 3, 10, (100.0,) * 3, (50.0,) * 3)
CHANGES = {
    "model": {
        "name": "tiny",
        "layers": 3,
        "width": 16,
        "heads": 2,
        "positions": 6,
        "ffn_multiple": 2.0,
        "init": "torch",
        "mixer_bias": "out",
    },
    "objective": {"name": "classify", "pool": "cls", "patches": "shifted", "position_std": 1.0},
    "data": "images",
    "position": "none",
    "mechanism": {"name": "sa", "mask_diagonal": True, "temperature": "learned"},
}
WORDS = [
    "data=images",
    "objective=classify",
    "objective.pool=cls",
    "objective.patches=shifted",
    "objective.position_std=1",
    "position=none",
    "mechanism=sa",
    "mechanism.sa.mask_diagonal=true",
    "mechanism.sa.temperature=learned",
]


def theirs(width=16, **changes):
    size = {"dim": width, "depth": 3, "heads": 2, "mlp_dim": 2 * width, "dim_head": width // 2}
    return vit_small.ViT((8, 12), 4, 5, **size, **changes)


def named(model):
    """The public weights under this project's names, in its shapes: there some have an axis of one more, or of none."""
    state = renamed(model.state_dict(), vit_small.NAMES)
    state["embedding.positions_ND"] = state["embedding.positions_ND"][0]
    state["embedding.class_D"] = state["embedding.class_D"][0, 0]
    return {name: value.reshape(1) if value.ndim == 0 else value for name, value in state.items()}


def test_the_same_weights_give_the_same_logits():
    public = shaken(theirs())
    model = ours(IMAGE._asdict(), **CHANGES).double()
    model.load_state_dict(named(public))
    images_BHWC = torch.randn(4, 8, 12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        expected = public(images_BHWC.permute(0, 3, 1, 2))
        assert expected.std() > 0.5
        torch.testing.assert_close(model(images_BHWC)[:, 0], expected, rtol=0, atol=1e-10)


def test_in_training_mode_the_same_draws_drop_the_same_numbers():
    """Where the preset says: after the embedding, in the MLP and at each branch's output, not at attention's weights."""
    (preset,) = read_spec("sweep", ["model=vit_small_spt", *WORDS, "lr=1e-4", "seeds=1"]).expand("f" * 64)
    dropped = {key: getattr(preset.model, key) for key in ("dropout", "dropout_at")}
    public = shaken(theirs(dropout=0.1))
    model = ours(IMAGE._asdict(), **CHANGES | {"model": CHANGES["model"] | dropped}).double()
    model.load_state_dict(named(public))
    images_BHWC = torch.randn(4, 8, 12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected, found = twice_in_training(
        lambda: public.train()(images_BHWC.permute(0, 3, 1, 2)), lambda: model.train()(images_BHWC)[:, 0]
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert not torch.allclose(model.eval()(images_BHWC)[:, 0], expected)


def test_the_preset_has_its_number_of_parameters():
    (spec,) = read_spec("sweep", ["model=vit_small_spt", *WORDS, "lr=1e-4", "seeds=1"]).expand("f" * 64)
    with torch.device("meta"):
        public = vit_small.ViT((32, 32), 4, 10, dim=512, depth=6, heads=8, mlp_dim=512)
    found = count_parameters(spec, CIFAR._asdict())
    assert found == sum(value.numel() for value in public.parameters()) == 9_622_512


def test_weights_start_as_its_code_draws_them():
    changes = CHANGES | {"model": CHANGES["model"] | {"width": 64}}
    torch.manual_seed(0)
    public, found = named(theirs(64)), ours(IMAGE._asdict(), **changes).state_dict()
    assert set(found) == set(public)
    for name, value in found.items():
        if value.numel() == 1 or not public[name].std():
            torch.testing.assert_close(value, public[name], msg=name)
        elif value.numel() > 60:
            assert value.std().item() == pytest.approx(public[name].std().item(), rel=0.25), name
    assert found["blocks.0.mixer.log_temperature"].item() == pytest.approx(-0.5 * torch.tensor(32.0).log().item())


@pytest.mark.parametrize("name", ["sa", "attentionx"])
@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
def test_a_learned_temperature_keeps_the_contract_and_begins_where_it_is_fixed(name, direction):
    shape = {"width": checks.WIDTH, "heads": checks.HEADS, "direction": direction}

    def made(temperature="learned"):
        return build(name, **shape, mask_diagonal=True, temperature=temperature)

    for check in (
        checks.check_shape_and_dtype,
        checks.check_padding_is_unread,
        checks.check_wholly_padded_is_finite,
        checks.check_second_derivatives,
        checks.check_degenerate_inputs,
    ):
        check(checks.build_seeded(made))
    layer = checks.build_seeded(made).double()
    fixed = checks.build_seeded(lambda: made("fixed")).double()
    torch.testing.assert_close(layer(checks.inputs()), fixed(checks.inputs()), rtol=0, atol=1e-7)
    with torch.no_grad():
        layer.log_temperature.add_(0.7)
    checks.check_weights_reproduce_forward(layer)
    assert not torch.allclose(layer(checks.inputs()), fixed(checks.inputs()))


def test_weight_decay_does_not_reach_the_temperature():
    spec = spec_of(**CHANGES | {"optimizer": {"name": "adamw", "weight_decay": 0.1}})
    model = ours(IMAGE._asdict(), **CHANGES)
    decay = {
        id(p): group["weight_decay"] for group in build_optimizer(spec, model).param_groups for p in group["params"]
    }
    found = {name: decay[id(p)] for name, p in model.named_parameters()}
    assert {name.rsplit(".", 1)[-1] for name, value in found.items() if not value} == {"log_temperature"}
    assert set(found.values()) == {0.0, 0.1}


def test_shifted_patches_hold_the_pixels_beside_them():
    """By a loop over patches and pixels; what is beyond the image is 0."""
    embedding = shaken(ours(IMAGE._asdict(), **CHANGES)).embedding
    images = torch.randn(2, 8, 12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def pixel(row, column):
        inside = 0 <= row < 8 and 0 <= column < 12
        return images[1, row, column] if inside else torch.zeros(3, dtype=torch.float64)

    found = embedding(images)[1]
    torch.testing.assert_close(found[0], embedding.class_D + embedding.positions_ND[0])
    for patch in range(6):
        top, left = 4 * (patch // 3), 4 * (patch % 3)
        numbers = torch.cat(
            [
                pixel(top + i + down, left + j + right)
                for i in range(4)
                for j in range(4)
                for down, right in ((0, 0), (0, -1), (0, 1), (-1, 0), (1, 0))
            ]
        )
        normed = nn.functional.layer_norm(numbers, (240,), embedding.norm.weight, embedding.norm.bias)
        expected = embedding.patches.weight @ normed + embedding.patches.bias + embedding.positions_ND[patch + 1]
        torch.testing.assert_close(found[patch + 1], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("part", "field", "neutral", "other"),
    [
        ("objective", "pool", "mean", "cls"),
        ("objective", "patches", "plain", "shifted"),
        ("objective", "position_std", 0.02, 1.0),
        ("mechanism", "temperature", "fixed", "learned"),
    ],
)
def test_settings_left_alone_are_in_no_id(part, field, neutral, other):
    base = {"data": "images", "model": CHANGES["model"] | {"positions": 64}, "objective": {"name": "classify"}}
    base |= {"mechanism": {"name": "sa"}}

    def id_of(**settings):
        return run_id(spec_of(**base | {part: base[part] | settings}))

    assert id_of(**{field: neutral}) == id_of() != id_of(**{field: other})
