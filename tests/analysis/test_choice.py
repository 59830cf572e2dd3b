"""Which mechanism to choose and what breaks first, on studies with known answers."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import matplotlib
import pandas as pd
import pytest

from analysis.claims.claim import Claim
from analysis.claims.prediction import conclusion
from analysis.drawing.interactive import describe
from analysis.drawing.style import RC
from analysis.numbers.window_ends import window_ends
from analysis.sections import curves
from analysis.sections.choice import breaks, choose
from analysis.sections.front import describe_runs
from analysis.sections.headline import MOST_LINES, answer, answer_table, lowest_nll, title
from analysis.sections.nll_figures import nll_figure
from analysis.sections.overview import trouble_table
from analysis.study.load import load
from tests.analysis.synthetic import write_study, write_table
from tests.analysis.test_mixers import measured_side_by_side

RATES = (1e-3, 1e-2, 1e-1, 1.0)
FINE = tuple(10 ** (place / 8 - 4) for place in range(33))  # fine enough to resolve the windows


def study_of(folder, nlls, *, rates=RATES, seeds=3, noise=(0.0, 0.001, 0.002), **more):
    """A study of mechanisms with a NLL at each rate, or a function of log10 of the rate; seeds differ by ``noise``."""

    def nll(name, lr, seed):
        known = nlls[name]
        return (known(math.log10(lr)) if callable(known) else known[rates.index(lr)]) + noise[seed]

    return load(write_study(folder, mechanisms=list(nlls), lrs=rates, seeds=seeds, nll=nll, **more))


def vee(best, slope):
    return lambda log_lr: best + slope * abs(log_lr + 2)


def test_the_choice_follows_the_verdicts_of_the_claims(tmp_path):
    nlls = {"sa": vee(2.0, 0.3), "sc": vee(2.1, 0.1), "mix": vee(2.0, 0.3)}
    lowest, widest = choose(study_of(tmp_path, nlls, rates=FINE))
    assert lowest == "Lowest NLL: sa at 1e-2 (undecided against mix; sc higher: supported)."
    assert widest == ("Widest own window: sc (wider than sa: supported; not compared with mix).")


def test_a_claim_on_two_series_tells_them_without_the_reference(tmp_path):
    """The consensus paper compares sc's window with sw's, too."""
    nlls = {"sa": vee(2.0, 0.3), "sc": vee(2.1, 0.1), "sw": vee(2.0, 0.3), "mix": vee(2.0, 0.3)}
    _, widest = choose(study_of(tmp_path, nlls, rates=FINE))
    assert widest == "Widest own window: sc (wider than sa: supported; sw narrower: supported; not compared with mix)."


def test_a_mechanism_that_hardly_sees_order_is_not_the_widest(tmp_path):
    """The less there is to learn, the wider the own window."""
    nlls = {"sa": vee(2.0, 0.3), "sc": vee(2.1, 0.1), "mix": vee(2.05, 0.2)}
    study = study_of(tmp_path, nlls, rates=FINE)
    assert choose(study)[1].startswith("Widest own window: sc (wider than sa: supported")
    blind = replace(study, runs=study.runs.assign(blind_to_order=(study.runs["mechanism"] == "sc").astype(int)))
    _, widest, left_out = choose(blind)
    assert widest == "Widest own window: mix (wider than sa: supported)."
    assert left_out == "Hardly able to see order, hence not counted for the window: sc."


def of_positions(folder, values):
    """sa at rope, and at others whose NLL is a function of log10 of the rate."""
    settings = [{}, *({"variant": f"position={value}"} for value in values)]
    study = write_study(folder, mechanisms=["sa"], lrs=FINE, seeds=3, settings=settings)
    runs = pd.read_parquet(study / "results" / "runs.parquet")
    for row in runs.index:
        form = values.get(str(runs.loc[row, "variant"]).partition("=")[2], vee(2.0, 0.3))
        runs.loc[row, "val_nll"] = form(math.log10(runs.loc[row, "lr"])) + 0.001 * runs.loc[row, "seed"]
    write_table(study / "results" / "runs.parquet", "runs", runs)
    described = [{"value": "rope", "variant": ""}, *({"value": v, "variant": f"position={v}"} for v in values)]
    item = {"axis": "position", "part": "position", "setting": "", "values": described}
    record = json.loads((study / "study.json").read_text())
    (study / "study.json").write_text(json.dumps(record | {"ablations": [item]}))
    return load(study)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"hope": vee(2.2, 0.3), "none": vee(2.3, 0.05)},
            "Does another position encoding than rope lower the NLL or widen the stable window? "
            "NLL higher with hope and none; own window wider with none, undecided with hope (3 seeds)",
        ),
        (
            {"hope": vee(1.8, 0.6)},
            "Does the position encoding hope in place of rope lower the NLL or widen the stable window? "
            "NLL lower; own window narrower (3 seeds)",
        ),
    ],
)
def test_a_study_of_one_named_setting_has_its_own_question_and_answer(values, said, tmp_path):
    study = of_positions(tmp_path, values)
    assert title(study) == said
    (ablation,) = study.study["ablations"]
    numbers = [{**each, "value": place} for place, each in enumerate(ablation["values"])]
    of_numbers = replace(study, study=study.study | {"ablations": [ablation | {"values": numbers}]})
    assert title(of_numbers).startswith("How far can the learning rate be pushed"), "a setting of numbers"


def test_a_setting_of_a_mechanism_is_named_as_the_user_typed_it(tmp_path):
    study = of_positions(tmp_path, {"hope": vee(1.8, 0.6)})
    (ablation,) = study.study["ablations"]
    of_sa = ablation | {"axis": "mechanism", "part": "sa", "setting": "qk_norm"}
    said = title(replace(study, study=study.study | {"ablations": [of_sa]}))
    assert said.startswith("Does qk_norm=hope in place of rope lower the NLL"), said


def test_what_is_undecided_is_one_clause(tmp_path):
    nlls = {"sa": vee(2.0, 0.3), "sc": vee(2.0, 0.29), "sw": vee(2.0, 0.3), "mix": vee(2.0, 0.3)}
    scattered = study_of(tmp_path, nlls, rates=RATES, noise=(0.0, 0.1, 0.2))
    assert choose(scattered)[1].count("undecided against") == 1


def test_the_first_page_has_the_limit_of_the_rate_and_the_price_of_the_wider_window(tmp_path):
    """sa's NLL leaves 5 % of 2.0 a third of a decade above 1e-2. Clocks of runs beside other work set no price."""
    nlls = {"sa": vee(2.0, 0.3), "sc": vee(2.1, 0.1)}
    nll = lambda name, lr, seed: nlls[name](math.log10(lr)) + 0.001 * seed  # noqa: E731
    folder = write_study(tmp_path, mechanisms=list(nlls), lrs=FINE, seeds=3, nll=nll)
    path = folder / "results" / "runs.parquet"
    runs = pd.read_parquet(path)
    runs["step_s"] = runs["mechanism"].map({"sa": 0.02, "sc": 0.09})
    write_table(path, "runs", runs.to_dict("records"))
    lowest, widest = choose(load(folder), is_long=True)
    assert lowest == "Lowest NLL: sa at 1e-2 (sc higher: supported); up to 2.2e-2 costs < 5 %."
    assert widest == "Widest own window: sc (wider than sa: supported)."
    measured_side_by_side(folder, ["sa", "sc"])  # sc's step takes twice as long
    assert choose(load(folder), is_long=True)[1] == (
        "Widest own window: sc (wider than sa: supported); 0.500 times the throughput of sa."
    )
    assert choose(load(folder))[1] == widest


def test_two_references_have_a_choice_each(tmp_path):
    """Of two norms, each with its own sa."""
    folder = write_study(
        tmp_path, mechanisms=["sa", "sc"], lrs=FINE, seeds=3, settings=({"norm": "layernorm"}, {"norm": "rmsnorm"}),
        nll=lambda name, lr, seed: {"sa": 2.0, "sc": 2.1}[name] + 0.3 * abs(math.log10(lr) + 2) + 0.001 * seed,
    )  # fmt: skip
    said = choose(load(folder))
    assert [text for text in said if text.startswith("Lowest")] == [
        "Lowest NLL beside sa layernorm: sa layernorm at 1e-2 (undecided against sa rmsnorm; "
        "sc layernorm higher: supported).",
        "Lowest NLL beside sa rmsnorm: sa rmsnorm at 1e-2 (sc rmsnorm higher: supported).",
    ]
    assert sum(text.startswith("Widest") for text in said) == 2


def test_two_seeds_only_indicate_a_choice(tmp_path):
    nlls = {"sa": vee(2.1, 0.3), "sc": vee(2.0, 0.1)}
    lowest, widest = choose(study_of(tmp_path, nlls, rates=FINE, seeds=2))
    assert lowest == "Lowest NLL: sc at 1e-2 (lower than sa: indicated)."
    assert widest.endswith("sc (wider than sa: indicated).")


def test_scattered_seeds_leave_the_choice_undecided(tmp_path):
    nlls = {"sa": {0: 2.0, 1: 2.1, 2: 2.2}, "sc": {0: 2.15, 1: 2.0, 2: 2.05}}
    study = load(
        write_study(
            tmp_path, mechanisms=["sa", "sc"], lrs=RATES, seeds=3,
            nll=lambda name, lr, seed: nlls[name][seed] + abs(math.log10(lr) + 2) * (0.3 + 0.05 * (seed == 1)),
        )
    )  # fmt: skip
    lowest, widest = choose(study)
    assert lowest == "Lowest NLL: sc at 1e-2 (undecided against sa)."
    assert "supported" not in widest and "undecided against" in widest


def test_a_series_that_was_compared_with_the_reference_alone_is_said_to_be(tmp_path):
    """mix is in front within the noise; that sc is higher was found against sa, not against mix."""
    shift = {"sa": (0.0, 0.0, 0.0), "mix": (-0.02, 0.01, -0.02), "sc": (0.2, 0.2, 0.2)}

    def nll(name, lr, seed):
        return 2.0 + shift[name][seed] + 0.3 * abs(math.log10(lr) + 2)

    study = load(write_study(tmp_path, mechanisms=list(shift), lrs=FINE, seeds=3, nll=nll))
    assert choose(study)[0] == "Lowest NLL: mix at 1e-2 (undecided against sa; sc higher than sa: supported)."


def test_a_lower_median_that_is_undecided_does_not_take_the_place_of_a_supported_one(tmp_path):
    bests = {"sa": (2.1, 2.11, 2.12), "sc": (2.0, 2.01, 2.02), "mix": (1.9, 1.9, 2.5)}
    nll = lambda name, lr, seed: bests[name][seed] + 0.3 * abs(math.log10(lr) + 2)  # noqa: E731
    folder = write_study(tmp_path, mechanisms=list(bests), lrs=RATES, seeds=3, nll=nll)
    assert choose(load(folder))[0] == (
        "Lowest NLL: sc at 1e-2 (lower than sa: supported; mix lower in the median: undecided against sa)."
    )


@pytest.mark.parametrize("nlls", [{"sa": (2.2, 2.0, 2.4, 3.1)}, {"sa": (2.2, 2.0, 2.4, 3.1), "sc": (3.3,) * 4}])
def test_no_choice_is_named_if_fewer_than_two_mechanisms_learned(tmp_path, nlls):
    study = study_of(tmp_path, nlls)
    assert choose(study) == [] and "Lowest NLL" not in answer(study)


def test_of_one_rate_the_choice_is_of_the_nll_alone(tmp_path):
    study = study_of(tmp_path, {"sa": (2.0,), "sc": (2.2,)}, rates=(1e-2,))
    assert choose(study) == ["Lowest NLL: sa at 1e-2 (sc higher: supported)."]


def test_the_terminal_has_the_choice_in_its_lines(tmp_path):
    nlls = {name: (2.2, 2.0 + place / 100, 2.4, 3.1) for place, name in enumerate(("sa", "sc", "mix", "sw"))}
    lines = answer(study_of(tmp_path, nlls)).splitlines()
    assert len(lines) <= MOST_LINES and any(line.startswith("Lowest NLL: sa at 1e-2") for line in lines)


def test_an_unclipped_study_says_at_which_rate_it_explodes_and_how_far(tmp_path):
    study = study_of(tmp_path, {"sa": (2.2, 2.0, 3.3, 167.0)}, noise=(0.0, 0.0, 0.0))
    assert breaks(study, study.series) == (
        "What ends the own windows, at the next rate swept: 3 of 3 runs learned nothing (sa at 1e-1). "
        "Worse at larger rates: sa at 1e0 (3 of 3 exploded, NLL up to 167 at 1e0)."
    )
    assert "at 1e-1 it learns nothing; at 1e0 it explodes" in " ".join(answer(study).split())
    assert "3 exploded and 3 learned nothing." in describe_runs(study)
    shown = [row[4].text for row in trouble_table(study).rows]
    assert shown == ["learned nothing"] * 3 + ["exploded"] * 3 and set(study.runs["status"]) == {"stable", "plateaued"}
    early = study_of(tmp_path / "early", {"sa": (2.2, 2.0, 167.0, 170.0)})
    assert window_ends(early)["sa"][1].reason == "exploded" and "from 1e-1 on it explodes" in answer(early)


def test_a_spike_is_a_failure(tmp_path):
    study = study_of(tmp_path, {"sa": (2.2, 2.0, 2.4, 2.5)}, statuses={("sa", 1e-1, 1): ("spiked", "planted")})
    table = answer_table(study)
    assert table.rows[0][table.header.index("first failure")].text == "1e-1: 1/3 spiked"
    assert (
        breaks(study, study.series)
        == "What ends the own windows, at the next rate swept: 1 of 3 runs spiked, 2 have a higher NLL (sa at 1e-1)."
    )


def test_the_end_of_a_window_has_the_runs_and_kinds_of_the_table(tmp_path):
    """One run spiked, one learned nothing, one did worse: no kind is left out."""
    nlls = {"sa": (2.2, 2.0, 3.25, 3.3)}  # token frequencies reach 3.2
    study = study_of(tmp_path, nlls, statuses={("sa", 1e-1, 1): ("spiked", "planted")}, noise=(0.0, -0.5, -0.5))
    table = answer_table(study)
    assert table.rows[0][table.header.index("first failure")].text == "1e-1: 2/3 learned nothing or spiked"
    assert "2 of 3 runs learned nothing or spiked, 1 has a higher NLL (sa at 1e-1)." in breaks(study, study.series)


def test_the_only_run_at_the_end_of_a_window_has_a_verb_in_the_singular(tmp_path):
    study = study_of(tmp_path, {"sa": (2.2, 2.0, 2.4, 2.5)}, seeds=1)
    assert breaks(study, study.series).endswith("at the next rate swept: 1 of 1 run has a higher NLL (sa at 1e-1).")


def test_no_failure_says_how_much_of_the_learning_is_lost(tmp_path):
    """From 2.0 to 3.14 of the token frequencies' 3.2: 1.14 / 1.2, 95 %."""
    nlls = {"sa": (2.2, 2.0, 2.4, 3.14), "sc": (2.2, 2.0, 2.01, 2.02), "sw": (2.2, 2.0, 2.001, 2.002)}
    study = study_of(tmp_path, nlls, noise=(0.0, 0.0, 0.0))
    table = answer_table(study)
    column = table.header.index("first failure")
    assert [row[column].text for row in table.rows] == ["1e0: 95 % lost", "1e0: 2 % lost", "1e0: nothing lost"]
    assert "at 1e0, 95 % of the learning is lost" in " ".join(answer(study).split())
    assert breaks(study, study.series) == (
        "What ends the own windows, at the next rate swept: 3 of 3 runs have a higher NLL (sa at 1e-1). "
        "Not ended within the rates swept: sc and sw."
    )


def test_learned_nothing_is_one_word(tmp_path):
    study = study_of(tmp_path, {"sa": (2.2, 2.0, 2.4, 3.3), "sc": (2.2, 2.0, 2.4, 3.1)})
    table = answer_table(study)
    assert table.rows[0][table.header.index("first failure")].text == "1e0: 3/3 learned nothing"
    words = [text.get_text() for ax in nll_figure(study).axes for text in ax.texts]
    assert "idle" not in table.caption and not any("nothing learned" in each for each in words)


def test_both_windows_have_whiskers_and_their_names_beside_them(tmp_path):
    study = study_of(tmp_path, {"sa": (2.2, 2.0, 2.4, 3.1), "sc": (2.2, 2.02, 2.3, 3.1)})
    bars = nll_figure(study).axes[-1]
    whiskers = [line for line in bars.lines if line.get_marker() == "|"]
    assert len(whiskers) == 2 * 2 * 2, "two ends of two windows of two series"
    assert sorted({tuple(line.get_xdata()) for line in whiskers}) == [(1e-2, 1e-3), (1e-2, 1e-1)]
    (named,) = [text.get_text() for text in bars.texts if text.get_text().startswith("thick")]
    assert named == "thick: own window\nthin: common window"


def test_a_legend_of_many_rates_is_thinned_and_a_browser_names_every_line(tmp_path):
    rates = tuple(10 ** (place / 10 - 3) for place in range(20))
    study = study_of(tmp_path, {"sa": vee(2.0, 0.3)}, rates=rates, seeds=1)
    with matplotlib.rc_context(RC):
        figure, _ = curves.row_figure(study)
        (legend,) = figure.legends
        names = [text.get_text() for text in legend.get_texts()]
        assert [name for name in names if "e" in name][:1] == ["1e-3"] and "7.943e-2" in names
        assert len(names) == 10 + len({"validation"} & set(names)) and "10 of 20" in legend.get_title().get_text()
        assert len({trace.get("name") for trace in describe(figure)["data"]} - {None, "", "validation"}) == 20


def test_no_measurement_better_than_the_baselines_is_said_plainly():
    claims = [Claim("a", "contradicted"), Claim("b", "undecided"), Claim("c", "undecided")]
    said = conclusion(claims)
    assert said == "Not shown: of 3 questions, a baseline answers 1 better and 2 as well, within the noise."
    assert conclusion([*claims, Claim("d", "holds")]).startswith("Better than every baseline: d. Of 4 questions,")


@pytest.mark.parametrize(
    ("changed", "begins"),
    [
        ({"status": "failed", "val_nll": math.nan}, "How far can the learning rate be pushed? "),
        ({"status": "plateaued", "val_nll": 3.5}, "How far can the learning rate be pushed? No mechanism learned"),
    ],
)
def test_a_setting_is_not_asked_about_where_nothing_was_learned(changed, begins, tmp_path):
    study = of_positions(tmp_path, {"hope": vee(1.8, 0.6)})
    assert title(replace(study, runs=study.runs.assign(**changed))).startswith(begins)


def test_values_that_are_not_compared_have_no_verdict_in_the_title(tmp_path):
    study = of_positions(tmp_path, {"hope": vee(1.8, 0.6)})
    (ablation,) = study.study["ablations"]
    other = replace(study, study=study.study | {"ablations": [ablation | {"axis": "optimizer", "part": "optimizer"}]})
    optimizers = study.runs["variant"].map(lambda variant: "lion" if variant else "adamw")
    lion = replace(other, runs=study.runs.assign(optimizer=optimizers))
    assert "undecided (" not in title(lion) and "Does =" not in title(lion)


def test_nlls_of_unlike_data_are_not_ranked(tmp_path):
    study = study_of(tmp_path, {"sa": vee(2.0, 0.3), "sc": vee(1.0, 0.3)})
    assert lowest_nll(study).startswith("sc at 1e-2 (")
    data = study.runs["mechanism"].map({"sa": "docstrings", "sc": "dna"})
    assert lowest_nll(replace(study, runs=study.runs.assign(data=data))) == ""
