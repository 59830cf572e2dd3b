"""``optimizer.groups.<role>.<setting>``: what it takes, what it refuses, and what steps are made of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from stability.build import build_model, build_optimizer
from stability.config.groups import ROLES
from stability.config.identity import run_id
from stability.config.parse import parse_run
from stability.config.parts import part
from stability.config.search import read_number, replace_numbers
from stability.optimizers import lr_factor, roles, set_lr
from stability.training import checkpoint
from stability.training.step import Replica
from tests.conftest import Lab
from tests.optimizers import faults
from tests.optimizers.checks import gradients
from tests.optimizers.oracles import LOOPS
from tests.optimizers.test_roles import by_name
from tests.reading import read_spec
from tests.within import assert_within

SMALL = {"name": "small", "layers": 1, "width": 4, "heads": 2, "positions": 4}
BASE: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay": 0.1, "beta1": 0.8, "beta2": 0.95},
    "sgd": {"weight_decay": 0.1, "momentum": 0.9},
}
GROUPS: dict[str, dict[str, Any]] = {
    "adamw": {
        "mixer": {"lr_scale": 0.5, "beta1": 0.5, "epsilon": 1e-3},
        "norm": {"weight_decay": 0.0},
        "residual": {"lr_scale": 3.0},
        "head": {"lr_scale": 2.0, "weight_decay": 0.7, "beta2": 0.7},
    },
    "sgd": {"mixer": {"lr_scale": 0.5, "momentum": 0.2}, "norm": {"weight_decay": 0.0}, "embedding": {"lr_scale": 0.0}},
}


# what an optimizer has for all parameters together
FOR_ALL = {
    "adamw": {"impl"},
    "prodigy": {
        "lr_scale", "beta1", "beta2", "beta3", "d0", "d_coef", "growth_rate", "bias_correction", "safeguard_warmup",
    },
    "sophia": {"hessian_every"},
}  # fmt: skip


def optimizer(name: str, **groups: Any) -> dict[str, Any]:
    return {"name": name, **BASE.get(name, {}), "groups": groups}


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("residual", ["identity", "hc"])
def test_steps_of_each_role_are_those_of_the_formula(lab, name, residual):
    """Eight steps in float64, at rates that change, entry by entry in plain Python numbers."""
    groups = {role: each for role, each in GROUPS[name].items() if role != "residual" or residual == "hc"}
    spec = lab.spec(model=SMALL, residual={"name": residual}, optimizer=optimizer(name, **groups))
    model = build_model(spec, 7).double()
    static = {key for key, _ in model.named_parameters() if key.endswith(("static_read", "static_post"))}
    start = {key: value.detach().flatten().tolist() for key, value in model.named_parameters()}
    rates = [1e-2 * (1 + step % 3) for step in range(1, 9)]
    steps = build_optimizer(spec, model)
    for step, rate in enumerate(rates, 1):
        set_lr(steps, rate)
        for value, gradient in zip(model.parameters(), gradients(model, step), strict=True):
            value.grad = gradient
        steps.step()
    drawn = [[each.flatten().tolist() for each in gradients(model, step)] for step in range(1, 9)]
    for number, (key, value) in enumerate(model.named_parameters()):
        own = dict(groups.get(by_name(key), {}))
        scale = own.pop("lr_scale", 1.0)
        scaled = [rate * scale for rate in rates]
        spared = {"weight_decay": 0.0} if key in static else {}
        settings = spec.optimizer.settings.model_copy(update=own | spared)
        for entry, found in enumerate(value.flatten().tolist()):
            expected = LOOPS[name](settings, start[key][entry], [each[number][entry] for each in drawn], scaled)
            assert_within(abs(found - expected), 1e-12 * max(1.0, abs(expected)), f"{key}: {found} and not {expected}")


def test_the_trainers_steps_scale_the_schedules_rate(lab):
    """Against θ − s·α·g, g the clipped gradient of the same batch in float64."""
    schedule = {"name": "linear", "warmup_steps": 3}
    groups = {"mixer": {"lr_scale": 0.5}, "head": {"lr_scale": 4.0}}
    spec = lab.spec(optimizer={"name": "sgd", "groups": groups}, schedule=schedule, clip_norm=0.1, lr_peak=0.5)
    replica = lab.replica(spec)
    for step in (1, 2, 5):
        before, wide = copy.deepcopy(replica.model.state_dict()), copy.deepcopy(replica.model).double()
        row = replica.train_step(step)
        examples = examples_of(replica, step)
        total, count = replica.objective.loss(wide, examples)
        (total / count).backward()
        norm = torch.stack([value.grad.norm() for value in wide.parameters()]).norm()
        rate = spec.lr_peak * lr_factor(spec.schedule, step, spec.steps)
        assert row["lr"] == rate
        for key, value in wide.named_parameters():
            scale = groups.get(by_name(key), {}).get("lr_scale", 1.0)
            expected = -scale * rate * value.grad * min(1.0, 0.1 / float(norm))
            moved = replica.model.get_parameter(key).detach().double() - before[key]
            # in units of float32: θ⁺ is rounded once, and the gradient sums 64 positions, 16 units off where they cancel
            largest = before[key].abs().max() + 16 * expected.abs().max()
            unit = torch.finfo(torch.float32).eps * float(largest)
            torch.testing.assert_close(moved, expected, rtol=1e-3, atol=unit)


def examples_of(replica: Replica, step: int) -> Any:
    from stability.objectives import training_examples

    spec = replica.spec
    return training_examples(
        spec, replica.corpus, replica.objective, "train", step, seed=spec.seed, batch=spec.batch
    ).map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


@pytest.mark.parametrize("name", GROUPS)
def test_a_scale_of_0_leaves_a_role_where_it_starts_bit_for_bit(lab, name):
    spec = lab.spec(optimizer=optimizer(name, mixer={"lr_scale": 0.0}, norm={"lr_scale": 0.0}), lr_peak=1e-2)
    start = build_model(spec, 256 + 1).state_dict()
    _, model = checkpoint.load(lab.train(spec).checkpoints()[-1])
    for key, value in model.state_dict().items():
        assert torch.equal(value, start[key]) == (by_name(key) in ("mixer", "norm")), key


def test_groups_that_change_nothing_train_the_same_run_to_the_byte(lab, tmp_path_factory):
    """Five groups in another order, all at the settings of the whole, beside the one group in the model's order."""
    elsewhere = Lab(tmp_path_factory.mktemp("grouped"))
    plain = lab.train(lab.spec(optimizer={"name": "adamw"}))
    same = {role: {"weight_decay": 0.01} for role in ("embedding", "norm", "mixer", "ffn", "head")}
    grouped = elsewhere.train(elsewhere.spec(optimizer={"name": "adamw", "groups": same}))
    assert plain.run_id != grouped.run_id
    assert plain.metrics_file.read_bytes() == grouped.metrics_file.read_bytes()
    (_, one), (_, other) = (checkpoint.load(each.checkpoints()[-1]) for each in (plain, grouped))
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())


@pytest.mark.parametrize("name", GROUPS)
def test_an_interrupted_run_with_roles_goes_on_bit_for_bit(lab, tmp_path_factory, name):
    changes = {"residual": {"name": "hc"}, "optimizer": optimizer(name, **GROUPS[name]), "steps": 6, "microbatch": 2}
    spec, elsewhere = lab.spec(**changes), Lab(tmp_path_factory.mktemp("whole"))
    lab.train(spec, steps=3)
    resumed, whole = lab.train(spec), elsewhere.train(elsewhere.spec(**changes))
    assert resumed.metrics_file.read_bytes() == whole.metrics_file.read_bytes()
    states = [checkpoint.load_trainer(each.checkpoints()[-1])["optimizer"] for each in (resumed, whole)]
    assert states[0]["param_groups"] == states[1]["param_groups"] and len(states[0]["param_groups"]) > 4
    for one, other in zip(*(state["state"].values() for state in states), strict=True):
        assert all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one)
    (_, one), (_, other) = (checkpoint.load(each.checkpoints()[-1]) for each in (resumed, whole))
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())


def test_what_says_nothing_is_the_run_without_it_and_all_else_another_run(lab):
    plain = lab.spec()
    assert "groups" not in plain.model_dump(mode="json")["optimizer"]
    for nothing in ({}, {"mixer": {}}, {"mixer": {"lr_scale": 1.0, "beta1": None}}, {"mixer": {"lr_scale": None}}):
        assert run_id(lab.spec(optimizer={"name": "adamw", "groups": nothing})) == run_id(plain)
    others = [{"mixer": {"lr_scale": 2}}, {"ffn": {"lr_scale": 2}}, {"mixer": {"lr_scale": 2, "beta1": 0.5}}]
    specs = [lab.spec(optimizer={"name": "adamw", "groups": each}) for each in others]
    assert len({run_id(spec) for spec in (plain, *specs)}) == 4
    for spec in specs:
        assert parse_run(spec.model_dump(mode="json")) == spec and hash(spec)
    turned = {"norm": {"lr_scale": 2}, "embedding": {"beta1": 0.5, "beta2": 0.5}}
    again = {"embedding": {"beta2": 0.5, "beta1": 0.5}, "norm": {"lr_scale": 2.0}}
    one, other = (lab.spec(optimizer={"name": "adamw", "groups": each}) for each in (turned, again))
    assert run_id(one) == run_id(other) and one == other, "the optimizer's groups stand in the order of the roles"


def test_the_command_line_gives_a_group_to_every_optimizer_of_the_sweep():
    words = ["optimizer=[adamw,sgd]", "optimizer.sgd.momentum=0.5", "optimizer.groups.mixer.lr_scale=0.5"]
    spec = read_spec("sweep", [*words, "optimizer.groups.norm.weight_decay=0"])
    groups = {"norm": {"weight_decay": 0.0}, "mixer": {"lr_scale": 0.5}}
    dumped = [each.model_dump(mode="json") for each in spec.optimizer]
    assert [(each["name"], each["groups"]) for each in dumped] == [("adamw", groups), ("sgd", groups)]
    assert dumped[1]["momentum"] == 0.5
    own = {
        "adamw": {"groups": {"mixer": {"beta1": 0.5}}},
        "sgd": None,
        "groups": {"mixer": {"lr_scale": 2, "beta1": 0.1}},
    }
    own["sgd"] = {"groups": {"mixer": {"beta1": None}}}
    values = {**spec.model_dump(mode="json"), "optimizer": own}
    both = type(spec).model_validate(values).optimizer
    assert both[0].groups[0].dump() == {"lr_scale": 2.0, "beta1": 0.5}
    assert both[1].groups[0].dump() == {"lr_scale": 2.0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.groups.mixr.lr_scale=1"], r"optimizer.groups.mixr: no such role of a parameter; did you mean 'mixer'\?"),
        (
            ["optimizer.groups.mixer.lr_scal=1"],
            r"optimizer.groups.mixer.lr_scal: adamw has no such setting; did you mean 'lr_scale'\?",
        ),
        (
            ["optimizer=[adamw,sgd]", "optimizer.groups.mixer.beta1=0.5"],
            "optimizer.groups.mixer.beta1: sgd has no such setting; choices: lr_scale, momentum, weight_decay",
        ),
        (["optimizer.groups.mixer.lr_scale=-1"], "optimizer.groups.mixer.lr_scale=-1: input should be greater"),
        (["optimizer.groups.mixer.lr_scale=nan"], "optimizer.groups.mixer.lr_scale=nan: input should be a finite"),
        (["optimizer.groups.mixer.beta1=1"], "optimizer.groups.mixer.beta1=1: input should be less than 1"),
        (["optimizer.groups.mixer=3"], "optimizer.groups.mixer=3: takes settings, not a value"),
        (["ablate.adamw.groups.mixr.lr_scale=[2]"], r"ablate.adamw.groups.mixr: .* did you mean 'mixer'\?"),
        (["ablate.adamw.groups.mixer.beta=[2]"], r"ablate.adamw.groups.mixer.beta: unknown key; did you mean"),
        (["ablate.adamw.groups.mixer.beta1=[2]"], "ablate.adamw.groups.mixer.beta1: optimizer.groups.mixer.beta1=2: input"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(words, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_spec("sweep", words)
    assert len(str(caught.value).splitlines()) == 1


def test_a_role_that_the_model_does_not_have_is_refused_before_anything_runs(entered, lab):
    words = ["data=text", f"data.path={lab.text}", f"runs_dir={lab.pool}", "launcher=serial", "steps=2"]
    result = entered("stability.sweep", *words, "residual=[hc,identity]", "optimizer.groups.residual.lr_scale=0.5")
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert "optimizer.groups.residual: no parameter of this model plays that role; choices: embedding, norm" in line
    varied = entered("stability.sweep", *words, "ablate.adamw.groups.residual.lr_scale=[0.5,1]")
    assert varied.returncode == 2 and "optimizer.groups.residual: no parameter" in varied.stderr
    assert (
        entered(
            "stability.sweep", *words, "residual=hc", "optimizer.groups.residual.lr_scale=0.5", "dry_run=true"
        ).returncode
        == 0
    )
    assert {path.name for path in lab.pool.iterdir()} <= {"cache"}, "nothing was begun"
    spec = lab.spec(optimizer={"name": "adamw", "groups": {"position": {"lr_scale": 2}}})
    with pytest.raises(ValueError, match=r"optimizer.groups.position: no parameter .* choices: embedding, norm"):
        build_optimizer(spec, build_model(spec, 256))


def test_a_tokenizer_refuses_groups_in_one_line():
    with pytest.raises(ValueError, match="optimizer.groups.mixer: a tokenizer's optimizer takes all parameters alike"):
        read_spec("train_tokenizer", ["data.path=README.md", "optimizer.groups.mixer.lr_scale=0.5"])


def test_a_role_varies_around_the_base_as_plain_sweeps_would_make_it():
    words = ["mechanism=sa", "lr=1e-3", "seeds=1"]
    points = read_spec("sweep", [*words, "ablate.adamw.groups.mixer.lr_scale=[0.3,1,3]"]).points("data")
    assert [label for label, _ in points] == ["", *(f"adamw.groups.mixer.lr_scale={scale}" for scale in (0.3, 3))]
    plain = [read_spec("sweep", [*words, f"optimizer.groups.mixer.lr_scale={scale}"]) for scale in (1, 0.3, 3)]
    assert [run_id(run) for _, run in points] == [run_id(spec.points("data")[0][1]) for spec in plain]
    decays = read_spec("sweep", [*words, "ablate.adamw.groups.norm.weight_decay=[0,0.5]"]).points("data")
    assert [label for label, _ in decays] == ["", *(f"adamw.groups.norm.weight_decay={each}" for each in ("0", "0.5"))]


def test_a_search_finds_a_roles_scale(lab):
    recipe = lab.spec().model_dump(mode="json")
    before, path = copy.deepcopy(recipe), "optimizer.adamw.groups.mixer.lr_scale"
    assert read_number(path, recipe) == 1.0
    found = parse_run(replace_numbers(recipe, {path: 0.25}))
    assert recipe == before
    assert found == lab.spec(optimizer={"name": "adamw", "groups": {"mixer": {"lr_scale": 0.25}}})


class KeepsItsMomentum(faults.Sound):
    """A plugin that reads one setting from itself and no group."""

    class optimizer(faults.Descent):
        def __init__(self, parameters: Any, lr: float, momentum: float, weight_decay: float):
            super().__init__(parameters, lr, 0.0, weight_decay)
            self.momentum = momentum


@pytest.fixture
def plugged(monkeypatch):
    """Return the function that makes a class known under a name of its own."""
    from stability.registry import Registry

    known = Registry.load, Registry.names

    def plug(name: str, made: Any) -> None:
        monkeypatch.setattr(Registry, "names", lambda self, **having: (*known[1](self, **having), name))
        monkeypatch.setattr(
            Registry, "load", lambda self, each, **having: made if each == name else known[0](self, each, **having)
        )

    return plug


def test_a_plugins_optimizer_has_groups_without_a_word_of_its_own(lab, plugged):
    plugged("sound", faults.Sound)
    groups = {"mixer": {"lr_scale": 0.5, "momentum": 0.0}, "head": {"weight_decay": 0.0}}
    spec = lab.spec(optimizer={"name": "sound", "groups": groups})
    steps = build_optimizer(spec, build_model(spec, 256))
    held = {
        group.get("name"): (group["lr"] / spec.lr_peak, group["momentum"], group["weight_decay"])
        for group in steps.param_groups
    }
    assert held == {
        "decayed": (1.0, 0.9, 0.1), "undecayed": (1.0, 0.9, 0.0), "mixer decayed": (0.5, 0.0, 0.1),
        "mixer undecayed": (0.5, 0.0, 0.0), "head decayed": (1.0, 0.9, 0.0), "head undecayed": (1.0, 0.9, 0.0),
    }  # fmt: skip


def test_a_setting_that_no_group_can_have_to_itself_is_refused(plugged):
    plugged("keeps", KeepsItsMomentum)
    assert part("optimizers", {"name": "keeps", "groups": {"mixer": {"weight_decay": 0.5}}}).groups
    with pytest.raises(ValueError, match="groups.mixer.momentum: keeps has one momentum for all parameters"):
        part("optimizers", {"name": "keeps", "groups": {"mixer": {"momentum": 0.5}}})


def test_every_role_takes_every_setting_of_every_optimizer(lab):
    """Each in a group of its own is found in that group, and nowhere else; but for what an optimizer has once only."""
    from stability.registry import Registry
    from tests.optimizers.values import NEEDED, other

    for name in Registry("optimizers").names():
        config = Registry("optimizers").load(name).Config
        for field in (*config.model_fields, "lr_scale"):
            value = 0.5 if field == "lr_scale" else other(name, field)
            needed = NEEDED.get((name, field), {})
            grouped = {"name": name, **needed, "groups": {"mixer": {field: value}}}
            if field in FOR_ALL.get(name, ()):
                with pytest.raises(ValueError, match=rf"groups.mixer.{field}: {name} .* all parameters"):
                    lab.spec(optimizer=grouped)
                continue
            spec, plain = lab.spec(optimizer=grouped), lab.spec(optimizer={"name": name, **needed})
            assert run_id(spec) != run_id(plain)
            model = build_model(spec, 256)
            rows = {}
            for each in (spec, plain):
                made = build_optimizer(each, model)
                rows[each] = {id(p): repr({k: v for k, v in group.items() if k not in ("params", "name", "lr_scale", "splits")})
                              for group in made.param_groups for p in group["params"]}  # fmt: skip
            told = roles(model)
            different = {told[key] for key, p in model.named_parameters() if rows[spec][id(p)] != rows[plain][id(p)]}
            assert different == {"mixer"}, (name, field, different)
    assert set(told.values()) <= set(ROLES)
