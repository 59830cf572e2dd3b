"""A study that sweeps residual schemes: labels, looks, claims, gradient norms, and what `what=streams` measured."""

from __future__ import annotations

import math

import matplotlib
import numpy as np
import pandas as pd
import pytest

from analysis.claims.judging import judge
from analysis.drawing import pieces
from analysis.drawing.style import RC, looks
from analysis.sections import gradients, nll, streams
from analysis.study.load import load
from stability.runs import results
from stability.runs.parquet import write_parquet
from tests.analysis.figures import write_figures
from tests.analysis.synthetic import write_study

SCHEMES = ("hc", "identity", "mhc_lite")
LRS = (1e-3, 1e-2, 1e-1)
SETTINGS = tuple({"residual": name} for name in SCHEMES)


def write(path, frame):
    write_parquet(frame, path, {"schema_version": str(results.SCHEMA_VERSION)})


def study_of(tmp_path, seeds=3, lower=0.1, slopes=(0.1, 0.2, 0.1), **options):
    """sa with three schemes: identity's best NLL is 2.0, hc's as low, mhc_lite's ``lower``; rises by ``slopes`` per
    decade around 1e-2."""
    folder = write_study(
        tmp_path, mechanisms=["sa"], lrs=LRS, seeds=seeds, settings=SETTINGS, nll=lambda m, lr, seed: 2.0, **options
    )
    path = folder / "results" / "runs.parquet"
    runs = pd.read_parquet(path)
    rise = runs["residual"].map(dict(zip(SCHEMES, slopes, strict=True))) * np.abs(np.log10(runs["lr"] / 1e-2))
    runs["val_nll"] = (
        2.0 + rise - lower * (runs["residual"] == "mhc_lite") + 1e-3 * runs["seed"] * (1 + (runs["residual"] == "hc"))
    )
    write(path, runs)
    return folder


def test_every_scheme_is_a_series_of_its_own_the_plain_one_first(tmp_path):
    study = load(study_of(tmp_path))
    assert study.series == ("sa identity", "sa hc", "sa mhc_lite")
    assert nll.nll_tables(study)[0].header == ("LR", "sa identity", "sa hc", "sa mhc_lite")
    found = looks(study)
    assert len({look.color for look in found.values()}) == len({look.marker for look in found.values()}) == 3


def test_schemes_are_compared_with_the_plain_one(tmp_path):
    claims = {claim.subject: claim for claim in judge(load(study_of(tmp_path)))}
    best = claims["best NLL: sa mhc_lite"]
    assert best.verdict == "holds" and best.text == (
        "Supported (n = 3): sa mhc_lite's best NLL is 0.100 nats lower than sa identity's (95 %: −0.100 to −0.100 "
        "nats). Medians: 1.901 against 2.001."
    )
    assert claims["best NLL: sa hc"].verdict == "undecided"
    # 0.1 nats at both ends of the sweep are 5 %, and a little more than identity's share of learning: 0.09 are inside both
    wide = {claim.subject: claim for claim in judge(load(study_of(tmp_path / "wide", slopes=(0.09, 0.2, 0.1))))}
    assert wide["own window: sa hc"].verdict == "holds" and "wider" in wide["own window: sa hc"].text
    assert claims["own window: sa hc"].verdict == "unresolved"


def test_mhc_lite_is_compared_with_mhc_after_the_plain_one(tmp_path):
    folder = study_of(tmp_path)
    path = folder / "results" / "runs.parquet"
    runs = pd.read_parquet(path)
    write(path, runs.assign(residual=runs["residual"].replace({"hc": "mhc"})))
    claims = {claim.subject: claim for claim in judge(load(folder))}
    best = claims["best NLL sa mhc_lite"]
    assert list(claims).index("best NLL: sa mhc") < list(claims).index("best NLL sa mhc_lite")
    assert best.verdict == "holds" and best.paper == "mHC-lite" and "Medians: 1.901 against 2.002." in best.text
    assert "sa mhc_lite's best NLL is 0.101 nats lower than sa mhc's, margin 0.01 nats" in best.text


def test_one_seed_makes_no_claim(tmp_path):
    claims = {claim.subject: claim for claim in judge(load(study_of(tmp_path, seeds=1)))}
    assert {claims[key].verdict for key in claims if key.startswith(("best", "own", "common"))} == {"no claim"}


def test_a_study_of_one_scheme_has_neither_such_claims_nor_gradient_norms(tmp_path):
    study = load(write_study(tmp_path, mechanisms=["sa", "sc"], lrs=LRS, seeds=2))
    assert not [claim for claim in judge(study) if claim.paper == "mHC-lite"]
    assert gradients.norm_figures(study) == {}


def test_gradient_norms_are_running_means_with_a_line_a_scheme(tmp_path):
    study = load(study_of(tmp_path))
    drawn = gradients.norm_figures(study)[gradients.NORMS_NAME]
    figure = drawn.figure
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["LR 1e-3", "LR 1e-2", "LR 1e-1"]
    assert all(len(ax.lines) == 3 for ax in figure.axes)
    assert "streams the head reads the sum of n normed ones" in drawn.caption
    rows = pd.DataFrame({"run_id": "a", "step": np.arange(1, 101), "grad_norm": np.arange(100.0)})
    assert gradients.norms(rows)["a"].loc[50] == pytest.approx(48.5)


QUANTITIES = {"log_range": 30.0, "column_sum": 1.25, "row_sum": 1.0, "spectral_norm": 1.1}


def stream_rows(study, scheme="mhc_lite", threshold=12.0):
    """Rows of mhc_lite's runs with two connections: a quantity's quantiles run from half of the value above to it."""
    rows = []
    for run in study.runs[study.runs["residual"] == scheme].itertuples():
        base = {"run_id": run.run_id, "phase": "terminal", "lr": run.lr, "branch": "mixer", "num_values": 64}
        for connection in (None, 0, 1):
            values = [("single", key, value) for key, value in QUANTITIES.items()]
            if connection is not None:
                values += [
                    ("product", "column_sum", 1.5 + connection),
                    ("product", "row_sum", 1.0),
                    ("product", "spectral_norm", 2.0 + connection),
                ]
                values += [("product", "forward_gain", 3.0 + connection), ("rest", "backward_gain", 5.0 - connection)]
            for matrix, quantity, value in values:
                place = base | {"connection": connection, "matrix": matrix, "quantity": quantity}
                rows += [place | {"quantile": q, "value": value * (1 + q) / 2} for q in (0, 0.05, 0.5, 0.95, 1)]
            rows.append(
                base
                | {"connection": connection, "matrix": "single", "quantity": "beyond", "quantile": None, "value": 0.25}
            )
            if connection is not None:
                rows.append(
                    base
                    | {
                        "connection": connection,
                        "matrix": "single",
                        "quantity": "iterations",
                        "quantile": None,
                        "value": 7.0,
                        "num_values": 1,
                    }
                )
            if connection is not None and threshold is not None:
                rows.append(rows[-1] | {"quantity": "threshold", "value": threshold})
    return pd.DataFrame(rows, columns=results.PROBE_COLUMNS["streams"])


@pytest.fixture
def probed(tmp_path):
    folder = study_of(tmp_path, seeds=2)
    write(folder / "results" / "streams.parquet", stream_rows(load(folder)))
    return folder


def test_the_table_holds_the_worst_of_a_run(probed):
    (table,) = streams.TABLES.of_study(load(probed))
    assert [row[0].text for row in table.rows] == ["sa mhc_lite"] * 3
    cells = dict(
        zip(
            [measure.label for measure in streams.MEASURES],
            (cell.text for cell in table.rows[0][2:]),
            strict=False,
        )
    )
    assert cells["ln 1/ν"] == "30" and cells["outliers"] == "25 %"
    texts = [cell.text for cell in table.rows[0][4:]]
    # |0.625 − 1| is more than |1.25 − 1|; products through all depth are connection 1's, gradients from the head back
    # to 0
    assert texts == ["3.8e-1", "5.0e-1", "1.5e0", "5.0e-1", "3", "4", "5"]
    assert sum(span for _, span in table.groups) == len(table.header)


def test_the_figure_has_a_row_a_scheme_and_quantiles_by_connection(probed):
    study = load(probed)
    ((name, drawn),) = streams.figures(study).items()
    figure = drawn.figure
    assert name == "streams-terminal-0" and len(figure.axes) == 4
    rows = study.probed("streams")
    sums = rows[(rows["matrix"] == "product") & (rows["quantity"] == "column_sum") & (rows["run_lr"] == 1e-3)]
    assert streams.quantile(sums, 0.5, "median").to_dict() == {0.0: 1.5 * 0.75, 1.0: 2.5 * 0.75}
    assert streams.quantile(sums, 1.0, "max").to_dict() == {0.0: 1.5, 1.0: 2.5}
    gains = figure.axes[3].lines
    assert list(figure.axes[0].lines[0].get_ydata()) == [12, 12]  # the run's own threshold of an outlier
    assert math.isclose(gains[1].get_ydata()[-1], 4.0) and math.isclose(gains[2].get_ydata()[0], 5.0)


def test_labels_of_sums_of_both_signs_over_many_decades_do_not_overlap(probed):
    path = probed / "results" / "streams.parquet"
    rows = pd.read_parquet(path)
    sums = (rows["matrix"] == "product") & (rows["quantity"] == "column_sum")
    rows.loc[sums, "value"] *= 4e5 * (rows.loc[sums, "quantile"] - 0.5)
    write(path, rows)
    with matplotlib.rc_context(RC):
        ((_, drawn),) = streams.figures(load(probed)).items()
        drawn.figure.draw_without_rendering()
    ax = drawn.figure.axes[2]
    low, high = ax.get_ylim()
    labels = [label.get_window_extent() for at, label in zip(ax.get_yticks(), ax.get_yticklabels(), strict=True)
              if low <= at <= high]  # fmt: skip
    labels.sort(key=lambda box: box.y0)
    assert low < -1e4 and high > 1e4 and len(labels) > 2, "a signed axis"
    assert all(upper.y0 >= lower.y1 for lower, upper in zip(labels, labels[1:], strict=False))


def test_captions_say_how_many_tokens_and_iterations(probed, tmp_path):
    study = load(probed)
    drawn = {name: pieces.paragraph(each.caption) for name, each in streams.figures(study).items()}
    assert list(drawn) == ["streams-terminal-0"]
    said = pieces.typst(streams.body(study, drawn)).replace("\xa0", " ")
    assert said.count("64 tokens a run") == 2 and said.count("K = 7") == 2
    assert "that exceeds 12." in said and "ln 1/ν = 12, above which a token counts as an outlier" in said
    assert said.count("Computed in float64 from the trained weights") == 2 and "largest over smallest" not in said
    assert said.count("smallest over the largest entry") + said.count("smallest over largest entry") == 2
    assert "7 iterations leave columns that sum to" in said


def test_the_example_of_the_paper_is_computed_for_the_studys_number_of_iterations():
    log_range, sums = streams.example(20)
    assert (round(log_range, 1), [round(total, 3) for total in sums]) == (29.9, [1.820, 0.590, 0.590])
    assert "20 iterations leave columns that sum to 1.820, 0.590 and 0.590 (ln 1/ν = 29.9)" in streams.example_text(
        [20.0]
    )
    assert streams.example_text([]) == ""


def test_a_table_from_before_the_threshold_was_a_setting_says_what_it_counted(tmp_path):
    folder = study_of(tmp_path, seeds=2)
    frame = stream_rows(load(folder))
    runs = sorted(set(frame["run_id"]))
    for older, told in (
        (runs, "exceeds 7 (6 runs measured before the threshold was a setting: K)."),
        (runs[:2], "exceeds 12 and 7 (2 runs measured before"),
    ):
        write(
            folder / "results" / "streams.parquet",
            frame[~(frame["run_id"].isin(older) & (frame["quantity"] == "threshold"))],
        )
        (table,) = streams.TABLES.of_study(load(folder))
        assert told in table.caption and table.rows[0][3].text == "25 %"


def test_intervals_of_the_worst_are_what_the_seeds_showed(tmp_path):
    """Three runs whose Student intervals would have run from below 0 to beyond 100 %."""
    folder = study_of(tmp_path, seeds=3)
    frame, seed = stream_rows(load(folder)), load(folder).runs.set_index("run_id")["seed"]
    place = frame["run_id"].map(seed).astype(int)
    tail = np.array([1.0, 1.01, 60.0])[place]
    frame["value"] = frame["value"].where(
        ~frame["quantity"].isin(["log_range", "column_sum", "spectral_norm"]), frame["value"] * tail
    )
    frame["value"] = frame["value"].where(frame["quantity"] != "beyond", np.array([0.2, 0.25, 0.99])[place])
    write(folder / "results" / "streams.parquet", frame)
    (table,) = streams.TABLES.of_study(load(folder))
    details = dict(zip(table.header, (cell.detail for cell in table.rows[0]), strict=True))
    assert (
        details["outliers"] == "20 %–99 %, n=3"
        and details["ln 1/ν"] == "30–1800, n=3"
        and details["spectral"] == "3–180, n=3"
    )
    assert (
        "-" not in "".join(cell.detail.replace("e-", "") for row in table.rows for cell in row)
        and "smallest and largest over the seeds" in table.caption
    )


def test_figures_of_the_study_are_drawn(probed, tmp_path):
    drawn = {path.stem for path in write_figures(probed, tmp_path / "figures")}
    assert {"streams-terminal-0", "gradient-norms"} <= drawn
