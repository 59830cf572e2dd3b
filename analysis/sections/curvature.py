"""Show what single steps did and, where `measure=…` asked for it, the loss along u, the spectrum, the sharpness and the
blocks of parameters. It goes on under the heading of α_max."""

from __future__ import annotations

from analysis.drawing.pieces import Pieces, shown
from analysis.numbers.step_shares import drawn_phases
from analysis.sections.block_shares import BLOCKS_CAPTION, block_figures, blocks_table
from analysis.sections.differences import differences_table
from analysis.sections.section import Drawn, Figures, Section, by_phase, pictures
from analysis.sections.spectrum_figures import DENSITY_CAPTION, PROFILE_CAPTION, density_figures, profile_figures
from analysis.sections.step_figures import STEPS_CAPTION, step_figures
from analysis.sections.steps import fallen_tables, sharpness_table
from analysis.study.load import Study
from analysis.study.step_terms import terms_in_brief


def figures(study: Study) -> Figures:
    phases, terms = drawn_phases(study), terms_in_brief(study)
    return {
        **by_phase(study, "steps", phases, step_figures, STEPS_CAPTION + terms),
        **by_phase(study, "profile", phases, profile_figures, PROFILE_CAPTION + terms),
        **by_phase(study, "density", phases, density_figures, DENSITY_CAPTION),
        **by_phase(study, "blocks", phases, block_figures, BLOCKS_CAPTION),
    }


def body(study: Study, drawn: Drawn) -> Pieces:
    single = (differences_table(study), sharpness_table(study), blocks_table(study))
    return pictures(drawn) + shown([*fallen_tables(study), *single])


SECTION = Section(body, figures=figures)
