"""Report whether the papers' claims hold in the study: a table and sentences, in the report and at the end of a
sweep."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.claims import judging
from analysis.drawing.typeset import Table, boxed, heading
from analysis.sections.section import Drawn, Section, typst
from analysis.study.load import Study


def tables(study: Study, phases: Sequence[str]) -> Sequence[Table | str]:
    judged = judging.claims_table(study)
    return [*([] if judged is None else [judged]), judging.paragraph(study)]


def body(study: Study, drawn: Drawn) -> str:
    sentences = boxed([claim.text for claim in judging.judge(study)])
    return heading("Do the paper's claims hold here?") + typst([judging.claims_table(study)]) + sentences


SECTION = Section(body, tables=tables)
