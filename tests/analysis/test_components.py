"""The report of proteins: the parts of the NLL as they were stored."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis.drawing import pieces
from analysis.sections import components
from analysis.study.load import load
from tests.analysis.synthetic import quickstart_alpha, write_study, write_table

LRS = (1e-3, 1e-2)


@pytest.fixture
def study_dir(tmp_path):
    """sa and mix, two rates, three seeds. Sequence 2.5, 2.6, 2.7 at the first rate, 0.2 less at the second; structure
    what is left of the total."""
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
    runs["val_nll_sequence"] = [
        2.5 + 0.1 * seed - 0.2 * (lr == 1e-2) for lr, seed in zip(runs["lr"], runs["seed"], strict=True)
    ]
    runs["val_nll_structure"] = runs["val_nll"] - runs["val_nll_sequence"]
    runs["unigram_nll_sequence"], runs["unigram_nll_structure"] = 2.89, 7.3
    runs.loc[runs["status"] == "diverged", ["val_nll_sequence", "val_nll_structure"]] = None
    write_table(file, "runs", runs.to_dict("records"))
    return folder


def test_rows_are_total_and_components_of_each_mechanism(study_dir):
    [table] = components.component_tables(load(study_dir))
    assert table.header == ("Component", "Mechanism", "1e-3", "1e-2")
    assert [(row[0].text, row[1].text) for row in table.rows] == [
        (part, name) for part in ("Total", "Sequence", "Structure") for name in ("sa", "mix")
    ]
    sequence = table.rows[3]
    assert (sequence[2].text, sequence[3].text, sequence[3].bold, sequence[2].bold) == ("2.600", "2.400", True, False)
    assert table.rows[5][2].text == "6.500" and table.rows[5][3].text == "6.700" and table.rows[5][2].bold
    assert "n=2" in table.rows[2][3].detail and "diverged 1/3" in table.rows[2][3].detail
    assert "sequence 2.890, structure 7.300" in table.caption


def test_a_study_of_text_has_no_components(tmp_path):
    study = load(write_study(tmp_path, lrs=LRS))
    assert components.component_tables(study) == [] and not components.applies(study)


@pytest.fixture
def scored_dir(study_dir):
    """Every run but one scored by the first oracle, that one by another: sequence 2 + seed / 10, structure 3, 1 less at
    the second rate."""
    file = study_dir / "results" / "runs.parquet"
    runs = pd.read_parquet(file)
    runs["gen_nll_sequence"] = [2.0 + 0.1 * seed for seed in runs["seed"]]
    runs["gen_nll_structure"] = [3.0 - (lr == 1e-2) for lr in runs["lr"]]
    runs["gen_nll"] = runs["gen_nll_sequence"] + runs["gen_nll_structure"]
    others = [("mix", 1e-3, 2)]
    by = [run in others for run in runs[["mechanism", "lr", "seed"]].itertuples(index=False, name=None)]
    runs["gen_oracle"] = ["ckpt:other/step_000006" if is_other else "ckpt:judge/step_000009" for is_other in by]
    write_table(file, "runs", runs.to_dict("records"))
    return study_dir


def test_the_generative_nll_has_the_same_rows_beside_and_a_table_for_each_oracle(scored_dir):
    validation, judged, other = components.component_tables(load(scored_dir))
    assert [table.title for table in (validation, judged)] == [
        "NLL by component against learning rate",
        "Generative NLL by component against learning rate",
    ]
    assert judged.header == validation.header and [row[:2] for row in judged.rows] == [
        row[:2] for row in validation.rows
    ]
    assert [cell.text for cell in judged.rows[0][2:]] == ["5.100", "4.050"] and judged.rows[0][3].bold, (
        "of sa: a median over three seeds, and over the two that finished"
    )
    assert [cell.text for cell in judged.rows[5][2:]] == ["3.000", "2.000"] and "n=2" in judged.rows[5][2].detail
    assert (
        "Oracle: ckpt:judge/step_000009. Its masked NLL" in judged.caption
        and "Oracle: ckpt:other/step_000006." in other.caption
    )
    assert [(row[0].text, row[1].text, row[2].text) for row in other.rows] == [
        ("Total", "mix", "5.200"),
        ("Sequence", "mix", "2.200"),
        ("Structure", "mix", "3.000"),
    ]
    assert "Generative" in pieces.typst(components.SECTION.body(load(scored_dir), {}))
