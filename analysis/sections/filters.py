"""Show layers as filters (`stability.probe what=spectra`): factors, energies before and after, tables."""

from __future__ import annotations

from analysis.drawing.pieces import Pieces, shown
from analysis.sections.layer_figures import (
    ENERGY_CAPTION,
    FILTER_CAPTION,
    energy_figures,
    filter_figures,
    probed_phases,
)
from analysis.sections.layers import study_tables
from analysis.sections.section import Drawn, Figures, Section, by_phase, pictures
from analysis.study.load import Study


def figures(study: Study) -> Figures:
    phases = probed_phases(study)
    return {
        **by_phase(study, "filter", phases, filter_figures, FILTER_CAPTION),
        **by_phase(study, "energy", phases, energy_figures, ENERGY_CAPTION),
    }


def body(study: Study, drawn: Drawn) -> Pieces:
    return pictures(drawn) + shown(study_tables(study, "spectra"))


SECTION = Section(body, figures=figures)
