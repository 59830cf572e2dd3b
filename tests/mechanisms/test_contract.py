"""Every registered mechanism keeps the contract; every check fails on the fault it is there for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stability.config.parts import validate_settings
from stability.mechanisms import build
from stability.mechanisms._attention import AbstractSoftmaxAttention
from stability.mechanisms._base import MixerShape
from stability.mechanisms._observed import AbstractAttention, AbstractConsensus
from stability.optimizers._groups import MATRICES, kinds
from stability.registry import Registry
from tests.mechanisms import checks, direction_checks, faults, names, sight_faults
from tests.mechanisms.plugins.gated import GatedMean
from tests.mechanisms.plugins.sigmoid_seen import SeenSigmoid
from tests.mechanisms.small import OTHER, OWN_DECAY, SMALL

REGISTRY = Registry("mechanisms")
NAMES = REGISTRY.names(cross=False)
CASES = [
    pytest.param(name, settings, direction, id=f"{name}-{'small-' if settings else ''}{direction}")
    for name in NAMES
    for settings in ({}, *([SMALL[name]] if name in SMALL else []))
    for direction in sorted(REGISTRY.load(name).supported_directions(validate_settings("mechanisms", name, settings)))
]
ORDERED = [
    *(pytest.param(name, {}, 150, id=name) for name in NAMES if name != "mix"),  # a pattern is longer than one layer
    *(pytest.param("sc", {"rope": rope}, 150, id=f"sc-{rope}") for rope in ("relative", "absolute", "none")),
    pytest.param("sc", {"graph": "complete"}, 600, id="sc-complete"),  # with more edges it is told later
    pytest.param("mix", {"pattern": ["sc"]}, 150, id="mix-sc-gradient"),
    pytest.param("mix", {"pattern": ["sc"], "sc": {"rope": "absolute"}}, 150, id="mix-sc"),
    pytest.param("two_way", {"of": "sw", "weights": "shared"}, 150, id="two_way-shared"),
]
OF_A_MODULE = (
    checks.check_shape_and_dtype,
    checks.check_padding_is_unread,
    checks.check_wholly_padded_is_finite,
    checks.check_second_derivatives,
    checks.check_degenerate_inputs,
)
OF_A_BUILDER = (
    checks.check_deterministic,
    checks.check_save_load,
    checks.check_own_init_stays,
    checks.check_biases_may_go,
)
PLANTED = (
    (checks.check_future_is_unseen, lambda: faults.LeaksFuture(causal=True)),
    (checks.check_future_is_unseen, lambda: faults.LeaksFutureByItsScale(causal=True)),
    (checks.check_future_is_unseen, lambda: sight_faults.SelectsByTheFuture(causal=True)),
    (checks.check_past_is_seen, lambda: faults.IgnoresPast(causal=True)),
    (checks.check_both_sides_are_seen, lambda: faults.Mean(causal=True)),
    (checks.check_both_sides_are_seen, faults.IgnoresPast),
    (checks.check_padding_is_unread, faults.ReadsPadding),
    (checks.check_padding_is_unread, sight_faults.ReadsPaddingAfterTwoGaps),
    (checks.check_wholly_padded_is_finite, faults.EmptyRows),
    (checks.check_every_parameter_is_trained, faults.ChoosesWithoutLearning),
    (checks.check_second_derivatives, faults.ForgetsCurvature),
    (checks.check_second_derivatives, faults.SelectsAtATie),
    (checks.check_degenerate_inputs, faults.DividesByZeroNorm),
    (checks.check_weights_reproduce_forward, faults.ExposesASoftmax),
    (checks.check_weights_reproduce_forward, faults.ClaimsToAverage),
    (checks.check_weights_reproduce_forward, faults.WeighsPadding),
    (checks.check_weights_reproduce_forward, faults.ForgetsToSubtract),
    (checks.check_edges_reproduce_forward, faults.HidesAnEdge),
    (checks.check_edges_reproduce_forward, faults.HidesItsRotation),
    (checks.check_edges_reproduce_forward, faults.HidesAnIteration),
)
BEYOND_NINE = (
    (checks.check_future_is_unseen, lambda: sight_faults.LeaksFutureInALaterBlock(causal=True)),
    (checks.check_past_is_seen, lambda: sight_faults.ForgetsThePastAtALaterBlock(causal=True)),
    (checks.check_both_sides_are_seen, sight_faults.ForgetsThePastAtALaterBlock),
    (checks.check_padding_is_unread, sight_faults.ReadsPaddingInALaterBlock),
    (checks.check_wholly_padded_is_finite, sight_faults.EmptyBlocks),
)
EXPOSED = (
    (AbstractAttention, checks.check_weights_reproduce_forward),
    (AbstractSoftmaxAttention, checks.check_softmax_is_as_declared),
    (AbstractConsensus, checks.check_edges_reproduce_forward),
)
OTHER_SETTINGS = [
    ("sa", {"mask_diagonal": True}, "bidirectional"),
    ("sa", {"mask_diagonal": True}, "causal"),
    ("attentionx", {"mask_diagonal": True}, "causal"),
    ("attentionx", {"mask_diagonal": False, "gamma": 0.5}, "bidirectional"),
    ("sw", {"window": 1}, "causal"),
    ("sa", {"temperature": "learned"}, "causal"),
    ("sa", {"kv_heads": 1}, "causal"),
    ("attentionx", {"temperature": "learned"}, "bidirectional"),
]


def builder(name: str, settings: dict, direction: str):
    shape = {"width": checks.WIDTH, "heads": checks.HEADS, "direction": direction, "num_layers": 2}
    return lambda: build(name, **shape, **settings)


@pytest.mark.parametrize(("name", "settings", "direction"), CASES)
@pytest.mark.parametrize("check", OF_A_MODULE, ids=lambda check: check.__name__)
def test_mechanism_keeps(name, settings, direction, check):
    check(checks.build_seeded(builder(name, settings, direction)))


@pytest.mark.parametrize(("name", "settings", "direction"), CASES)
@pytest.mark.parametrize("check", OF_A_BUILDER, ids=lambda check: check.__name__)
def test_mechanism_is_reproducible(name, settings, direction, check):
    check(builder(name, settings, direction))


@pytest.mark.parametrize(("name", "settings", "direction"), CASES)
def test_mechanism_sees_what_its_direction_says(name, settings, direction):
    module = checks.build_seeded(builder(name, settings, direction))
    if direction == "causal":
        checks.check_future_is_unseen(module)
        checks.check_past_is_seen(module)
    else:
        checks.check_both_sides_are_seen(module)


@pytest.mark.parametrize(("name", "settings"), [(name, settings) for name in OTHER for settings in OTHER[name]])
def test_a_mechanism_with_other_settings_keeps_the_contract(name, settings):
    for direction in sorted(REGISTRY.load(name).supported_directions(validate_settings("mechanisms", name, settings))):
        make = builder(name, settings, direction)
        reaches_neighbours = name not in ("bigbird", "sparse_transformer") and settings.get("dilation", 1) == 1
        if reaches_neighbours:
            test_mechanism_sees_what_its_direction_says(name, settings, direction)
        elif direction == "causal":
            checks.check_future_is_unseen(checks.build_seeded(make))
        test_what_a_mechanism_exposes_reproduces_its_forward(name, settings, direction)
        for check in OF_A_MODULE:
            check(checks.build_seeded(make))
        for check in OF_A_BUILDER:
            check(make)


@pytest.mark.parametrize(("name", "settings", "direction"), CASES)
def test_what_a_mechanism_exposes_reproduces_its_forward(name, settings, direction):
    module = checks.build_seeded(builder(name, settings, direction))
    for abstract, check in EXPOSED:
        if isinstance(module, abstract):
            check(module)


@pytest.mark.parametrize(("name", "settings", "direction"), OTHER_SETTINGS)
def test_weights_with_other_settings_reproduce_forward(name, settings, direction):
    shape = {"width": checks.WIDTH, "heads": checks.HEADS, "direction": direction}
    module = checks.build_seeded(lambda: build(name, **shape, **settings))
    if module.log_temperature is not None:
        nn.init.constant_(module.log_temperature, 0.3)  # it begins as the factor that is not learned
    checks.check_weights_reproduce_forward(module)
    checks.check_softmax_is_as_declared(module)


@pytest.mark.parametrize(("name", "settings", "steps"), ORDERED)
def test_a_mechanism_tells_a_text_from_its_mirror_image_or_says_that_it_is_blind(name, settings, steps):
    config, mechanism = validate_settings("mechanisms", name, settings), REGISTRY.load(name)
    causal = "bidirectional" not in mechanism.supported_directions(config)
    shape = {"width": direction_checks.WIDTH, "heads": direction_checks.HEADS}
    direction_checks.check_the_mirror_image_is_told(
        lambda: build(name, **shape, direction="causal" if causal else "bidirectional", **settings),
        causal=causal,
        blind=mechanism.blind_to_order(config),
        steps=steps,
    )


def test_a_pattern_is_blind_to_order_if_all_of_its_mechanisms_are():
    blind = REGISTRY.load("mix").blind_to_order
    patterns = {("sa", "sc"): False, ("sc",): True, ("sa",): False}
    absolute = {"sc": {"rope": "absolute"}}
    found = {
        pattern: blind(validate_settings("mechanisms", "mix", {"pattern": list(pattern), **absolute}))
        for pattern in patterns
    }
    assert found == patterns
    assert not blind(validate_settings("mechanisms", "mix", {"pattern": ["sc"], "sc": {"rope": "gradient"}}))


def test_given_edges_that_point_one_way_tell_a_text_from_its_mirror_image():
    after = torch.arange(direction_checks.NUM_POSITIONS - 1)
    edges = torch.stack([after, after + 1], 1)

    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer = build("sc", width=16, heads=2, graph="given", rope="none")

        def forward(self, x_BND):
            return self.mixer(x_BND, edges=edges)

    config, mechanism = validate_settings("mechanisms", "sc", {"graph": "given", "rope": "none"}), REGISTRY.load("sc")
    direction_checks.check_the_mirror_image_is_told(Given, blind=mechanism.blind_to_order(config))


@pytest.mark.parametrize(
    ("make", "blind"),
    [
        (faults.Mean, False),
        (lambda: build("sw", width=16, heads=2), True),
        (lambda: build("sc", width=16, heads=2, graph="complete"), True),  # it tells, but later than others
    ],
    ids=["blind", "sighted", "slow"],
)
def test_what_a_mechanism_says_wrongly_of_its_blindness_is_caught(make, blind):
    with pytest.raises(AssertionError, match="mirrored, the text costs"):
        direction_checks.check_the_mirror_image_is_told(make, blind=blind)


def test_the_mechanisms_that_probes_observe_are_these():
    """Without the class a mechanism is not observed, and nothing here would fail."""
    assert set(names.ALL) <= set(NAMES)
    classes = {name: REGISTRY.load(name) for name in names.ALL}
    for abstract, expected in (
        (AbstractSoftmaxAttention, names.SOFTMAX),
        (AbstractAttention, names.ATTENTION),
        (AbstractConsensus, ("sc",)),
    ):
        assert tuple(name for name in names.ALL if issubclass(classes[name], abstract)) == expected


def test_directions_are_as_listed():
    able = {
        direction: tuple(sorted({case.values[0] for case in CASES if case.values[-1] == direction} & set(names.ALL)))
        for direction in ("bidirectional", "causal")
    }
    assert able["causal"] == tuple(name for name in names.ALL if name not in names.BIDIRECTIONAL_ONLY)
    assert able["bidirectional"] == tuple(name for name in names.ALL if name not in names.CAUSAL_ONLY)


@pytest.mark.parametrize("name", NAMES)
def test_cost_grows_with_length_and_covers_the_output_projection(name):
    mechanism, config = REGISTRY.load(name), validate_settings("mechanisms", name, {})
    shape = MixerShape(checks.WIDTH, checks.HEADS)
    costs = [mechanism.cost(config, shape, num_positions) for num_positions in (8, 16, 32)]
    assert costs[0] >= 8 * checks.WIDTH**2
    assert 2 * costs[0] <= costs[1] <= costs[2] / 2


@pytest.mark.parametrize("name", NAMES)
def test_undone_direction_is_refused_by_name(name):
    possible = REGISTRY.load(name).supported_directions(validate_settings("mechanisms", name, {}))
    for direction in {"causal", "bidirectional"} - possible:
        with pytest.raises(ValueError, match=f"cannot be {direction}"):
            build(name, width=16, heads=2, direction=direction, num_layers=2)


@pytest.mark.parametrize(("check", "fault"), PLANTED)
def test_check_catches_planted_fault(check, fault):
    with pytest.raises(AssertionError):
        check(checks.build_seeded(fault))


@pytest.mark.parametrize(("check", "fault"), BEYOND_NINE)
def test_check_catches_a_fault_that_shows_only_beyond_nine_positions(check, fault):
    check(checks.build_seeded(fault), lengths=(1, 9))
    with pytest.raises(AssertionError, match="N = "):
        check(checks.build_seeded(fault))


@pytest.mark.parametrize("name", names.RECURRENT)
def test_optimizers_of_matrices_take_nothing_of_a_recurrence_but_linear_maps(name):
    """Tables of rates or bounds have two axes, too, and orthogonalised mean nothing."""
    module = build(name, width=16, heads=2, direction="causal", layer=1, num_layers=2, **SMALL[name])
    maps = {id(part.weight) for part in module.modules() if isinstance(part, nn.Linear)}
    taken = [key for key, kind in kinds(module).items() if kind == MATRICES]
    assert taken and not [key for key in taken if id(module.get_parameter(key)) not in maps]
    assert name not in ("mamba", "mamba2") or len(taken) == len(maps)


def test_what_is_written_down_is_of_mechanisms_that_there_are():
    assert {*SMALL, *(name for name, *_ in OWN_DECAY)} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_of_a_mechanism_is_trained(name):
    settings = SMALL.get(name, {})
    directions = REGISTRY.load(name).supported_directions(validate_settings("mechanisms", name, settings))
    for direction in sorted(directions):
        checks.check_every_parameter_is_trained(checks.build_seeded(builder(name, settings, direction)))


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [*OWN_DECAY, *((name, {}, {}) for name in NAMES if name not in {listed for listed, *_ in OWN_DECAY})],
)
def test_what_a_mechanism_leaves_out_of_weight_decay_is_written_down(name, settings, expected):
    directions = REGISTRY.load(name).supported_directions(validate_settings("mechanisms", name, settings))
    for direction in sorted(directions):
        checks.check_own_decay(builder(name, settings, direction)(), expected)


@pytest.mark.parametrize(
    ("fault", "message"),
    [(faults.SparesWhatNobodyKnows, "written down is {}"), (faults.SparesWhatItHasNot, "not have")],
)
def test_own_decay_that_is_not_written_down_or_of_nothing_is_caught(fault, message):
    expected = {"gate.bias": False} if message == "not have" else {}
    with pytest.raises(AssertionError, match=message):
        checks.check_own_decay(fault(), expected)


@pytest.mark.parametrize(
    "check_and_fault",
    [
        (checks.check_deterministic, faults.RedrawsAtEveryCall),
        (checks.check_save_load, faults.KeepsStateOutside),
        (checks.check_own_init_stays, faults.StartsLocalOverItsOwn),
        (checks.check_biases_may_go, faults.AddsABiasItself),
    ],
)
def test_check_of_a_builder_catches_planted_fault(check_and_fault):
    check, fault = check_and_fault
    with pytest.raises(AssertionError):
        check(fault)


@pytest.mark.parametrize("causal", [False, True])
def test_the_sound_mechanism_behind_the_faults_passes(causal):
    module = checks.build_seeded(lambda: faults.Mean(causal))
    for check in OF_A_MODULE:
        check(module)
    (checks.check_future_is_unseen if causal else checks.check_both_sides_are_seen)(module)
    for check in (checks.check_deterministic, checks.check_save_load):
        check(lambda: faults.Mean(causal))


def test_the_sound_mechanism_that_starts_parameters_itself_keeps_the_contract():
    def made():
        return GatedMean(None, MixerShape(checks.WIDTH, checks.HEADS, "causal"))

    for check in OF_A_MODULE:
        check(checks.build_seeded(made))
    checks.check_future_is_unseen(checks.build_seeded(made))
    for check in OF_A_BUILDER:
        check(made)
    assert checks.build_seeded(made).own_init, "there is nothing to look at"


def test_the_sound_mechanisms_behind_the_faults_of_what_is_exposed_pass():
    checks.check_weights_reproduce_forward(checks.build_seeded(lambda: SeenSigmoid(None, faults.SHAPE)))


@pytest.mark.parametrize("name", ["sa", "sw", "sc", "ca", "cc"])
def test_shapes_that_cannot_be_are_refused_when_built(name):
    for width, heads, message in (
        (8, 0, "heads=0 must be at least 1"),
        (8, -2, "heads=-2 must be at least 1"),
        (-8, 2, "width=-8 must be at least 1"),
        (9, 3, "head width 9/3 = 3 is odd, and RoPE turns pairs; choose an even width"),
        (12, 4, "head width 12/4 = 3 is odd, and RoPE turns pairs; heads that leave an even one: 1, 2, 3, 6"),
    ):
        with pytest.raises(ValueError) as caught:
            build(name, width=width, heads=heads)
        assert str(caught.value) == message


@pytest.mark.parametrize("name", ["sc", "ca", "cc"])
def test_without_rope_a_head_width_may_be_odd(name):
    x_BND = torch.ones(1, 4, 9)
    context = () if name == "sc" else (x_BND,)
    assert build(name, width=9, heads=3, rope="none")(x_BND, *context).shape == (1, 4, 9)
