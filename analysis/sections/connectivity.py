"""Show the plain graphs' connectivity, under the heading that all probes of layers share."""

from __future__ import annotations

from analysis.drawing.pieces import Pieces, heading, shown
from analysis.sections.connectivity_figures import CONNECTIVITY_CAPTION, connectivity_figure
from analysis.sections.layers import connectivity_table
from analysis.sections.section import Drawn, Figures, Section, is_of_rates, pictures, sourced
from analysis.study.load import Study

NAME = "connectivity"
ELSEWHERE = {"mirror", "training_free", "training_free_layers"}  # probes of models, whose sections have own headings


def applies(study: Study) -> bool:
    """Return whether `stability.probe` measured layers or graphs: the heading stands before all of them."""
    return is_of_rates(study) and not study.probes.keys() <= ELSEWHERE


def figures(study: Study) -> Figures:
    if NAME not in study.probes:
        return {}
    return {NAME: sourced(study, connectivity_figure(study.probes[NAME]), CONNECTIVITY_CAPTION)}


def body(study: Study, drawn: Drawn) -> Pieces:
    found = [connectivity_table(study.probes[NAME])] if NAME in study.probes else []
    return heading("What the layers do to their signal") + pictures(drawn) + shown(found)


SECTION = Section(body, applies, figures)
