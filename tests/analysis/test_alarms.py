"""First alarms, leads and false alarms against runs whose alarms are planted by hand."""

import math
import re
import statistics
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest, poisson, ttest_ind

from analysis.claims import signals
from analysis.claims.judging import judge
from analysis.drawing.marks import symbols
from analysis.numbers.alarms import (
    SIGNALS,
    find_alarms,
    find_beginnings,
    find_comparable,
    find_leads,
    find_warnings,
    judge_signals,
    list_rows,
)
from analysis.report import summary
from analysis.sections import alarms as section
from analysis.study.load import load
from tests.analysis.synthetic import write_study

NORM = SIGNALS[1]
LOGITS = next(each for each in SIGNALS if each.column == "attention_logit_max")


def calm(number, size=0.01):
    """A signal that alternates around 1: its median is 1 or between, its scaled deviation about 1.5 times ``size``."""
    return [1 + size * (-1) ** place for place in range(number)]


def test_an_alarm_begins_where_a_signal_leaves_its_own_median():
    values = calm(60)
    values[30] = values[31] = 1.2
    assert np.flatnonzero(find_alarms(values)).tolist() == [30, 31]
    assert np.flatnonzero(find_beginnings(find_alarms(values))).tolist() == [30]
    assert not find_alarms(calm(60)).any()


def test_a_fall_is_no_alarm_and_the_first_rows_are_none():
    values = calm(60)
    values[30], values[5] = 0.2, 9.0
    assert not find_alarms(values).any()


def test_a_named_limit_and_a_number_that_is_not_finite_give_alarm_at_once():
    values = calm(6)
    values[2], values[4] = 60.0, math.inf
    assert np.flatnonzero(find_alarms(values, 50.0)).tolist() == [2, 4]
    assert np.flatnonzero(find_alarms(values)).tolist() == [4]
    assert not find_alarms([-math.inf if place % 3 else -5.0 for place in range(60)], -1.0).any()  # α_max / α, ∞ or 5


def test_alarms_are_those_of_a_slow_loop():
    draws = np.random.default_rng(1)
    values = (np.exp(draws.normal(0, 0.3, 400)) + 0.002 * np.arange(400)).tolist()
    flags = []
    for place, value in enumerate(values):
        seen = values[max(0, place - 50) : place]
        if len(seen) < 10:
            flags.append(False)
            continue
        middle = statistics.median(seen)
        spread = 1.4826 * statistics.median(abs(each - middle) for each in seen)
        flags.append(value > middle + 3 * spread)
    assert sum(flags) > 5 and find_alarms(values).tolist() == flags
    expected = [place for place in range(400) if flags[place] and not (place and flags[place - 1])]
    assert np.flatnonzero(find_beginnings(np.array(flags))).tolist() == expected


BREAK = 150  # the first step of a broken run's rise


def write_runs(folder, leads, false=0):
    """Three seeds at a rate that breaks and one that does not. A broken run's loss rises by 5 nats at `BREAK`, its
    gradient norm ``leads[seed]`` steps before (None: never); a sound run's norm rises ``false`` times alone."""
    status = {("sa", 1e-2, seed): ("diverged", "loss is nan at step 200") for seed in range(3)}
    study = write_study(
        folder, mechanisms=("sa",), lrs=(1e-3, 1e-2), seeds=3, nll=lambda *each: 2.0, statuses=status, curves=False
    )
    loaded, rows = load(study), []
    for run in loaded.runs.itertuples():
        loss, norm = calm(200), calm(200)
        if run.status == "diverged":
            loss[BREAK:] = [6.0] * (200 - BREAK)
            if leads[int(run.seed)] is not None:
                norm[BREAK - leads[int(run.seed)]] = 2.0
        for place in range(false):
            norm[40 + 20 * place] = 2.0
        rows += [
            {"run_id": run.run_id, "step": float(step + 1), "loss": loss[step], "grad_norm": norm[step]}
            for step in range(200)
        ]
    curves = pd.DataFrame(rows).assign(update_norm=np.nan, lr=1e-3, val_nll=np.nan)
    runs = loaded.runs.assign(num_steps=200.0)
    return replace(loaded, curves=curves, runs=runs)


def test_leads_run_from_the_first_alarm_in_time_to_the_onset(tmp_path):
    study = write_runs(tmp_path, [30, 10, None])
    found = find_warnings(study, NORM)
    broken = found[found["broke"]]
    # smoothed over 20 steps, a rise of 5 nats exceeds 0.5 at its third step: 5 · (1 − 0.95³) = 0.71, 5 · (1 − 0.95²) = 0.49
    assert broken["onset"].tolist() == [BREAK + 3] * 3
    assert sorted(broken["lead"].dropna()) == [12.0, 32.0] and broken["lead"].isna().sum() == 1
    assert found[~found["broke"]]["alarms"].tolist() == [0.0] * 3


def test_signals_are_judged_by_warned_runs_leads_and_false_alarms(tmp_path):
    study = write_runs(tmp_path, [30, 10, None], false=5)
    by_name = {each.signal.name: each for each in judge_signals([study])}
    assert set(by_name) == {"training loss", "gradient norm"}  # the update norm was not logged
    norm, loss = by_name["gradient norm"], by_name["training loss"]
    assert (norm.broken, norm.runs) == (3, 3)
    assert loss.warned.value == 1.0 and loss.lead.value == 2.0 and loss.false.value == 0.0
    # the planted false alarms, at steps 41, 61, 81, 101 and 121, lie within 50 steps of the onset only from 103 on
    assert norm.warned.value == 1.0 and norm.lead.value == BREAK + 3 - 121
    assert norm.beyond_loss.value == norm.lead.value - loss.lead.value
    assert (norm.warned.low, norm.warned.high) == pytest.approx(binomtest(3, 3).proportion_ci(method="exact"))
    # steps 12 to 201 of a sound run have more than ten rows before; 42 to 171 have an alarm in the 50 before them
    assert norm.false.value == pytest.approx(1000 * 5 / 190)
    assert (norm.chance.value, loss.chance.value) == (pytest.approx(130 / 190), 0.0)


def test_intervals_of_chance_are_at_least_those_of_independent_alarms(tmp_path):
    """Also without any alarm: three runs of 190 steps are 11.4 windows of 50."""
    norm, none = (
        next(
            each
            for each in judge_signals([write_runs(tmp_path / str(false), [30, 10, None], false)])
            if each.signal == NORM
        )
        for false in (5, 0)
    )
    # of a Poisson mean: P(15 or more | low) = P(15 or fewer | high) = 0.025
    low, high = (each * 570 / 1000 for each in (norm.false.low, norm.false.high))
    assert (poisson.sf(14, low), poisson.cdf(15, high)) == pytest.approx((0.025, 0.025))
    assert (none.false.low, none.chance.low) == (0.0, 0.0)
    assert poisson.cdf(0, none.false.high * 570 / 1000) == pytest.approx(0.025)
    assert (1 - none.chance.high) ** (570 / 50) == pytest.approx(0.025)


def test_a_share_has_the_exact_interval_of_as_many_trials_as_units(tmp_path):
    warned = next(each for each in judge_signals([write_runs(tmp_path, [30, 10, None])]) if each.signal == NORM).warned
    assert warned.value == pytest.approx(2 / 3)
    assert (warned.low, warned.high) == pytest.approx(binomtest(2, 3).proportion_ci(method="exact"))


def test_a_run_that_breaks_before_it_has_a_median_is_left_out(tmp_path):
    study = with_signals(write_runs(tmp_path, [30, 10, None]))
    found = find_warnings(every(study, 20), LOGITS)  # seven rows before the onset, ten of a sound run
    assert len(found) == 0 and len(find_warnings(every(study, 10), LOGITS)) == 6


def every(study, steps):
    """The study as if its signals had been logged at these steps only."""
    return replace(study, signals={name: rows[rows["step"] % steps == 0] for name, rows in study.signals.items()})


def test_a_run_of_several_studies_counts_once(tmp_path):
    study = write_runs(tmp_path, [30, 10, None])
    (one, *_), (two, *_) = judge_signals([study]), judge_signals([study, study])
    assert (one.broken, one.runs) == (two.broken, two.runs) == (3, 3)


def with_signals(study):
    """The norms as the largest attention logits of two layers, of which the second is the larger."""
    logs = study.curves.rename(columns={"grad_norm": "attention_logit_max"})[["run_id", "step", "attention_logit_max"]]
    small = logs.assign(attention_logit_max=0.1 * logs["attention_logit_max"])
    layers = pd.concat([small.assign(block="blocks.0"), logs.assign(block="blocks.1")])
    return replace(study, signals={"activations": layers})


def test_the_layer_nearest_to_an_alarm_counts(tmp_path):
    study = with_signals(write_runs(tmp_path, [30, 10, None]))
    pd.testing.assert_series_equal(find_warnings(study, LOGITS)["lead"], find_warnings(study, NORM)["lead"])
    assert set(list_rows(study, LOGITS)["value"]) == set(study.curves["grad_norm"])
    low = replace(LOGITS, sign=-1, limit=-3.0)
    assert set(list_rows(study, low)["value"]) == set(-0.1 * study.curves["grad_norm"])


def test_a_signal_may_be_a_quotient_whose_low_values_give_alarm(tmp_path):
    study = write_runs(tmp_path, [30, 10, None])
    edge = study.curves[["run_id", "step"]].assign(alpha=2e-3, alpha_max=2e-3 / study.curves["grad_norm"])
    logged = replace(study, signals={"edge": edge})
    ratio = next(each for each in SIGNALS if each.over)
    assert sorted(list_rows(logged, ratio)["value"]) == pytest.approx(sorted(-1 / study.curves["grad_norm"]))


def test_a_report_says_which_signal_warns(tmp_path):
    study = write_runs(tmp_path, [30, 10, 20])
    assert not section.applies(study)
    logged = with_signals(study)
    assert section.applies(logged)
    (said,) = section.sentences(logged)
    # three of three is at least 29 %, and no alarm in 11.4 windows of 50 steps at most 28 %
    assert said.startswith(
        "3 runs broke, 3 did not. More often than by chance warn: training loss (100 %, by chance 0 %)"
    )
    assert said.endswith("The earliest is gradient norm, 22 steps before the onset (95 %: 12 to 32).")
    printed = summary(logged)
    assert "Which signal warns" in printed and "largest attention logit 50" in printed and said[:20] in printed
    assert section.figures(logged)["alarms"].figure.axes[0].get_xlabel() == "steps from the onset"
    (row,) = [row for row in section.table(logged).rows if row[0].text == "training loss"]
    assert row[2].text == "100 %" and re.fullmatch(r"\d+ % to 100 %", row[2].detail)
    assert symbols("α_max / α") == "$\\alpha_\\mathrm{max}$ / α"


def test_broken_runs_that_the_first_page_counts_by_another_end_are_named(tmp_path):
    """A loss may rise by a spike's height and come back: such a run broke, and learned nothing in the end."""
    logged = with_signals(write_runs(tmp_path, [30, 10, 20]))
    broken = logged.runs.index[logged.runs["status"] == "diverged"]
    for status, told in (("diverged", ""), ("plateaued", " Of those that broke, 1 learned nothing in the end.")):
        runs = logged.runs.copy()
        runs.loc[broken[0], "status"] = status
        (said,) = section.sentences(replace(logged, runs=runs))
        assert said.startswith(f"3 runs broke, 3 did not.{told} More often than by chance")


def test_the_table_of_signals_has_the_claim_on_each(tmp_path):
    """The first page counts these claims and sends its reader to the appendix."""
    study = with_signals(write_runs(tmp_path, [30, 20, 25]))
    table = section.table(study)
    assert table is not None and table.header[-1] == "gain on the loss"
    cells, claims = {row[0].text: row[-1] for row in table.rows}, {each.test: each for each in judge(study)}
    claim = claims[signals.TEST, "gradient norm"]
    assert (cells["gradient norm"].text, cells["gradient norm"].bold) == (claim.effect, True)
    assert (
        cells["gradient norm"].detail == f"{claim.interval}\nsupported (n = 3)" and cells["training loss"].text == "--"
    )
    broken = replace(study, runs=study.runs[study.runs["status"] == "diverged"])
    unjudged = section.table(broken)
    assert unjudged is not None and {row[-1].text for row in unjudged.rows} == {"--"}


def test_runs_that_break_before_a_signal_can_be_judged_are_counted(tmp_path):
    study = with_signals(write_runs(tmp_path, [30, 10, 20]))
    early = {
        run for run, _ in zip(study.runs.loc[study.runs["status"] == "diverged", "run_id"], range(2), strict=False)
    }
    # the rise of two runs comes at step 9 instead
    losses = study.curves["loss"].mask(study.curves["run_id"].isin(early) & (study.curves["step"] > 8), 6.0)
    some = every(replace(study, curves=study.curves.assign(loss=losses)), 20)
    (said,) = section.sentences(some)
    assert said.startswith(
        "3 runs broke, 3 did not. 2 broke too early to judge, with at most 10 rows before. Logged too"
    )
    assert "rarely to be judged: largest attention logit." in said
    last = (
        study.curves["loss"]
        .mask(study.curves["step"] > 8, 6.0)
        .where(study.curves["run_id"].isin(study.runs.loc[study.runs["status"] == "diverged", "run_id"]), 1.0)
    )
    (said,) = section.sentences(replace(study, curves=study.curves.assign(loss=last)))
    assert said == "3 runs broke, 3 did not. All broke too early to judge: no signal has more than 10 rows before."


def test_a_report_without_breaks_says_so(tmp_path):
    study = with_signals(write_runs(tmp_path, [30, 10, 20]))
    calm_runs = study.runs.assign(status="stable", reason="")
    flat = study.curves.assign(loss=1.0)
    sound = replace(study, runs=calm_runs, curves=flat)
    assert (
        section.sentences(sound) == ["No run broke by this rule: nothing to warn of."] and section.figures(sound) == {}
    )


@pytest.mark.parametrize(("leads", "verdict"), [((30, 20, 25), "holds"), ((-2, -2, -1), "contradicted")])
@pytest.mark.parametrize("false", [0, 1])
def test_a_signal_with_earlier_alarms_warns_before_the_loss(tmp_path, leads, verdict, false):
    """Three groups of one broken run each; the loss warns 2 steps before the onset, the norm as planted before the loss.

    One of the sound runs has an alarm 1 step long: 50 of its 190 steps have a lead of 50, 49, … 1.
    """
    study = with_signals(write_runs(tmp_path, list(leads)))
    by_chance = [0.0, 0.0, 0.0]
    if false:
        run = study.runs.loc[study.runs["status"] != "diverged", "run_id"].iloc[0]
        norms = study.curves["grad_norm"].mask((study.curves["run_id"] == run) & (study.curves["step"] == 101), 2.0)
        study, by_chance = replace(study, curves=study.curves.assign(grad_norm=norms)), [sum(range(51)) / 190, 0.0, 0.0]
    claim = next(each for each in signals.claims(study) if each.subject == "signal gradient norm")
    result = ttest_ind(leads, by_chance, equal_var=False)
    assert claim.p == pytest.approx(result.pvalue)
    assert (claim.verdict, claim.n) == (verdict if result.pvalue < 0.05 else "undecided", 3)
    assert claim.verdict == verdict or false
    mean = statistics.fmean(leads) - statistics.fmean(by_chance)
    assert claim.effect == f"{mean:+.1f} steps".replace("-", "−")
    low, high = result.confidence_interval()
    assert claim.interval == f"95 %: {low:+.1f} to {high:+.1f} steps".replace("-", "−")
    warned = sum(lead > -2 for lead in leads)
    assert claim.note.startswith(f"It warned of {warned} and the loss of 3 of 3 broken runs.")
    assert claim.subject in {each.subject for each in judge(study)}


def test_leads_by_chance_are_those_of_a_loop_over_steps(tmp_path):
    """Each step of a sound run as an onset, by the definition."""
    study = write_runs(tmp_path, [30, 10, None], false=5)
    found = find_warnings(study, NORM)
    values = study.curves[study.curves["run_id"] == found.index[~found["broke"]][0]].sort_values("step")["grad_norm"]
    leads = []
    for onset in range(12, 202):
        rows = [step for step in range(max(1, onset - 50), onset) if values.iloc[step - 1] > 1.5]
        leads.append(onset - rows[0] if rows else 0)
    sound = found[~found["broke"]].iloc[0]
    assert (sound["chance_lead"], sound["chance_warned"]) == (sum(leads), sum(lead > 0 for lead in leads))
    assert sound["steps"] == len(leads)


def test_an_alarm_that_began_long_before_the_onset_counts_until_it_ends(tmp_path):
    """A logit beyond its limit from step 5 on warns of the break, and of any other step: by chance, too."""
    study = with_signals(write_runs(tmp_path, [30, 10, 20]))
    logs = study.signals["activations"]
    large = logs["attention_logit_max"].mask(logs["step"] >= 5, 60.0)
    study = replace(study, signals={"activations": logs.assign(attention_logit_max=large)})
    found = next(each for each in judge_signals([study]) if each.signal == LOGITS)
    assert (found.warned.value, found.lead.value) == (1.0, 50.0)
    assert found.chance.value == 1.0 and found.false.value == pytest.approx(1000 / 190)
    assert "largest attention logit" not in section.sentences(study)[0].split("More often")[1]
    (claim,) = (each for each in signals.claims(study) if each.subject == "signal largest attention logit")
    by_chance = statistics.fmean(min(50, onset - 5) for onset in range(12, 202))
    assert claim.effect == f"{50 - 2 - by_chance:+.1f} steps".replace("-", "−")


def test_leads_of_several_onsets_are_those_of_each(tmp_path):
    alarms = np.array([10.0, 12.0, 100.0])
    assert find_leads(alarms, np.array([10.0, 11.0, 60.0, 61.0, 63.0, 150.0, 151.0])).tolist() == [
        0.0, 1.0, 50.0, 49.0, 0.0, 50.0, 0.0,
    ]  # fmt: skip
    assert find_leads(alarms[:0], np.array([5.0])).tolist() == [0.0]


def test_chance_is_judged_at_the_rates_of_broken_runs(tmp_path):
    """Of curves with broken runs, from the lowest rate of one on; if none held there, at the largest that held."""
    lrs = (1e-4, 1e-3, 1e-2, 1e-1)
    broken = {("sa", 1e-2, 0), ("sa", 1e-1, 0), ("sa", 1e-1, 1), ("sw", 1e-1, 0), ("sw", 1e-1, 1)}
    status = dict.fromkeys(broken, ("diverged", "loss is nan at step 200"))
    study = load(
        write_study(tmp_path, mechanisms=("sa", "sw", "fox"), lrs=lrs, seeds=2, nll=lambda *each: 2.0, statuses=status)
    )
    known = study.runs.set_index("run_id").loc[find_comparable(study)]
    assert set(zip(known["series"], known["lr"], known["seed"], strict=True)) == {
        ("sa", 1e-2, 1), ("sw", 1e-2, 0), ("sw", 1e-2, 1),
    }  # fmt: skip


@pytest.mark.parametrize("column", ["attention_logit_max", "grad_norm"])
def test_a_number_that_was_not_finite_is_null_in_a_log_and_gives_alarm(tmp_path, column):
    study = with_signals(write_runs(tmp_path, [None, None, None]))
    broken = study.runs.loc[study.runs["status"] == "diverged", "run_id"]

    def lose(rows):
        lost = rows["run_id"].isin(broken) & (rows["step"] == 140) & (rows.get("block", "blocks.1") == "blocks.1")
        return rows.assign(**{column: rows[column].mask(lost)}) if column in rows else rows

    lost = replace(study, curves=lose(study.curves), signals={"activations": lose(study.signals["activations"])})
    signal = next(each for each in SIGNALS if each.column == column)
    leads = find_warnings(lost, signal).loc[broken, "lead"]
    assert leads.tolist() == [BREAK + 3 - 140] * 3


def test_an_alpha_max_without_limit_is_null_and_no_alarm(tmp_path):
    study = write_runs(tmp_path, [None, None, None])
    edge = study.curves[["run_id", "step"]].assign(alpha=2e-3, alpha_max=4e-3, curvature=1.0)
    ratio, rows = next(each for each in SIGNALS if each.over), edge["step"] == 140
    free, lost = (
        replace(study, signals={"edge": edge.assign(
            alpha_max=edge["alpha_max"].mask(rows), curvature=edge["curvature"].mask(rows, curvature)
        )})
        for curvature in (-3.0, 1.0)
    )  # fmt: skip
    assert list_rows(free, ratio)["value"].min() == -math.inf
    found = (find_warnings(each, ratio) for each in (free, lost))
    assert [each.loc[each["broke"], "lead"].notna().sum() for each in found] == [0, 3]


def test_a_study_whose_runs_all_broke_has_no_claim_on_signals(tmp_path):
    study = with_signals(write_runs(tmp_path, [30, 10, None]))
    broken = replace(study, runs=study.runs[study.runs["status"] == "diverged"])
    found = signals.claims(broken)
    assert {each.verdict for each in found} == {"not judged"} and "chance is judged by runs that held" in found[0].text
    (said,) = section.sentences(broken)
    assert said == (
        "3 runs broke, 0 did not. No run of a curve with broken ones held, so chance is unknown and no signal is judged."
    )


def test_one_broken_run_shows_no_signal_to_warn_beyond_chance(tmp_path):
    """One of one is at least 2.5 %, and no alarm in the 190 steps of a sound run is up to 62 % by chance."""
    study = with_signals(write_runs(tmp_path, [30, 10, 20]))
    one = with_signals(replace(study, runs=study.runs[study.runs["seed"] == 0]))
    (said,) = section.sentences(one)
    assert said.endswith("No signal is shown to warn of more of them than it would by chance.")


def test_a_study_without_logs_of_signals_has_no_claim_on_them(tmp_path):
    assert signals.claims(write_runs(tmp_path, [30, 10, None])) == []
