"""Show the generative NLL (what an oracle makes of the models' own samples): figure, tables and windows, as the right
halves of the paper's Figures 2 and 3 and Tables 2 and 3."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.drawing.pieces import Pieces, heading, shown
from analysis.drawing.typeset import Table
from analysis.numbers.windows import GENERATIVE
from analysis.sections.generation import generation_tables
from analysis.sections.nll import window_table
from analysis.sections.nll_figures import nll_figure
from analysis.sections.section import Drawn, Figures, Section, is_of_rates, pictures, sourced
from analysis.study import wording
from analysis.study.load import Study

NAME = "generative-nll"
CAPTION = (
    "Generative NLL in {unit} against learning rate; points, lines, bars and ×: as for the validation NLL. A low "
    "value is no proof of good samples: repetition scores low. {oracle}"
)


def oracle(study: Study) -> str:
    """Name the oracle, ``"Oracle: …. "``, if one scored every generation of the study; "" where none did, or several,
    whose numbers make no common line."""
    scored = study.runs[np.isfinite(study.runs["gen_nll"])]
    names = sorted(set(scored["gen_oracle"]))
    return f"Oracle: {names[0] or 'not recorded'}. " if len(names) == 1 else ""


def figures(study: Study) -> Figures:
    """Draw the figure, where one oracle scored generations at several learning rates."""
    figure = nll_figure(study, GENERATIVE) if oracle(study) else None
    caption = CAPTION.format(unit=wording.generative_unit(study), oracle=oracle(study).strip())
    return {} if figure is None else {NAME: sourced(study, figure, caption)}


def generative_windows(study: Study) -> list[Table]:
    return [window_table(study, GENERATIVE, oracle(study))] if oracle(study) else []


def applies(study: Study) -> bool:
    return is_of_rates(study) and bool(_tables(study))


def tables(study: Study, phases: Sequence[str]) -> Sequence[Table | str]:
    return _tables(study)


def _tables(study: Study) -> list[Table]:
    return [*generation_tables(study), *generative_windows(study)]


def body(study: Study, drawn: Drawn) -> Pieces:
    return heading("Generative NLL") + pictures(drawn) + shown(_tables(study))


SECTION = Section(body, applies, figures, tables)
