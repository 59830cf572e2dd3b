"""One report of many studies: where each stands, cells against the runs' own rows, the paper's numbers beside."""

import dataclasses
import json
import math
import statistics

import pandas as pd
import pypdf
import pytest

from analysis.export import export_paper
from analysis.paper import beside, contents, figures, printed
from analysis.paper.grid import blocks
from analysis.paper.tables import alpha_tables, nll_tables
from analysis.report import build_paper
from analysis.study.load import load
from tests.analysis.synthetic import nll, quickstart_alpha, write_study, write_table

LRS = (5e-4, 1e-3, 5e-3)
RESIDUES = {"position": ["residue", "residues"], "held_out": "proteins"}


def write(tmp_path, name, model, words=None, oracle="", parts=(), **shape):
    """A study of a size and modality, as its own record has them; generations scored by ``oracle``."""
    shape = {"mechanisms": ("sa", "sc"), "lrs": LRS, "nll": early, "curves": False} | shape
    folder = write_study(tmp_path, name=name, settings=({"model": model},), **shape)
    manifest = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(manifest | ({"words": words} if words else {})))
    path = folder / "results" / "runs.parquet"
    runs = pd.read_parquet(path)
    if oracle:
        runs["gen_nll"], runs["gen_oracle"] = runs["val_nll"] + 1.25, oracle
    for part, of_it in parts:
        runs[f"val_nll_{part}"] = runs["val_nll"] * of_it
    write_table(path, "runs", runs.to_dict("records"))
    return load(folder)


def early(mechanism, lr, seed):
    return nll(mechanism, 12 * lr, seed)


def cells(table, first):
    """The rows of a table that begin with a text."""
    return [row for row in table.rows if row[0].text == first]


@pytest.fixture
def three(tmp_path):
    return [
        write(tmp_path, "t", "text_54m", oracle="big", alpha=quickstart_alpha, seeds=3),
        write(tmp_path, "d", "dna_51m", {"tokens": "nucleotides"}, mechanisms=("sa", "mix")),
        write(tmp_path, "p", "protein_320m", RESIDUES, parts=(("sequence", 0.75),), lrs=(1e-4, 5e-4), mechanisms=("mix",)),
    ]  # fmt: skip


def test_size_and_modality_are_read_from_the_record(three, tmp_path):
    small = write(tmp_path, "s", "nano")
    found = [(block.modality, block.size) for block in blocks([*reversed(three), small])]
    assert found == [("text", "nano"), ("text", "54M"), ("dna", "51M"), ("protein", "320M")]


def test_widths_of_one_study_are_rows_and_leave_the_names_of_series(tmp_path):
    models = ("nano width=64", "nano width=256", "nano layers=8 parametrization=mup")
    folder = write_study(tmp_path, name="two", settings=[{"model": model} for model in models], lrs=LRS)
    found = blocks([load(folder)])
    assert {block.size for block in found} == {"nano width=64", "nano width=256", "nano layers=8"}
    assert all("width" not in series for block in found for series in block.study.series)


def test_a_study_of_two_sizes_stands_in_two_places(tmp_path):
    folder = write_study(tmp_path, name="two", settings=({"model": "text_54m"}, {"model": "text_193m"}), lrs=LRS)
    found = blocks([load(folder)])
    assert [block.size for block in found] == ["54M", "193M"]
    assert all(set(block.study.series) == {"sa", "sc", "mix", "sw"} for block in found)


def test_nll_cells_are_medians_of_the_runs_with_divergences_counted(three):
    (table,) = nll_tables("text", blocks(three)[:1])
    runs = three[0].runs.to_dict("records")
    assert table.header == ("mechanism", *("5e-4", "1e-3", "5e-3") * 2)
    for series in ("sa", "sc"):
        (row,) = cells(table, series)
        for column, key in enumerate(("val_nll", "gen_nll")):
            for place, lr in enumerate(LRS):
                own = [run for run in runs if run["mechanism"] == series and math.isclose(run["lr"], lr)]
                known = [run[key] for run in own if run["status"] != "diverged"]
                lost, cell = len(own) - len(known), row[1 + 3 * column + place]
                told = f"{cell.text} {cell.detail}"
                assert cell.text == (f"{statistics.median(known):.3f}" if known else f"diverged {lost}/3")
                assert (f"diverged {lost}/3" in told) == bool(lost)
    assert any("3/3" in cell.text for row in table.rows for cell in row), "no run diverged here"


def test_alpha_cells_count_every_step_of_every_run(three):
    table = next(table for table in alpha_tables({"text": blocks(three)[:1]}) if "paper" in table.title)
    steps = three[0].curvature[three[0].curvature["state"] == "paper"]
    for lr, first in zip(LRS, ("5e-4", "1e-3", "5e-3"), strict=True):
        (row,) = cells(table, first)
        for place, series in enumerate(("sa", "sc")):
            runs = [run for run in three[0].runs.to_dict("records") if (run["mechanism"], run["lr"]) == (series, lr)]
            values = [v for run in runs for v in steps[steps["run_id"] == run["run_id"]]["alpha_max"]]
            finite = [v for v in values if math.isfinite(v)]
            percent = 100 * sum(v > lr for v in values) / (25 * len(runs))
            assert row[1 + place].text == (f"{statistics.median(finite):.1e}".replace("e-0", "e-") if finite else "--")
            assert row[3 + place].text == f"{percent:.0f}"


def test_the_papers_numbers_stand_under_ours_at_their_own_place_alone(three, tmp_path):
    table = next(table for table in alpha_tables({"text": blocks(three)[:1]}) if "paper" in table.title)
    assert [[cell.text for cell in row] for row in cells(table, "paper")] == [
        ["paper", "2.6e-3", "2.9e-3", "100", "100"],
        ["paper", "1.5e-6", "6.7e-3", "0", "100"],
        ["paper", "—", "5.5e-3", "0", "67"],
    ]
    assert not any(
        cells(table, "paper") for table in alpha_tables({"text": blocks(three)[:1]}) if "checkpoint”" in table.title
    )
    (protein,) = nll_tables("protein", blocks(three)[2:])
    assert [[cell.text for cell in row] for row in cells(protein, "mix, paper")] == [["mix, paper", "2.585", "2.519"]]
    other = write(tmp_path, "o", "text_55m", alpha=quickstart_alpha)
    assert not any(cells(table, "paper") for table in alpha_tables({"text": blocks([other])}))


def test_studies_of_one_place_are_not_averaged_and_their_common_runs_count_once(tmp_path):
    one, other = (write(tmp_path, name, "nano", lrs=LRS, mechanisms=each) for name, each in (("a", ("sa", "sc")), ("b", ("sa",))))  # fmt: skip
    (block,) = blocks([one, other])
    assert set(block.study.series) == {"sa (a)", "sa (b)", "sc"} and len(block.study.runs) == 18
    (same,) = blocks([one, one])
    assert set(same.study.series) == {"sa", "sc"} and len(same.study.runs) == 12


@pytest.mark.parametrize("column", ["data_fingerprint", "planned_steps"])
def test_studies_of_two_tasks_at_one_size_stand_apart_each_under_its_own_name(tmp_path, column):
    one, other = (write(tmp_path, name, "text_54m", mechanisms=("sa",)) for name in ("a", "b"))
    other.runs[column] = "f" * 64 if column == "data_fingerprint" else 7.0
    found = blocks([one, other])
    assert [(block.title, len(block.study.runs)) for block in found] == [("Text 54M (a)", 6), ("Text 54M (b)", 6)]
    assert all(set(block.study.series) == {"sa"} for block in found)
    headings = [row[0].text for table in nll_tables("text", found) for row in table.rows if "Size" in row[0].text]
    assert headings == ["Size = 54M (a)", "Size = 54M (b)"]
    assert [len(cells(table, "sa, paper")) for table in nll_tables("text", found)], (
        "the paper's numbers are of the size"
    )


def test_sizes_whose_rates_fill_no_page_together_have_tables_of_their_own(tmp_path):
    many = [write(tmp_path, f"s{k}", f"text_{k}m", lrs=[k * lr for lr in LRS], seeds=1) for k in (1, 2, 3, 4)]
    assert len(nll_tables("text", blocks(many))) == 4 and len(nll_tables("text", blocks(many[:2]))) == 1


def test_the_zoom_begins_where_the_first_mechanism_leaves_its_window(tmp_path):
    lrs, limits = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2], {"sa": 2e-3, "sc": 2e-2}
    study = write(tmp_path, "z", "nano", lrs=lrs, seeds=1, nll=lambda m, lr, s: 3.0 + (lr > limits[m]))
    assert figures.zoom(study) == [1e-3, 3e-3, 1e-2, 3e-2]


def test_the_ablation_has_table_9_beside_it_at_its_size_alone(tmp_path):
    values = [{"value": 2, "variant": ""}, {"value": 4, "variant": "window=4"}]
    for model, expected in (("text_193m", ["4.5488", "4.4545"]), ("nano", None)):
        settings = ({"model": model}, {"model": model, "variant": "window=4"})
        folder = write_study(tmp_path, name=model, mechanisms=["sc"], lrs=[1e-3], settings=settings, curves=False)
        manifest = json.loads((folder / "study.json").read_text())
        manifest["ablations"] = [{"part": "sc", "axis": "mechanism", "setting": "window", "values": values}]
        (folder / "study.json").write_text(json.dumps(manifest))
        (table,) = printed.ablation_tables_beside(load(folder))
        found = cells(table, "Validation NLL, paper")
        assert ([cell.text for cell in found[0][1:]] if found else None) == expected
        assert "a single learning rate" in " ".join(map(str, contents.pieces([load(folder)])[0]))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"mechanisms": ["sa"], "lrs": [1e-3], "seeds": 1}, "no curve to draw"),
        ({"mechanisms": [f"m{k}" for k in range(20)], "seeds": 1}, "m19"),
        ({"nll": lambda *_: math.inf}, "diverged 2/2"),
        ({}, "was not measured in any of these studies"),
    ],
)
def test_studies_of_any_shape_make_a_report(tmp_path, shape, words):
    study = write(tmp_path, "x", "nano", **shape)
    told = " ".join(str(piece) for pieces in contents.pieces([study]) for piece in pieces)
    assert words in told


def test_one_pdf_and_one_folder_hold_all_studies_and_the_figures_are_told_apart(three, tmp_path):
    folders = [tmp_path / "studies" / study.name for study in three]
    text = " ".join(page.extract_text() for page in pypdf.PdfReader(build_paper(folders[1:], "all", tmp_path)).pages)
    assert all(title in " ".join(text.split()) for title in ("DNA 51M", "Protein 320M", "Size = 320M"))
    written = export_paper(folders[1:2], tmp_path / "files")
    assert len(set(written)) == len(written) and any(path.name == "nll-grid-0.svg" for path in written)


def residual_study(tmp_path, name="res", dataset="Skylion007/openwebtext", seeds=3):
    settings = [{"residual": each, "objective": "ar", "model": "nanogpt_s"} for each in ("identity", "mhc_lite")]
    folder = write_study(
        tmp_path, name=name, mechanisms=["sa"], settings=settings, lrs=LRS, seeds=seeds, nll=early, unigram=9.0
    )
    manifest = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(manifest | {"spec": {"data": {"name": "hf", "dataset": dataset}}}))
    return load(folder)


def with_train_nll(study, leave_out=(), phase="terminal"):
    """A study with a training NLL of each finished run but ``leave_out``: 0.01, 0.03, 0.05, … by seed below validation."""
    runs = study.runs[(study.runs["status"] != "diverged") & ~study.runs["run_id"].isin(leave_out)]
    gap = 0.01 + 0.02 * runs["seed"]
    rows = {"run_id": runs["run_id"], "phase": phase, "lr": runs["lr"], "sequences": 512.0, "train_nll": runs["val_nll"] - gap,
            "nll": runs["val_nll"], "difference": gap}  # fmt: skip
    return dataclasses.replace(study, probes={"train_nll": pd.DataFrame(rows)})


def test_mhc_lites_table_has_the_measured_training_nll_the_gap_and_the_papers_numbers(tmp_path):
    """Against the runs' own rows: mean and standard deviation at the best rate; the logged losses are not shown."""
    plain = [residual_study(tmp_path), residual_study(tmp_path, "edu", "HuggingFaceFW/fineweb-edu", seeds=1)]
    studies = [with_train_nll(study) for study in plain]
    (table,) = beside.loss_tables([*studies, write(tmp_path, "t", "text_54m")])
    assert table.groups == (("", 1), ("openwebtext, S", 3), ("fineweb-edu, S", 3))
    assert table.header[1:] == ("train", "validation", "gap") * 2 and "stability.probe" not in table.caption
    runs = studies[0].runs[studies[0].runs["residual"] == "mhc_lite"]
    rate = runs.groupby("lr")["val_nll"].median().idxmin()
    own = runs[runs["lr"] == rate].sort_values("seed")
    gaps, series = [0.01, 0.03, 0.05], own["series"].iloc[0]
    train = [nll - gap for nll, gap in zip(own["val_nll"], gaps, strict=True)]
    (row,) = cells(table, series)
    for cell, values, sign in zip(row[1:4], (train, own["val_nll"].tolist(), gaps), ("", "", "+"), strict=True):
        assert cell.text == f"{sign}{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"
        assert cell.detail.startswith("n=3, ")
    assert row[3].text == "+0.030 ± 0.020"
    assert row[6].text == "+0.010" and row[6].detail.startswith("n=1")
    (paper,) = cells(table, f"{series}, paper")
    assert [cell.text for cell in paper[1:]] == ["3.471", "3.467", "-0.004", "3.468", "3.477", "+0.009"]


def test_where_the_training_nll_is_missing_the_table_names_the_command(tmp_path):
    command = "python -m stability.probe what=train_nll ckpt=runs/studies/res measures it"
    study = residual_study(tmp_path)
    for lacking in (study, with_train_nll(study, phase="earliest")):
        (table,) = beside.loss_tables([lacking])
        ours = [row for row in table.rows if "paper" not in row[0].text]
        assert {cell.text for row in ours for cell in (row[1], row[3])} == {"--"} and "±" in ours[0][2].text
        assert command in table.caption
    best = study.runs.sort_values("val_nll")["run_id"].iloc[0]
    (table,) = beside.loss_tables([with_train_nll(study, leave_out=[best])])
    details = [row[1].detail.split(",")[0] for row in table.rows if "paper" not in row[0].text]
    assert sorted(details) == ["n=2", "n=3"] and command in table.caption


def test_attentionxs_table_has_mean_and_standard_deviation_of_the_accuracy(tmp_path):
    folder = write_study(
        tmp_path, name="vit", mechanisms=["sa", "attentionx"], lrs=LRS, seeds=3, settings=({"objective": "classify"},)
    )
    path = folder / "results" / "runs.parquet"
    runs = pd.read_parquet(path)
    runs["val_accuracy"] = [0.5 + 0.01 * place for place in range(len(runs))]
    write_table(path, "runs", runs)
    manifest = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(
        json.dumps(manifest | {"spec": {"data": {"name": "images", "dataset": "cifar100"}}})
    )
    study = load(folder)
    table = beside.accuracy_table([study, write(tmp_path, "t", "text_54m")])
    assert [row[0].text for row in table.rows] == ["cifar100", "cifar100, paper"]
    for series, cell in zip(table.header[1:], table.rows[0][1:], strict=True):
        own = study.of(series)
        own = own[own["status"] != "diverged"]
        best = own[own["lr"] == own.groupby("lr")["val_accuracy"].median().idxmax()]["val_accuracy"]
        assert cell.text == f"{100 * statistics.mean(best):.2f} ± {100 * statistics.stdev(best):.2f}"
    assert {cell.text for cell in table.rows[1][1:]} == {"61.86 ± 0.47", "64.00 ± 0.37"}
    assert beside.accuracy_table([write(tmp_path, "u", "text_54m")]) is None


def test_a_report_with_sc_says_what_the_papers_own_tables_make_of_its_claims(three, tmp_path):
    told = " ".join(str(piece) for pieces in contents.pieces(three) for piece in pieces)
    assert "8 of 18 cells" in told and "DNA 172M at 5e-4 (mix)" in told
    told = " ".join(str(piece) for pieces in contents.pieces([residual_study(tmp_path)]) for piece in pieces)
    assert "8 of 18 cells" not in told and "mhc_lite" in told
