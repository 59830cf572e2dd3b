"""Arrange a report over many studies in the consensus paper's order, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import matplotlib
from matplotlib.figure import Figure

from analysis import assembly
from analysis.drawing.pieces import Picture, Pieces, heading, paragraph, shown
from analysis.drawing.style import RC
from analysis.drawing.tables import source
from analysis.drawing.typeset import Cell, Table
from analysis.measures import NLL_TITLES
from analysis.numbers.ablations import ablations
from analysis.numbers.step_shares import PHASES
from analysis.numbers.window_ends import shown_states
from analysis.numbers.windows import VALIDATION
from analysis.paper.beside import accuracy_table, claims_table, loss_tables
from analysis.paper.figures import ALPHA_CAPTION, NLL_CAPTION, alpha_grids, nll_grids
from analysis.paper.grid import (
    Block,
    blocks,
    group_by_modality,
    join_texts,
    modality,
    modality_text,
    reason_to_leave_out,
    size,
)
from analysis.paper.printed import ablation_tables_beside
from analysis.paper.tables import alpha_tables, list_measured, nll_tables
from analysis.sections import ablation, curves
from analysis.study.load import Study
from analysis.study.once import once_per_study
from analysis.study.protocol import state_text
from analysis.words import count_range, join_words, lr_text, plural

NAME = "paper_layout"  # default name of the output


def subtitle(studies: Sequence[Study]) -> str:
    """Return a line with the report's numbers of studies and runs, modalities and sizes."""
    places = blocks(studies)
    kinds = join_words(modality_text(each) for each in group_by_modality(places)) or "no table of learning rates"
    runs = plural(sum(len(study.runs) for study in studies), "run")
    return f"{'1 study' if len(studies) == 1 else f'{len(studies)} studies'} · {kinds} · {runs}"


def pieces(studies: Sequence[Study]) -> tuple[Pieces, ...]:
    """Return each part's pieces, drawn once for all output formats; every picture has a unique name and file."""
    return _draw(*studies)


@once_per_study
def _draw(*studies: Study) -> tuple[Pieces, ...]:
    return tuple(_pieces(studies))


def _pieces(studies: Sequence[Study]) -> Iterator[Pieces]:
    places = blocks(studies)
    yield heading("What was run") + shown([_studies(studies)]) + _explain_omissions(studies)
    if places:
        yield heading("NLL against learning rate") + _nll(places)
        yield heading("Maximum stable learning rate α_max along the optimizer's step") + _alpha(places)
    varied = [study for study in studies if ablations(study)]
    if varied:
        yield heading("One setting at a time") + sum((_ablation(study) for study in varied), ())
    if others := shown([*loss_tables(studies), *filter(None, [accuracy_table(studies)])]):
        yield heading("Tables 1 of mHC-lite and AttentionX") + others
    if any(set(study.runs["mechanism"]) & {"sc", "mix"} for study in studies):
        yield heading("What the consensus paper's own tables say of its claims") + shown([claims_table()])
    if places:
        found: Pieces = ()
        for number, block in enumerate(places):
            prefix = f"{block.modality}-{block.size}-{number}-".replace(" ", "-").lower()
            found += name_pictures(assembly.pictures(curves.SECTION, block.study, prefix), prefix, block.title)
        yield heading("Learning curves") + (found or paragraph("No training loss was recorded."))


def _studies(studies: Sequence[Study]) -> Table:
    """Return a row for each study: place in the grid, size, rates, seeds, and its runs' verdicts."""
    rows = []
    for study in studies:
        runs, lrs = study.runs, sorted(set(study.runs["lr"]))
        span = lr_text(lrs[0]) if len(lrs) == 1 else f"{lr_text(lrs[0])} to {lr_text(lrs[-1])}"
        ended = [f"{number} {status}" for status, number in shown_states(runs).value_counts().items()]
        texts = (
            modality_text(modality(study)), join_words(dict.fromkeys(runs["model"].map(size))),
            count_range(runs["num_params"]), f"{len(lrs)}: {span}", str(runs["seed"].nunique()), ", ".join(ended),
        )  # fmt: skip
        rows.append((Cell(study.name), *map(Cell, texts)))
    caption = (
        "Modality and size are the names of a study's data and of its model; parameters are counted. "
        "Commands, commits and versions: in the studies' own reports. "
        + join_texts({study.name: source(study) for study in studies})
    )
    header = ("study", "modality", "size", "parameters", "learning rates", "seeds", "runs")
    return Table("The studies of this report", caption, header, tuple(rows), (), ("left",) * len(header))


def _explain_omissions(studies: Iterable[Study]) -> Pieces:
    """Describe the studies without a place in tables of learning rates, with the reason."""
    told = {study.name: reason for study in studies if (reason := reason_to_leave_out(study))}
    said = "; ".join(f"{name} {reason}" for name, reason in told.items())
    return paragraph(f"Without a place in the tables of learning rates: {said}.") if told else ()


def _nll(places: Sequence[Block]) -> Pieces:
    """Return the grids of curves, validation then generative, and each modality's tables."""
    found: Pieces = ()
    for column, what in NLL_TITLES.items():
        name = "nll-grid" if column == VALIDATION else "generative-nll-grid"
        found += make_pictures(name, lambda: nll_grids(places, column), NLL_CAPTION.format(what=what))  # noqa: B023
    if not found:
        found = paragraph(
            "No study has a finite validation NLL at more than one learning rate: there is no curve to draw."
        )
    return found + shown(table for kind, part in group_by_modality(places).items() for table in nll_tables(kind, part))


def _alpha(places: Sequence[Block]) -> Pieces:
    """Return the grid of each phase and state, and each modality's tables."""
    found: Pieces = ()
    for phase, state in list_measured(places):
        caption = ALPHA_CAPTION.format(phase=PHASES.get(phase, phase), state=state_text(state))
        name = f"alpha-grid-{phase}-{state}"
        found += make_pictures(name, lambda: alpha_grids(places, phase, state), caption)  # noqa: B023
    tables = shown(alpha_tables(group_by_modality(places)))
    return found + tables or paragraph("α_max was not measured in any of these studies.")


def make_pictures(name: str, draw, caption: str) -> Pieces:
    """Return figures as pictures, numbered after ``name``; the first has the caption.

    Args:
        name: begins the names.
        draw: returns the figures.
        caption: the first one's caption.
    """
    with matplotlib.rc_context(RC):
        made: list[Figure] = draw()
    return tuple(
        Picture(
            f"{name}-{number}", each, caption if not number else "The figure above, continued.", f"{name}-{number}.pdf"
        )
        for number, each in enumerate(made)
    )


def _ablation(study: Study) -> Pieces:
    """Return a study's ablation as in its own report, with the paper's numbers added."""
    prefix = f"{study.name}-"
    return shown(ablation_tables_beside(study)) + name_pictures(
        assembly.pictures(ablation.SECTION, study, prefix), prefix, study.name
    )


def name_pictures(pictures: Iterable[Picture], prefix: str, title: str) -> Pieces:
    """Return pictures with their place in names and captions: several are of one kind.

    Args:
        pictures: the pictures.
        prefix: begins each name.
        title: begins each caption.
    """
    return tuple(replace(each, name=f"{prefix}{each.name}", caption=f"{title}. {each.caption}") for each in pictures)
