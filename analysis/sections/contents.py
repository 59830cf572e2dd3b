"""List the report's sections: a section is one file beside this one, and two words here: its import, and its
place in `SECTIONS`."""

from analysis.sections import (
    ablation_figure,
    accuracy,
    alpha,
    claims,
    components,
    connectivity,
    curvature,
    curves,
    discrepancy,
    edge,
    filters,
    generative,
    gradient_norms,
    gradients,
    lineage,
    mixers,
    nll_figures,
    optimizers,
    overview,
    qk,
    samples,
    search,
    stream_figures,
    structure,
    troubles,
)
from analysis.sections.section import Section

SECTIONS: tuple[Section, ...] = (
    overview.SECTION,
    claims.SECTION,
    search.SECTION,
    lineage.SECTION,
    optimizers.SECTION,
    mixers.SECTION,
    edge.SECTION,
    ablation_figure.SECTION,
    nll_figures.SECTION,
    accuracy.SECTION,
    components.SECTION,
    generative.SECTION,
    samples.SECTION,
    alpha.SECTION,
    curvature.SECTION,
    connectivity.SECTION,
    filters.SECTION,
    qk.SECTION,
    discrepancy.SECTION,
    stream_figures.SECTION,
    curves.SECTION,
    gradient_norms.SECTION,
    gradients.SECTION,
    structure.SECTION,
    troubles.SECTION,
)

# What a sweep prints after the tables of the other sections: the end of a printout is what its reader sees.
PRINTED_LAST: tuple[Section, ...] = (
    ablation_figure.SECTION,
    alpha.SECTION,
    optimizers.SECTION,
    mixers.SECTION,
    claims.SECTION,
)
