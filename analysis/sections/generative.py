"""The generative NLL (what an oracle makes of the models' own samples) in the report: figure, tables and windows, as the right halves of the paper's
Figures 2 and 3 and Tables 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from analysis.drawing.tables import captioned
from analysis.drawing.typeset import Table, heading
from analysis.numbers.windows import GENERATIVE
from analysis.sections.generation import generation_tables
from analysis.sections.nll import window_table
from analysis.sections.nll_figures import nll_figure
from analysis.study import wording
from analysis.study.load import Study

NAME = "generative-nll"
CAPTION = (
    "Generative NLL in {unit} against learning rate; points, lines, bars and ×: as for the validation NLL. A low value is no proof "
    "of good samples: repetition scores low. {oracle}"
)


def oracle(study: Study) -> str:
    """``"Oracle: …. "``, if one scored every generation of the study; "" where none did, or several, whose numbers make no common line."""
    scored = study.runs[np.isfinite(study.runs["gen_nll"])]
    names = sorted(set(scored["gen_oracle"]))
    return f"Oracle: {names[0] or 'not recorded'}. " if len(names) == 1 else ""


def generative_figures(study: Study) -> dict[str, Figure | None]:
    """The figure, where one oracle scored generations at several learning rates."""
    return {NAME: nll_figure(study, GENERATIVE)} if oracle(study) else {}


def generative_windows(study: Study) -> list[Table]:
    return [window_table(study, GENERATIVE, oracle(study))] if oracle(study) else []


def section(study: Study, figures: Mapping[str, Path | None]) -> str:
    """Nothing where no generations were scored."""
    found = [*generation_tables(study), *generative_windows(study)]
    caption = CAPTION.format(unit=wording.generative_unit(study), oracle=oracle(study).strip())
    drawn = captioned(study, figures, NAME, caption) if figures.get(NAME) is not None else ""
    return heading("Generative NLL") + drawn + "".join(table.typst() for table in found) if found else ""
