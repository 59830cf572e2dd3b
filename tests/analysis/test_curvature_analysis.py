"""Tables and figures of the recorded steps and the spectra; figures are checked for what they hold."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from analysis.report import build
from analysis.sections import curvature
from analysis.sections.alpha import step_figure, typical_steps
from analysis.sections.curvature import blocks_table, step_figures
from analysis.sections.spectrum_figures import density_figures, profile_figures, smooth, spectrum_rows_of
from analysis.sections.steps import find_fallen, make_fallen_tables, sharpness_table
from analysis.study.load import load
from stability.runs import results
from stability.runs.schema import SPECTRA_COLUMNS
from tests.analysis.synthetic import quickstart_alpha, write_study
from tests.analysis.test_report import text_of


def alpha_of(values):
    return lambda mechanism, lr, seed, state: values


def with_spectra(folder, **kwargs):
    """A study of two mechanisms and two rates with every spectrum, written as `results.write` does."""
    path = write_study(folder, mechanisms=["sa", "sc"], lrs=[1e-3, 1e-2], seeds=2, alpha=quickstart_alpha, **kwargs)
    runs = load(path).runs
    rows = {name: [] for name in SPECTRA_COLUMNS}
    for run in runs.itertuples():
        labels = {"run_id": run.run_id, "phase": "terminal", "state": "checkpoint", "lr": run.lr}
        known = {"loss_before": 2.9, "slope": -10.0, "curvature": 2000.0, "alpha_max": 0.01, "critical_lr": 0.03}
        rows["profile"] += [
            {**labels, **known, "alpha": a, "loss": 2.9 - 10 * a + 1000 * a**2 - 2e4 * a**3 / 3}
            for a in np.linspace(-0.005, 0.04, 30)
        ]
        rows["density"] += [
            {**labels, "probe": 0, "node": node, "weight": 0.25, "num_params": 99}
            for node in (-1.0, 0.0, 0.5, 30.0 * run.lr**0.1)
        ]
        rows["blocks"] += [{**labels, "block": "blocks.0", "share": 3.0, "curvature": 3.0}]
        numbers = dict.fromkeys(SPECTRA_COLUMNS["sharpness"][4:], 1.0 + run.seed)
        rows["sharpness"] += [{**labels, **numbers, "attention_entropy": None if run.mechanism == "sc" else 2.0}]
    for name, each in rows.items():
        frame = pd.DataFrame(each, columns=list(SPECTRA_COLUMNS[name]))
        results.write_parquet(
            frame, path / "results" / f"{name}.parquet", {"schema_version": str(results.SCHEMA_VERSION)}
        )
    return path


@pytest.fixture(scope="module")
def spectra_dir(tmp_path_factory):
    return with_spectra(tmp_path_factory.mktemp("spectra"))


def test_steps_that_lowered_their_loss_are_counted_and_lost_ones_did_not(tmp_path):
    path = write_study(
        tmp_path, mechanisms=["sa"], lrs=[1e-3], seeds=1, states=["paper"], alpha=alpha_of([1.0, 2.0, 3.0, 4.0])
    )
    study = load(path)
    study.curvature["loss_after"] = [2.8, 2.95, math.nan, 2.85]
    assert find_fallen(study.curvature).tolist() == [True, False, False, True]
    (table,) = make_fallen_tables(study)
    assert table.header == ("LR", "sa")
    assert (table.rows[0][1].text, table.rows[0][1].detail) == ("50", "n=4")


def test_the_steps_beyond_alpha_max_that_lowered_their_loss_are_counted_not_asserted(tmp_path):
    path = write_study(
        tmp_path,
        mechanisms=["sa"],
        lrs=[1e-2],
        seeds=1,
        states=["paper"],
        alpha=alpha_of([1e-3, 1e-3, 1.0, math.inf, 0.0]),
    )
    study = load(path)
    study.curvature["loss_after"] = [2.8, 2.95, 2.8, 2.8, 2.95]
    assert "of the 3 steps beyond it, 1 lowered the loss nevertheless" in make_fallen_tables(study)[0].caption
    beyond_none = replace(study, curvature=study.curvature.assign(alpha_max=1.0))
    assert "no step went beyond it here" in make_fallen_tables(beyond_none)[0].caption


def test_the_critical_rate_is_compared_with_alpha_max_where_both_are_numbers(tmp_path):
    path = write_study(
        tmp_path,
        mechanisms=["sa"],
        lrs=[1e-3],
        seeds=1,
        states=["paper"],
        alpha=alpha_of([1.0, 2.0, math.inf, 0.0, 1.0, 1.0]),
    )
    study = load(path)
    study.curvature["critical_lr"] = [2.0, 6.0, 5.0, 0.0, math.inf, 0.0]
    (table,) = make_fallen_tables(study)
    assert table.header == ("LR", "sa", "sa")
    assert (table.rows[0][2].text, table.rows[0][2].detail) == ("2.5", "2.2–2.8, n=2")


def test_sharpness_has_a_row_for_each_series_and_rate_and_a_dash_where_there_is_none(spectra_dir):
    table = sharpness_table(load(spectra_dir))
    assert table is not None
    assert [(row[0].text, row[1].text) for row in table.rows] == [
        ("sa", "1e-3"),
        ("sa", "1e-2"),
        ("sc", "1e-3"),
        ("sc", "1e-2"),
    ]
    assert (table.rows[0][2].text, table.rows[0][2].detail) == ("1.5", "1–2")
    assert table.rows[2][-1].text == "--"


def with_stale_rows(folder):
    """`with_spectra`, of whose runs two of sa at 1e-2 and one at 1e-3 diverged; their rows still call themselves
    terminal, as old results do."""
    path = with_spectra(folder)
    table = path / "results" / "runs.parquet"
    runs = pd.read_parquet(table)
    lost = (runs["mechanism"] == "sa") & ((runs["lr"] == 1e-2) | (runs["seed"] == 1))
    runs.loc[lost, ["status", "val_nll"]] = ["diverged", None]
    results.write_parquet(runs, table, {"schema_version": str(results.SCHEMA_VERSION)})
    return path


def test_spectra_of_diverged_runs_are_never_terminal_and_the_runs_are_counted(tmp_path):
    study = load(with_stale_rows(tmp_path))
    for table in (sharpness_table(study), blocks_table(study)):
        details = {(row[0].text, row[1].text): row[0].detail for row in table.rows}
        assert (
            details["sa", "1e-3"] == "terminal, run's own state, n=1\ndiverged 1/2"
            and details["sa", "1e-2"] == "terminal, run's own state, n=0\ndiverged 2/2"
        )
        assert details["sc", "1e-2"] == "terminal, run's own state, n=2"
        assert {cell.text for cell in table.rows[1][2:]} == {"--"} and "a run that diverged" in table.caption
    assert (sharpness_table(study).rows[0][2].text, sharpness_table(study).rows[0][2].detail) == ("1", ""), (
        "the seed that is left"
    )
    for name in ("profile", "density", "blocks"):
        rows = spectrum_rows_of(study, name, "terminal")
        assert (
            set(rows.loc[rows["series"] == "sa", "run_lr"]) == {1e-3}
            and rows.loc[rows["series"] == "sa", "run_id"].nunique() == 1
        )


def test_profile_and_density_say_how_many_runs_diverged(tmp_path):
    study = load(with_stale_rows(tmp_path))
    (profile,), (density,) = profile_figures(study), density_figures(study)
    panels = [(ax.get_title(loc="right"), [text.get_text() for text in ax.texts]) for ax in profile.axes]
    assert panels == [("diverged: sa 1/2", []), ("", []), ("", ["diverged"]), ("", [])], (
        "sa and sc at 1e-3, then at 1e-2, where both of sa's runs diverged"
    )
    assert [ax.get_title(loc="right").replace("\n", " ") for ax in density.axes] == ["diverged: 1e-3 1/2, 1e-2 2/2", ""]


def test_a_panel_of_steps_shows_medians_and_the_training_rate(spectra_dir):
    study = load(spectra_dir)
    (figure,) = step_figures(study)
    ax = figure.axes[0]
    lines = {line.get_linestyle(): line for line in ax.get_lines() if len(line.get_xdata()) == 2}
    assert any(np.allclose(line.get_ydata(), 1e-3) for line in lines.values())
    run = study.with_run(study.curvature)
    expected = (
        run[(run.state == "paper") & (run.run_lr == 1e-3) & (run.series == "sa")].groupby("step")["alpha_max"].median()
    )
    drawn = [line.get_ydata() for line in ax.get_lines() if len(line.get_xdata()) == 25]
    assert any(np.allclose(np.nan_to_num(y), np.nan_to_num(expected.where(np.isfinite(expected)))) for y in drawn)


def test_the_profile_marks_alpha_max_the_critical_and_the_training_rate(spectra_dir):
    (figure,) = profile_figures(load(spectra_dir))
    assert len(figure.axes) == 4
    upright = sorted(line.get_xdata()[0] for line in figure.axes[0].get_lines() if len(set(line.get_xdata())) == 1)
    assert upright == [1e-3, 0.01, 0.03]
    model = next(line for line in figure.axes[0].get_lines() if len(line.get_xdata()) == 400)
    x = np.asarray(model.get_xdata())
    assert np.allclose(model.get_ydata(), 2.9 - 10 * x + 1000 * x**2)


def test_the_density_of_several_runs_integrates_to_one(spectra_dir):
    study = load(spectra_dir)
    (figure,) = density_figures(study)
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["sa", "sc"]
    rows = study.spectra["density"]
    grid = np.linspace(-10, 40, 20001)
    assert np.trapezoid(smooth(rows, grid, 0.2), grid) == pytest.approx(1, rel=1e-9)


def test_without_spectra_there_is_no_figure_of_them(quickstart):
    assert {name.split("-")[0] for name in curvature.figures(quickstart)} == {"steps"}
    assert sharpness_table(quickstart) is None
    assert [draw(quickstart, "earliest") for draw in (step_figures, profile_figures, density_figures)] == [[]] * 3


def test_the_report_shows_what_was_measured(spectra_dir, tmp_path, drawn):
    drawn("steps", "profile", "density", "blocks")
    text = text_of(build(spectra_dir, tmp_path))
    for words in ("Sharpness and its companions", "Steps whose loss really fell", "step by step, terminal checkpoint", "Spectral density of the Hessian",
                  "Batch loss along the step direction", "Learning-rate sensitivity"):  # fmt: skip
        assert words in text


def test_a_study_with_spectra_and_no_steps_is_reported(tmp_path, drawn):
    drawn("density", "blocks")
    path = with_spectra(tmp_path)
    curvature = load(path).curvature.iloc[:0]
    results.write_parquet(
        curvature, path / "results" / "curvature.parquet", {"schema_version": str(results.SCHEMA_VERSION)}
    )
    assert "Spectral density of the Hessian" in text_of(build(path, tmp_path))


def test_typical_steps_are_those_of_the_median_at_the_lowest_best_and_highest_rate(tmp_path):
    """Five steps at each rate, α_max one to five times the rate: the third is the median, and the parabola's zero."""
    nll = lambda m, lr, seed: 2.0 + 0.2 * abs(math.log10(lr / 1e-2))  # noqa: E731
    alpha = lambda m, lr, *_: [lr * factor for factor in (2, 5, 1, 3, 4)]  # noqa: E731
    lrs = (1e-4, 1e-3, 1e-2, 1e-1)
    study = load(write_study(tmp_path, mechanisms=("sa", "sc"), lrs=lrs, seeds=1, nll=nll, alpha=alpha))
    steps = typical_steps(study, "sa")
    assert steps["run_lr"].tolist() == [1e-4, 1e-2, 1e-1]
    assert steps["alpha_max"].tolist() == pytest.approx([3e-4, 3e-2, 3e-1])
    zero = steps["alpha_max"] * steps["slope"] + steps["alpha_max"] ** 2 * steps["curvature"] / 2
    assert zero.abs().max() < 1e-12
    found = step_figure(study)
    assert found is not None and found[0] == "sa" and len(found[1].axes) == 3
    assert step_figure(load(write_study(tmp_path / "one", lrs=(1e-2,), alpha=alpha))) is None
