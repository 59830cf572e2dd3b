"""Tabulate what is lost where another mechanism stands in for a trained `sa` (`stability.probe what=training_free`)."""

from __future__ import annotations

from analysis.drawing.tables import source
from analysis.drawing.typeset import Table
from analysis.measures import RATE, SERIES, Form, Measure, Place, grid_table, percent, phase_tables, rows_of_run
from analysis.numbers.spread import INTERVAL_RULES, POSITIVE, REAL, SHARE, Scale
from analysis.study import wording
from analysis.study.load import Column, Frame, Study
from analysis.words import power
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
    return _tables(rows_of_run(models, mechanism), rows_of_run(layers, mechanism), words, "One run.")


def _tables(models: Frame, layers: Frame, words: Words, origin: str) -> list[Table]:
    """Return the three tables of each phase that the rows have."""
    left_out = (
        "Share of the products q·k and weight · value of sa that are left out, over heads, layers and sequences, "
        f"layers being given what they are in the trained model. {BUDGETS} {NOT_TIMED}"
    )
    off = (
        "‖y − y_sa‖ / ‖y_sa‖ of a layer's output, where it is given what it is in the trained model; the mean over "
        f"sequences, of the layer where that is largest. {BUDGETS}"
    )
    beyond = (
        f"Nats per predicted position on held-out {words.held_out} beyond the trained model's, where another mechanism "
        f"stands in for sa in all layers, without training. {BUDGETS}"
    )

    def of_phase(of_models: Frame, phase: str) -> list[Table]:
        of_layers = layers[layers["phase"] == of_models["phase"].iloc[0]]
        return [
            _table(f"NLL beyond that of sa, {phase}", beyond, origin, gaps(of_models), "{:+.4f}".format, REAL),
            _table(f"Products skipped, {phase}", left_out, origin, shares(of_models), percent, SHARE),
            _table(f"Relative error of the worst layer, {phase}", off, origin, errors(of_layers), power, POSITIVE),
        ]

    return phase_tables(models, of_phase)


def _table(title: str, caption: str, origin: str, values: Column, form: Form, scale: Scale) -> Table:
    """Return a table of medians over seeds, a row a series, learning rate and stand-in, a column a budget."""
    rows = values.rename("value").reset_index()
    budgets = sorted(set(rows["budget"]))
    measures = [
        Measure(f"{budget:g}", lambda part, budget=budget: part.loc[part["budget"] == budget, "value"], form, scale)
        for budget in budgets
    ]
    places = (SERIES, RATE, Place("stand-in", "mixer"), Place("settings", "label"))
    told = f"{caption} {INTERVAL_RULES[scale]}. {origin}"
    return grid_table(title, told, rows, places, measures, (("", 4), ("budget", len(budgets))))
