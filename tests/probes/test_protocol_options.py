"""Every option of the protocol against the protocol written out by hand, and what a study's command does with it."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from analysis.study.load import load
from analysis.study.protocol import explain_undefined_states
from stability import hessian
from stability.models.backbone import Backbone
from stability.probes.curvature.alpha_max import is_measured, measure
from stability.probes.curvature.protocol import protocol_of
from stability.probes.curvature.spectra import list_missing_tables
from stability.runs.parquet import read_metadata, write_parquet
from stability.runs.results import collect, write
from stability.runs.schema import PROTOCOL
from stability.runs.study import StudyFolder

from .test_alpha_max import SHORT, ByHand, assert_rows, measured

STATES = ("paper", "checkpoint")


@pytest.mark.parametrize("method", ["taylor", "double_backward"])
def test_microbatches_give_the_numbers_of_the_whole_batch(lab, method):
    directory, whole = measured(lab, lab.spec(lr_peak=3e-3), SHORT.model_copy(update={"method": method}))
    _, parts = measured(lab, lab.spec(lr_peak=3e-3), SHORT.model_copy(update={"method": method, "microbatch": 3}))
    columns = ["loss_before", "slope", "curvature", "alpha_max"]
    assert parts[columns].to_numpy() == pytest.approx(whole[columns].to_numpy(), rel=1e-4)
    assert parts.loss_after.to_numpy() == pytest.approx(whole.loss_after.to_numpy(), rel=1e-5)
    assert json.loads(read_metadata(directory.curvature_file("terminal"))[PROTOCOL])["microbatch"] == 3


def test_no_pass_ever_sees_more_rows_than_the_microbatch(lab, monkeypatch):
    directory, rows = lab.train(lab.spec()), []
    forward = Backbone.forward

    def watched(self, inputs_BN, *args, **kwargs):
        rows.append(inputs_BN.shape[0])
        return forward(self, inputs_BN, *args, **kwargs)

    monkeypatch.setattr(Backbone, "forward", watched)
    for _ in measure(directory, SHORT.model_copy(update={"microbatch": 1}), cache_dir=lab.cache, device="cpu"):
        pass
    assert set(rows) == {1}


@pytest.mark.parametrize("state", STATES)
def test_the_clipped_gradients_slope_enters_where_asked_and_the_clipping_norm_is_the_protocols(lab, state):
    spec = lab.spec(lr_peak=3e-3)
    directory, table = measured(lab, spec, SHORT.model_copy(update={"gradient": "clipped", "clip_norm": 0.05}))
    by_hand = ByHand(lab, directory, spec.model_copy(update={"clip_norm": 0.05}))
    by_hand.clipped_slope = True
    assert_rows(table, by_hand, state)


@pytest.mark.parametrize("state", STATES)
def test_without_weight_decay_u_lacks_the_decay_that_the_steps_still_take(lab, state):
    spec = lab.spec(lr_peak=3e-3, optimizer={"name": "adamw", "weight_decay": 10.0})
    directory, table = measured(lab, spec, SHORT.model_copy(update={"weight_decay": False}))
    by_hand = ByHand(lab, directory, spec)
    by_hand.measured_decay, by_hand.clipped_slope = False, state == "paper"
    assert_rows(table, by_hand, state)
    _, included = measured(lab, spec, SHORT)
    by_hand.measured_decay = True
    assert_rows(included, by_hand, state)
    assert (abs(included.curvature / table.curvature - 1) > 0.1).any(), (
        "the decay is too small here to tell the two apart"
    )


def test_a_file_older_than_an_option_counts_as_measured_with_its_default(lab):
    directory, table = measured(lab, lab.spec())
    stored = json.loads(protocol_of(SHORT))
    for key in ("microbatch", "gradient", "weight_decay", "clip_norm"):
        stored.pop(key)
    write_parquet(table, directory.curvature_file("terminal"), {PROTOCOL: json.dumps(stored)})
    asked = SHORT.model_copy(update={"gradient": "true"})
    assert is_measured(directory, asked)
    for change in ({"microbatch": 1}, {"gradient": "clipped"}, {"weight_decay": False}, {"clip_norm": 2.0}):
        assert not is_measured(directory, asked.model_copy(update=change)), change
    write_parquet(table, directory.curvature_file("terminal"), {PROTOCOL: json.dumps({**stored, "method": "gone"})})
    assert not is_measured(directory, asked)


OLD_COLUMNS = ["gradient", "difference_curvature", "float64_curvature"]  # what a file of before has not


def as_before(directory, curvature=SHORT, **changes):
    """The terminal file as it was before gradient=auto: the true gradient's slope in every state, no column that says
    so, no states that are not defined."""
    for _ in measure(
        directory, curvature.model_copy(update={"gradient": "true"}), cache_dir=CACHE[directory], device="cpu"
    ):
        pass
    path = directory.curvature_file("terminal")
    stored = {**json.loads(read_metadata(path)[PROTOCOL]), "gradient": "true", **changes}
    write_parquet(pd.read_parquet(path).drop(columns=OLD_COLUMNS), path, {PROTOCOL: json.dumps(stored)})
    return pd.read_parquet(path)


CACHE = {}


@pytest.fixture
def old(lab):
    directory = lab.train(lab.spec(lr_peak=3e-3))
    CACHE[directory] = lab.cache
    return directory


def steps_taken(directory, curvature):
    return sum(1 for _ in measure(directory, curvature, cache_dir=CACHE[directory], device="cpu"))


def test_of_a_file_from_before_only_state_paper_is_measured_again(old):
    before = as_before(old)
    assert steps_taken(old, SHORT.model_copy(update={"state": ("checkpoint",)})) == 0
    assert steps_taken(old, SHORT.model_copy(update={"gradient": "true"})) == 0
    assert steps_taken(old, SHORT) == SHORT.warmup_steps + SHORT.recorded_steps, "those of state paper"
    after = pd.read_parquet(old.curvature_file("terminal"))
    assert dict(after.groupby("state").gradient.unique().map(list)) == {"checkpoint": ["true"], "paper": ["clipped"]}
    own = [table[table.state == "checkpoint"][before.columns].reset_index(drop=True) for table in (before, after)]
    pd.testing.assert_frame_equal(*own, check_exact=True)
    assert (before[before.state == "paper"].slope.to_numpy() < after[after.state == "paper"].slope.to_numpy()).all(), (
        "the true one is longer, and descends"
    )
    assert is_measured(old, SHORT) and steps_taken(old, SHORT) == 0


def test_tables_of_the_loss_itself_are_not_measured_again(old):
    tables = SHORT.model_copy(update={"measure": ("blocks", "profile"), "gradient": "true"})
    assert steps_taken(old, tables) > 0
    auto = tables.model_copy(update={"gradient": "auto"})
    assert list_missing_tables(old, auto) == []
    assert list_missing_tables(old, auto.model_copy(update={"clip_norm": 2.0})) == [("terminal", ("profile", "blocks"))]


def test_u_without_decay_is_measured_again_where_it_was_guessed(old):
    asked = SHORT.model_copy(update={"weight_decay": False, "state": ("checkpoint",)})
    as_before(old, asked)
    assert not is_measured(old, asked)
    assert steps_taken(old, asked) > 0
    assert is_measured(old, asked)


@pytest.mark.parametrize("state", STATES)
def test_auto_takes_the_clipped_gradient_in_state_paper_and_the_losss_own_in_state_checkpoint(lab, state):
    spec = lab.spec(lr_peak=3e-3)
    directory, table = measured(lab, spec, SHORT.model_copy(update={"clip_norm": 0.05}))
    by_hand = ByHand(lab, directory, spec.model_copy(update={"clip_norm": 0.05}))
    by_hand.clipped_slope = state == "paper"
    assert_rows(table, by_hand, state)
    assert set(table[table.state == state].gradient) == {"clipped" if state == "paper" else "true"}


def test_a_state_that_the_optimizer_does_not_define_is_named_where_its_rows_would_be(lab, capsys):
    directory = lab.train(lab.spec(optimizer={"name": "sgd"}, lr_peak=1e-2))
    study = StudyFolder.of(lab.pool, "both")
    study.write([directory.run_id, lab.train(lab.spec()).run_id])
    assert hessian.main([f"ckpt={study.path}", *WORDS]) == 0
    sentence = "The paper's warm-up state is not defined for sgd (1 run): its warm-up sets the averages m and v of Adam"
    assert sentence in " ".join(capsys.readouterr().out.split())
    found = collect(study.path)
    assert found.runs.set_index("optimizer").undefined_states.fillna("").to_dict() == {"sgd": "paper", "adamw": ""}
    assert set(found.curvature[found.curvature.run_id == directory.run_id].state) == {"checkpoint"}
    assert hessian.main([f"ckpt={directory.path}", *WORDS]) == 0
    printed = capsys.readouterr().out
    assert "skips 1 of 1" in printed and "state=paper      is not defined for this run's optimizer" in printed
    # a file from before says it by the rows that it lacks
    path = directory.curvature_file("terminal")
    write_parquet(pd.read_parquet(path), path, {PROTOCOL: read_metadata(path)[PROTOCOL]})
    assert collect(study.path).runs.set_index("optimizer").undefined_states.fillna("").to_dict() == {
        "sgd": "paper",
        "adamw": "",
    }


def test_a_run_that_was_asked_for_that_state_alone_says_so_without_a_row(lab):
    directory = lab.train(lab.spec(optimizer={"name": "sgd"}, lr_peak=1e-2))
    study = StudyFolder.of(lab.pool, "alone")
    study.write([directory.run_id])
    for asked, states in ((SHORT.model_copy(update={"state": ("paper",)}), set()), (SHORT, {"checkpoint"})):
        list(measure(directory, asked, cache_dir=lab.cache, device="cpu"))
        write(collect(study.path), study.results)
        assert explain_undefined_states(load(study.path)).startswith(
            "The paper's warm-up state is not defined for sgd (1 run)"
        )
        assert set(collect(study.path).curvature.state) == states
        assert is_measured(directory, asked)


def study_of(lab):
    directories = [lab.train(lab.spec(lr_peak=lr)) for lr in (1e-3, 1e-2)]
    study = StudyFolder.of(lab.pool, "two")
    study.write([directory.run_id for directory in directories])
    return study, directories


WORDS = ["warmup_batches=2", "warmup_steps=1", "recorded_steps=2", "device=cpu"]


def test_a_study_is_measured_and_tabulated_by_one_command_that_resumes(lab, capsys):
    study, directories = study_of(lab)
    words = [f"ckpt={study.path}", *WORDS, "phase=all", "tables=all"]
    assert hessian.main(words) == 0
    printed = capsys.readouterr().out
    for phase in ("terminal", "earliest"):
        assert f"run's own state, {phase}" in printed
    assert (
        "slope of the clipped gradient in the paper's warm-up state and true gradient in the run's own state; weight decay "
        "included in u" in printed
    )
    assert "slope of the true gradient; weight decay included in u" in " ".join(printed.split()), (
        "of the table of that state"
    )
    assert set(pd.read_parquet(study.results / "curvature.parquet").phase) == {"terminal", "earliest"}
    kept = directories[0].curvature_file("terminal").stat().st_mtime_ns
    directories[1].curvature_file("earliest").unlink()
    assert hessian.main(words) == 0
    assert "skips 1 of 2: measured already" in capsys.readouterr().out
    assert directories[1].curvature_file("earliest").exists()
    assert directories[0].curvature_file("terminal").stat().st_mtime_ns == kept


def test_gradient_true_reads_as_written_and_a_wrong_word_is_refused(lab):
    from tests.reading import read_spec

    assert read_spec("hessian", ["ckpt=x", "gradient=true"]).curvature.gradient == "true"
    assert read_spec("hessian", ["ckpt=x", "gradient=clipped"]).curvature.gradient == "clipped"
    for word in ("gradient=false", "gradient=raw", "microbatch=0", "clip_norm=-1", "positions=8", "lr=1e-3"):
        with pytest.raises(ValueError, match=word.split("=")[0]):
            read_spec("hessian", ["ckpt=x", word])


def test_a_file_older_than_parity_steps_counts_as_measured_and_one_with_fewer_of_them_does_not(lab):
    directory, table = measured(lab, lab.spec())
    assert table.groupby("state").parity_curvature.count().tolist() == [1, 1]
    fewer, more = (SHORT.model_copy(update={"parity_steps": number}) for number in (0, 2))
    assert is_measured(directory, fewer)
    assert not is_measured(directory, more)
    stored = {key: value for key, value in json.loads(protocol_of(SHORT)).items() if key != "spectra"}
    assert "parity_steps" not in stored
    write_parquet(
        table.drop(columns=["parity_curvature", "parity_alpha_max"]),
        directory.curvature_file("terminal"),
        {PROTOCOL: json.dumps(stored)},
    )
    assert is_measured(directory, more)


def test_the_collected_steps_carry_the_protocol_with_the_runs_own_batch_and_clipping_norm(lab):
    study, directories = study_of(lab)
    measured(lab, lab.spec(), SHORT)
    for _ in measure(
        directories[1], SHORT.model_copy(update={"batch": 2, "clip_norm": 0.5}), cache_dir=lab.cache, device="cpu"
    ):
        pass
    rows = collect(study.path).curvature
    stored = {run_id: json.loads(group.protocol.iloc[0]) for run_id, group in rows.groupby("run_id")}
    assert [(stored[d.run_id]["batch"], stored[d.run_id]["clip_norm"]) for d in directories] == [(4, 1.0), (2, 0.5)]
    assert stored[directories[0].run_id]["parity_steps"] == 1
