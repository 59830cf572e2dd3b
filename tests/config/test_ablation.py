"""`ablate.<part>.<setting>=[…]`: what it expands to, how its runs are told apart, what it refuses; and the parameter
counts of the paper's Table 9."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from stability import sweep
from stability.build import build_model
from stability.config.ablation import exact_text
from stability.config.identity import run_id
from stability.models.backbone import num_parameters
from stability.runs.results import collect
from tests.reading import read_spec
from tests.sizes import count_parameters

SC = ("mechanism=sc", "lr=[1e-3,1e-2]", "seeds=2")


def variants(*words: str) -> list[tuple[str, str]]:
    """(mechanism, label) of every kind of run, in order."""
    points = read_spec("sweep", [*words]).points("data")
    return list(dict.fromkeys((run.mechanism.name, label) for label, run in points))


@pytest.mark.parametrize("value", [0.1, -1e-3, 1e22, 4.361026750842233e-2, 1 / 3, 0.1 + 0.2, float("inf")])
def test_a_number_is_written_shortly_and_read_back_as_the_same_number(value):
    text = exact_text(value)
    assert float(text) == value
    assert len(text) <= len(repr(value))


def test_each_setting_varies_alone_around_the_base_at_every_rate_and_seed():
    points = read_spec("sweep", [*SC, "ablate.sc.window=[2,4,8]", "ablate.sc.rank=[1,4]"]).points("data")
    settings = {label: (run.mechanism.settings.window, run.mechanism.settings.rank) for label, run in points}
    assert settings == {"": (2, 4), "window=4": (4, 4), "window=8": (8, 4), "rank=1": (2, 1)}
    assert len(points) == 4 * 2 * 2
    assert {(label, run.lr_peak, run.seed) for label, run in points} == {
        (label, lr, seed) for label in settings for lr in (1e-3, 1e-2) for seed in (0, 1)
    }
    assert len({run_id(run) for _, run in points}) == len(points), (
        "the base is trained once, whatever values coincide with it"
    )


def test_the_base_and_its_variants_are_the_runs_that_plain_sweeps_would_make():
    points = read_spec("sweep", [*SC, "ablate.sc.window=[4]"]).points("data")
    for label, words in (("", []), ("window=4", ["mechanism.sc.window=4"])):
        plain = read_spec("sweep", [*SC, *words]).expand("data")
        assert [run_id(run) for run in plain] == [run_id(run) for each, run in points if each == label]


def test_only_the_named_part_varies_and_other_axes_are_crossed_with_it():
    assert variants("mechanism=[sa,sc]", "lr=1e-3", "ablate.sc.window=[4]") == [
        ("sa", ""),
        ("sc", ""),
        ("sc", "window=4"),
    ]
    crossed = read_spec(
        "sweep", ["mechanism=sc", "norm=[layernorm,rmsnorm]", "lr=1e-3", "seeds=1", "ablate.sc.window=[4]"]
    ).points("data")
    assert [(run.norm.name, label) for label, run in crossed] == [
        ("layernorm", ""),
        ("layernorm", "window=4"),
        ("rmsnorm", ""),
        ("rmsnorm", "window=4"),
    ]


def test_an_optimizers_settings_vary_for_every_mechanism_and_carry_its_name():
    points = read_spec(
        "sweep", ["mechanism=[sa,sc]", "lr=1e-3", "seeds=1", "ablate.adamw.beta2=[0.95,0.999]", "ablate.sc.rope=[none]"]
    ).points("data")
    assert [(run.mechanism.name, label) for label, run in points] == [
        ("sa", ""), ("sa", "adamw.beta2=0.95"), ("sc", ""), ("sc", "adamw.beta2=0.95"), ("sc", "rope=none"),
    ]  # fmt: skip
    assert [run.optimizer.settings.beta2 for _, run in points] == [0.999, 0.95, 0.999, 0.95, 0.999]


def test_settings_of_the_recipe_and_whole_fields_vary_one_at_a_time_for_every_mechanism():
    """Each variant is the run that the plain words make."""
    varied = {
        "qk_norm=rmsnorm": ("ablate.sa.qk_norm=[rmsnorm]", "mechanism.sa.qk_norm=rmsnorm"),
        "model.logit_softcap=30": ("ablate.model.logit_softcap=[30]", "model.logit_softcap=30"),
        "schedule.warmup_steps=50": ("ablate.schedule.warmup_steps=[50]", "schedule.warmup_steps=50"),
        "objective.z_loss=0.0001": ("ablate.objective.z_loss=[1e-4]", "objective.z_loss=1e-4"),
        "clip_norm=null": ("ablate.clip_norm=[1,null]", "clip_norm=null"),
        "batch=4": ("ablate.batch=[4]", "batch=4"),
        "optimizer=stable_adamw": ("ablate.optimizer=[adamw,stable_adamw]", "optimizer=stable_adamw"),
        "norm=rmsnorm": ("ablate.norm=[rmsnorm]", "norm=rmsnorm"),
        "ffn=moe": ("ablate.ffn=[moe]", "ffn=moe"),
        "mlp.bias=false": ("ablate.mlp.bias=[false]", "ffn.bias=false"),
        "position=learned": ("ablate.position=[none,learned]", "position=learned"),
        "position=none": ("ablate.position=[none,learned]", "position=none"),
    }
    base = ("mechanism=sa", "lr=1e-3", "seeds=1")
    points = read_spec("sweep", [*base, *dict.fromkeys(word for word, _ in varied.values())]).points("data")
    assert {label: run_id(run) for label, run in points} == {
        label: run_id(read_spec("sweep", [*base, *words]).expand("data")[0])
        for label, words in {"": (), **{label: (word,) for label, (_, word) in varied.items()}}.items()
    }
    assert len(points) == len({run_id(run) for _, run in points}) == 1 + len(varied)
    both = read_spec("sweep", ["mechanism=[sa,sw]", *base[1:], "ablate.clip_norm=[null]"]).points("data")
    assert [(run.mechanism.name, run.clip_norm) for _, run in both] == [
        ("sa", 1.0), ("sa", None), ("sw", 1.0), ("sw", None),
    ]  # fmt: skip


def test_a_variant_of_another_optimizer_has_that_ones_rates_under_lr_scaled():
    spec = read_spec("sweep", ["mechanism=sa", "lr=scaled", "seeds=1", "ablate.optimizer=[sgd]"])
    plain = {
        name: read_spec("sweep", ["mechanism=sa", "lr=scaled", "seeds=1", f"optimizer={name}"]).rates()[0]
        for name in ("adamw", "sgd")
    }
    assert spec.rates() == (plain["adamw"], plain["sgd"]) and plain["adamw"] != plain["sgd"]


def test_the_parts_of_a_pattern_vary_under_the_patterns_name():
    points = read_spec(
        "sweep",
        ["mechanism=mix", "lr=1e-3", "seeds=1", "ablate.mix.sc.window=[2,4]", "ablate.mix.pattern=[[sa,sc],[sc,sa]]"],
    ).points("data")
    windows = {
        label: next(part.settings.window for part in run.mechanism.settings.parts if part.name == "sc")
        for label, run in points
    }
    assert windows == {"": 2, "sc.window=4": 4, "pattern=[sc,sa]": 2}
    assert points[-1][1].mechanism.settings.pattern == ("sc", "sa")


def test_the_base_value_stands_in_its_place_among_the_columns():
    def columns(*words):
        return {
            item.setting: [(value, label) for value, label, _ in found]
            for item, _, found in read_spec("sweep", ["mechanism=sc", *words]).ablations()
        }

    assert columns("ablate.sc.window=[1,4]", "ablate.sc.rope=[none]") == {
        "window": [(1, "window=1"), (2, ""), (4, "window=4")],
        "rope": [("gradient", ""), ("none", "rope=none")],
    }
    assert columns("ablate.sc.window=[4,2]")["window"] == [(4, "window=4"), (2, "")]
    assert columns("ablate.optimizer=[sgd]")[""] == [("adamw", ""), ("sgd", "optimizer=sgd")]
    assert columns("ablate.clip_norm=[null]")[""] == [(1.0, ""), (None, "clip_norm=null")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ablate.sc.windw=[1]"], r"ablate\.sc\.windw: unknown key; did you mean 'window'\? \(choices: window, rank, "),
        (["ablate.scc.window=[1]"], r"ablate\.scc: no such part; did you mean 'sc'\?"),
        (
            ["ablate.sw.window=[1]"],
            r"ablate\.sw\.window: sw is not among what this sweep selects \(sc, identity, adamw, layernorm, standard, mlp, rope\)",
        ),
        (["ablate.sc.window=[4,4.0]"], r"ablate\.sc\.window=\[4,4\]: 4 is listed twice; give each value once"),
        (["ablate.sc.window=[2,2]"], r"2 is listed twice"),
        (["ablate.sc.step_size=[0.2,0.20000000001]"], r"0\.2 is listed twice"),
        (
            ["ablate.sc.window=[0]"],
            r"ablate\.sc\.window: mechanism\.sc\.window=0: input should be greater than or equal to 1",
        ),
        (
            ["ablate.sc.window=4"],
            r"ablate\.sc\.window=4: must be a list of one setting's values, e\.g\. ablate\.sc\.window=\[2,4,8\]",
        ),
        (["ablate.sc.window=[]"], r"ablate\.sc\.window=\[\]: must be a list"),
        (["ablate.sc=[4]"], r"ablate\.sc=\[4\]: names no setting; e\.g\. ablate\.sc\.SETTING=\[2,4,8\]"),
        (["ablate.sc.window.of=[4]"], r"ablate\.sc\.window: has no settings of its own$"),
        (["ablate.sc.name=[sa]"], r"ablate\.sc\.name: unknown key"),
        (
            ["mechanism=mix", "ablate.mix.sd.window=[4]"],
            r"ablate\.mix\.sd: has no settings of its own; did you mean 'sc'\?",
        ),
        (["mechanism=mix", "ablate.mix.sc.windw=[4]"], r"ablate\.mix\.sc\.windw: unknown key; did you mean 'window'\?"),
        (["ablate.clip_norm=[-1]"], r"ablate\.clip_norm: clip_norm=-1: input should be greater than 0"),
        (["ablate.clip_nrm=[1]"], r"ablate\.clip_nrm=\[1\]: names no setting"),
        (["ablate.clip_norm=null"], r"ablate\.clip_norm=null: must be a list"),
        (["ablate.clip_norm.x=[1]"], r"ablate\.clip_norm\.x: clip_norm varies as a whole, ablate\.clip_norm=\[…\]$"),
        (
            ["ablate.optimizer.beta2=[0.9]"],
            r"optimizer varies as a whole, ablate\.optimizer=\[…\]; its settings: ablate\.adamw\.beta2=\[…\]$",
        ),
        (
            ["ablate.ffn.bias=[false]"],
            r"ffn varies as a whole, ablate\.ffn=\[…\]; its settings: ablate\.mlp\.bias=\[…\]$",
        ),
        (["ablate.ffn=[mop]"], r"ablate\.ffn: no ffn called 'mop'; did you mean 'moe'\?"),
        (["ablate.glu.bias=[true]"], r"ablate\.glu\.bias: glu is not among what this sweep selects"),
        (["ablate.optimizer=[adam]"], r"ablate\.optimizer: no optimizer called 'adam'; did you mean 'adamw'\?"),
        (
            ["optimizer=[adamw,sgd]", "ablate.optimizer=[lion]"],
            r"ablate\.optimizer: this sweep selects several already; add the others to optimizer=\[…\]",
        ),
        (
            ["ablate.model.width=[32]"],
            r"ablate\.model\.width: a size has curves of its own; write model\.width=\[32\]",
        ),
        (["ablate.model.widt=[32]"], r"ablate\.model\.widt: unknown key; did you mean 'width'\?"),
        (
            ["ablate.schedule.warmup_steps=[-3]"],
            r"schedule\.warmup_steps=-3: input should be greater than or equal to 0",
        ),
        (["ablat.sc.window=[4]"], r"ablat\.sc\.window: unknown key"),
    ],
)
def test_what_cannot_be_varied_is_refused_in_one_line(words, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_spec("sweep", ["mechanism=sc", "lr=1e-3", *words])
    assert "\n" not in str(caught.value)


TABLE_9 = {"edge_hidden": (4, 16, 64), "rank": (1, 8, 16), "window": (4, 8, 12)}  # around 256, 4 and 2


def test_a_setting_of_a_preset_can_be_left_out_or_have_other_values():
    study = "study=ablation_consensus_193m"
    assert variants(study, "~ablate.sc.rank", "ablate.sc.edge_hidden=[64]", "lr=1e-3", "seeds=1") == [
        ("sc", label) for label in ("", "edge_hidden=64", "window=4", "window=8", "window=12")
    ]  # fmt: skip


def test_the_small_ablations_base_is_the_flagships_sc():
    small, flagship = (
        read_spec("sweep", [f"study={name}"]).points("data") for name in ("ablation_consensus", "flagship")
    )
    bases = {run_id(run) for variant, run in small if not variant}
    assert len(bases) == 3 and bases <= {run_id(run) for _, run in flagship}


def test_the_preset_at_the_papers_size_has_model_data_and_objective_of_the_papers_text_and_its_rates():
    """Table 9's baseline is the text 193M model, trained as it is trained for Figure 2."""
    whole, text = (read_spec("sweep", [f"study={name}"]) for name in ("ablation_consensus_193m", "text_193m"))
    for field in ("model", "data", "objective", "optimizer", "steps", "batch", "clip_norm", "generate"):
        assert getattr(whole, field) == getattr(text, field), field
    (sc,), of_text = whole.mechanism, next(each for each in text.mechanism if each.name == "sc")
    assert sc == of_text
    base = sc.settings
    assert (base.edge_hidden, base.rank, base.window) == (256, 4, 2)
    ablated = variants("study=ablation_consensus_193m", "lr=1e-3", "seeds=1")
    assert ablated == [("sc", ""), *(("sc", f"{key}={each}") for key, row in TABLE_9.items() for each in row)]
    assert whole.lr.rates() == tuple(
        float(rate) for rate in yaml.safe_load((CONF / "lr" / "paper_medium.yaml").read_text())["values"]
    )


def test_a_studys_runs_carry_their_variant_and_another_study_calls_the_same_run_its_base(lab, capsys):
    words = [
        f"runs_dir={lab.pool}", "report=false", "data=text", f"data.path={lab.text}", "launcher=serial", "device=cpu", "lr=1e-3", "tables=all",
        "mechanism=sc", "objective=mlm", "seeds=1", "steps=3", "batch=4", "hessian=false", "evaluation.sequences=8", "model.layers=2", "model.width=16", "model.heads=2",
        "model.positions=16",
    ]  # fmt: skip
    assert sweep.main([*words, "ablate.sc.window=[1,2]", "name=varied"]) == 0
    out = capsys.readouterr().out
    assert "sc window=1 lr=0.001 seed=0" in out and "Ablation of sc" in out
    runs = collect(lab.pool / "studies" / "varied").runs
    assert list(runs.variant) == ["", "window=1"]
    assert sweep.main([*words, "mechanism.sc.window=1", "name=plain"]) == 0
    assert "skips 1 finished run, trains none" in capsys.readouterr().out
    plain = collect(lab.pool / "studies" / "plain").runs
    assert (plain.run_id[0], plain.variant[0]) == (runs.run_id[1], "")
    assert sweep.main([*words, "ablate.sc.window=[1,2]", "dry_run=true"]) == 0
    out = capsys.readouterr().out
    assert "sc/identity/layernorm/adamw window=1 " in out and "2 runs (0 of them finished)" not in out


def test_a_plan_of_a_model_that_no_memory_holds_counts_its_parameters(lab, capsys):
    """16 layers of width 65,536: the MLPs alone have 8·d²·16 = 5.5e11 weights."""
    words = [
        f"runs_dir={lab.pool}",
        "data=text",
        "objective=mlm",
        f"data.path={lab.text}",
        "mechanism=sa",
        "lr=1e-3",
        "device=cpu",
        "dry_run=true",
    ]
    assert sweep.main([*words, "model.layers=16", "model.width=65536", "model.heads=512", "model.positions=16"]) == 0
    out = capsys.readouterr().out
    blocks = 16 * (12 * 65536**2 + 13 * 65536)  # two LayerNorms 4d, qkv and out 4d² + 4d, MLP 8d² + 5d
    assert f"{blocks + (256 + 1) * 65536 + 256 * 65536 + 256 + 2 * 65536:,}" in out
    assert "no room in 80 GB" in out and "on one H100 SXM" in out


@pytest.mark.parametrize("mechanism", ["sa", "sc", "sw", "mix"])
def test_counting_without_building_counts_what_is_built(lab, mechanism):
    spec = lab.spec(mechanism={"name": mechanism})
    assert count_parameters(spec, 256) == num_parameters(build_model(spec, 256))


CONF = Path(__file__).parents[2] / "conf"
# The paper's Table 9, row "Model Size", in millions: value of the setting → size, at the text model of Table 10 called
# 193M.
MODEL_SIZE = {
    "edge_hidden": {4: 179, 16: 180, 64: 182, 256: 193},
    "rank": {1: 186, 4: 193, 8: 203, 16: 222},
    "window": {2: 193, 4: 193, 8: 193, 12: 193},
}
TEXT_193M = {"name": "text_193m", "layers": 12, "width": 768, "heads": 12, "positions": 1024}


def at_papers_scale(lab, **settings) -> int:
    mechanism = {"name": "sc", "window": 2, "rank": 4, "edge_hidden": 256, **settings}
    return count_parameters(lab.spec(model=TEXT_193M, mechanism=mechanism), 50257)


def missing_millions(lab, edge_mlp: str) -> tuple[float, float]:
    """Between which bounds lies what our model would have to have more, for every entry to come out rounded as the
    paper has it?"""
    sizes = [
        (size, at_papers_scale(lab, edge_mlp=edge_mlp, **{setting: value}))
        for setting, row in MODEL_SIZE.items()
        for value, size in row.items()
    ]
    return max(size - 0.5 - count / 1e6 for size, count in sizes), min(
        size + 0.5 - count / 1e6 for size, count in sizes
    )


def test_the_papers_model_sizes_differ_as_ours_do_with_the_shared_edge_mlp(lab):
    low, high = missing_millions(lab, "shared")
    assert low < high, "one constant brings all twelve entries of the row"
    low, high = missing_millions(lab, "separate")
    assert low > high, "three first layers do not fit the paper's row"


def test_a_heads_edge_mlp_has_the_parameters_of_its_layers(lab):
    """2·64 → ξ with biases, then α, β and r·64 rows of Λ with biases: (129 + 2 + 64r)·ξ + 2 + 64r for each of 12 · 12
    heads (facts 1: 131ξ + 64rξ)."""
    edges = {
        (hidden, rank): 144 * ((131 + 64 * rank) * hidden + 2 + 64 * rank)
        for hidden, rank in ((4, 4), (256, 4), (256, 16))
    }
    base = at_papers_scale(lab)
    for (hidden, rank), expected in edges.items():
        assert base - at_papers_scale(lab, edge_hidden=hidden, rank=rank) == edges[256, 4] - expected
    assert base == at_papers_scale(lab, window=12)
    assert math.isclose(base / 1e6, 162.4, abs_tol=0.1), "as stated, without what the paper leaves unsaid"
