"""`lr=scaled`: multiples of each optimizer's reference rate, from the command line to the runs, and what refuses them."""

from __future__ import annotations

import pytest

from stability.config.base import validate
from stability.config.entries import HessianSpec
from stability.config.rates import LearningRates
from stability.optimizers.adamw import AdamW
from stability.optimizers.sgd import SGD
from tests.reading import read_spec

BOTH = ["mechanism=sa", "optimizer=[adamw,sgd]", "seeds=1", "launcher=serial"]


def rates_by_optimizer(spec):
    found: dict[str, list[float]] = {}
    for _, run in spec.points("f" * 64):
        found.setdefault(run.optimizer.name, []).append(run.lr_peak)
    return found


def test_each_optimizer_gets_multiples_of_its_own_reference_in_three_digits():
    spec = read_spec("sweep", [*BOTH, "lr=scaled", "lr.low=0.03", "lr.high=30", "lr.num=7"])
    # 0.03 · 1000^(k/6) by hand: 0.03, 0.0948683, 0.3, 0.948683, 3, 9.48683, 30
    wanted = (0.03, 0.0948683, 0.3, 0.948683, 3.0, 9.48683, 30.0)
    assert (AdamW.lr_reference, SGD.lr_reference) == (1e-3, 0.1), "what the numbers below are made of"
    assert rates_by_optimizer(spec) == {
        "adamw": [3e-5, 9.49e-5, 3e-4, 9.49e-4, 3e-3, 9.49e-3, 3e-2],
        "sgd": [3e-3, 9.49e-3, 3e-2, 9.49e-2, 0.3, 0.949, 3.0],
    }
    assert spec.lr.rates() == tuple(float(f"{each:.3g}") for each in wanted), "the multiples themselves"


def test_listed_values_are_multiples_where_it_is_said():
    spec = read_spec("sweep", [*BOTH, "lr=[0.1,1,2.5]", "lr.scaled=true"])
    assert rates_by_optimizer(spec) == {"adamw": [1e-4, 1e-3, 2.5e-3], "sgd": [1e-2, 0.1, 0.25]}
    plain = read_spec("sweep", [*BOTH, "lr=[0.1,1,2.5]"])
    assert rates_by_optimizer(plain) == {"adamw": [0.1, 1.0, 2.5], "sgd": [0.1, 1.0, 2.5]}


def test_edge_scaled_is_edge_over_multiples_from_0_03_to_30():
    words = ["lr=edge", "lr.scaled=true", "lr.low=0.03", "lr.high=30", "lr.num=7"]
    found, written_out = (read_spec("sweep", [*BOTH, *each]) for each in (["lr=edge_scaled"], words))
    assert found.lr == written_out.lr and found.lr.edge is not None
    assert {name: (min(rates), max(rates)) for name, rates in rates_by_optimizer(found).items()} == {
        "adamw": (3e-5, 3e-2),
        "sgd": (3e-3, 3.0),
    }


def test_a_run_id_holds_the_rate_and_nothing_of_how_it_was_chosen():
    from stability.config.identity import run_id

    scaled = read_spec("sweep", [*BOTH, "lr=[2]", "lr.scaled=true"])
    same = read_spec("sweep", ["mechanism=sa", "seeds=1", "launcher=serial", "optimizer=sgd", "lr=0.2"])
    ids = {run.optimizer.name: run_id(run) for _, run in scaled.points("f" * 64)}
    assert ids["sgd"] == run_id(same.points("f" * 64)[0][1])


def test_an_ablation_s_variants_have_the_rates_of_their_base():
    spec = read_spec("sweep", [*BOTH, "lr=scaled", "lr.num=2", "ablate.adamw.beta2=[0.9,0.999]"])
    rates = {}
    for label, run in spec.points("f" * 64):
        rates.setdefault((run.optimizer.name, label), []).append(run.lr_peak)
    assert rates == {
        ("adamw", ""): [3e-5, 3e-2],
        ("adamw", "adamw.beta2=0.9"): [3e-5, 3e-2],
        ("sgd", ""): [3e-3, 3.0],
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["lr=scaled", "search=optuna"],
            "lr.scaled=true gives each optimizer rates of its own, and search.space.lr_peak gives all the same",
        ),
        (
            ["lr=[1,1.001]", "lr.scaled=true"],
            "lr.scaled=true: 2 multiples from 1 to 1.001 of the reference rate 0.001 are not distinct rates",
        ),
        (["lr=scaled", "lr.scale=true"], "lr.scale: unknown key; did you mean 'lr.scaled'?"),
    ],
)
def test_what_multiples_do_not_go_with_is_refused_in_a_line(words, message):
    with pytest.raises(ValueError) as caught:
        read_spec("sweep", [*BOTH, *words])
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_rates_that_are_asked_about_are_no_multiples():
    with pytest.raises(ValueError, match="lr.scaled=true works in a sweep only"):
        validate(
            HessianSpec,
            {"hf": "x", "lr": {"values": [1.0], "scaled": True}, "data": {"name": "text", "path": "README.md"}},
        )


def test_a_range_without_scaling_is_what_it_was():
    spec = LearningRates(low=3e-4, high=1e-1, num=6)
    assert spec.rates_of(0.1) == spec.rates() == (3e-4, 9.59e-4, 3.06e-3, 9.79e-3, 3.13e-2, 1e-1)
