"""Tabulate what is lost where another mechanism stands in for a trained `sa` (`stability.probe what=training_free`)."""

from __future__ import annotations

from collections.abc import Callable

from analysis.drawing.tables import source
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.spread import INTERVAL_RULES, POSITIVE, REAL, SHARE, Scale
from analysis.numbers.step_shares import PHASES, phases_of
from analysis.sections.layers import percent, spread_cell
from analysis.study import wording
from analysis.study.load import Column, Frame, Study
from analysis.words import lr_text, power
from stability.runs.words import Words

NAME, LAYERS = "training_free", "training_free_layers"
SETTING = ["order", "series", "run_lr", "mixer", "label", "budget"]
RUN = [*SETTING, "seed"]
BUDGETS = (
    "Budget: the share that may be kept, sparge's τ and the keys of a fasa query over the positions; 1: all of sa."
)
NOT_TIMED = "Shares of products, not of time: all pairs are computed here, under a mask."


def gaps(models: Frame) -> Column:
    """Return by run and budget the NLL less that of `sa`, in nats per counted position of all sequences together."""
    rows = models[models["counted"] > 0]
    rows = rows.assign(lost=rows["counted"] * (rows["nll"] - rows["sa_nll"]))
    sums = rows.groupby(RUN)[["lost", "counted"]].sum()
    return sums["lost"] / sums["counted"]


def shares(models: Frame) -> Column:
    """Return by run and budget the share of products that is skipped, the mean over sequences and layers."""
    return models.groupby(RUN)["skipped"].mean()


def errors(layers: Frame) -> Column:
    """Return by run and budget the relative error of the worst layer, the mean over sequences of each."""
    return layers.groupby([*RUN, "layer"])["error"].mean().groupby(level=RUN).max()


def study_tables(study: Study) -> list[Table]:
    """Return three tables for each phase: NLL gap, products skipped, error of the worst layer; [] where no run was
    probed."""
    if NAME not in study.probes or LAYERS not in study.probes:
        return []
    return _tables(study.probed(NAME), study.probed(LAYERS), wording.words(study), source(study))


def run_tables(models: Frame, layers: Frame, mechanism: str, words: Words) -> list[Table]:
    """Return the same tables as `study_tables` of one run's own rows. ``words``: its objective's."""
    both = [rows.assign(series=mechanism, run_lr=rows["lr"], seed=0, order=0) for rows in (models, layers)]
    return _tables(both[0], both[1], words, "One run.")


def _tables(models: Frame, layers: Frame, words: Words, origin: str) -> list[Table]:
    """Return the three tables of each phase that the rows have."""
    made = []
    for phase in phases_of(models):
        of_phase, of_layers = (rows[rows["phase"] == phase] for rows in (models, layers))
        named = PHASES.get(phase, phase)
        made += [
            _table(
                f"NLL beyond that of sa, {named}",
                f"Nats per predicted position on held-out {words.held_out} beyond the trained model's, where another "
                f"mechanism stands in for sa in all layers, without training. {BUDGETS} {INTERVAL_RULES[REAL]}. "
                f"{origin}",
                gaps(of_phase),
                "{:+.4f}".format,
                REAL,
            ),
            _table(
                f"Products skipped, {named}",
                "Share of the products q·k and weight · value of sa that are left out, over heads, layers and "
                f"sequences, layers being given what they are in the trained model. {BUDGETS} {NOT_TIMED} "
                f"{INTERVAL_RULES[SHARE]}. {origin}",
                shares(of_phase),
                percent,
                SHARE,
            ),
            _table(
                f"Relative error of the worst layer, {named}",
                "‖y − y_sa‖ / ‖y_sa‖ of a layer's output, where it is given what it is in the trained model; the mean "
                f"over sequences, of the layer where that is largest. {BUDGETS} {INTERVAL_RULES[POSITIVE]}. {origin}",
                errors(of_layers),
                power,
                POSITIVE,
            ),
        ]
    return made


def _table(title: str, caption: str, values: Column, form: Callable[[float], str], scale: Scale) -> Table:
    """Return a table of medians over seeds, a row a series, learning rate and stand-in, a column a budget."""
    budgets = sorted(set(values.index.get_level_values("budget")))
    body = []
    for (_, series, lr, mixer, label), part in values.groupby(level=SETTING[:-1]):
        per_budget = dict(list(part.groupby(level="budget")))
        cells = [
            spread_cell(per_budget[budget], form, scale) if budget in per_budget else Cell("--") for budget in budgets
        ]
        body.append((Cell(str(series)), Cell(lr_text(lr)), Cell(str(mixer)), Cell(str(label)), *cells))
    header = ("mechanism", "LR", "stand-in", "settings", *(f"{budget:g}" for budget in budgets))
    return Table(title, caption, header, tuple(body), (("", 4), ("budget", len(budgets))))
