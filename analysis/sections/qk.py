"""Show σ(W_qᵀW_k) of softmax attention (`stability.probe what=qk`)."""

from __future__ import annotations

from analysis.drawing.pieces import Pieces, shown
from analysis.sections.layer_figures import QK_CAPTION, probed_phases, qk_figures
from analysis.sections.layers import study_tables
from analysis.sections.section import Drawn, Figures, Section, by_phase, pictures
from analysis.study.load import Study


def figures(study: Study) -> Figures:
    return by_phase(study, "qk", probed_phases(study), qk_figures, QK_CAPTION)


def body(study: Study, drawn: Drawn) -> Pieces:
    return pictures(drawn) + shown(study_tables(study, "qk"))


SECTION = Section(body, figures=figures)
