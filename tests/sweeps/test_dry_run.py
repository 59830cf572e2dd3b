"""What the plan charges for α_max and for what `measure` adds to it, what it leaves out as done, what it measures."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stability.config.curvature import CurvatureSpec
from stability.config.parts import part
from stability.corpora.base import AbstractCorpus
from stability.mechanisms import build
from stability.plan.plan import Plan, _note_short_validation, name_kind, note_full_windows
from stability.training.devices import peak_memory_mb
from sweeps import costs, dry_run, timings
from sweeps.costs import PRODUCT, RECORDED_STEP, Cost, Timing, curvature_steps, measure_costs
from sweeps.dry_run import find_remaining
from sweeps.estimated import GPUS
from sweeps.trial import make_trials
from tests.sweeps import fakes
from tests.sweeps.real import make_sweep

ALONE = CurvatureSpec(state=("checkpoint",), warmup_steps=0, recorded_steps=2, parity_steps=0)


def cost(**changes):
    return curvature_steps(ALONE.model_copy(update=changes), 4)


@pytest.mark.parametrize("name", ["critical_lr", "profile", "sharpness", "density", "blocks"])
def test_everything_that_can_be_measured_costs_something_more(name):
    assert cost(measure=("alpha_max", name)) > cost() + 1


def test_a_table_alone_is_charged_one_recorded_step_and_its_products():
    spectra = ALONE.spectra.model_copy(update={"density_probes": 2, "density_products": 5})
    assert cost(measure=("density",), spectra=spectra) == pytest.approx(RECORDED_STEP + 10 * PRODUCT)
    both = cost(measure=("density",), spectra=spectra, state=("paper", "checkpoint"), warmup_batches=7, warmup_steps=3)
    assert both == pytest.approx(2 * (RECORDED_STEP + 10 * PRODUCT) + 7 + 2 * 3)


def test_differences_are_charged_for_no_more_steps_than_are_recorded():
    assert cost(parity_steps=9) == cost(parity_steps=2) > cost(parity_steps=1) > cost()


def test_deeper_models_have_more_blocks_and_two_phases_cost_twice():
    assert curvature_steps(ALONE.model_copy(update={"measure": ("blocks",)}), 8) > cost(measure=("blocks",))
    assert cost(phase="all") == 2 * cost()


def described(spec):
    """The plan's text."""
    plan = Plan.of(spec)
    return dry_run.describe(plan, make_trials(spec, plan.points))


def left(trial, retry="failed"):
    found = find_remaining(trial, retry)
    return found.steps, found.after


def test_what_is_finished_costs_nothing_and_what_was_interrupted_only_what_its_checkpoint_leaves(tmp_path):
    queued, trained, failed, interrupted, plain = (
        fakes.make_trial(tmp_path, index, steps=8, curvature={} if index < 4 else None) for index in range(5)
    )
    for trial in (trained, plain):
        fakes.finish(trial.directory, "stable", step=8, val_nll=2.5)
    failed.directory.set_status("failed", step=3, reason="planted")
    interrupted.directory.set_status("running", step=5, num_steps=8)
    for step in (2, 6):
        (interrupted.directory.path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    assert left(queued) == (1.0, True)
    assert left(trained) == (0.0, True), "its α_max is missing"
    assert left(plain) == (0.0, False)
    assert (left(failed), left(failed, "none")) == ((1.0, True), (0.0, False))
    assert left(interrupted) == (0.25, True)


def test_the_plans_total_counts_only_what_is_left(tmp_path, monkeypatch):
    timing = Timing(step_s=1.0, train_s=100.0, after_s=20.0, memory_mb=512.0)
    monkeypatch.setattr(
        dry_run,
        "measure_costs",
        lambda plan, gpu: {f"{name}/identity/layernorm/adamw": Cost(1000, 5.0, timing) for name in ("sa", "sc")},
    )
    monkeypatch.setattr(dry_run, "slots", lambda spec: 2)
    spec, trials = make_sweep(tmp_path)
    fakes.finish(trials[0].directory, "diverged", step=5, val_nll=2.5)
    text = described(spec)
    a_run = spec.steps * spec.batch * spec.model.positions
    assert "4 runs (1 of them finished)" in text
    assert [line.split()[:3] for line in text.splitlines() if line.startswith("s") and "identity" in line] == [
        ["sa/identity/layernorm/adamw", "2", "1"],
        ["sc/identity/layernorm/adamw", "2", "2"],
    ]
    assert (
        f"in all: {4 * a_run:,} tokens; left to do: 3 runs, {3 * a_run:,} tokens, 6 min 00 s of work, about 3 min 00 "
        "s and 1.0 GiB with 2 at a time" in text
    )


def test_one_run_at_one_rate_and_seed_is_told_in_the_singular(tmp_path, monkeypatch):
    monkeypatch.setattr(
        dry_run,
        "measure_costs",
        lambda plan, gpu: {"sa/identity/layernorm/adamw": Cost(1000, 5.0, Timing(1.0, 100.0, 20.0, 512.0))},
    )
    spec, _ = make_sweep(tmp_path, "lr=1e-3")
    text = described(spec.model_copy(update={"mechanism": spec.mechanism[:1]}))
    assert (
        text.startswith("study ")
        and ": 1 run (0 of them finished), learning rate 0.001, 1 seed\n" in text
        and "left to do: 1 run, " in text
    )


def test_a_plan_says_which_seeds_it_has_where_they_do_not_begin_at_zero(tmp_path, monkeypatch):
    cost = Cost(1000, 5.0, Timing(1.0, 100.0, 20.0, 512.0))
    monkeypatch.setattr(
        dry_run, "measure_costs", lambda plan, gpu: dict.fromkeys((kind.name for kind in plan.kinds), cost)
    )
    spec, _ = make_sweep(tmp_path, "lr=1e-3", "seeds=3", "first_seed=5")
    assert ", learning rate 0.001, 3 seeds from 5 on\n" in described(spec)


def test_a_plan_says_that_it_does_not_know_how_many_trials_share_a_gpu(tmp_path, monkeypatch):
    timing = Timing(step_s=1.0, train_s=100.0, after_s=20.0, memory_mb=512.0)
    monkeypatch.setattr(
        dry_run,
        "measure_costs",
        lambda plan, gpu: {f"{name}/identity/layernorm/adamw": Cost(1000, 5.0, timing) for name in ("sa", "sc")},
    )
    monkeypatch.setattr(dry_run, "slots", lambda spec: 1)
    monkeypatch.setattr("stability.build.resolve_device", lambda device: torch.device("cuda"))
    unknown = "with 1 at a time, one a GPU: how many share one the sweep measures when it starts (gpus_per_trial=auto)"
    for number, (words, is_unknown) in enumerate(
        [((), True), (("gpus_per_trial=0.25",), False), (("launcher=serial",), False)]
    ):
        (folder := tmp_path / str(number)).mkdir()
        spec, _ = make_sweep(folder, "launcher=ray", *words)
        text = described(spec)
        assert (unknown in text) == is_unknown and "with 1 at a time" in text


def test_a_plan_says_what_is_kept_of_a_sequence_where_it_can_be_gone_on_with(tmp_path):
    """A key and a value of the width, four bytes a number, for each position and layer."""
    both, _ = make_sweep(tmp_path, "lr=1e-3")
    causal = both.model_copy(update={"mechanism": both.mechanism[:1], "objective": part("objectives", "ar")})
    rows = [
        [line.split() for line in described(spec).splitlines() if line.startswith(("sa/", "sc/"))]
        for spec in (both, causal)
    ]
    numbers = 2 * both.model.width * both.model.layers * both.model.positions
    assert [row[5] for of_spec in rows for row in of_spec] == ["--", "--", f"{4 * numbers / 1024:.1f}KiB"]


def test_a_plan_names_steps_sequences_and_lengths_and_large_states_in_mib(tmp_path):
    spec, _ = make_sweep(tmp_path, "lr=1e-3", "steps=[4,1200]", "batch=6", "model.positions=24")
    assert "training: 4 or 1,200 steps a run, each of 6 sequences of 24 tokens (batch=6)" in described(spec)
    columns = [dry_run._state_column(each) for each in (None, 2**20, 192 * 2**20)]
    assert columns == ["--".rjust(13), "1024.0KiB".rjust(13), "192.0MiB".rjust(13)]
    runs = [dry_run._timing_columns(Timing(0.1, each, 0.0, 1000.0), GPUS["h100"]).split()[1] for each in (58.0, 720.0)]
    assert runs == ["58s", "0.2h"]


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_a_plan_for_a_gpu_in_float32_names_the_faster_precisions(tmp_path, precision):
    spec, _ = make_sweep(tmp_path, "lr=1e-3", f"precision={precision}", "plan_gpu=a100")
    line = "float32: matrix products of precision=tf32 are up to 8 times as fast, of precision=bf16 up to 16 times;"
    assert (line in described(spec)) == (precision == "float32")


def test_a_mechanism_that_does_not_count_its_operations_has_a_plan(tmp_path, monkeypatch):
    from stability.mechanisms import AbstractMechanism
    from stability.mechanisms.sa import EXPORT as SA

    spec, _ = make_sweep(tmp_path, "mechanism=[sa,sc]", "lr=1e-3", "hessian=false")
    monkeypatch.setattr(SA, "cost", AbstractMechanism.cost)
    text = described(spec)
    rows = {line.split("/")[0]: line.split() for line in text.splitlines() if "/identity/" in line}
    assert "all layers; --: the mechanism has no `cost`\n" in text
    assert rows["sa"][4] == "--" and float(rows["sc"][4].replace(",", "")) > 0


def test_a_kinds_time_and_memory_are_its_own(tmp_path):
    spec, _ = make_sweep(tmp_path, "mechanism=[sa,sc]", "hessian=true")
    ballast = bytearray(600 * 2**20)
    peak_mb = peak_memory_mb(torch.device("cpu"))
    del ballast
    found = measure_costs(Plan.of(spec))
    for cost in found.values():
        assert 0 < cost.timing.step_s < cost.timing.train_s
        assert cost.timing.after_s > 0
        assert 50 < cost.timing.memory_mb < (peak_mb - 300 if Path("/proc/self/clear_refs").exists() else peak_mb + 1)


def test_the_run_of_a_kind_is_one_of_the_plans_runs_at_its_lowest_rate(tmp_path):
    """So a plan times steps that are trained, not a rate at which an optimizer's matrices overflow."""
    spec, _ = make_sweep(tmp_path, "optimizer=[adamw,sgd]", "lr=[1e-2,1e-3]")
    plan = Plan.of(spec)
    assert len(plan.kinds) == 4
    for kind in plan.kinds:
        runs = [run for label, run in plan.points if name_kind(run, label) == kind.name]
        assert kind.spec == min(runs, key=lambda run: (run.lr_peak, run.seed))


def test_times_are_expected_of_each_kind_that_is_left_and_of_one_kind_none(tmp_path, monkeypatch):
    """The clock is replaced: a step of sc takes three times one of sa."""
    spec, _ = make_sweep(tmp_path, "hessian=true", "curvature.recorded_steps=3")
    plan = Plan.of(spec)
    trials = make_trials(plan.spec, plan.points)
    step_s = {"sa": 1.0, "sc": 3.0}
    monkeypatch.setattr(timings, "time_step", lambda replica, timed_s: step_s[replica.spec.mechanism.name])
    state = torch.random.get_rng_state()
    found = costs.expected_times(plan, trials)
    assert torch.equal(torch.random.get_rng_state(), state), "no run starts elsewhere for it"
    after_s = costs.curvature_steps(spec.curvature, spec.model.layers)
    assert {trial.spec["mechanism"]["name"]: found[trial.run_id] for trial in trials} == {
        "sa": (1.0, pytest.approx(after_s)),
        "sc": (3.0, pytest.approx(3 * after_s)),
    }
    monkeypatch.setattr(costs, "EXPECTING_S", -1.0)
    assert costs.expected_times(plan, trials) == {}, "no time for any"
    monkeypatch.undo()
    for trial in trials:
        if trial.spec["mechanism"]["name"] == "sa":
            fakes.finish(trial.directory, "stable", step=12, val_nll=2.5)
    monkeypatch.setattr(timings, "Replica", None)
    assert costs.expected_times(plan, trials) == {}, "one kind is left, and its first run says as much"


def test_a_kind_whose_step_fails_has_no_expected_time_and_the_others_have(tmp_path, monkeypatch):
    spec, _ = make_sweep(tmp_path)
    plan = Plan.of(spec)
    trials = make_trials(plan.spec, plan.points)

    def step_s(replica, timed_s):
        if replica.spec.mechanism.name == "sc":
            raise AttributeError("planted")
        return 1.0

    monkeypatch.setattr(timings, "time_step", step_s)
    found = costs.expected_times(plan, trials)
    assert {trial.spec["mechanism"]["name"] for trial in trials if trial.run_id in found} == {"sa"}


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"held_out": 0.01}, "data.held_out=0.05 holds out enough"),
        ({"hold_out": 0.1}, "data.hold_out=0.5 holds out enough"),
        ({"held_out": 100}, "data.held_out=500 holds out enough"),
        ({"held_out": 0.2}, "about 5 times as much data would give them"),  # all of the data
        ({"hold_out": None}, "about 5 times as much data would give them"),
        ({"hold_out": "region"}, "about 5 times as much data would give them"),
    ],
)
def test_a_short_validation_names_the_setting_that_mends_it(settings, advice):
    corpus = AbstractCorpus()
    corpus.windows = lambda split, num, positions: [None] * min(num, 40)
    spec = SimpleNamespace(
        evaluation=SimpleNamespace(sequences=200),
        model=SimpleNamespace(positions=8),
        data=SimpleNamespace(settings=SimpleNamespace(**settings)),
    )
    plan = SimpleNamespace(
        spec=spec, corpus=corpus, is_read=True, objective=SimpleNamespace(tokens_needed=lambda positions: positions)
    )
    assert _note_short_validation(plan) == (
        f"validation: on all 40 held-out examples, fewer than evaluation.sequences=200; {advice}"
    )


@pytest.mark.parametrize(("window", "is_noted"), [(6, False), (7, True), (5000, True)])
def test_a_window_over_all_positions_is_said_to_be_plain_attention_and_is(window, is_noted):
    positions = 8
    windowed = part("mechanisms", {"name": "sw", "window": window})
    run = SimpleNamespace(mechanism=windowed, model=SimpleNamespace(positions=positions))
    kind = SimpleNamespace(spec=run)
    line = f"mechanism.sw.window={window} covers all 8 positions: sw is sa here"
    assert note_full_windows([kind, kind]) == ([line] if is_noted else [])
    sw = build("sw", width=16, heads=2, window=window).double()
    sa = build("sa", width=16, heads=2).double()
    sa.load_state_dict(sw.state_dict())
    x_BND = torch.randn(2, positions, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(sw(x_BND), sa(x_BND), rtol=0, atol=1e-12) is is_noted  # of 8 terms of about 1


def test_a_sweeps_notes_have_its_full_windows(tmp_path):
    spec = make_sweep(tmp_path, "mechanism=[sc,sw]", "mechanism.sw.window=5000")[0]
    line = f"mechanism.sw.window=5000 covers all {spec.model.positions} positions: sw is sa here"
    assert line in Plan.of(spec).notes
