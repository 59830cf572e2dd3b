"""Every run counts: synthetic studies in which runs diverged, died early, crashed or were never measured, and what
tables, figures and claims make of them."""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from analysis import report
from analysis.drawing.typeset import Cell
from analysis.numbers.step_comparison import compare_stable_steps
from analysis.numbers.step_shares import count_stable_steps, phases_and_states
from analysis.sections import curvature as curvature_plots
from analysis.sections.alpha import alpha_figures
from analysis.sections.alpha_tables import alpha_tables, last_table
from analysis.sections.steps import make_fallen_tables
from analysis.study.load import load
from analysis.study.protocol import ADAMS, explain_undefined_states
from stability.config.curvature import CurvatureSpec
from stability.registry import Registry
from tests.analysis.synthetic import write_study

LRS = (1e-3, 3e-2)
STABLE, BEYOND = [1.0] * 25, [1e-9] * 25


def study_of(tmp_path, diverged=(), alpha=lambda *_: STABLE, **settings):
    """Three seeds of sa and sc at two rates; ``diverged``: (mechanism, lr, seed) of the runs that did."""
    nll = lambda m, lr, seed: math.inf if (m, lr, seed) in diverged else 2.0  # noqa: E731
    wanted = {"lrs": LRS, "mechanisms": ("sa", "sc"), "seeds": 3, "states": ["paper"], "nll": nll, "alpha": alpha}
    return load(write_study(tmp_path, **(wanted | settings)))


def row_of(table, lr):
    return next(row for row in table.rows if row[0].text == lr)


TWO_OF_THREE = {("sa", 3e-2, 0), ("sa", 3e-2, 2)}
ALL = {("sa", 3e-2, seed) for seed in range(3)}


def nearly(m, lr, *_):
    """92 % of sc's steps are stable at the highest rate, all of the others."""
    return [1.0] * 23 + [1e-9] * 2 if m == "sc" and lr > 1e-2 else STABLE


def test_two_of_three_that_diverged_count_as_no_stable_step(tmp_path):
    """A third is stable, not the survivor's 100 %; the survivor's numbers stand beside it under that name."""
    (table,) = alpha_tables(study_of(tmp_path, TWO_OF_THREE, nearly))
    _, sa_median, sc_median, sa, sc = row_of(table, "3e-2")
    assert sa == Cell("33", "0–100, n=75\ndiverged 2/3\nsurvivors 100") and sc == Cell("92", "92–92, n=75", bold=True)
    assert (sa_median.text, sa_median.detail, sa_median.bold) == ("1.0e0", "n=1\ndiverged 2/3", False), (
        "a median of survivors only is not set in bold"
    )
    assert sc_median.bold
    assert (
        "A run that diverged has no terminal checkpoint and counts as 0 % over the 25 steps that it would have recorded"
        in table.caption
    )
    assert "Diverged: sa 2/3 at 3e-2." in table.text(details=False)


def test_where_all_diverged_the_cells_are_the_papers_dash_and_zero(tmp_path):
    (table,) = alpha_tables(study_of(tmp_path, ALL))
    _, median, _, share, other = row_of(table, "3e-2")
    assert median == Cell("--", "diverged 3/3") and share == Cell("0", "0–0, n=75\ndiverged 3/3") and other.bold


def test_a_rate_at_which_every_run_diverged_has_a_row_a_panel_and_a_tick(tmp_path):
    study = study_of(tmp_path, ALL | {("sc", 3e-2, seed) for seed in range(3)})
    (table,) = alpha_tables(study)
    assert [cell.text for cell in row_of(table, "3e-2")] == ["3e-2", "--", "--", "0", "0"]
    (figure,) = alpha_figures(study)
    assert all([text.get_text() for text in ax.texts] == ["3/3"] for ax in figure.axes)
    assert all("3e-2" in [label.get_text() for label in ax.get_xticklabels()] for ax in figure.axes)
    assert "diverged, of all runs (0 % stable)" in [text.get_text() for text in figure.legends[0].get_texts()]
    (steps,) = curvature_plots.step_figures(study)
    panels = {ax.get_title(loc="left"): " ".join(ax.get_title(loc="right").split()) for ax in steps.axes}
    assert panels == {"$\\alpha$ = 1e-3": "", "$\\alpha$ = 3e-2": "diverged: sa 3/3, sc 3/3"}


def test_a_series_that_only_diverged_is_in_tables_and_figures(tmp_path):
    study = study_of(tmp_path, {("sa", lr, seed) for lr in LRS for seed in range(3)})
    (table,) = alpha_tables(study)
    assert table.header == ("LR", "sa", "sc", "sa", "sc") and row_of(table, "1e-3")[1] == Cell("--", "diverged 3/3")
    assert [ax.get_title(loc="left") for ax in alpha_figures(study)[0].axes] == ["sa", "sc"]


def test_a_study_in_which_every_run_diverged_prints_what_its_sweep_asked_for(tmp_path):
    every = {(m, lr, seed) for m in ("sa", "sc") for lr in LRS for seed in range(3)}
    study = study_of(tmp_path, every)
    assert alpha_tables(study) == [], "nobody asked for α_max"
    asked = {"hessian": True, "curvature": {"phase": "all", "state": ["paper"], "recorded_steps": 7}}
    study = replace(study, study=study.study | {"spec": asked})
    assert phases_and_states(study) == [("terminal", "paper"), ("earliest", "paper")]
    assert row_of(alpha_tables(study)[0], "3e-2")[3] == Cell("0", "0–0, n=21\ndiverged 3/3")


def test_a_table_without_a_row_states_the_protocol_by_which_its_runs_were_to_be_measured(tmp_path):
    study = study_of(tmp_path, EVERY)
    protocol = CurvatureSpec(state=("paper", "checkpoint"), recorded_steps=7, warmup_steps=3).model_dump(mode="json")
    asked = {"hessian": True, "curvature": protocol, "batch": 4, "clip_norm": 2.0}
    paper, checkpoint = alpha_tables(replace(study, study=study.study | {"spec": asked}))
    how = (
        "Protocol: 5 warm-up batches, 3 warm-up steps, 7 recorded steps of 4 sequences; slope of the {} gradient; "
        "weight decay included in u; clipping norm 2"
    )
    for table, gradient in ((paper, "clipped"), (checkpoint, "true")):
        for text in (table.caption, table.brief):
            assert f"{how.format(gradient)}; method auto. No step was recorded." in text


def test_a_table_without_a_row_states_the_protocol_of_the_studys_other_rows_of_that_state_before_the_one_asked_for(
    tmp_path,
):
    """Diverged after the earliest checkpoint, which was measured later by other settings than the sweep's."""
    study = study_of(tmp_path, EVERY)
    study = early(study, 3e-2, 0, STABLE, step=0)
    measured_by = CurvatureSpec(
        state=("paper",), recorded_steps=25, gradient="true", batch=9, clip_norm=1.0
    ).model_dump(mode="json")
    asked = {"hessian": True, "curvature": CurvatureSpec(state=("paper",), recorded_steps=7).model_dump(mode="json")}
    study = replace(
        study, curvature=study.curvature.assign(protocol=json.dumps(measured_by)), study=study.study | {"spec": asked}
    )
    terminal = alpha_tables(study, phases=("terminal",))[0]
    assert (
        "25 recorded steps of 9 sequences; slope of the true gradient" in terminal.caption
        and "No step was recorded." in terminal.caption
    )
    bare = study_of(tmp_path / "bare", EVERY)
    named = {"phase": "terminal", "state": ["paper"], "recorded_steps": 7}
    bare = replace(bare, study=bare.study | {"spec": {"hessian": True, "curvature": named}})
    assert "Protocol: not recorded" in alpha_tables(bare)[0].caption, "a record of states alone says nothing of how"
    del named["recorded_steps"]
    bare = replace(bare, study=bare.study | {"spec": {"hessian": True, "curvature": named}})
    with pytest.raises(ValueError, match="study.json has no curvature.recorded_steps"):
        alpha_tables(bare)  # no number of steps is made up


def early(study, lr, seed, steps, step=4900):
    """The study with rows of sa's run at its earliest (step 250) and, for ``step``, its last checkpoint."""
    run = study.runs[
        (study.runs["mechanism"] == "sa") & (study.runs["lr"] == lr) & (study.runs["seed"] == seed)
    ].run_id.iloc[0]
    row = dict.fromkeys(study.curvature.columns, math.nan) | {
        "run_id": run,
        "state": "paper",
        "lr": lr,
        "note": "",
        "protocol": "",
        "method": "taylor",
    }
    places = {"earliest": 250.0} | ({"last": float(step)} if step else {})
    rows = [
        row | {"phase": phase, "step": i, "alpha_max": value, "checkpoint_step": at}
        for phase, at in places.items()
        for i, value in enumerate(steps)
    ]
    runs = study.runs.copy()
    runs.loc[runs["run_id"] == run, ["num_steps", "planned_steps", "last_checkpoint_step"]] = (
        step + 1 if step else 251,
        5000,
        step or 250,
    )
    return replace(study, runs=runs, curvature=pd.concat([study.curvature, pd.DataFrame(rows)], ignore_index=True))


def test_a_run_that_died_before_its_first_checkpoint_counts_as_zero_at_both_phases(tmp_path):
    study = study_of(tmp_path, {("sa", 3e-2, 0)}, phases=("terminal", "earliest"))
    diverged = study.runs[study.runs["status"] == "diverged"]["run_id"]
    study = replace(study, curvature=study.curvature[~study.curvature["run_id"].isin(diverged)])
    for table in alpha_tables(study):
        assert row_of(table, "3e-2")[3] == Cell("67", "0–100, n=75\ndiverged 1/3\nsurvivors 100")
    assert "one that diverged before it counts as 0 % over 25 steps" in alpha_tables(study)[1].caption


def test_a_run_that_died_at_step_4900_of_5000_counts_by_its_earliest_checkpoint_there_and_as_zero_at_the_end(tmp_path):
    """Its last checkpoint, though measured as stable as any, is in a table of its own, and in no figure of terminal
    ones."""
    study = study_of(tmp_path, {("sa", 3e-2, 0)}, phases=("terminal",))
    others = study.curvature.assign(phase="earliest", checkpoint_step=250.0)
    study = early(
        replace(study, curvature=pd.concat([study.curvature, others], ignore_index=True)),
        3e-2,
        0,
        STABLE[:20] + BEYOND[:5],
    )
    terminal, earliest, last = alpha_tables(study)
    assert row_of(terminal, "3e-2")[3] == Cell("67", "0–100, n=75\ndiverged 1/3\nsurvivors 100")
    assert row_of(earliest, "3e-2")[3] == Cell("93", "80–100, n=75")
    assert last.title == "Last checkpoints before runs ended early"
    ((name, lr, seed, where, end, median, share),) = last.rows
    assert [cell.text for cell in (name, lr, seed, where, end)] == [
        "sa",
        "3e-2",
        "0",
        "step 4,900 of 5,000",
        "diverged, step 4,901",
    ]
    assert (median.text, share.text, share.detail) == ("1.0e0", "80", "n=25")
    texts = [text.get_text() for text in alpha_figures(study)[0].axes[0].texts]
    assert texts == ["1/3"]
    assert [table.title for table in alpha_tables(study, phases=("terminal",))] == [terminal.title]


def test_a_terminal_row_of_a_run_that_diverged_is_not_believed(tmp_path):
    study = study_of(tmp_path, {("sa", 3e-2, 0)})
    study = early(study, 3e-2, 0, STABLE)
    study = replace(study, curvature=study.curvature.assign(phase="terminal"))
    assert row_of(alpha_tables(study)[0], "3e-2")[3].text == "67"
    assert last_table(study) is None


def test_runs_that_crashed_wait_or_were_not_measured_are_no_results_and_said(tmp_path):
    statuses = {("sa", 3e-2, 0): ("failed", "x"), ("sa", 3e-2, 1): ("queued", "")}
    alpha = lambda m, lr, seed, _: [] if (m, seed) == ("sc", 2) else STABLE  # noqa: E731
    (table,) = alpha_tables(study_of(tmp_path, alpha=alpha, statuses=statuses))
    _, _, median, sa, sc = row_of(table, "3e-2")
    assert sa == Cell("100", "n=25\nnot measured 2/3", bold=True)
    assert median.detail.endswith("n=2\nnot measured 1/3") and sc.detail == "100–100, n=50\nnot measured 1/3"


def with_sgd(tmp_path, diverged, settings=({"optimizer": "adamw"}, {"optimizer": "sgd"}), **more):
    """A study of which no run with sgd has a row in state "paper", nor any that a file says is not defined."""
    study = study_of(tmp_path, diverged, settings=settings, states=("paper", "checkpoint"), **more)
    sgd = set(study.runs[study.runs["optimizer"] == "sgd"].run_id)
    asked = {
        "hessian": True,
        "curvature": {"phase": "terminal", "state": ["paper", "checkpoint"], "recorded_steps": 25},
    }
    rows = study.curvature[~((study.curvature["state"] == "paper") & study.curvature["run_id"].isin(sgd))]
    return replace(study, curvature=rows, study=study.study | {"spec": asked})


EVERY = {(m, lr, seed) for m in ("sa", "sc") for lr in LRS for seed in range(3)}


def test_a_state_that_an_optimizer_does_not_have_makes_no_run_diverge_in_it(tmp_path):
    study = with_sgd(tmp_path, {("sa", 3e-2, 0)})
    for state, expected in (("paper", {"not defined"}), ("checkpoint", {"diverged", "measured"})):
        count = count_stable_steps(study, "terminal", state)
        assert set(count.loc[count["optimizer"] == "sgd", "outcome"]) == expected
        assert set(count.loc[count["optimizer"] == "adamw", "outcome"]) == {"diverged", "measured"}


def test_a_table_with_other_optimizers_says_where_a_state_is_not_defined(tmp_path):
    """In the cells of the runs with sgd, of which one of three diverged, and in the caption; the figure's panels say it
    too."""
    study = with_sgd(tmp_path, {("sa", 3e-2, 0)})
    paper, checkpoint = alpha_tables(study)
    names = ("sa adamw", "sc adamw", "sa sgd", "sc sgd")
    assert paper.header == checkpoint.header == ("LR", *names, *names)
    row = row_of(paper, "3e-2")
    assert row[3] == row[4] == row[7] == row[8] == Cell("not defined")
    assert row[5] == Cell("67", "0–100, n=75\ndiverged 1/3\nsurvivors 100") == row_of(checkpoint, "3e-2")[7]
    for text in (paper.caption, paper.brief):
        assert (
            "Not defined here: sa sgd and sc sgd." in text
            and "Diverged: sa sgd" not in text
            and "Not measured at all" not in text
        )
    assert [
        "Not defined in this state: sa sgd and sc sgd." in table.caption for table in make_fallen_tables(study)
    ] == [
        True,
        False,
    ]
    panels = [[text.get_text() for text in ax.texts] for ax in alpha_figures(study)[0].axes]
    assert panels[:4] == [["1/3"], [], ["not defined"], ["not defined"]]


def test_where_every_run_of_an_optimizer_that_is_no_adam_diverged_there_is_no_table_of_the_papers_state(tmp_path):
    """No file says that the state is not defined: none of the runs left a checkpoint. Zeroes belong into the table of
    the runs' own state alone."""
    study = with_sgd(tmp_path, EVERY, settings=({"optimizer": "sgd"},))
    assert phases_and_states(study) == [("terminal", "checkpoint")]
    (table,) = alpha_tables(study)
    assert "run's own state" in table.title and row_of(table, "3e-2")[3] == Cell("0", "0–0, n=75\ndiverged 3/3")
    assert explain_undefined_states(study).startswith(
        "The paper's warm-up state is not defined for sgd (12 runs): its warm-up sets the averages m and v of Adam"
    )
    mixed = with_sgd(tmp_path / "mixed", EVERY)
    assert (
        row_of(alpha_tables(mixed)[0], "3e-2")[5:]
        == (Cell("0", "0–0, n=75\ndiverged 3/3"),) * 2 + (Cell("not defined"),) * 2
    )


def test_an_optimizer_of_a_plugin_lacks_a_state_in_all_its_runs_where_the_file_of_one_says_so(tmp_path):
    study = with_sgd(tmp_path, {("sa", 3e-2, 0)}, settings=({"optimizer": "lion"},))
    assert (count_stable_steps(study, "terminal", "paper")["outcome"] != "not defined").all()
    runs = study.runs.assign(explain_undefined_states=["paper"] + [""] * (len(study.runs) - 1))
    rows = study.curvature[study.curvature["state"] != "paper"]
    count = count_stable_steps(replace(study, runs=runs, curvature=rows), "terminal", "paper")
    assert (count["outcome"] == "not defined").all()


def test_the_optimizers_that_are_an_adam_are_those_of_the_project():
    """By what each of them builds, as the measurement itself asks it."""
    registry = Registry("optimizers")
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    parts = {name: registry.load(name) for name in registry.names()}
    adams = [
        name for name, part in parts.items() if isinstance(part.build(part.Config(), [weight], 1e-3), torch.optim.Adam)
    ]
    assert tuple(sorted(adams)) == ADAMS


def test_the_steps_of_a_run_that_diverged_are_those_of_the_protocol(tmp_path):
    study = study_of(tmp_path, {("sa", 3e-2, 0)}, alpha=lambda *_: [1.0] * 5)
    assert count_stable_steps(study, "terminal", "paper").set_index("outcome").loc["diverged", "steps"] == 5, (
        "as many as the others recorded"
    )
    study = replace(study, curvature=study.curvature.assign(protocol=json.dumps({"recorded_steps": 9})))
    assert count_stable_steps(study, "terminal", "paper").set_index("outcome").loc["diverged", "steps"] == 9


def test_steps_whose_loss_fell_count_diverged_runs_too(tmp_path):
    (table,) = make_fallen_tables(study_of(tmp_path, TWO_OF_THREE))
    assert (
        row_of(table, "3e-2")[1] == Cell("33", "0–100, n=75\ndiverged 2/3\nsurvivors 100")
        and row_of(table, "3e-2")[2].text == "100"
    )


def test_the_terminals_tables_count_diverged_runs(tmp_path):
    folder = write_study(tmp_path, lrs=LRS, mechanisms=("sa", "sc"), seeds=3, states=["paper"], alpha=lambda *_: STABLE,
                         nll=lambda m, lr, seed: math.inf if (m, lr, seed) in TWO_OF_THREE else 2.0)  # fmt: skip
    text = " ".join(report.summary(folder).split())
    assert "3e-2 1.0e0 1.0e0* 33 100*" in text and "Diverged: sa 2/3 at 3e-2." in text


def by_hand(study, series, lrs, seeds):
    """% stable of each seed over the rates, by a loop over runs."""
    values = []
    for seed in seeds:
        stable = steps = 0
        for lr in lrs:
            run = study.runs[
                (study.runs["series"] == series) & (study.runs["lr"] == lr) & (study.runs["seed"] == seed)
            ].iloc[0]
            rows = study.curvature[study.curvature["run_id"] == run.run_id]
            stable += 0 if run.status == "diverged" else sum(value > lr for value in rows["alpha_max"])
            steps += 25
        values.append(100 * stable / steps)
    return np.array(values)


def test_pairs_are_taken_at_the_same_rates_where_every_seeds_edge_is_another(tmp_path):
    """sa diverges from another rate on in each seed. Left out where it diverged, it would be compared at 1e-3 and 1e-2
    with sc at 1e-2 and 3e-2."""
    lrs = (1e-4, 1e-3, 1e-2, 3e-2)
    edges = {0: 3e-2, 1: 1e-2, 2: 1e-3}
    diverged = {("sa", lr, seed) for seed, edge in edges.items() for lr in lrs if lr >= edge}
    study = study_of(tmp_path, diverged, nearly, lrs=lrs)
    shares = compare_stable_steps(study, "sc", "sa", "paper")
    sc, sa = by_hand(study, "sc", (1e-2, 3e-2), range(3)), by_hand(study, "sa", (1e-2, 3e-2), range(3))
    assert shares.lrs == (1e-2, 3e-2) and shares.diverged == (0, 5) and shares.left_out == ()
    assert (shares.first, shares.second) == pytest.approx((96, 100 / 6)) and (sc.mean(), sa.mean()) == pytest.approx(
        (96, 100 / 6)
    )
    quantile = 0.95 / math.sqrt(2 * 0.975 * 0.025)  # Student's of two degrees of freedom in closed form: 4.3027
    half = quantile * (sc - sa).std(ddof=1) / math.sqrt(3)
    assert shares.result.interval == pytest.approx(((sc - sa).mean() - half, 100), rel=1e-9), (
        "151 points are more than there can be"
    )
    assert shares.result.direction == 1 and shares.result.n == 3


def test_survivors_do_not_turn_the_claim_around(tmp_path):
    """sa diverges in two of three seeds at the highest rate and its survivor is stable, sc is stable in 92 % of its
    steps and never diverges."""
    shares = compare_stable_steps(study_of(tmp_path, TWO_OF_THREE, nearly), "sc", "sa", "paper")
    assert (shares.first, shares.second) == pytest.approx((96, 200 / 3)) and shares.result.direction == 0, (
        "three seeds: 46, −4, 46 points"
    )


def test_a_seed_that_lacks_one_rate_is_left_out_and_named(tmp_path):
    study = study_of(tmp_path, {("sa", 3e-2, 1)}, nearly, statuses={("sc", 3e-2, 2): ("failed", "x")})
    shares = compare_stable_steps(study, "sc", "sa", "paper")
    assert shares.lrs == LRS and shares.left_out == (2,) and shares.result.n == 2
    assert (shares.first, shares.second) == pytest.approx((96, 75))


def test_rates_that_no_seed_has_of_both_are_not_compared(tmp_path):
    statuses = {("sa", 3e-2, 0): ("failed", "x"), ("sa", 3e-2, 1): ("queued", ""), ("sc", 3e-2, 2): ("failed", "x")}
    shares = compare_stable_steps(study_of(tmp_path, statuses=statuses), "sc", "sa", "paper")
    assert shares.lrs == (1e-3,) and shares.result.n == 3
