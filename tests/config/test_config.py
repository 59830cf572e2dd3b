from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest
from pydantic import BaseModel

import stability
import sweeps
from stability import config
from stability.config.base import validate
from stability.config.curvature import CurvatureSpec
from stability.config.identity import run_id
from stability.config.parse import parse, parse_run
from stability.config.rates import LearningRates
from stability.config.sweep import SweepSpec
from stability.registry import FAMILIES, Registry, add_plugin
from tests.mechanisms.names import CAUSAL, listed
from tests.reading import read_spec

ROOT = Path(__file__).resolve().parents[2]


def test_a_repeated_study_takes_its_number_of_seeds_from_its_first_one_on():
    words = ["mechanism=[sa,sc]", "lr=[1e-3,1e-2]", "seeds=3"]
    seeds = {
        first: [run.seed for _, run in read_spec("sweep", [*words, f"first_seed={first}"]).points("f" * 64)]
        for first in (0, 5)
    }
    assert seeds == {0: [0, 1, 2] * 4, 5: [5, 6, 7] * 4}
    known, new = (
        {run_id(run) for _, run in read_spec("sweep", [*words, *more]).points("f" * 64)}
        for more in ((), ("first_seed=5",))
    )
    assert not known & new


def test_a_run_spec_survives_json_and_keeps_its_id(lab):
    spec = lab.spec(mechanism={"name": "mix", "pattern": ["sa", "sc"], "sc": {"window": 3}})
    again = parse_run(spec.model_dump(mode="json"))
    assert again == spec
    assert hash(again) == hash(spec)
    assert run_id(again) == run_id(spec)


def test_the_id_follows_what_trains_and_not_where_it_lies(lab, tmp_path):
    spec = lab.spec()
    copy = tmp_path / "elsewhere.txt"
    copy.write_bytes(lab.text.read_bytes())
    assert run_id(lab.spec(data={"name": "text", "path": str(copy)})) == run_id(spec)
    copy.write_text(copy.read_text().replace("wide", "vast"))
    assert run_id(lab.spec(data={"name": "text", "path": str(copy)})) != run_id(spec)
    for change in (
        {"seed": 1},
        {"lr_peak": 2e-3},
        {"threads": 2},
        {"steps": 13},
        {"mechanism": {"name": "sw"}},
        {"behaviour": 99},
    ):
        assert run_id(lab.spec(**change)) != run_id(spec), change


def test_lr_ranges_are_equal_ratios_and_include_both_ends():
    assert LearningRates(low=3e-4, high=1e-1, num=6).rates() == (3e-4, 9.59e-4, 3.06e-3, 9.79e-3, 3.13e-2, 1e-1)
    assert LearningRates(values=(1e-2, 1e-3)).rates() == (1e-3, 1e-2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"low": 1e-3}, "either values, or low, high and num"),
        ({"values": [1e-3], "num": 3}, "either values, or low, high and num"),
        ({"values": [1e-3, 1e-3]}, "positive and distinct"),
        ({"low": 1e-2, "high": 1e-3, "num": 3}, "must be below"),
    ],
)
def test_bad_learning_rates_say_what_would_be_right(values, message):
    with pytest.raises(ValueError, match=message):
        validate(LearningRates, values)


def test_a_wrong_item_is_one_mistake_and_an_empty_list_is_one_too():
    with pytest.raises(ValueError) as wrong:
        validate(CurvatureSpec, {"measure": ["alpha"]})
    assert str(wrong.value).startswith("measure='alpha': input should be 'alpha_max'")
    assert len(str(wrong.value).splitlines()) == 1
    with pytest.raises(ValueError, match=r"measure=\[\]: must list at least 1"):
        validate(CurvatureSpec, {"measure": []})
    with pytest.raises(ValueError) as both:
        validate(CurvatureSpec, {"measure": ["alpha"], "state": []})
    assert [line.split("=")[0] for line in str(both.value).splitlines()] == ["state", "measure"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"objective": {"name": "ar"}, "mechanism": {"name": "sc"}},
            f"objective=ar needs a causal mechanism and sc is none; these are: {listed(*CAUSAL)}, and mix of these; sc goes with "
            "objective=mlm or score_entropy",
        ),
        ({"mechanism": {"name": "sx"}}, r"no mechanism called 'sx'; did you mean 's\w'\?"),
        ({"mechanism": {"name": "self-consensus"}}, r"no mechanism called 'self-consensus'; did you mean 'sc'\?"),
        ({"mechanism": {"name": "sliding_window_attention"}}, r"did you mean 'sw'\?"),
        ({"mechanism": {"name": "sc", "windw": 3}}, r"mechanism.sc.windw: unknown key; did you mean 'window'\?"),
        ({"mechanism": {"name": "mix", "pattern": ["sa", "sw", "sc"]}}, "3 entries for 2 layers"),
        ({"optimizer": {"name": "adamw", "beta1": 1.0}}, "optimizer.adamw.beta1=1.0: input should be less than 1"),
        (
            {"model": {"name": "x", "layers": 1, "width": 16, "heads": 3, "positions": 8}},
            r"model.heads=3 must divide model.width=16.*\[1, 2, 4, 8\]",
        ),
        ({"schedule": {"name": "cosine", "warmup_steps": 12}}, "schedule.warmup_steps=12 must be below steps=12"),
        ({"lr_peak": float("nan")}, "lr_peak=nan"),
        ({"norm": "batchnorm"}, "no norm called 'batchnorm'; did you mean 'layernorm'"),
        ({"stepz": 3}, r"stepz: unknown key; did you mean 'steps'\?"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_built(lab, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        lab.spec(**changes)
    assert len(str(caught.value).splitlines()) <= 2


def all_settings() -> list[type[BaseModel]]:
    """Every class of settings that the project's packages define, whatever holds it."""
    for package in (stability, sweeps):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name != "stability.sentences.st_module":  # a class of a library that need not be there
                importlib.import_module(module.name)
    found: list[type[BaseModel]] = []
    pending = [config.Settings]
    while pending:
        model = pending.pop()
        pending += model.__subclasses__()
        if model.__module__.split(".")[0] in ("stability", "sweeps") and model not in found:
            found.append(model)
    return found


def test_every_field_has_a_description():
    for model in all_settings():
        for name, field in model.model_fields.items():
            nested = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
            assert field.description or nested, f"{model.__qualname__}.{name} has no description"


def names_read(*folders: str) -> set[str]:
    """The names of all attributes that the code of some folders reads."""
    return {
        node.attr
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def keys_read(*folders: str) -> set[str]:
    """The literal keys that the code of some folders reads, as an optimizer does of a group of parameters."""
    return {
        node.slice.value
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Constant)
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_setting_of_a_part_is_read_where_parts_of_its_family_live(family):
    """A name that something else has elsewhere does not count: only what a family's own packages read."""
    homes = {"data": ("stability/data", "stability/corpora")}.get(family, (f"stability/{family}",))
    read = names_read(*homes) | (keys_read(*homes) if family == "optimizers" else set())
    unread = {
        (name, field)
        for name in Registry(family).names()
        for field in Registry(family).load(name).Config.model_fields
        if field not in read
    }
    assert unread == set()


def test_settings_of_every_file_are_looked_at():
    """Some of those that no registry and no entry's spec lead to by themselves."""
    names = {model.__name__ for model in all_settings()}
    assert {"StackSize", "AbstractTokenizerRecipe", "TokenizerRunSpec", "SpectraSpec", "Dimension", "Part"} <= names


def test_every_field_is_read_by_some_code():
    """A config field that nothing reads lets a sweep over it change nothing."""
    read = names_read("stability", "sweeps") | keys_read("stability/optimizers")
    unread = {name for model in all_settings() for name in model.model_fields if name not in read}
    # `behaviour` separates ids of runs that trained differently: to be in the spec is all that it is for
    assert unread == {"behaviour"}


def test_a_plugin_is_found_by_its_stem_and_cannot_replace_a_part(tmp_path, monkeypatch, lab):
    package = tmp_path / "my_lab_plugins"
    package.mkdir()
    (package / "__init__.py").write_text("")
    source = (ROOT / "stability" / "mechanisms" / "sa.py").read_text()
    (package / "twice.py").write_text(source)
    (package / "sc.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("stability.registry._plugins", {})
    add_plugin("my_lab_plugins.twice")
    spec = parse_run(
        {**lab.spec().model_dump(mode="json"), "plugins": ["my_lab_plugins.twice"], "mechanism": {"name": "twice"}}
    )
    assert spec.mechanism.name == "twice"
    assert "twice" in Registry("mechanisms").names()
    for module, message in (
        ("my_lab_plugins.sc", "would replace the mechanism 'sc'"),
        ("my_lab_plugins.absent", "no module"),
        ("json", "has no EXPORT"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(SweepSpec, {"plugins": [module]})


def test_a_sweeps_primary_claim_is_one_of_its_parts_and_quantities_and_moves_no_run():
    words = ["mechanism=[sa,sc]", "lr=[1e-3]", "seeds=1"]
    spec = read_spec("sweep", [*words, "primary=sc.window"])
    assert spec.primary == "sc.window" and spec.name == read_spec("sweep", words).name
    assert [run_id(run) for _, run in spec.points("x")] == [
        run_id(run) for _, run in read_spec("sweep", words).points("x")
    ]
    for given, message in (
        ("scc.window", r"primary=scc.window: scc is no part of this sweep; did you mean 'sc'\?"),
        ("sc", r"primary=sc: give PART.QUANTITY, e.g. primary=sc.window; quantities: window, common_window, best,"),
        ("sc.widow", r"primary=sc.widow: give PART.QUANTITY"),
    ):
        with pytest.raises(ValueError, match=message):
            read_spec("sweep", [*words, f"primary={given}"])


def test_a_primary_claim_names_one_comparison_of_a_sweep():
    sized = ["study=consensus_widths"]
    both = ["mechanism=[sa,sc]", "residual=[identity,mhc]", "objective=ar", "lr=[1e-3]"]
    cast = ["mechanism=[sa,sc]", "precision=[float32,bf16]", "lr=[1e-3]"]
    for words, given in (
        (sized, "sc width=256.window"), (sized, "width=64 sc.best"), (both, "sc mhc.best"), (cast, "sc.window"),
        (cast, "sc precision=bf16.window"), (["mechanism=[sc]", "lr=[1e-3]"], "sc.window"),
    ):  # fmt: skip
        assert read_spec("sweep", [*words, f'primary="{given}"']).primary == given
    for words, given, rest in (
        (sized, "sc.window", " fits 2 comparisons, of sc width=64, sc width=256; name one, e.g. "
         "'primary=\"sc width=64.window\"'"),
        (sized, "sc width=128.window", ": width=128 is no part of this sweep; did you mean"),
        (sized, "sa width=64.window", " fits no comparison; name one, e.g. 'primary=\"sc width=64.window\"'"),
        (both, "mhc.best", " fits 2 comparisons, of sa mhc, sc mhc;"),
        (both, "sa identity.best", " fits no comparison;"),
    ):  # fmt: skip
        with pytest.raises(ValueError) as caught:
            read_spec("sweep", [*words, f'primary="{given}"'])
        assert str(caught.value).startswith(f"primary={given}{rest}"), str(caught.value)


def test_a_sweeps_primary_claim_may_be_on_a_variant():
    words = ["mechanism=[sa]", "lr=[1e-3]", "ablate.sa.qk_norm=[rmsnorm]", "ablate.model.logit_softcap=[0.5]"]
    for given in ("qk_norm=rmsnorm.window", "model.logit_softcap=0.5.best"):
        assert read_spec("sweep", [*words, f"primary='{given}'"]).primary == given
    for given, rest in (("qk_norm=rmsnrm.window", "; did you mean 'qk_norm=rmsnorm'?"), ("clip_norm=1.window", "")):
        with pytest.raises(ValueError) as caught:
            read_spec("sweep", [*words, f"primary='{given}'"])
        assert str(caught.value).startswith(
            f"primary={given}: {given.rpartition('.')[0]} is no part of this sweep{rest}"
        )


def test_a_sweeps_reference_is_one_of_its_mechanisms_and_moves_no_run():
    words = ["mechanism=[sa,sc]", "lr=[1e-3]", "seeds=1"]
    spec = read_spec("sweep", [*words, "reference=sc"])
    assert spec.reference == "sc" and read_spec("sweep", words).reference is None
    assert [run_id(run) for _, run in spec.points("x")] == [
        run_id(run) for _, run in read_spec("sweep", words).points("x")
    ]
    with pytest.raises(ValueError, match=r"reference=scc: not a mechanism of this sweep; did you mean 'sc'\?"):
        read_spec("sweep", [*words, "reference=scc"])
