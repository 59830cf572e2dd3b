"""The report of proteins: the parts of the NLL as they were stored."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis import components
from analysis.load import load
from tests.analysis.synthetic import quickstart_alpha, write_study, write_table

LRS = (1e-3, 1e-2)


@pytest.fixture
def study_dir(tmp_path):
    """sa and mix, two rates, three seeds. Sequence 2.5, 2.6, 2.7 at the first rate, 0.2 less at the second; structure what is left of the total."""
    folder = write_study(
        tmp_path,
        mechanisms=("sa", "mix"),
        lrs=LRS,
        seeds=3,
        nll=lambda mechanism, lr, seed: float("inf") if (mechanism, lr, seed) == ("sa", 1e-2, 2) else 9.0 + 0.1 * seed,
        alpha=quickstart_alpha,
        settings=({"objective": "multitrack", "data": "protein"},),
    )
    file = folder / "results" / "runs.parquet"
    runs = pd.read_parquet(file)
    runs["val_nll_sequence"] = [2.5 + 0.1 * seed - 0.2 * (lr == 1e-2) for lr, seed in zip(runs["lr"], runs["seed"], strict=True)]
    runs["val_nll_structure"] = runs["val_nll"] - runs["val_nll_sequence"]
    runs["unigram_nll_sequence"], runs["unigram_nll_structure"] = 2.89, 7.3
    runs.loc[runs["status"] == "diverged", ["val_nll_sequence", "val_nll_structure"]] = None
    write_table(file, "runs", runs.to_dict("records"))
    return folder


def test_rows_are_total_and_components_of_each_mechanism(study_dir):
    [table] = components.component_tables(load(study_dir))
    assert table.header == ("Component", "Mechanism", "1e-3", "1e-2")
    assert [(row[0].text, row[1].text) for row in table.rows] == [(part, name) for part in ("Total", "Sequence", "Structure") for name in ("sa", "mix")]
    sequence = table.rows[3]
    assert (sequence[2].text, sequence[3].text, sequence[3].bold, sequence[2].bold) == ("2.600", "2.400", True, False)
    assert table.rows[5][2].text == "6.500" and table.rows[5][3].text == "6.700" and table.rows[5][2].bold
    assert "n=2" in table.rows[2][3].detail and "diverged 1/3" in table.rows[2][3].detail
    assert "sequence 2.890, structure 7.300" in table.caption


def test_a_study_of_text_has_no_components(tmp_path):
    study = load(write_study(tmp_path, lrs=LRS))
    assert components.component_tables(study) == [] and components.section(study) == ""
