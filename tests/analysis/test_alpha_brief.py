"""The text that `stability.hessian` prints of a study: α_max at each mechanism's best rate, in a few lines."""

import math

from analysis.drawing.typeset import Cell, longest_part
from analysis.sections.alpha_brief import describe_at_best_rates, tabulate_at_best_rates
from analysis.sections.alpha_tables import alpha_tables
from analysis.study.load import load
from tests.analysis.synthetic import write_study

RATES, ALL = (1e-3, 1e-2, 1e-1), ("terminal", "last", "earliest")
NAMES = tuple(f"m{number:02d}" for number in range(20))


def best_rate(name):
    return RATES[int(name[1:]) % 2]


def study_of(folder, names=NAMES, **settings):
    """Twenty mechanisms with their lowest NLL at 1e-3 or 1e-2; α_max is five times the rate in 3 of 4 steps."""

    def nll(name, lr, seed):
        return 2.0 + abs(math.log10(lr / best_rate(name))) + 0.001 * seed

    def alpha(name, lr, seed, state):
        return [5 * lr, 5 * lr, 5 * lr, lr / 2]

    wanted = {"mechanisms": names, "lrs": RATES, "nll": nll, "alpha": alpha, "phases": ("terminal", "earliest")}
    return load(write_study(folder, **(wanted | settings)))


def test_every_mechanism_has_its_best_rate_and_the_steps_measured_there(tmp_path):
    table = tabulate_at_best_rates(study_of(tmp_path, NAMES[:2]), ALL)
    assert table.groups[1:] == tuple(
        (f"{phase}, {state} state", 2) for phase in ("terminal", "earliest") for state in ("warm-up", "own")
    )
    first, second = table.rows
    assert first == (Cell("m00"), Cell("1e-3"), *(Cell("5.0e-3", "", bold=True), Cell("75")) * 4)
    assert second == (Cell("m01"), Cell("1e-2"), *(Cell("5.0e-2", "", bold=True), Cell("75")) * 4)


def test_the_text_of_twenty_mechanisms_fits_a_terminal(tmp_path):
    lines = describe_at_best_rates(study_of(tmp_path), ALL).splitlines()
    assert len(lines) <= 17 and "… 12 more rows: tables=all" in lines
    assert max(map(len, lines)) <= 120


def test_a_phase_that_was_not_asked_for_is_left_out(tmp_path):
    table = tabulate_at_best_rates(study_of(tmp_path, NAMES[:1]), ("terminal",))
    assert [text for text, _ in table.groups[1:]] == ["terminal, warm-up state", "terminal, own state"]


def test_without_a_recorded_step_the_text_says_so(tmp_path):
    study = study_of(tmp_path, NAMES[:1], alpha=None)
    assert describe_at_best_rates(study, ALL).startswith("no step was recorded at a best learning rate")


def test_a_study_without_a_best_rate_says_why(tmp_path):
    study = study_of(tmp_path, NAMES[:1], nll=lambda *_: math.inf)
    assert describe_at_best_rates(study, ALL).startswith("no best learning rate: ")


def test_long_names_have_fewer_columns_than_short_ones(tmp_path):
    """Heads of "parametrization=mup" ran over each other in eight columns."""
    short = alpha_tables(study_of(tmp_path / "short", NAMES[:4]))
    wide = study_of(tmp_path / "long", [f"m{place:016d}" for place in range(4)])
    assert {len(table.header) for table in short} == {9} and {len(table.header) for table in alpha_tables(wide)} == {5}
    assert [longest_part(name) for name in ("sa qk_norm=rmsnorm", "sa a.b=c", "")] == [7, 2, 0]
