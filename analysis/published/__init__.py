"""Hold the numbers printed in papers' tables, digit for digit, for comparison with a study."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pandas as pd

from analysis.study.load import Frame

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Source:
    """One or several similar tables in a paper.

    Attributes:
        file: the CSV beside this module.
        paper: title.
        tables: the paper's table numbers.
        says: contents, in the paper's words.
    """

    file: str
    paper: str
    tables: str
    says: str


CONSENSUS = "Stabilizing Transformer Training Through Consensus"
NLL = Source(
    "consensus_nll.csv",
    CONSENSUS,
    "Tables 2, 3 and 4",
    "validation and generative NLLs, one run each; — where none is printed",
)
ALPHA_MAX = Source(
    "consensus_alpha_max.csv",
    CONSENSUS,
    "Tables 5, 6, 7 (terminal) and 8 (earliest checkpoint)",
    "median α_max and % stable steps, by the paper of 25 steps each, which five shares of text 54M cannot be (67 in "
    "Table 5, 53, 7, 27 and 7 in 8: of 15, rounded); — where no step has a finite α_max",
)
ABLATION = Source(
    "consensus_ablation.csv",
    CONSENSUS,
    "Table 9",
    "validation and generative NLLs of sc at text 193M, one field varied at a time",
)
LOSSES = Source(
    "mhc_lite_losses.csv",
    "mHC-lite: You Don’t Need 20 Sinkhorn-Knopp Iterations",
    "Table 1",
    "final training and validation losses of nanoGPT by residual connection, one run each",
)
ACCURACY = Source(
    "attentionx_accuracy.csv",
    "AttentionX: Exploiting Consensus Discrepancy In Attention",
    "Table 1",
    "validation accuracy of ViT-small in per cent, mean ± standard deviation of three runs",
)


@cache
def _read(file: str) -> Frame:
    return pd.read_csv(FOLDER / file, dtype={"table": str, "component": str}, keep_default_na=True).fillna(
        {"component": ""}
    )


def numbers(source: Source) -> Frame:
    """Return a source's numbers, one row per table cell; NaN for a printed dash.

    Rates and NLLs are floats. Names are this project's (sa, sc, sw, mix; text, dna, protein).
    """
    return _read(source.file).copy()
