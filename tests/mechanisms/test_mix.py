from __future__ import annotations

import json

import pytest

from stability.config.parts import part, validate_settings
from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from stability.mechanisms.mix import Mix
from stability.registry import Registry
from tests.reading import compose


def mix(**settings):
    return validate_settings("mechanisms", "mix", settings)


def names(num_layers: int, **settings) -> list[str]:
    layers = [
        build("mix", width=16, heads=2, layer=layer, num_layers=num_layers, **settings) for layer in range(num_layers)
    ]
    return [type(layer).__module__.rsplit(".", 1)[-1] for layer in layers]


def test_default_is_first_half_softmax_attention_then_consensus():
    assert names(4) == ["sa", "sa", "sc", "sc"]
    assert names(5) == ["sa", "sa", "sa", "sc", "sc"]


def test_full_pattern_writes_any_arrangement():
    assert names(3, pattern=("sc", "sw", "sa")) == ["sc", "sw", "sa"]
    assert names(6, pattern=["sc", "sw", "sa"]) == ["sc", "sc", "sw", "sw", "sa", "sa"]
    assert names(2, pattern=["sw"]) == ["sw", "sw"]


def test_a_cycled_pattern_begins_again_until_the_last_layer():
    assert names(5, pattern=["sc", "sw", "sa"], order="cycled") == ["sc", "sw", "sa", "sc", "sw"]
    assert names(5, pattern=["sc", "sw", "sa"], order="stretched") == ["sc", "sc", "sw", "sw", "sa"]
    assert names(8, pattern=["sc", "sc", "sc", "sa"], order="cycled") == ["sc", "sc", "sc", "sa"] * 2
    assert names(3, pattern=["sw"], order="cycled") == ["sw"] * 3


def test_order_of_a_pattern_survives_json_and_is_one_of_two():
    written = part("mechanisms", {"name": "mix", "order": "cycled"})
    assert part("mechanisms", json.loads(json.dumps(written.model_dump(mode="json")))) == written
    assert written.settings.order == "cycled"
    with pytest.raises(ValueError, match=r"^mechanism\.mix\.order='cyclic': input should be 'stretched' or 'cycled'$"):
        mix(order="cyclic")


def test_cost_of_a_cycled_layer_is_that_of_its_part():
    shape = MixerShape(16, 2, layer=1, num_layers=4)
    assert Mix.cost(mix(order="cycled"), shape, 32) == Registry("mechanisms").load("sc").cost(
        validate_settings("mechanisms", "sc", {}), shape, 32
    )
    assert Mix.cost(mix(), shape, 32) != Mix.cost(mix(order="cycled"), shape, 32)


def test_direct_keys_become_settings_of_the_part():
    config = mix(pattern=["sa", "sc"], sa={}, sc={"window": 4})
    assert [item.name for item in config.parts] == ["sa", "sc"]
    assert Mix.build(config, MixerShape(16, 2, layer=1, num_layers=2)).config.window == 4


def test_parts_beyond_the_pattern_are_dropped_and_missing_ones_get_defaults():
    config = mix(pattern=["sw", "sc"], sc={"window": 3}, sa={})
    assert config.parts == (part("mechanisms", "sw"), part("mechanisms", {"name": "sc", "window": 3}))
    assert mix(sa={}, sc={}) == mix() == mix(parts=[{"name": "sc"}])
    assert hash(mix(sa={}, sc={})) == hash(mix())


def test_settings_survive_their_way_through_spec_json():
    written = part("mechanisms", {"name": "mix", "pattern": ["sc", "sa"], "sc": {"window": 4, "rope": "none"}})
    stored = json.loads(json.dumps(written.model_dump(mode="json")))
    assert part("mechanisms", stored) == written
    assert [item["name"] for item in stored["parts"]] == ["sc", "sa"]


def test_directions_are_those_that_every_part_can_do():
    assert Mix.supported_directions(mix()) == {"bidirectional"}
    assert Mix.supported_directions(mix(pattern=["sa", "sw"])) == {"bidirectional", "causal"}
    with pytest.raises(ValueError, match="mix of sa, sc cannot be causal"):
        build("mix", width=16, heads=2, direction="causal", layer=0, num_layers=2)


def test_cost_is_that_of_the_layers_part():
    shapes = [MixerShape(16, 2, layer=layer, num_layers=2) for layer in (0, 1)]
    for shape, name in zip(shapes, ("sa", "sc"), strict=True):
        assert Mix.cost(mix(), shape, 32) == Registry("mechanisms").load(name).cost(
            validate_settings("mechanisms", name, {}), shape, 32
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scc": {"window": 4}}, "mechanism.mix.scc: unknown key; did you mean 'sc'?"),
        ({"patern": ["sa"]}, "mechanism.mix.patern: unknown key; did you mean 'pattern'?"),
        ({"sc": {"windw": 4}}, "mechanism.mix.sc.windw: unknown key; did you mean 'window'?"),
        ({"sc": {"window": "wide"}}, "mechanism.mix.sc.window='wide': input should be a valid integer"),
        ({"sc": 3}, "mechanism.mix.sc=3: takes settings of sc"),
        (
            {"pattern": ["sa", "scc"]},
            "mechanism.mix.pattern=[sa,scc]: 'scc' cannot stand in a pattern; did you mean 'sc'?",
        ),
        ({"pattern": ["sa", "mix"]}, "mechanism.mix.pattern=[sa,mix]: 'mix' cannot stand in a pattern; choices: "),
        ({"pattern": []}, "mechanism.mix.pattern=[]: must be a list of mechanisms"),
        ({"pattern": "sa"}, "mechanism.mix.pattern='sa': must be a list of mechanisms"),
        ({"mix": {}}, "mechanism.mix.mix: unknown key; "),
        ({"parts": {"sc": {}}}, "mechanism.mix.parts={'sc': {}}: must be a list"),
    ],
)
def test_error_is_one_line_and_names_the_nearest_choice(settings, message):
    with pytest.raises(ValueError) as caught:
        mix(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pattern_longer_than_the_model_is_refused():
    with pytest.raises(
        ValueError, match=r"mechanism.mix.pattern=\[sa,sc,sa\] has 3 entries for 2 layers; give at most 2"
    ):
        build("mix", width=16, heads=2, pattern=["sa", "sc", "sa"], layer=0, num_layers=2)


def test_hydra_puts_the_parts_settings_under_mix():
    composed = compose("sweep", ["mechanism=[mix]", "mechanism.mix.sc.window=4"])["mechanism"]
    can_stand_in_it = {*Registry("mechanisms").names(cross=False)} - {"mix"}
    assert set(composed["mix"]) == {"pattern", "order", *can_stand_in_it}
    assert composed["mix"]["sc"]["window"] == 4
    assert mix(**composed["mix"]) == mix(sc={"window": 4})


def test_what_a_part_needs_of_a_run_mix_needs():
    Mix.check_positions(mix(sc={"window": 63}), 64)
    with pytest.raises(ValueError, match=r"^mechanism\.mix\.sc\.window=64 must be below model\.positions=64$"):
        Mix.check_positions(mix(sc={"window": 64}), 64)
    assert Mix.needs_edges(mix(sc={"graph": "given"}))
    assert not Mix.needs_edges(mix())


def test_cross_mechanism_cannot_stand_in_a_pattern():
    with pytest.raises(
        ValueError, match=r"mechanism\.mix\.pattern=\[sa,cc\]: 'cc' cannot stand in a pattern; did you mean 'sc'\?"
    ):
        mix(pattern=["sa", "cc"])
