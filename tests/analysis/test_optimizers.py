"""What the report says of several optimizers, from studies whose numbers are made up and worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import matplotlib
import pandas as pd
import pyarrow.parquet as pq
import pytest

from analysis import assembly
from analysis.claims.at_best_rate import QUANTITIES, difference
from analysis.claims.at_best_rate import optimizers_reading as reading
from analysis.drawing.pieces import Picture
from analysis.drawing.style import RC
from analysis.drawing.typeset import Table
from analysis.numbers.optimizers import groups, numbers_of
from analysis.report import build, summary
from analysis.sections import alpha, headline
from analysis.sections import optimizers as optimizer_figures
from analysis.sections.optimizers import bounds_text, optimizer_tables
from analysis.sections.sentences import sentences
from analysis.study import multiples
from analysis.study.load import load
from stability.runs.older import OlderFile
from tests.analysis.figures import write_figures
from tests.analysis.synthetic import run_id, write_study, write_table
from tests.analysis.test_report import text_of

REFERENCES = {"adamw": 1e-3, "sgd": 7e-4}
MULTIPLES = (0.1, 0.316, 1.0, 3.16, 10.0)
# NLL by multiple of the reference; ∞ where it diverged
VALLEYS = {
    "adamw": dict(zip(MULTIPLES, (3.1, 2.9, 2.8, 2.9, math.inf), strict=True)),
    "sgd": dict(zip(MULTIPLES, (3.15, 3.1, 3.0, math.inf, math.inf), strict=True)),
}


def rate(optimizer, multiple):
    return float(f"{multiple * REFERENCES[optimizer]:.3g}")


def write_scaled(
    folder, *, seeds=3, record=True, name="scaled", valleys=VALLEYS, shift=lambda optimizer, seed: 0.01 * seed
):
    """Two optimizers whose rates differ, joined from two studies as a sweep with `lr=scaled` leaves them."""
    parts = []
    for optimizer in valleys:
        own = {rate(optimizer, multiple): multiple for multiple in valleys[optimizer]}

        def nll(_mechanism, lr, seed, optimizer=optimizer, own=own):
            return valleys[optimizer][own[lr]] + shift(optimizer, seed)

        def alpha(_mechanism, lr, seed, _state):
            return [2 * lr, 4 * lr, math.inf, 0.5 * lr + seed * lr]

        parts.append(
            write_study(
                folder / optimizer, name=name, mechanisms=["sa"], lrs=list(own), seeds=seeds, nll=nll, alpha=alpha,
                states=("checkpoint",), settings=({"optimizer": optimizer},),
            )
        )  # fmt: skip
    target = folder / "studies" / name
    (target / "results").mkdir(parents=True)
    for table in ("runs", "curvature", "curves"):
        frame = pd.concat([pd.read_parquet(part / "results" / f"{table}.parquet") for part in parts], ignore_index=True)
        if table == "runs":
            size = frame["optimizer"].map({"adamw": 8, "sgd": 4})
            frame["optimizer_state_bytes"], frame["step_s"] = (
                frame["num_params"] * size,
                0.001 * size + 1e-4 * frame["seed"],
            )
        if table == "curvature":
            frame["rms_u"] = 0.5
        write_table(target / "results" / f"{table}.parquet", table, frame.to_dict("records"))
    manifest = json.loads((parts[0] / "study.json").read_text())
    if record:
        manifest |= {"lr_references": {name: REFERENCES[name] for name in valleys}, "lr_multiples": list(MULTIPLES)}
    (target / "study.json").write_text(json.dumps(manifest))
    return target


@pytest.fixture
def scaled(tmp_path):
    return load(write_scaled(tmp_path))


def test_rates_of_a_scaled_study_are_the_multiples_that_were_swept_and_ratios_stay(scaled, tmp_path):
    assert {name: sorted(set(part["lr"])) for name, part in scaled.runs.groupby("optimizer")} == {
        "adamw": list(MULTIPLES),
        "sgd": list(MULTIPLES),
    }, "0.316 · 7e-4 was rounded to 2.21e-4, which is 0.3157 times 7e-4"
    steps = scaled.with_run(scaled.curvature)
    first = steps[steps["step"] == 0]
    assert (first["alpha_max"] / first["lr"]).tolist() == pytest.approx([2.0] * len(first))
    assert set(steps["rms_u"]) == {0.5}
    raw = pq.read_table(tmp_path / "studies" / "scaled" / "results" / "runs.parquet")["lr"].to_pylist()
    assert rate("sgd", 0.316) in raw and 0.316 not in raw, "the file holds the rates themselves"


def test_the_loss_along_a_step_is_back_at_its_start_at_alpha_max_in_multiples_too(scaled):
    steps = alpha.typical_steps(scaled, scaled.series[0])
    at_limit = steps["slope"] * steps["alpha_max"] + steps["curvature"] * steps["alpha_max"] ** 2 / 2
    assert len(steps) > 1 and at_limit.tolist() == pytest.approx([0.0] * len(steps), abs=1e-12)


def test_rates_are_left_alone_where_all_optimizers_have_one_reference_or_it_is_not_on_record(tmp_path):
    study = load(write_scaled(tmp_path, record=False))
    assert not study.is_in_multiples and rate("sgd", 10.0) in set(study.runs["lr"])
    same = {"lr_references": {"adamw": 1e-3, "lion": 1e-3}, "lr_multiples": [1.0]}
    assert not multiples.are_rates_of_their_own(same)


def test_numbers_are_those_worked_out_by_hand(scaled):
    (group,) = groups(scaled)
    found = numbers_of(scaled, group)
    adamw, sgd = found["sa adamw"], found["sa sgd"]
    assert (adamw.best, sgd.best) == (1.0, 1.0)
    assert (adamw.nll.median, sgd.nll.median) == pytest.approx((2.81, 3.01))
    assert adamw.to_stable == pytest.approx((math.log10(3.16), 1.0)) and sgd.to_stable == pytest.approx(
        (0.0, math.log10(3.16))
    )
    assert adamw.to_near == pytest.approx((math.log10(3.16), 1.0)), "2.9 lies within 5 % of 2.8, the next rate diverged"
    # of 2, 4, ∞, 0.5 + seed: the finite ones' medians 2, 2, 2.5
    assert (adamw.ratio.median, adamw.ratio.n) == (2.0, 3)
    assert (adamw.rms_u.median, adamw.rms_step.median) == pytest.approx((0.5, 0.5e-3))
    assert sgd.rms_step.median == pytest.approx(0.5 * 7e-4), "in rates themselves, not in multiples"
    assert (adamw.optimizer_bytes, sgd.optimizer_bytes) == (8.0, 4.0)
    assert (
        sgd.diverged == {0.1: (0, 3), 0.316: (0, 3), 1.0: (0, 3), 3.16: (3, 3), 10.0: (3, 3)} and sgd.num_diverged == 6
    )


def test_the_reading_counts_divergences_first_and_tells_apart_what_differs_beyond_the_intervals(scaled):
    texts = reading(scaled)
    assert texts[0] == (
        "Of 30 runs, 9 diverged, rates being multiples of the reference: sgd 6 of 15 (3/3 at 3.16, 3/3 at 10); "
        "adamw 3 of 15 (3/3 at 10)."
    )
    whole = " ".join(texts)
    assert "Lowest NLL at the best rate: adamw, 2.810" in whole
    assert "NLL at the best rate, against adamw's seed by seed: higher of sgd +0.200 (+0.200 to +0.200)." in whole
    assert (
        "α_max over the rate, at the best rate, against adamw's seed by seed: no significant difference: sgd." in whole
    )
    assert "Bytes of state a parameter, least and most: sgd 4.00 and adamw 8.00." in whole
    assert "after Holm's correction over 4 comparisons; in parentheses the uncorrected interval" in whole


def test_what_the_seeds_do_not_agree_on_is_not_told_apart(tmp_path):
    swings = {"adamw": (0.0, 0.0, 0.0), "sgd": (-0.9, 0.3, 0.1)}
    study = load(write_scaled(tmp_path, shift=lambda optimizer, seed: swings[optimizer][seed]))
    text = next(each for each in reading(study) if each.startswith("NLL at the best rate, against"))
    assert text == "NLL at the best rate, against adamw's seed by seed: no significant difference: sgd."


def test_a_difference_that_only_stands_alone_is_not_told_among_several(tmp_path):
    """Of NLLs higher by 0.2, 0.24 and 0.15: t = 7.5 and p = 0.017, which four comparisons make 0.07."""
    swings = {"adamw": (0.0, 0.0, 0.0), "sgd": (0.0, 0.04, -0.05)}
    study = load(write_scaled(tmp_path, shift=lambda optimizer, seed: swings[optimizer][seed]))
    (group,) = groups(study)
    numbers = numbers_of(study, group)
    nll = next(each for each in QUANTITIES if each.key == "nll")
    alone = difference(nll, numbers["sa sgd"].by_seed["nll"], numbers["sa adamw"].by_seed["nll"])
    assert alone.direction == 1 and alone.p == pytest.approx(0.017, abs=0.001)
    text = next(each for each in reading(study) if each.startswith("NLL at the best rate, against"))
    assert text == "NLL at the best rate, against adamw's seed by seed: no significant difference: sgd."


def test_one_seed_allows_no_comparison(tmp_path):
    texts = reading(load(write_scaled(tmp_path, seeds=1)))
    assert not any("against adamw's seed by seed" in text for text in texts)
    assert any(text.startswith("With one seed nothing is said of differences.") for text in texts)


def test_a_seed_whose_other_runs_are_missing_is_no_seed_that_diverged_everywhere(tmp_path):
    folder = write_scaled(tmp_path)
    path = folder / "results" / "runs.parquet"
    runs = pd.read_parquet(path)
    lost = (runs["optimizer"] == "sgd") & (runs["seed"] == 0) & (runs["status"] != "diverged")
    runs.loc[lost, ["status", "val_nll"]] = ["failed", None]
    write_table(path, "runs", runs.to_dict("records"))
    study = load(folder)
    (group,) = groups(study)
    by_seed = numbers_of(study, group)["sa sgd"].by_seed
    assert set(by_seed["nll"]) == set(by_seed["room"]) == {1, 2}


def test_where_runs_of_many_rates_diverged_the_range_is_named(tmp_path):
    lost = VALLEYS | {"sgd": dict.fromkeys(MULTIPLES, math.inf)}
    assert "sgd 15 of 15 (at 5 of 5 rates, from 0.1 to 10)" in reading(load(write_scaled(tmp_path, valleys=lost)))[0]


def test_a_difference_of_bounds_is_told_by_what_they_leave_possible():
    room = next(each for each in QUANTITIES if each.key == "room")
    wide, narrow = {0: (1.0, 1.5), 1: (1.0, 1.4)}, {0: (0.2, 0.5), 1: (0.2, 0.6)}
    assert difference(room, wide, narrow).direction == 1 and difference(room, narrow, wide).direction == -1
    open_ended = {0: (0.2, math.inf), 1: (0.2, 0.6)}
    assert difference(room, wide, open_ended).direction == 0
    assert difference(room, {0: (1.0, math.inf), 1: (1.0, math.inf)}, narrow).direction == 1
    endless, short = {0: (1.0, math.inf), 1: (1.0, math.inf)}, {0: (0.1, 0.1), 1: (0.1, 0.1)}
    assert difference(room, endless, short).text == "+0.90 (+0.90 to ∞)"
    assert difference(room, short, endless).text.replace("−", "-") == "-0.90 (-∞ to -0.90)"


def test_an_optimizer_that_diverged_everywhere_has_no_best_rate_and_is_counted(tmp_path, drawn):
    drawn("optimizers")
    lost = VALLEYS | {"sgd": dict.fromkeys(MULTIPLES, math.inf)}
    study = load(write_scaled(tmp_path, valleys=lost))
    texts = reading(study)
    assert "sgd 15 of 15" in texts[0] and "Without any: sgd." in texts[1]
    assert any("higher of sgd" in text for text in texts if text.startswith("NLL at the best"))
    windows, steps = optimizer_tables(study)
    row = next(row for row in windows.rows if row[0].text == "sgd")
    assert [cell.text for cell in row[1:7]] == ["15/15", "--", "every run diverged", "none", "none", "--"]
    with matplotlib.rc_context(RC):
        assert write_figures(tmp_path / "studies" / "scaled", tmp_path / "figures")


def test_tables_name_no_rate_of_one_optimizer_beside_another_s(scaled):
    windows, steps = optimizer_tables(scaled)
    assert windows.header[2:] == ("best", "NLL", "to stable", "to 5 %", "α_max / α", "sensitivity")
    assert [row[2].text for row in windows.rows] == ["1", "1"]
    assert [row[4].text for row in windows.rows] == ["0.50–1.00", "0.00–0.50"]
    assert [row[3].bold for row in windows.rows] == [True, False]
    assert [row[3].text for row in steps.rows] == ["8.00", "4.00"]
    # 4 ms + 0.1 ms a seed over 8 ms + 0.1 ms a seed: the middle seed's
    assert [row[4].text for row in steps.rows] == ["1.00", f"{4.1 / 8.1:.2f}"]


def test_the_table_with_alpha_max_says_whose_is_a_multiplier(scaled):
    protocol = json.dumps({"optimizer": {"name": "prodigy", "is_multiplier": True}})
    told = replace(scaled, curvature=scaled.curvature.assign(protocol=protocol))
    assert "The LR of prodigy multiplies a rate that it finds by itself" in optimizer_tables(told)[0].caption
    assert "multiplies" not in optimizer_tables(scaled)[0].caption


def test_the_unit_of_the_best_rate_is_named_only_if_it_is_a_multiple(scaled, tmp_path):
    assert "(nats per predicted token), over its reference rate; all" in optimizer_tables(scaled)[0].caption
    plain = load(write_scaled(tmp_path / "plain", record=False))
    assert "(nats per predicted token); all that follows" in optimizer_tables(plain)[0].caption


def test_the_first_page_shows_the_optimizer_that_all_others_are_compared_with(scaled, monkeypatch):
    (plain,) = headline.compared_with(scaled)
    assert scaled.of(plain)["optimizer"].iloc[0] == "adamw" and headline.lists_reference(scaled) == ""
    monkeypatch.setattr(headline, "MOST_ROWS", 1)
    assert headline.best_series(scaled) == [plain]


def test_time_side_by_side_is_the_mean_over_turns_with_what_is_done_every_few_steps(scaled):
    seconds = {"adamw": [0.01, 0.01, 0.01, 0.03], "sgd": [0.005, 0.005, 0.005, 0.075]}
    series = {row.optimizer: row.series for row in scaled.runs.itertuples()}
    rows = [{"series": series[name], "seconds": seconds[name], "tokens_per_step": 8} for name in seconds]
    told = replace(scaled, throughput={"device": "CPU", "machine": "one", "rows": rows})
    steps = optimizer_tables(told)[1]
    assert [(row[4].text, row[4].detail) for row in steps.rows] == [("1.00", "15.0 ms"), ("1.50", "median 0.50")]
    assert "mean over 4 turns" in steps.caption and "CPU; one." in steps.caption
    assert "adamw 1.00 and sgd 1.50, mean of turns side by side." in " ".join(reading(told))
    assert "python -m benchmarks.throughput runs/studies/scaled" in optimizer_tables(scaled)[1].caption


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ((0.5, 0.5), "0.50"),
        ((0.5, 1.0), "0.50–1.00"),
        ((0.5, math.inf), "≥ 0.50"),
        ((math.nan, math.nan), "none"),
        ((-0.0, 0.5), "0.00–0.50"),
    ],
)
def test_decades_say_what_is_known_of_them(bounds, text):
    assert bounds_text(bounds) == text


def test_the_section_stands_in_the_report_and_in_what_a_sweep_prints(tmp_path, drawn):
    drawn("optimizers")
    folder = write_scaled(tmp_path)
    pdf = text_of(build(folder, tmp_path / "reports"))
    assert pdf.count("Optimizers, each at rates of its own") == 2, "in the contents, and as a heading"
    assert "Reference rates adamw 1e-3, sgd 7e-4; LR and" in pdf
    assert "Optimizers: what a step is, and costs" in summary(folder)
    assert "optimizers.svg" in [path.name for path in write_figures(folder, tmp_path / "figures")]


def test_the_title_ranks_optimizers_by_their_nlls_since_their_rates_have_no_common_unit(scaled):
    assert headline.title(scaled) == (
        "Which optimizer has the lowest NLL, each at rates of its own? adamw (2.810) and sgd (3.010)"
    )


def test_of_many_optimizers_the_first_page_draws_those_of_its_table_over_multiples(scaled, monkeypatch):
    def first():
        return next(each for each in next(iter(assembly.pieces(scaled))) if isinstance(each, Picture))

    assert first().name == "optimizers", "of two, all are drawn"
    monkeypatch.setattr(headline, "MOST_ROWS", 1)
    assert first().name == "nll-in-brief" and "The 1 series with the lowest NLLs" in first().caption
    *_, bars = first().figure.axes
    assert [label.get_text() for label in bars.get_yticklabels()] == ["sa adamw"]
    assert bars.get_xlabel() == "times each optimizer's own rate"


def test_many_optimizers_have_a_panel_each_beside_the_one_that_all_are_compared_with(tmp_path, monkeypatch):
    study = load(write_scaled(tmp_path))
    (group,) = groups(study)
    assert optimizer_figures.apart_figure(study, group) is None, "two curves can be told apart in one panel"
    monkeypatch.setattr(optimizer_figures, "MOST_TOGETHER", 1)
    with matplotlib.rc_context(RC):
        figure = optimizer_figures.apart_figure(study, group)
    adamw, sgd = figure.axes
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["adamw", "sgd"]
    assert [text.get_text() for text in sgd.texts] == ["3/3", "3/3"] and len(adamw.texts) == 1, "diverged, of all"
    beside = sgd.lines[0].get_ydata()
    assert beside[:4] == pytest.approx([3.11, 2.91, 2.81, 2.91]) and math.isnan(beside[4]), "adamw's medians"
    assert sgd.lines[1].get_ydata()[:3] == pytest.approx([3.16, 3.11, 3.01])


def test_a_study_of_one_optimizer_has_no_such_section(tmp_path):
    folder = write_study(tmp_path, mechanisms=["sa", "sc"])
    assert groups(load(folder)) == [] and "Optimizers" not in summary(folder)


@pytest.mark.parametrize(
    ("name", "columns"), [("runs", ["optimizer_state_bytes", "step_s", "state_bytes"]), ("curvature", ["rms_u"])]
)
def test_results_that_are_older_than_the_columns_name_the_upgrade(name, columns, tmp_path):
    folder = write_study(tmp_path, mechanisms=["sa"], lrs=[1e-3], seeds=1, alpha=lambda *_: [1.0])
    path = folder / "results" / f"{name}.parquet"
    pq.write_table(pq.read_table(path).drop_columns(columns), path)
    with pytest.raises(OlderFile, match=rf"{name}.parquet was written by an older version; .* upgrade=true"):
        load(folder)


def test_what_lr_edge_found_is_in_multiples_too(tmp_path):
    folder = write_scaled(tmp_path)
    edge = {
        "num_seeds": 3, "best_lr": rate("sgd", 1.0), "best_nll": 3.0, "best_low": rate("sgd", 0.316), "best_high": 9e-4,
        "verdict_lr": 1.17e-3, "verdict_next_lr": 1.4e-3, "verdict_exceptions": f"{rate('sgd', 0.316):g}", "nll_lr": 9e-4,
        "nll_next_lr": 1.17e-3, "nll_exceptions": "", "lowest_lr": rate("sgd", 0.1), "highest_lr": rate("sgd", 10.0),
        "resolution_decades": 0.05, "nll_tolerance": 0.05, "num_rates": 5, "num_runs": 15, "num_grid_runs": 100,
        "num_rounds": 2, "state": "found",
    }  # fmt: skip
    own = run_id("scaled", "sa", rate("sgd", 0.1), 0, {"optimizer": "sgd"})
    write_table(folder / "results" / "edges.parquet", "edges", [{"run_id": own} | edge])
    study = load(folder)
    (row,) = study.searches["edges"].itertuples()
    assert (row.best_lr, row.best_low, row.verdict_exceptions) == (1.0, 0.316, "0.316")
    assert (row.verdict_lr, row.verdict_next_lr) == (1.67, 2.0)
    found = numbers_of(study, groups(study)[0])["sa sgd"]
    assert found.to_stable == pytest.approx((math.log10(1.67), math.log10(2.0)))


def test_the_sentences_say_whether_any_best_nll_is_told_apart(scaled, tmp_path):
    assert sentences(scaled)[0].startswith("NLL at the best rate, against adamw's seed by seed: higher of sgd +0.200")
    alike = load(write_scaled(tmp_path / "alike", valleys={**VALLEYS, "sgd": VALLEYS["adamw"]}))
    assert sentences(alike)[0].startswith("No best NLL is told apart from that of adamw after Holm's correction over")


def test_axes_legends_and_headings_say_that_rates_are_multiples(tmp_path):
    """They said "learning rate" and "LR", of multiples of two optimizers' own rates."""
    study = load(write_scaled(tmp_path))
    parts = [piece for part in assembly.pieces(study) for piece in part]
    headings = {text for piece in parts if isinstance(piece, Table) for text in piece.header}
    assert {"× own LR", "best × own LR"} <= headings and not {"LR", "best LR"} & headings
    axes = [ax for piece in parts if isinstance(piece, Picture) for ax in piece.figure.axes]
    labels = {axis.get_label_text() for ax in axes for axis in (ax.xaxis, ax.yaxis)}
    assert "α, times own rate" in labels
    legends = [legend for piece in parts if isinstance(piece, Picture) for legend in piece.figure.legends]
    titles = {legend.get_title().get_text() for legend in legends}
    assert "times own rate" in titles and not {"learning rate", "learning rate α"} & (labels | titles)
    assert "\n× own LR " in summary(study)
    other = [piece for part in assembly.pieces(load(write_study(tmp_path / "one", lrs=(1e-3, 1e-2)))) for piece in part]
    assert any("best LR" in piece.header for piece in other if isinstance(piece, Table))
