"""mHC-lite's claims of throughput, gradient norms, doubly stochastic mixing and depth, from numbers whose answer is
known."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest

from analysis.study.load import load
from stability.runs import results
from stability.runs.parquet import write_parquet
from tests.analysis.judged import claims_of
from tests.analysis.synthetic import write_study

SCHEMES = ("identity", "hc", "mhc", "mhc_lite")
LRS = (1e-3, 1e-2)


def write(path, frame):
    write_parquet(frame, path, {"schema_version": str(results.SCHEMA_VERSION)})


def study_of(tmp_path, seeds=3, norms=None, diverged=()):
    """sa with four schemes; ``norms``: gradient norm by (scheme, seed), 1 where it says nothing; ``diverged``: (scheme,
    rate, seed) of runs that did."""
    settings = tuple({"residual": name} for name in SCHEMES)
    folder = write_study(
        tmp_path,
        mechanisms=["sa"],
        lrs=LRS,
        seeds=seeds,
        settings=settings,
        nll=lambda m, lr, seed: 2.0 + 0.1 * abs(math.log10(lr / 1e-2)),
    )
    runs, curves = (pd.read_parquet(folder / "results" / f"{name}.parquet") for name in ("runs", "curves"))
    keys = {run.run_id: (run.residual, run.seed) for run in runs.itertuples()}
    # A rate and a step weigh on both schemes of a pair alike.
    rate = curves["run_id"].map(runs.set_index("run_id")["lr"])
    curves["grad_norm"] = (
        curves["run_id"].map(lambda run: (norms or {}).get(keys[run], 1.0))
        * (1 + 1 / curves["step"])
        * (100 * rate) ** 0.5
    )
    lost = [(run.residual, run.lr, run.seed) in diverged for run in runs.itertuples()]
    runs.loc[lost, ["status", "val_nll"]] = ["diverged", None]
    write(folder / "results" / "curves.parquet", curves)
    write(folder / "results" / "runs.parquet", runs)
    return folder


NORM = "gradient norm sa mhc_lite beside sa mhc"


@pytest.mark.parametrize(
    ("factors", "verdict", "word"),
    [
        ((0.9, 0.91, 0.89), "holds", "is 0.900 times"),
        ((1.1, 1.12, 1.09), "contradicted", "is 1.103 times"),
        ((0.5, 1.0, 1.9), "undecided", "Undecided: needs"),
        ((1.001,) * 3, "undecided", ""),
    ],
)
def test_gradient_norms_are_paired_by_rate_and_seed(tmp_path, factors, verdict, word):
    """Seeds differ by a factor of ten, which a comparison that is not paired would drown in."""
    norms = {("mhc", seed): 10.0**seed for seed in range(3)} | {
        ("mhc_lite", seed): 10.0**seed * factor for seed, factor in enumerate(factors)
    }
    claim, mean = claims_of(study_of(tmp_path, norms=norms))[NORM], math.prod(factors) ** (1 / 3)
    assert (
        (claim.verdict, claim.n) == (verdict, 3)
        and word in claim.text
        and "slightly lower than mHC's" in claim.statement
    )
    assert claim.effect == f"{mean:.3f} times the norm" and "at the rates 1e-3, 1e-2" in claim.text
    low, high = map(float, claim.interval.removeprefix("95 %: ").split(" to "))
    assert 0 < low <= mean <= high


def test_gradient_norms_are_compared_at_the_rates_that_all_runs_of_both_finished(tmp_path):
    """The survivors of 1e-2 would say that the norm is lower; 1e-3, which every run finished, says the contrary."""
    norms = {("mhc_lite", seed): 1.2 for seed in range(3)}
    claim = claims_of(study_of(tmp_path, norms=norms, diverged={("mhc", 1e-2, 0)}))[NORM]
    assert claim.verdict == "contradicted" and "at the rate 1e-3 (" in claim.text
    everywhere = {("mhc", lr, lr == LRS[1]) for lr in LRS}
    claim = claims_of(study_of(tmp_path / "other", norms=norms, diverged=everywhere))[NORM]
    assert (claim.verdict, claim.n) == (
        "not judged",
        0,
    ) and "at no learning rate did every run of both finish" in claim.text


def test_one_seed_makes_no_claim_and_two_make_indications(tmp_path):
    norms = {("mhc_lite", seed): 0.9 for seed in range(2)}
    assert claims_of(study_of(tmp_path, seeds=1, norms=norms))[NORM].verdict == "no claim"
    assert "Indicated (n = 2)" in claims_of(study_of(tmp_path / "two", seeds=2, norms=norms))[NORM].text


@pytest.mark.parametrize(("share", "verdict"), [(1.2, "holds"), (0.8, "contradicted")])
def test_throughput_is_judged_from_turns_side_by_side_alone(tmp_path, share, verdict):
    folder = study_of(tmp_path)
    subject = "throughput sa mhc_lite beside sa hc"
    before = claims_of(folder)[subject]
    assert (
        before.verdict == "not judged"
        and "python -m benchmarks.throughput runs/studies/synthetic" in before.text
        and "higher than HC's" in before.statement
    )
    turns = np.linspace(1, 2, 21)
    seconds = {"sa hc": turns, "sa mhc_lite": turns / share * (1 + 0.02 * np.cos(np.arange(21))), "sa mhc": turns}
    rows = [
        {"run_id": name, "series": name, "num_params": 1, "tokens_per_step": 64, "seconds": list(values)}
        for name, values in seconds.items()
    ]
    (folder / "results" / "throughput.json").write_text(
        json.dumps({"version": 1, "device": "CPU", "machine": "one", "rows": rows})
    )
    claim = claims_of(folder)[subject]
    assert (claim.verdict, claim.n) == (verdict, 21) and float(claim.effect.split()[0]) == pytest.approx(
        share, rel=0.02
    )
    rows[0]["seconds"] = rows[1]["seconds"] = rows[2]["seconds"] = [1.0, 1.1]
    (folder / "results" / "throughput.json").write_text(
        json.dumps({"version": 1, "device": "CPU", "machine": "one", "rows": rows})
    )
    assert claims_of(folder)[subject].verdict == "no claim"


def probed(folder, errors, share=0.01, threshold=30.0):
    """`streams.parquet` of two connections: ``errors`` by scheme, how far a column's sum is off 1 in single matrices
    and in their product, by seed."""
    rows = []
    for run in load(folder).runs.itertuples():
        if run.residual not in errors:
            continue
        base = {"run_id": run.run_id, "phase": "terminal", "lr": run.lr, "branch": "mixer", "num_values": 64}
        single, product = (np.resize(each, 8)[int(run.seed)] for each in errors[run.residual])
        for connection in (None, 0, 1):
            values = [("single", "column_sum", 1 + single), ("single", "row_sum", 1.0)]
            values += (
                [] if connection is None else [("product", "column_sum", 1 + product), ("product", "row_sum", 1.0)]
            )
            for matrix, quantity, value in values:
                rows += [
                    base
                    | {"connection": connection, "matrix": matrix, "quantity": quantity, "quantile": q, "value": value}
                    for q in (0.0, 0.5, 1.0)
                ]
            if run.residual == "mhc":
                about = [("beyond", np.resize(share, 8)[int(run.seed)])]
                about += (
                    []
                    if connection is None
                    else [("iterations", 20.0)] + ([("threshold", threshold)] if threshold else [])
                )
                rows += [
                    base
                    | {"connection": connection, "matrix": "single", "quantity": name, "quantile": None, "value": value}
                    for name, value in about
                ]
    write(folder / "results" / "streams.parquet", pd.DataFrame(rows, columns=results.PROBE_COLUMNS["streams"]))
    return folder


EXACT = (2e-15, 8e-15)


def test_exactness_drift_and_outliers_are_told(tmp_path):
    folder = probed(
        study_of(tmp_path),
        {"mhc_lite": EXACT, "mhc": ([0.01, 0.02, 0.015], [0.1, 0.25, 0.12]), "hc": (0.4, 0.4)},
        share=[0.01, 0.012, 0.011],
    )
    found = claims_of(folder)
    lite = found["stochasticity sa mhc_lite"]
    assert (
        (lite.verdict, lite.n) == ("holds", 6) and "8.0e-15 of their product" in lite.text and "in float64" in lite.text
    )
    drift = found["drift sa mhc"]
    assert (drift.verdict, drift.n, drift.effect) == (
        "holds",
        3,
        "10 times as far from 1",
    ) and "1.5e-2 off 1 in single matrices and 1.2e-1" in drift.text
    assert found["drift sa hc"].statement.endswith("(our comparison)") and found["drift sa hc"].verdict == "undecided"
    outliers = found["outliers sa mhc"]
    assert (outliers.verdict, outliers.n, outliers.effect) == (
        "holds",
        3,
        "1.1 % of tokens",
    ) and outliers.interval == "95 %: 0.852 to 1.35 %"  # t_2 · 0.1 % / √3 = 0.248 %
    assert ", at 1e-2 (" in outliers.text, "at its best rate"
    # Holm's correction counts them: the interval excludes the limit exactly if the p-value is below 5 %
    assert drift.p < 0.05 and outliers.p < 0.05 and found["drift sa hc"].p == 1.0
    depth = found["depth sa mhc"]
    assert depth.verdict == "not judged" and "one depth (2 connections)" in depth.text and "layers=[6,24]" in depth.text


def probed_depths(tmp_path, ranges, errors):
    """mhc at two depths of 2 and 8 connections; ``ranges`` and ``errors``: by depth and seed."""
    settings = tuple({"residual": name, "model": f"nano layers={layers}"} for name in SCHEMES[2:] for layers in (1, 4))
    folder = write_study(tmp_path, mechanisms=["sa"], lrs=LRS, seeds=3, settings=settings, nll=lambda *_: 2.0)
    rows = []
    for run in load(folder).runs.itertuples():
        layers, seed = int(run.model[-1]), int(run.seed)
        if run.residual != "mhc":
            continue
        base = {"run_id": run.run_id, "phase": "terminal", "lr": run.lr, "branch": "mixer", "num_values": 64}
        values = [(None, "single", "log_range", 0.5, ranges[layers][seed]), (None, "single", "log_range", 1.0, 99.0)]
        values += [
            (connection, "product", "column_sum", at, 1 + errors[layers][seed] * (connection + 1) / (2 * layers))
            for connection in range(2 * layers)
            for at in (0.0, 1.0)
        ]
        names = ("connection", "matrix", "quantity", "quantile", "value")
        rows += [base | dict(zip(names, each, strict=True)) for each in values]
    write(folder / "results" / "streams.parquet", pd.DataFrame(rows, columns=results.PROBE_COLUMNS["streams"]))
    return folder


def test_deeper_models_are_compared_seed_by_seed(tmp_path):
    """Medians of ln(1/ν) and the product's error at all connections, whose size the test states."""
    found = claims_of(
        probed_depths(tmp_path, {1: (5.0, 6.0, 9.0), 4: (7.0, 8.1, 10.9)}, {1: (0.01, 0.1, 1.0), 4: (0.001, 0.5, 10.0)})
    )
    ranges, columns = found["depth range sa mhc"], found["depth columns sa mhc"]
    assert (ranges.verdict, ranges.n, ranges.effect) == ("holds", 3, "+2.00")
    assert "changes by +2.00 from 2 to 8 connections (95 %: +1.75 to +2.25)" in ranges.text
    assert "relative range" in ranges.statement and "column sums" in columns.statement
    assert found["best NLL sa mhc_lite layers=4"].statement.startswith("layers=4: mHC-lite's loss")
    assert (columns.verdict, columns.n, columns.effect) == ("undecided", 3, "+0.23 decades")
    nearer = claims_of(
        probed_depths(tmp_path / "less", {1: (5.0, 6.0, 9.0), 4: (4.0, 4.9, 8.1)}, {1: (0.1,) * 3, 4: (0.2,) * 3})
    )
    assert nearer["depth range sa mhc"].verdict == "contradicted"
    assert nearer["depth columns sa mhc"].effect == "+0.30 decades"


def test_what_is_not_exact_or_does_not_drift_contradicts(tmp_path):
    found = claims_of(probed(study_of(tmp_path), {"mhc_lite": (2e-15, 1e-3), "mhc": (1e-13, 3e-13)}, share=0.0))
    assert (
        found["stochasticity sa mhc_lite"].verdict == "contradicted"
        and "not doubly stochastic" in found["stochasticity sa mhc_lite"].text
    )
    assert found["drift sa mhc"].verdict == "contradicted" and "are 1 to rounding" in found["drift sa mhc"].text
    assert (
        found["outliers sa mhc"].verdict == "contradicted"
        and "in sa mhc 0 % of tokens and connections have ln(1/ν) > 30" in found["outliers sa mhc"].text
    )
    nearer = claims_of(
        probed(
            study_of(tmp_path / "nearer"), {"mhc": ([0.1, 0.12, 0.11], [0.01, 0.012, 0.013])}, share=[0.0, 0.01, 0.01]
        )
    )
    assert nearer["drift sa mhc"].verdict == "contradicted" and "lie 0.106 times as far" in nearer["drift sa mhc"].text
    assert nearer["outliers sa mhc"].verdict == "undecided"
    assert nearer["outliers sa mhc"].interval == "95 %: 0 to 2.1 %", "no share is below 0"


def test_outliers_by_another_threshold_are_not_judged(tmp_path):
    for threshold, told in ((None, "above 20"), (5.0, "above 5")):
        claim = claims_of(probed(study_of(tmp_path / told), {"mhc": (0.1, 0.2)}, threshold=threshold))[
            "outliers sa mhc"
        ]
        assert claim.verdict == "not judged" and told in claim.text and "outlier_log_range=30" in claim.text


def test_a_run_that_stopped_early_is_not_the_trained_model(tmp_path):
    """Its matrices may be anything: the one run whose product is off had diverged."""
    folder = study_of(tmp_path, diverged={("mhc_lite", 1e-2, 2)})
    found = claims_of(probed(folder, {"mhc_lite": (2e-15, [*[8e-15] * 2, 0.5, *[0.0] * 5])}))
    assert found["stochasticity sa mhc_lite"].n == 5 and found["stochasticity sa mhc_lite"].verdict == "contradicted", (
        "its seed finished at the other rate"
    )
    assert (
        claims_of(
            probed(
                study_of(tmp_path / "both", diverged={("mhc_lite", lr, 2) for lr in LRS}),
                {"mhc_lite": (2e-15, [8e-15, 8e-15, 0.5, *[0.0] * 5])},
            )
        )["stochasticity sa mhc_lite"].n
        == 4
    )


def test_without_the_probe_the_study_says_what_would_judge(tmp_path):
    claim = claims_of(study_of(tmp_path))["stochasticity"]
    assert (
        claim.verdict == "not judged"
        and "python -m stability.probe what=streams ckpt=runs/studies/synthetic" in claim.text
        and claim.statement
    )


def test_equal_losses_of_mhc_and_mhc_lite_are_on_par_and_a_higher_one_is_not(tmp_path):
    subject = "best NLL sa mhc_lite"
    folder = study_of(tmp_path)
    path = folder / "results" / "runs.parquet"
    runs = pd.read_parquet(path)
    lite = runs["residual"] == "mhc_lite"
    for shift, verdict in (
        ([0.001, -0.001, 0.002], "holds"),
        ([0.02, 0.021, 0.022], "contradicted"),
        ([0.0, -0.05, 0.05], "undecided"),
        ([0.0, -0.03, 0.06], "undecided"),
        ([-0.02, -0.021, -0.022], "holds"),
        ([0.002, 0.0025, 0.003], "holds"),  # certainly higher, and certainly within the margin of 0.01 nats
        ([0.007, 0.01, 0.013], "undecided"),  # certainly higher, by more than the margin or by less
    ):
        write(path, runs.assign(val_nll=runs["val_nll"] + np.array(shift)[runs["seed"].astype(int)] * lite))
        claim = claims_of(folder)[subject]
        assert (
            (claim.verdict, claim.n) == (verdict, 3)
            and "on par with mHC's or lower" in claim.statement
            and claim.interval
            and float(claim.effect.replace("−", "-"))
            == pytest.approx(np.mean(shift), abs=6e-4)  # the interval is that of the mean
        )


def test_a_seed_in_which_every_rate_diverged_is_not_left_out(tmp_path):
    """mhc_lite's two surviving seeds are better by far, its third diverged at every rate: that is no result for it."""
    folder = study_of(tmp_path, diverged={("mhc_lite", lr, 1) for lr in LRS})
    path = folder / "results" / "runs.parquet"
    runs = pd.read_parquet(path)
    runs["val_nll"] = runs["val_nll"].where(runs["residual"] != "mhc_lite", runs["val_nll"] - 0.5 - 1e-3 * runs["seed"])
    write(path, runs)
    claim = claims_of(folder)["best NLL sa mhc_lite"]
    assert (claim.verdict, claim.n) == (
        "undecided",
        3,
    ) and "sa mhc_lite diverged at every rate in 1 of 3 seeds" in claim.text
