"""Every parameter of every model plays exactly one role: that of the place that its module is built into."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import nn

from stability.build import build_model, build_optimizer
from stability.config.groups import ROLES
from stability.config.parse import parse_run
from stability.optimizers import roles
from stability.registry import Registry
from tests.conftest import TINY
from tests.objectives.subjects import FORMATS, REQUIRED, SOURCES

MECHANISMS = Registry("mechanisms").names(cross=False, trainable=True)
RESIDUALS, NORMS, FFNS, POSITIONS = (Registry(family).names() for family in ("residuals", "norms", "ffns", "positions"))
# what each kind of model reads; cross mechanisms in every block, or before the blocks, come with some
MODALITIES: list[tuple[str, dict[str, Any]]] = [
    *((name, REQUIRED.get(name, {})) for name in Registry("objectives").names()),
    ("mlm", {"context": 3}),
    ("multitrack", {"sources": ["sequence"], "contexts": []}),
]
# A parameter's role by its name alone, the first that fits; nothing of it is read from the modules.
BY_NAME = {
    r"positions_ND$": "position",
    r"^embedding\.(.+\.)?(norm|norms)\.": "norm",
    r"^embedding\.branches\.\d+\.mechanism\.": "cross",
    r"^embedding\.": "embedding",
    r"^blocks\.\d+\.mixer\.": "mixer",
    r"^blocks\.\d+\.ffn\.": "ffn",
    r"^blocks\.\d+\.(mixer|ffn)_norm\.": "norm",
    r"^blocks\.\d+\.(mixer|ffn)_residual\.": "residual",
    r"^blocks\.\d+\.cross\.mechanism\.": "cross",
    r"^blocks\.\d+\.cross\.norm\.": "norm",
    r"^blocks\.\d+\.cross\.residual\.": "residual",
    r"^(blocks\.\d+\.modulation|noise_level|final_modulation)\.": "condition",
    r"^(final|context)_norm\.": "norm",
    r"^head\.": "head",
}


def by_name(name: str) -> str:
    return next(role for pattern, role in BY_NAME.items() if re.search(pattern, name))


def spec_of(objective: str, settings: dict[str, Any], **changes: Any):
    made = Registry("objectives").load(objective)
    config = made.Config(**settings)
    return parse_run(
        {
            **TINY,
            "objective": {"name": objective, **settings},
            "data": {"name": SOURCES[made.corpus_kind]},
            "cross": "auto" if made.contexts_of(config) or made.num_context(config) else None,
            "data_fingerprint": "made up",
            **changes,
        }
    )


def built(spec) -> nn.Module:
    kind = Registry("objectives").load(spec.objective.name).corpus_kind
    with torch.device("meta"):
        return build_model(spec, FORMATS[kind])


def check_partition(spec) -> set[str]:
    """Hold the roles to the names, and the groups of an optimizer that has one for each role to the parameters; return
    the roles that are played."""
    model = built(spec)
    found = roles(model)
    assert list(found) == [name for name, _ in model.named_parameters()]
    for name, role in found.items():
        assert role == by_name(name), f"{name} plays {role}"
    groups = {role: {"lr_scale": 0.5} for role in found.values()}
    optimizer = build_optimizer(
        parse_run({**spec.model_dump(mode="json"), "optimizer": {"name": "sgd", "groups": groups}}), model
    )
    held = [(id(value), group["name"].split()[0]) for group in optimizer.param_groups for value in group["params"]]
    expected = [(id(value), by_name(name)) for name, value in model.named_parameters()]
    assert sorted(held) == sorted(expected), "groups do not hold every parameter once, by its role"
    return set(found.values())


def directions_of(mechanism: str) -> frozenset[str]:
    part = Registry("mechanisms").load(mechanism)
    return part.supported_directions(part.Config())


@pytest.mark.parametrize(("objective", "settings"), MODALITIES, ids=lambda value: str(value)[:40])
def test_every_parameter_of_every_model_plays_one_role(objective, settings):
    """Every residual with every norm around `sa`, and every mechanism in one of these places."""
    direction, seen = Registry("objectives").load(objective).direction, set()
    able = [name for name in MECHANISMS if direction in directions_of(name)]
    around = list(itertools.product(RESIDUALS, NORMS))
    assert "sa" in able and len(able) > 3
    for mechanism, (residual, norm) in [*(("sa", each) for each in around), *zip(able, itertools.cycle(around))]:
        parts = {"mechanism": {"name": mechanism}, "residual": {"name": residual}, "norm": {"name": norm}}
        seen |= check_partition(spec_of(objective, settings, **parts))
    has_head = Registry("objectives").load(objective).has_head
    assert seen >= {"embedding", "norm", "mixer", "residual", "ffn"} and has_head == ("head" in seen)


@pytest.mark.parametrize("ffn", FFNS)
@pytest.mark.parametrize("position", POSITIONS)
def test_so_it_is_with_every_feed_forward_network_and_position_scheme(ffn, position):
    found = check_partition(spec_of("mlm", {}, ffn={"name": ffn}, position={"name": position}))
    assert ("position" in found) == Registry("positions").load(position).adds


def test_together_the_models_play_all_roles():
    parts = {"residual": {"name": "hc"}, "position": {"name": "learned"}}
    found = set(roles(built(spec_of("mlm", {"context": 3}, **parts))).values())
    assert found | set(roles(built(spec_of("score_entropy", {}))).values()) == set(ROLES)


def test_a_parameter_without_a_role_is_named():
    model = built(spec_of("mlm", {}))
    model.register_parameter("forgotten", nn.Parameter(torch.zeros(2)))
    with pytest.raises(AssertionError, match="forgotten plays no role"):
        roles(model)


def test_a_module_may_say_of_a_part_of_its_own_that_it_plays_another_role():
    class Gated(nn.Module):
        own_roles = {"gate": "norm"}

        def __init__(self):
            super().__init__()
            self.inner, self.gate = nn.Linear(2, 2), nn.Linear(2, 2)

    class Wrong(Gated):
        own_roles = {"gate": "gates"}

    model = built(spec_of("mlm", {}))
    model.blocks[0].mixer = Gated()
    found = roles(model)
    assert found["blocks.0.mixer.gate.weight"] == "norm" and found["blocks.0.mixer.inner.weight"] == "mixer"
    model.blocks[0].mixer = Wrong()
    with pytest.raises(AssertionError, match="gate.weight plays gates"):
        roles(model)


def test_a_tied_parameter_plays_the_role_of_the_first_place_that_holds_it():
    model = built(spec_of("mlm", {}))
    model.head.weight = model.embedding.weight
    found = roles(model)
    assert found["embedding.weight"] == "embedding" and "head.weight" not in found
