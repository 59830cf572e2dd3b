"""Searches over the ledger, in rounds: what they ask for, what a cut or a crash in between changes (nothing), what they
refuse. Trials are fakes."""

import importlib
import math

import pytest

from stability.config.base import validate
from stability.config.identity import run_id
from stability.config.search import AshaSpec, Dimension, SearchSpec
from stability.config.sweep import SweepSpec
from sweeps import launch
from sweeps.search.asha import AsynchronousAsha, SynchronousAsha
from sweeps.search.edge import most_rates
from sweeps.search.optuna import OptunaSearch, propose
from sweeps.search.rounds import make_search
from sweeps.trial import make_trials
from tests.reading import read_spec
from tests.sizes import with_slow
from tests.sweeps import fakes
from tests.sweeps.searching import EDGES, Sweep, cut_at


def test_the_edge_of_every_curve_is_found_with_all_seeds_and_nothing_is_trained_twice(tmp_path):
    sweep = Sweep(tmp_path, "lr=edge", "seeds=2")
    assert sweep.run().num_trained == len(sweep.trained) == len(set(sweep.trained))
    record = sweep.study.read()
    assert record["run_ids"] == sweep.trained
    rows = dict(zip(("sa", "sc"), record["edges"], strict=True))
    for mechanism, row in rows.items():
        assert row["state"] == "found" and abs(math.log10(row["best_lr"]) + 2.5) < 0.05 and row["num_seeds"] == 2
        assert (
            math.log10(row["verdict_lr"])
            <= EDGES[mechanism]
            < math.log10(row["verdict_next_lr"])
            <= math.log10(row["verdict_lr"]) + 0.05
        )
    assert (
        sum(row["num_runs"] for row in rows.values())
        == len(sweep.trained)
        < sum(row["num_grid_runs"] for row in rows.values()) / 2
    )
    assert rows["sa"]["run_id"] == record["run_ids"][0]
    again = Sweep(tmp_path, "lr=edge", "seeds=2")
    assert again.run().num_skipped == len(sweep.trained) and not again.trained
    assert (
        again.printed == f"skips {len(sweep.trained)} finished runs of {rows['sc']['num_rounds']} rounds, trains none\n"
    )
    assert again.study.read() == record


def test_wandb_s_server_is_looked_for_once_in_all_rounds_and_not_where_nothing_is_trained(tmp_path, monkeypatch):
    asked, seen = [], []
    monkeypatch.setattr("stability.runs.wandb_sink.probe_wandb", lambda: asked.append(1) or ("offline", "W&B: offline"))
    sweep = Sweep(tmp_path, "lr=edge", "logger=wandb")

    def train(trial):
        seen.append(trial.sinks["to"]["wandb"]["mode"])
        yield from sweep.train(trial)

    sweep.run(train)
    assert sweep.printed.count("round ") > 1 and sweep.printed.count("W&B: offline\n") == 1
    assert asked == [1] and set(seen) == {"offline"}
    sweep.run(train)
    assert asked == [1]


@pytest.mark.parametrize(
    ("kind", "count"), with_slow([("lr=edge", 7), ("search=optuna", 16)], [("lr=edge", 25), ("search=optuna", 0)])
)
def test_a_search_that_was_cut_off_ends_with_the_runs_of_one_that_was_not(tmp_path, kind, count):
    (tmp_path / "cut").mkdir()
    (tmp_path / "whole").mkdir()
    words = [kind, *(["search.num=14", "search.startup=5", "search.batch=3"] if kind == "search=optuna" else [])]
    cut, whole = Sweep(tmp_path / "cut", *words), Sweep(tmp_path / "whole", *words)
    whole.run()
    outcome = cut.run(cut_at(cut, count))
    assert outcome.interrupted and len(cut.trained) == count
    listed = cut.study.read()["run_ids"]
    assert set(cut.trained) <= set(listed) <= set(whole.trained), "what is under way stands in the study"
    assert not cut.run().interrupted
    assert sorted(cut.trained) == sorted(whole.trained)
    assert {key: cut.study.read()[key] for key in whole.search.record()} == whole.search.record()


def test_a_curve_with_a_failed_run_waits_for_the_next_time_and_the_others_go_on(tmp_path):
    def train(trial):
        if trial.spec["mechanism"]["name"] == "sa" and trial.spec["lr_peak"] == 0.1:
            yield
            trial.directory.set_status("failed", step=1, reason="ValueError: planted")
            return
        yield from sweep.train(trial)

    sweep = Sweep(tmp_path, "lr=edge")
    outcome = sweep.run(train)
    assert outcome.num_failed == 1
    failed, found = sweep.study.read()["edges"]
    assert (failed["state"], failed["num_rates"], found["state"]) == ("failed", 8, "found")
    assert sweep.run().num_failed == 0
    assert [row["state"] for row in sweep.study.read()["edges"]] == ["found", "found"]
    assert len(sweep.trained) == len(set(sweep.trained))


def test_a_plan_says_how_many_runs_there_may_be(tmp_path):
    sweep = Sweep(tmp_path, "lr=edge", "seeds=2")
    search = make_search(sweep.spec, "f" * 64, {})
    assert search.most_runs == 2 * 2 * most_rates(sweep.spec.lr.rates(), sweep.spec.lr.edge)
    assert "best rate and edges to 0.05 decades take up to 40 rates of each kind" in search.plan()
    assert [len(part) for part in (search.ask(), sweep.spec.points("f" * 64))] == [36, 36]
    search = make_search(Sweep(tmp_path, "search=optuna", "search.num=9").spec, "f" * 64, {})
    assert search.most_runs == 18 and "9 points of each kind with lr_peak from 0.0001 to 0.1" in search.plan()


def test_a_search_is_told_finite_numbers_and_finds_a_better_point_than_its_random_ones(tmp_path):
    sweep = Sweep(
        tmp_path,
        "mechanism=sc",
        "search=optuna",
        "search.num=40",
        "search.batch=2",
        "search.space.steps={low:10,high:90}",
    )
    assert sweep.run().num_trained == 40
    rows = sweep.study.read()["search"]
    scores = [row["score"] for row in rows[::2]]
    assert {row["field"] for row in rows} == {"lr_peak", "steps"} and all(
        isinstance(row["value"], int) for row in rows if row["field"] == "steps"
    )
    assert 5.5 in scores and all(math.isfinite(score) for score in scores), (
        "a diverged run counts with its NLL at initialisation"
    )
    assert min(scores[10:]) < min(scores[:10]) and min(scores) < 2.55
    assert [row["round"] for row in rows[::2]] == [1 + index // 2 for index in range(40)]
    assert all(len(f"{row['value']:.3g}") >= len(f"{row['value']:g}") for row in rows), "three digits"


def test_a_search_goes_on_where_more_points_are_asked_for(tmp_path):
    """On a machine of another size, too: its rounds would have begun with other points."""
    words = ("mechanism=sc", "search=optuna", "search.startup=3")
    short, long = (
        Sweep(tmp_path, *words, f"search.num={num}", f"search.batch={batch}") for num, batch in ((6, 2), (10, 4))
    )
    short.run()
    long.run()
    assert len(short.trained) == 6 and len(long.trained) == 4
    assert long.study.read()["run_ids"] == short.trained + long.trained


def test_points_of_another_space_are_not_taken_for_ones_of_this(tmp_path):
    Sweep(tmp_path, "mechanism=sc", "search=optuna", "search.num=2").run()
    other = Sweep(tmp_path, "mechanism=sc", "search=optuna", "search.num=2", "search.space.steps={low:10,high:90}")
    other.run()
    assert len(other.trained) == 2 and {row["field"] for row in other.study.read()["search"]} == {"lr_peak", "steps"}


def test_every_seed_of_a_point_is_run_and_a_failed_one_is_not_told(tmp_path):
    def train(trial):
        if len(sweep.trained) == 3:
            yield
            sweep.trained.append(trial.run_id)
            trial.directory.set_status("failed", step=1, reason="ValueError: planted")
            return
        yield from sweep.train(trial)

    sweep = Sweep(tmp_path, "mechanism=sc", "search=optuna", "search.num=3", "search.batch=3", "seeds=2")
    assert sweep.run(train).num_failed == 1
    scores = [row["score"] for row in sweep.study.read()["search"]]
    assert [score is None for score in scores] == [False, False, True, True, False, False]
    assert sweep.run().num_failed == 0
    assert None not in [row["score"] for row in sweep.study.read()["search"]]


def test_the_points_of_a_search_have_the_sweeps_own_seeds(tmp_path):
    words = ("mechanism=sc", "search=optuna", "search.num=2", "search.batch=2", "seeds=2", "first_seed=7")
    seeds = []

    def train(trial):
        seeds.append(trial.spec["seed"])
        yield from sweep.train(trial)

    sweep = Sweep(tmp_path, *words)
    sweep.run(train)
    assert seeds == [7, 8, 7, 8]


def test_a_space_with_few_points_ends_when_all_are_tried(tmp_path):
    sweep = Sweep(
        tmp_path,
        "mechanism=sc",
        "lr=1e-3",
        "search=optuna",
        "search.space.lr_peak=null",
        "search.space.steps={low:20,high:24}",
        "search.num=30",
    )
    assert sweep.run().num_trained == 5


def test_the_same_seed_proposes_the_same_points_and_another_one_others():
    def proposed(seed, told=()):
        search = SearchSpec(
            name="optuna",
            startup=2,
            seed=seed,
            space=(Dimension(path="x", low=1, high=9), Dimension(path="n", low=1, high=50)),
        )
        return list(propose(search.space, {"n"}, told, search, len(told), 4))

    told = [({"x": 1.5, "n": 3}, 1.0), ({"x": 8.5, "n": 40}, 2.0), ({"x": 1.7, "n": 5}, 1.1)]
    assert proposed(0, told) == proposed(0, told) != proposed(1, told)
    assert proposed(0) != proposed(0, told)


@pytest.mark.parametrize(
    "told", [[], [({"x": 1.5, "n": 3}, 1.0), ({"x": 8.5, "n": 40}, 2.0), ({"x": 1.7, "n": 5}, 1.1)]]
)
def test_tunes_optuna_search_is_told_the_same_and_suggests_the_same_points(told, monkeypatch):
    space = (Dimension(path="x", low=1, high=9, log=True), Dimension(path="n", low=1, high=50))
    search, asked = SearchSpec(name="optuna", startup=2, space=space), []
    tunes = fakes.imported("ray.tune.search.optuna").OptunaSearch
    suggest = tunes.suggest
    monkeypatch.setattr(tunes, "suggest", lambda self, trial: asked.append(trial) or suggest(self, trial))
    own, by_tune = (list(propose(space, {"n"}, told, search, len(told), 6, by_tune=how)) for how in (False, True))
    assert own == by_tune and len(asked) == len({point["x"] for point in own}) == 6
    assert (own != list(propose(space, {"n"}, [], search, len(told), 6))) == bool(told)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["search.space.mechanism.sc.steep={low:1,high:2}"],
            r"search.space.mechanism.sc.steep: unknown key; did you mean 'step'",
        ),
        (
            ["search.space.mechanism.sw.window={low:1,high:2}"],
            r"search.space.mechanism.sw.window: no run of this sweep has it",
        ),
        (
            ["search.space.mechanism.sc.rope={low:1,high:2}"],
            r"search.space.mechanism.sc.rope: is 'gradient' in this sweep, and only numbers can be searched",
        ),
        (["search.space.steps={low:1.5,high:2}"], r"search.space.steps: 1.5 is no integer"),
        (["search.space.batch={low:0,high:2}"], r"search.space.batch: 0 makes no run; batch=0"),
        (["search.space.lr={low:1e-4,high:1e-2}"], r"search.space.lr: unknown key; did you mean 'lr_peak'"),
        (["search.space.seed={low:0,high:2}"], r"search.space.seed: unknown key"),
        (["search.space.model.deep.x={low:0,high:2}"], r"search.space.model.deep.x: deep has no settings"),
        (["search.space.lr_peak={low:0,high:2}"], r"search.space.lr_peak: low=0 must be positive with log=true"),
        (["search.space.lr_peak={low:3}"], r"search.space.lr_peak: low=3 must be below high=0.1"),
        (["search.space.steps=4"], r"search.space.steps=4: must be a range"),
        (["lr=edge"], r"search=optuna chooses its own points: leave lr=edge out"),
        (
            ["search.space.lr_peak=null", "search.space.steps={low:1,high:2}", "lr=range"],
            r"search: give one learning rate",
        ),
        (["search=none", "search.space.steps={low:1,high:2}"], r"search.space belongs to a search; add search=optuna"),
    ],
)
def test_what_cannot_be_searched_is_said_before_anything_runs(tmp_path, words, message):
    with pytest.raises(ValueError, match=message) as caught:
        make_search(Sweep(tmp_path, *([] if "search=none" in words else ["search=optuna"]), *words).spec, "f" * 64, {})
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["lr=1e-3"],
            "lr=1e-3: search=optuna varies the learning rate from 0.0001 to 0.1 and would not use it; leave it out, give "
            "another range by search.space.lr_peak={low:…,high:…}, or vary another setting instead and add "
            "search.space.lr_peak=null",
        ),
        (["lr=[1e-3,1e-2]"], "lr=[1e-3,1e-2]: search=optuna varies the learning rate"),
        (["lr=range"], "lr=range: search=optuna varies the learning rate"),
        (["lr.num=3"], "lr.num=3: search=optuna varies the learning rate"),
        (
            ["batch=3", "search.space.batch={low:2,high:9}"],
            "batch=3: search=optuna varies batch from 2 to 9 and would not use it; leave it out, or that range",
        ),
        (
            ["mechanism=sc", "mechanism.sc.step_size=0.3", "search.space.mechanism.sc.step_size={low:0.1,high:2}"],
            "mechanism.sc.step_size=0.3: search=optuna varies mechanism.sc.step_size from 0.1 to 2",
        ),
    ],
)
def test_a_typed_setting_that_the_search_would_replace_is_refused(words, message):
    with pytest.raises(ValueError) as caught:
        read_spec("sweep", ["search=optuna", *words])
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["search=optuna"],
        ["search=optuna", "lr=1e-3", "search.space.lr_peak=null", "search.space.batch={low:2,high:9}"],
        ["search=pbt", "lr=range"],
        ["search=none", "lr=1e-3", "batch=3"],
    ],
)
def test_a_typed_setting_that_the_search_leaves_alone_is_used(words):
    spec = read_spec("sweep", words)
    assert spec.lr.rates() == ((1e-3,) if "lr=1e-3" in words else spec.lr.rates())


def test_without_optuna_one_line_says_what_to_do(tmp_path, monkeypatch):
    real = importlib.import_module

    def missing(name, *rest):
        if name == "optuna":
            raise ImportError(f"No module named {name!r}")
        return real(name, *rest)

    sweep = Sweep(tmp_path, "search=optuna")
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        RuntimeError,
        match=r"^search=optuna needs Optuna \(No module named 'optuna'\): pip install optuna, or choose lr=edge or lr=range$",
    ):
        sweep.run()


def test_settings_inside_a_hybrid_and_of_the_optimizer_can_be_searched(tmp_path):
    space = [
        "search.space.mechanism.mix.sc.window={low:1,high:4}",
        "search.space.optimizer.adamw.beta2={low:0.9,high:0.999}",
    ]
    sweep = Sweep(tmp_path, "mechanism=[mix,sc]", "search=optuna", *space)
    (_, run), *_ = OptunaSearch(sweep.spec, "f" * 64, 1, {}).ask()
    assert 0.9 <= run.optimizer.settings.beta2 <= 0.999 and run.optimizer.settings.beta2 != 0.95
    assert [part.settings.window for part in run.mechanism.settings.parts if part.name == "sc"][0] in range(1, 5)


HALVING = (
    "lr=range",
    "lr.num=9",
    "lr.low=1e-4",
    "lr.high=1",
    "seeds=2",
    "steps=18",
    "evaluation.every_steps=1",
    "search=asha",
)


def test_at_every_rung_the_best_rates_of_every_curve_go_on_with_all_their_seeds(tmp_path):
    sweep = Sweep(tmp_path, *HALVING)
    sweep.run()
    assert len(sweep.trained) == 36 + 12 + 4
    states = {trial.run_id: trial.directory.status() for trial in make_trials(sweep.spec, sweep.spec.points("f" * 64))}
    ended = {
        (run.mechanism.name, run.lr_peak, run.seed)
        for _, run in sweep.spec.points("f" * 64)
        if states[run_id(run)]["state"] == "stable"
    }
    assert ended == {(name, 3.16e-3, seed) for name in ("sa", "sc") for seed in range(2)}, "the rate next to 10^-2.5"
    steps = sorted(status["step"] for status in states.values())
    assert steps == [2] * 24 + [6] * 8 + [18] * 4
    stopped = sweep.study.read()["stopped"]
    assert len(stopped) == 32 and stopped[run_id(sweep.spec.points("f" * 64)[0][1])].startswith(
        "stopped at rung 1 of 2: place "
    )
    again = Sweep(tmp_path, *HALVING)
    assert again.run().num_trained == 0 and not again.trained and again.study.read() == sweep.study.read()


@pytest.mark.parametrize("count", [3, 40])
def test_a_halving_that_was_cut_off_ends_as_one_that_was_not(tmp_path, count):
    for name in ("cut", "whole"):
        (tmp_path / name).mkdir()
    cut, whole = Sweep(tmp_path / "cut", *HALVING), Sweep(tmp_path / "whole", *HALVING)
    whole.run()
    assert cut.run(cut_at(cut, count)).interrupted
    cut.run()
    assert sorted(cut.trained) == sorted(whole.trained)
    assert cut.study.read()["stopped"] == whole.study.read()["stopped"]


def test_a_grid_after_a_halving_takes_up_what_was_left(tmp_path):
    sweep = Sweep(tmp_path, *HALVING)
    sweep.run()
    spec = read_spec("sweep", [word for word in sweep.words if not word.startswith("search")])
    assert (
        launch.run(spec, make_trials(spec, spec.points("f" * 64)), console=sweep.console, run=sweep.train).num_trained
        == 32
    )


@pytest.mark.parametrize(
    ("settings", "steps", "every", "rungs"),
    [
        ({}, 200, 10, (30, 90)),
        ({}, 200, 100, (100,)),
        ({}, 500, 100, (100, 300)),
        ({}, 18, 1, (2, 6)),
        ({"reduction": 2, "first_step": 5}, 100, 5, (5, 10, 20, 40, 80)),
    ],
)
def test_rungs_fall_on_validations_before_the_last_step(settings, steps, every, rungs):
    assert AshaSpec(name="asha", **settings).rungs(steps, every) == rungs


def test_a_last_step_before_any_validation_is_refused():
    with pytest.raises(
        ValueError,
        match=r"^search=asha: no validation before the last of steps=100; give evaluation.every_steps=99 or less$",
    ):
        AshaSpec(name="asha").rungs(100, 100)
    assert AshaSpec(name="asha").rungs(100, 99) == (99,)
    with pytest.raises(ValueError, match=r"; give search.first_step=99 or less$"):
        AshaSpec(name="asha", first_step=100).rungs(100, 10)


def test_a_study_keeps_the_rungs_that_it_has_on_record_until_its_settings_change(tmp_path):
    sweep = Sweep(tmp_path, *HALVING)
    sweep.run()
    record = sweep.study.read()
    assert record["rungs"] == [2, 6]
    older = record | {"rungs": [3, 5]}
    assert "at steps 3, 5 of 18" in make_search(sweep.spec, "f" * 64, older).plan()
    other = Sweep(tmp_path, *(word for word in HALVING if word != "steps=18"), "steps=36")
    assert "at steps 4, 12 of 36" in make_search(other.spec, "f" * 64, older).plan()


def test_one_learning_rate_cannot_be_left_early(tmp_path):
    with pytest.raises(ValueError, match="search=asha compares learning rates, and there is one; give several"):
        Sweep(tmp_path, "lr=1e-3", "search=asha")


def test_asha_leaves_no_room_for_an_edge(tmp_path):
    with pytest.raises(
        ValueError, match="search=asha stops runs early, and lr=edge needs every run to its end; choose one"
    ):
        Sweep(tmp_path, "lr=edge", "search=asha")
    plan = make_search(Sweep(tmp_path, *HALVING).spec, "f" * 64, {}).plan()
    assert plan == (
        "search=asha: at steps 2, 6 of 18 one in 3 learning rates of each kind goes on, once all have reached it"
    )


@pytest.mark.parametrize("launcher", ["auto", "serial", "slurm", "ray"])
@pytest.mark.parametrize("synchronous", [None, True, False])
def test_rungs_await_their_runs_wherever_ray_does_not_decide(tmp_path, launcher, synchronous):
    words = ["search=asha", "lr=range", f"launcher={launcher}"]
    words += [] if synchronous is None else [f"search.synchronous={str(synchronous).lower()}"]
    if synchronous is False and launcher in ("serial", "slurm"):
        with pytest.raises(
            ValueError, match=f"search.synchronous=false needs launcher=ray, and this is launcher={launcher}"
        ):
            Sweep(tmp_path, *words)
        return
    found = make_search(Sweep(tmp_path, *words).spec, "f" * 64, {})
    is_asynchronous = launcher in ("auto", "ray") and synchronous is not True
    assert isinstance(found, AsynchronousAsha if is_asynchronous else SynchronousAsha)


def test_the_older_words_of_synchronous_asha_are_read(tmp_path):
    one = Sweep(
        tmp_path, "lr=range", "launcher=ray", "halving.reduction=4", "halving.first_step=20", "ablate.sc.window=[2,4]"
    )
    assert one.spec.search == AshaSpec(name="asha", reduction=4, first_step=20, synchronous=True)
    older = one.spec.model_dump(mode="json") | {"search": None, "halving": {"reduction": 4, "first_step": 20}}
    assert validate(SweepSpec, older) == one.spec
    assert validate(SweepSpec, older | {"halving": None}).search is None


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["halving.first_step=5"], "halving.first_step=5 is search.first_step of search=asha, which is not chosen"),
        (["halving.reduction=1"], "search.reduction=1"),
        (["halving.reduction=3", "halving.last=1"], "search.last"),
        (["halving.reduction=3", "search=pbt"], "halving.reduction=3 is search=asha search.reduction=3 .*; choose one"),
    ],
)
def test_wrong_older_words_are_refused_by_their_new_names(tmp_path, words, text):
    with pytest.raises(ValueError, match=text):
        Sweep(tmp_path, "lr=range", *words)
