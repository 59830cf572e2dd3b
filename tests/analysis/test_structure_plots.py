from __future__ import annotations

import json
import shutil

import numpy as np
import pandas as pd
import pytest

from analysis.drawing.pieces import Picture, typst
from analysis.report import build
from analysis.sections.structure import TOKENIZER, applies, body, figures, load_results, structure_figure, table, write
from analysis.study.load import load
from tests.analysis.synthetic import write_study


@pytest.fixture
def results(tmp_path):
    rng = np.random.default_rng(0)
    chains = pd.DataFrame(
        {
            "chain": ["a", "b", "c"],
            "num_residues": [9, 9, 8],
            "rmsd": [1.0, 2.0, 3.0],
            "ideal_rmsd": [20.0, 30.0, 40.0],
            "mean_rmsd": [9.0, 10.0, 11.0],
            "point_rmsd": [10.0, 11.0, 12.0],
            "atom_rmsd": [np.nan] * 3,
            "same_tokens": [1.0, 1.0, 0.5],
        }
    )
    chains.to_parquet(tmp_path / "chains.parquet")
    pd.DataFrame({"token": range(6), "num": [3, 0, 1, 0, 2, 20]}).to_parquet(tmp_path / "codes.parquet")
    places = rng.normal(size=(9, 3, 3))
    mask = np.arange(9) != 4
    places[4] = np.nan
    np.savez(
        tmp_path / "example.npz", chain="b", rmsd=2.0, mask_N=mask, original_NAX=places, reconstructed_NAX=places + 1
    )
    summary = {
        "schema": 1,
        "num_chains": 3,
        "num_residues": 26,
        "positions": 9,
        "num_train_chains": 7,
        "mechanism": "sa",
        "frame": "raw",
    }
    summary |= {"used_codes": 4, "num_codes": 6, "perplexity": 2.0, "same_tokens": 0.85, "rotations": 4}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    return tmp_path


def test_the_table_says_means_errors_and_baselines(results):
    text = table(results)
    assert "backbone RMSD, reconstructed             2.00 ± 0.58 Å, median 2.00" in text
    assert "heavy-atom" not in text
    assert "4 of 6 (67 %), perplexity 2" in text
    assert "85.00 % of positions, 4 rotations a chain; of the worst chain 50 %" in text
    assert "3 held-out chains, 26 residues" in text


def test_the_figure_shows_both_backbones_with_their_gap_and_all_chains(results, tmp_path):
    figure = structure_figure(results)
    original, reconstructed, rmsd, codes = figure.axes
    assert len(original.lines) == 1 and len(reconstructed.lines) == 2
    x = np.asarray(original.lines[0].get_data_3d()[0])
    assert np.isnan(x).tolist() == [index == 4 for index in range(9)]
    assert rmsd.lines[0].get_xdata().tolist() == [1.0, 2.0, 3.0]
    assert codes.lines[0].get_ydata().tolist() == pytest.approx([20 / 26, 3 / 26, 2 / 26, 1 / 26])
    assert write(results, tmp_path / "reports" / "it.pdf").stat().st_size > 5000


def test_a_folder_without_results_and_results_of_another_version_are_refused(results, tmp_path):
    with pytest.raises(ValueError, match="no summary.json in .*train_tokenizer writes it"):
        load_results(tmp_path / "absent")
    (results / "summary.json").write_text('{"schema": 0}')
    with pytest.raises(ValueError, match="version 0, this is version 1"):
        load_results(results)


@pytest.fixture
def study_dir(tmp_path, results):
    """A study in a pool whose tokenizer 0123456789ab was measured."""
    folder = write_study(
        tmp_path / "pool", lrs=(1e-3, 1e-2), settings=({"objective": "multitrack", "data": "protein"},)
    )
    manifest = json.loads((folder / "study.json").read_text())
    manifest.setdefault("spec", {})["objective"] = {
        "name": "multitrack",
        "sources": ["structure"],
        "contexts": [],
        "tokenizer": "0123456789ab",
    }
    (folder / "study.json").write_text(json.dumps(manifest))
    shutil.copytree(
        results, folder.parent.parent / "tokenizers" / "0123456789ab" / "results", ignore=shutil.ignore_patterns("pool")
    )
    return folder


def test_a_study_on_structure_tokens_shows_what_its_tokenizer_does(study_dir, tmp_path):
    study = load(study_dir)
    ((name, drawn),) = figures(study).items()
    pictures = (Picture(TOKENIZER, drawn.figure, drawn.caption, "tokenizer.pdf"),)
    text = drawn.caption + typst(body(study, {TOKENIZER: pictures})).replace("\xa0", " ")
    assert name == TOKENIZER and applies(study)
    for word in (
        "0123456789ab",
        "backbone RMSD, reconstructed",
        "2.00",
        "± 0.58",
        "4 of 6 codes used, perplexity 2",
        "85.0 % of positions",
        "tokenizer.pdf",
    ):
        assert word in text
    assert build(study_dir, tmp_path / "reports").stat().st_size > 10_000


def test_a_study_whose_tokenizer_was_not_measured_or_that_has_none_says_nothing_of_it(study_dir):
    shutil.rmtree(study_dir.parent.parent / "tokenizers")
    study = load(study_dir)
    assert study.tokenizer is None and not applies(study) and figures(study) == {}
