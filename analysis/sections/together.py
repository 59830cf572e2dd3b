"""Compare several studies on one page: their answers, a panel of NLL against rate each, one table."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure

from analysis.drawing.marks import mechanism_legend
from analysis.drawing.pieces import Picture, Pieces, box, shown
from analysis.drawing.style import DASHES, FIXED, OTHERS, RC, Look, looks, lr_axis, panel_grid
from analysis.numbers.windows import is_any_finite, outcomes
from analysis.sections import headline, transfer
from analysis.sections.choice import HIGHEST, LOWEST, choose
from analysis.sections.nll_figures import nll_limits, nll_line
from analysis.sections.section import is_of_rates
from analysis.study import wording
from analysis.study.load import Study
from analysis.study.naming import spell
from analysis.study.reference import frequency_nll
from analysis.words import wrap

NAME, PANELS_PER_ROW = "studies", 3
LONGEST_TITLE, MOST_TITLED = 200, 4  # characters; studies with an answer of their own in it
CAPTION = (
    "Validation NLL at the end of training against learning rate, a panel a study. Points: seeds; line: their median, "
    "broken where half of them or more diverged; dashed: the NLL of frequencies alone, where nothing is learned."
)


def comparison(studies: Sequence[Study], prefix: str) -> Pieces:
    """Return each study's answer, a figure of all curves and a table of all series; () below two studies of rates.

    Of studies that differ in sizes alone: their joint law. Of others with sizes: why they have none.

    Args:
        studies: the studies.
        prefix: start of the figure's file name.
    """
    compared = [study for study in studies if is_of_rates(study)]
    if len(compared) < 2:
        return ()
    if of_sizes := transfer.together(compared, prefix):
        return of_sizes
    with matplotlib.rc_context(RC):
        figure = curves(compared)
    picture = () if figure is None else (Picture(NAME, figure, CAPTION, f"{prefix}{NAME}.pdf"),)
    said = [*_answers(compared), *filter(None, [transfer.say_apart(compared)])]
    return box(said) + picture + shown([headline.comparison_table(compared)])


def title(studies: Sequence[Study]) -> str:
    """Return the question of several studies with each one's answer; "" below two studies of rates.

    Studies that ask unlike questions, or whose answers are too long together, share that of the lowest NLL.
    """
    compared = [study for study in studies if is_of_rates(study)]
    if len(compared) < 2:
        return ""
    if groups := transfer.join(compared):
        return transfer.title_of(groups)
    titles = [headline.title(study).partition("? ") for study in compared]
    if len({question for question, _, _ in titles}) == 1:
        answers = "; ".join(f"{study.name}: {answer}" for study, (*_, answer) in zip(compared, titles, strict=True))
        if len(said := f"{titles[0][0]}? {answers}") <= LONGEST_TITLE:
            return said
    lowest = [f"{study.name}: {found}" for study in compared if (found := headline.lowest_nll(study))]
    more = len(lowest) - MOST_TITLED
    rest = [f"{more} further {'study' if more == 1 else 'studies'} below"] if more > 0 else []
    said = "; ".join([*lowest[:MOST_TITLED], *rest])
    return f"Which has the lowest NLL, and at which learning rate? {said}" if said else ""


def _answers(studies: Sequence[Study]) -> list[str]:
    """Return each study's answer and its lowest NLLs; a question that all share stands once, before them."""
    titles = [headline.title(study).partition("? ") for study in studies]
    questions = {question for question, _, _ in titles}
    shared = f"{questions.pop()}?" if len(questions) == 1 else ""
    told = []
    for study, (question, mark, answer) in zip(studies, titles, strict=True):
        said = answer if shared else f"{question}{mark}{answer}"
        told.append(
            " ".join([f"{study.name} ({wording.data(study) or 'data not recorded'}): {said}.", *_lowest(study)])
        )
    names = [name for study in studies for name in (*study.runs["mechanism"], *study.runs["objective"])]
    return list(filter(None, (shared, *told, spell(names))))


def _lowest(study: Study) -> list[str]:
    """Return which series has the lowest NLL, of recall the highest accuracy."""
    return [text for text in choose(study) if text.startswith((LOWEST, HIGHEST))]


def curves(studies: Sequence[Study]) -> Figure | None:
    """Draw a panel per study with several rates and a finite NLL; None without any."""
    tables = {study: {name: outcomes(study, name) for name in study.series} for study in studies}
    drawn = [study for study in studies if study.runs["lr"].nunique() > 1 and is_any_finite(tables[study].values())]
    if not drawn:
        return None
    styles = common_looks(drawn)
    figure, axes = panel_grid(len(drawn), min(PANELS_PER_ROW, len(drawn)), 1.5, 0.6)
    for ax, study in zip(axes, drawn, strict=True):
        unigram = frequency_nll(study.runs)
        nll_limits(ax, tables[study], unigram)
        for name, table in tables[study].items():
            nll_line(ax, table, styles[name])
        if math.isfinite(unigram):
            ax.axhline(unigram, color="#5b6470", linestyle=(0, (4, 3)), linewidth=0.9, zorder=2)
        lr_axis(ax, study.runs["lr"], most=4)
        ax.set_title(wrap(study.name, 26), loc="left", fontweight="bold")
        ax.set_xlabel(wording.rate_axis(study))
    axes[0].set_ylabel("validation NLL (nats)" if all(map(wording.nats, drawn)) else "validation loss")
    mechanism_legend(figure, styles)
    return figure


def common_looks(studies: Sequence[Study]) -> dict[str, Look]:
    """Return one look for each series of several studies: its first study's, or the next free one."""
    found: dict[str, Look] = {}
    free = [Look(color, marker, dashes) for dashes in DASHES for color, marker in (*OTHERS, *FIXED.values())]
    for study in studies:
        for name, look in looks(study).items():
            if name not in found:
                taken = set(map(repr, found.values()))
                found[name] = (
                    look if repr(look) not in taken else next((each for each in free if repr(each) not in taken), look)
                )
    return found
