from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from stability.config.parts import part, validate_settings
from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from stability.mechanisms.sw import SlidingWindowAttention
from stability.mechanisms.two_way import TwoWay, reversal
from stability.registry import Registry, add_plugin
from tests.mechanisms.checks import HEADS, NUM_POSITIONS, WIDTH, build_seeded, inputs, padding
from tests.mechanisms.names import CAUSAL, listed
from tests.mechanisms.oracles import softmax_attention
from tests.reading import read_spec


def two_way(**settings) -> Any:
    return build_seeded(lambda: build("two_way", width=WIDTH, heads=HEADS, **settings)).double()


def read_both_ways(module: TwoWay, x_ND: Tensor, valid: list[bool]) -> dict[int, Tensor]:
    """The outputs of valid positions by lists: of what lies between the first valid position and the last, causal
    attention from its beginning and causal attention from its end."""
    span = [place for place, is_valid in enumerate(valid) if is_valid]
    places = list(range(span[0], span[-1] + 1))
    outputs = {place: torch.zeros(WIDTH, dtype=torch.float64) for place in span}
    for mixer, order in zip((module.mixers[0], module.mixers[-1]), (places, places[::-1]), strict=True):
        visible_NN = torch.zeros(len(order), len(order), dtype=torch.float64)
        for row in range(len(order)):
            for column in range(row + 1):
                visible_NN[row, column] = valid[order[column]] or row == column
        read_ND = torch.stack([x_ND[place] for place in order])
        y_ND = softmax_attention(mixer, read_ND[None], visible_NN[None])[0]
        for row, place in enumerate(order):
            if valid[place]:
                outputs[place] = outputs[place] + y_ND[row]
    return outputs


@pytest.mark.parametrize("weights", ["separate", "shared"])
def test_forward_is_the_sum_of_both_readings(weights):
    module, x_BND, mask_BN = two_way(of="sa", weights=weights), inputs(), padding()
    for mask in (None, mask_BN):
        y_BND = module(x_BND, mask_BN=mask)
        rows = torch.ones_like(mask_BN) if mask is None else mask
        for row in range(len(x_BND)):
            for place, expected in read_both_ways(module, x_BND[row], rows[row].tolist()).items():
                assert torch.allclose(y_BND[row, place], expected, rtol=1e-10, atol=1e-12), (mask is None, row, place)


def test_reversal_turns_the_span_of_the_valid_positions_and_leaves_the_rest():
    mask_BN = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    expected = [[2, 1, 0, 3, 4], [0, 4, 3, 2, 1], [0, 1, 2, 3, 4], [4, 3, 2, 1, 0]]
    assert reversal(mask_BN).tolist() == expected


@pytest.mark.parametrize("name", ["sa", "sw"])
def test_with_shared_weights_a_reversed_sequence_has_the_reversed_output(name):
    shared, separate = two_way(of=name, weights="shared"), two_way(of=name)
    assert torch.allclose(shared(inputs().flip(1)), shared(inputs()).flip(1), rtol=1e-10, atol=1e-12)
    assert not torch.allclose(separate(inputs().flip(1)), separate(inputs()).flip(1), atol=1e-3)
    assert 2 * sum(value.numel() for value in shared.parameters()) == sum(
        value.numel() for value in separate.parameters()
    )


def test_padding_behind_or_before_a_sequence_changes_nothing():
    module, x_BND = two_way(of="sa"), inputs()
    alone = module(x_BND)
    for before, behind in ((0, 4), (3, 0), (2, 3)):
        padded = torch.nn.functional.pad(x_BND, (0, 0, before, behind), value=7.0)
        mask_BN = torch.zeros(padded.shape[:2], dtype=torch.bool)
        mask_BN[:, before : before + NUM_POSITIONS] = True
        found = module(padded, mask_BN=mask_BN)[:, before : before + NUM_POSITIONS]
        assert torch.allclose(found, alone, rtol=1e-10, atol=1e-12)


def test_both_readings_count_from_the_ends_of_the_sequence_and_not_of_its_padding():
    add_plugin("tests.mechanisms.plugins.counting")
    module, x_BND = two_way(of="counting"), inputs()
    ahead, back = module.mixers
    weighted = torch.arange(1, NUM_POSITIONS + 1, dtype=torch.float64)
    expected = torch.stack(
        [
            ahead.out(sum(weighted[m] * x_BND[:, m] for m in range(n + 1)))
            + back.out(sum(weighted[NUM_POSITIONS - 1 - m] * x_BND[:, m] for m in range(n, NUM_POSITIONS)))
            for n in range(NUM_POSITIONS)
        ],
        1,
    )
    assert torch.allclose(module(x_BND), expected, rtol=1e-10, atol=1e-12)
    padded = torch.nn.functional.pad(x_BND, (0, 0, 0, 4), value=7.0)
    mask_BN = (torch.arange(NUM_POSITIONS + 4) < NUM_POSITIONS).expand(len(x_BND), -1)
    found = module(padded, mask_BN=mask_BN)[:, :NUM_POSITIONS]
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_settings_reach_the_part_and_survive_json():
    written = part("mechanisms", {"name": "two_way", "of": "sw", "sw": {"window": 4}, "sa": {}})
    stored = json.loads(json.dumps(written.model_dump(mode="json")))
    inner = {"name": "sw", "qk_norm": "none", "softcap": None, "window": 4, "impl": "reference"}
    assert stored == {"name": "two_way", "of": inner, "weights": "separate"}
    assert part("mechanisms", stored) == written
    built: Any = TwoWay.build(written.settings, MixerShape(16, 2))
    assert [mixer.before for mixer in built.mixers] == [4, 4]


def test_the_command_line_chooses_the_part_and_its_settings():
    words = ["mechanism=two_way", "mechanism.two_way.of=sw", "mechanism.two_way.sw.window=4", "name=x"]
    (chosen,) = read_spec("sweep", words).mechanism
    assert chosen == part("mechanisms", {"name": "two_way", "of": "sw", "sw": {"window": 4}})


def test_an_objective_from_left_to_right_refuses_it_and_one_of_both_sides_trains_it(lab):
    with pytest.raises(ValueError, match="objective=ar needs a causal mechanism and two_way is none"):
        lab.spec(mechanism="two_way", objective="ar")
    assert lab.train(lab.spec(mechanism={"name": "two_way", "of": "sw"}, steps=4)).path.is_dir()


def test_cost_is_that_of_two_and_lengths_are_the_part_s(monkeypatch):
    shape = MixerShape(16, 2)
    settings = validate_settings("mechanisms", "two_way", {"of": "sw", "sw": {"window": 63}})
    of_one = Registry("mechanisms").load("sw").cost(settings.of.settings, MixerShape(16, 2, "causal"), 32)
    assert TwoWay.cost(settings, shape, 32) == 2 * of_one
    TwoWay.check_positions(settings, 64)

    def too_long(config, num_positions: int) -> None:
        raise ValueError(f"mechanism.sw.window={config.window} must be below model.positions={num_positions}")

    monkeypatch.setattr(SlidingWindowAttention, "check_positions", too_long)
    with pytest.raises(ValueError, match=r"^mechanism\.two_way\.sw\.window=63 must be below model\.positions=63$"):
        TwoWay.check_positions(settings, 63)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"of": "sc"},
            f"mechanism.two_way.of=sc: is no causal mechanism; did you mean 'sw'? (choices: {listed(*CAUSAL)})",
        ),
        (
            {"of": "mix"},
            f"mechanism.two_way.of=mix: is no causal mechanism; choices: {listed(*CAUSAL)}",
        ),
        ({"of": "sww"}, "mechanism.two_way.of=sww: is no causal mechanism; did you mean 'sw'?"),
        ({"sww": {}}, "mechanism.two_way.sww: unknown key; did you mean 'sw'?"),
        ({"of": "sw", "sw": {"windw": 2}}, "mechanism.two_way.sw.windw: unknown key; did you mean 'window'?"),
        ({"sw": 3}, "mechanism.two_way.sw=3: takes settings of sw"),
        ({"weights": "tied"}, "mechanism.two_way.weights='tied': input should be 'separate' or 'shared'"),
    ],
)
def test_error_is_one_line_and_names_the_nearest_choice(settings, message):
    with pytest.raises(ValueError) as caught:
        validate_settings("mechanisms", "two_way", settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
