"""What stands in for sa: how sequences, layers and seeds are taken together, tables, figures, the report's part."""

from __future__ import annotations

import pandas as pd
import pytest
from pypdf import PdfReader

from analysis.report import build
from analysis.sections.training_free import (
    SECTION,
    TABLES,
    choose_budget,
    errors,
    figures,
    gaps,
    phase_figures,
    shares,
)
from analysis.study.load import load
from stability.runs import results
from stability.runs.words import Words
from tests.analysis.synthetic import write_study

BUDGETS = (0.25, 0.6, 1.0)
SETTINGS = [("sparge", "θ = 0.1, λ = -50"), ("fasa", "1 of 4 chunks"), ("fasa", "4 of 4 chunks")]
NAMES = ("training_free", "training_free_layers")


def rows_of(run):
    """At budget b a gap of (1 − b)·(1 + seed) on 3 positions and of three times that on 1: 1.5·(1 − b)·(1 + seed); half
    of 1 − b is skipped by the first sequence and all of it by the second; layer l errs by (1 − b)·(l + 1)."""
    for mixer, label in SETTINGS:
        for budget in BUDGETS:
            for sequence, counted in enumerate((3.0, 1.0)):
                where = {"run_id": run.run_id, "phase": "terminal", "lr": run.lr, "mixer": mixer, "label": label,
                         "budget": budget, "sequence": sequence}  # fmt: skip
                lost = (1 - budget) * (1 + run.seed) * (1 + 2 * sequence)
                skipped = (1 - budget) * (0.5 + 0.5 * sequence)
                yield 0, {**where, "counted": counted, "nll": 2.0 + lost, "sa_nll": 2.0, "skipped": skipped}
                for layer in (0, 1):
                    yield 1, {**where, "layer": layer, "error": (1 - budget) * (layer + 1), "skipped": skipped}


def study_with(tmp_path, seeds=2, mechanisms=("sa",)):
    folder = write_study(tmp_path, name=f"probed{seeds}", mechanisms=list(mechanisms), lrs=(1e-3, 1e-2), seeds=seeds)
    runs = pd.read_parquet(folder / "results" / "runs.parquet")
    found = [row for run in runs[runs.mechanism == "sa"].itertuples() for row in rows_of(run)]
    for place, name in enumerate(NAMES):
        rows = [row for number, row in found if number == place]
        frame = pd.DataFrame(rows, columns=results.PROBE_COLUMNS[name])
        version = {"schema_version": str(results.SCHEMA_VERSION)}
        results.write_parquet(frame, folder / "results" / f"{name}.parquet", version)
    return folder


def cells(table):
    return [[cell.text for cell in row] for row in table.rows]


def test_gaps_weigh_sequences_by_their_positions_and_errors_are_of_the_worst_layer(tmp_path):
    study = load(study_with(tmp_path))
    models, layers = (study.probed(name) for name in NAMES)
    at = {"series": "sa", "run_lr": 1e-3, "mixer": "fasa", "label": "1 of 4 chunks", "budget": 0.25, "seed": 1}
    values = [
        float(each.xs(tuple(at.values()), level=tuple(at)).iloc[0])
        for each in (gaps(models), shares(models), errors(layers))
    ]
    assert values == pytest.approx([1.5 * 0.75 * 2, 0.75 * 0.75, 0.75 * 2])


def test_a_sequence_without_a_predicted_position_counts_for_nothing(tmp_path):
    models = load(study_with(tmp_path)).probed("training_free")
    models.loc[models["sequence"] == 1, ["counted", "nll", "sa_nll"]] = [0.0, float("nan"), float("nan")]
    assert gaps(models).xs(0.25, level="budget").min() == pytest.approx(0.75)


def test_tables_have_a_row_a_setting_and_a_column_a_budget(tmp_path):
    lost, skipped, error = TABLES.of_study(load(study_with(tmp_path)))
    assert lost.header == ("mechanism", "LR", "stand-in", "settings", "0.25", "0.6", "1")
    assert len(lost.rows) == 2 * len(SETTINGS)
    by_place = {tuple(row[1:4]): row[4:] for row in cells(lost)}
    assert by_place["1e-2", "sparge", "θ = 0.1, λ = -50"] == ["+1.6875", "+0.9000", "+0.0000"], "mean of two seeds"
    assert lost.rows[0][4].detail == "+1.1250 to +2.2500, n=2"
    assert cells(skipped)[0][4:] == ["56.25 %", "30 %", "0 %"]
    assert cells(error)[0][4:] == ["1.5", "0.8", "0"]
    assert [table.title.partition(",")[0] for table in (lost, skipped, error)] == [
        "NLL beyond that of sa", "Products skipped", "Relative error of the worst layer",
    ]  # fmt: skip


def test_one_runs_tables_need_no_study(tmp_path):
    frames = {name: pd.read_parquet(study_with(tmp_path, 1) / "results" / f"{name}.parquet") for name in NAMES}
    run = frames[NAMES[0]].run_id.iloc[0]
    of_run = {name: frame[frame.run_id == run] for name, frame in frames.items()}
    tables = TABLES.of_run(of_run, "sa", Words())
    assert [len(table.rows) for table in tables] == [3, 3, 3]


def test_figures_draw_a_point_a_budget_against_what_is_skipped_and_the_layers_of_one_budget(tmp_path):
    study = load(study_with(tmp_path, mechanisms=("sa", "sc")))
    assert set(figures(study)) == {"training_free-terminal-0"}
    (figure,) = phase_figures(study, "terminal")
    assert len(figure.axes) == 2 * 3, "sparge and fasa; gap, error, layers"
    lost, error, layers = figure.axes[3:]  # the second row: fasa
    lines = [line for line in lost.lines if len(line.get_xdata()) == len(BUDGETS)]
    assert len(lines) == 2 * 2, "learning rates, settings"
    assert sorted(lines[0].get_xdata()) == pytest.approx([0.0, 0.75 * 0.4, 0.75 * 0.75])
    assert sorted(lines[0].get_ydata()) == pytest.approx([0.0, 1.5 * 0.4 * 1.5, 1.5 * 0.75 * 1.5])
    assert sorted(error.lines[0].get_ydata()) == pytest.approx([0.0, 0.8, 1.5])
    assert layers.get_title(loc="left") == "error at budget 0.6"
    assert [list(line.get_ydata()) for line in layers.lines] == [pytest.approx([0.4, 0.8])] * 4
    assert lines[0].get_linestyle() != lines[1].get_linestyle(), "one of four chunks, and all"


@pytest.mark.parametrize(("budgets", "shown"), [([0.1, 0.4, 0.9], 0.4), ([0.25, 0.75], 0.25), ([1.0], 1.0)])
def test_the_layers_are_shown_at_the_budget_next_to_a_half(budgets, shown):
    assert choose_budget(budgets) == shown


def test_the_report_shows_figure_and_tables(tmp_path, drawn):
    drawn("training_free")
    pages = PdfReader(build(study_with(tmp_path), tmp_path)).pages
    text = " ".join("".join(page.extract_text() for page in pages).split())
    for words in (
        "What stands in for sa without training",
        "NLL beyond that of sa, terminal checkpoint",
        "against the share of sa’s products that is skipped",
    ):
        assert words in text


def test_without_a_probe_there_is_no_section(tmp_path):
    study = load(write_study(tmp_path, mechanisms=["sa"], lrs=(1e-3,), seeds=1))
    assert not SECTION.applies(study) and not TABLES.of_study(study)


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_table_names_the_probe_that_writes_it_again(tmp_path, name):
    folder = study_with(tmp_path, 1)
    (folder / "results" / f"{name}.parquet").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="python -m stability.probe what=training_free ckpt="):
        load(folder)
