"""Report whether the papers' claims hold in the study: a table and sentences, in the report and at the end of a
sweep."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.claims import judging
from analysis.drawing.pieces import Pieces, boxed, heading, shown
from analysis.drawing.typeset import Table
from analysis.sections.section import Drawn, Section
from analysis.study.load import Study


def tables(study: Study, phases: Sequence[str]) -> Sequence[Table | str]:
    judged = judging.claims_table(study)
    return [*([] if judged is None else [judged]), judging.paragraph(study)]


def body(study: Study, drawn: Drawn) -> Pieces:
    sentences = boxed([claim.text for claim in judging.judge(study)])
    return heading("Do the paper's claims hold here?") + shown([judging.claims_table(study)]) + sentences


SECTION = Section(body, tables=tables)
