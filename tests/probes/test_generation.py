"""`python -m stability.generate`: what lands on disk, what oracles say against a slow loop, that nothing is made twice,
and what a mistake is told."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.sections.generation import generation_tables
from analysis.study.load import load
from stability.config.base import validate
from stability.config.generation import GenerateSpec
from stability.corpora.tokens.vocabulary import BYTES, Vocabulary
from stability.generate import main
from stability.plan.runs import read_spec
from stability.probes.checkpoints import corpus_of
from stability.probes.generation import samples
from stability.probes.generation.generating import (
    check_kept,
    generate,
    is_generated,
    list_missing_phases,
    resolve_sampler,
    steps_of_a_phase,
)
from stability.probes.generation.samples import Sample
from stability.probes.generation.text_oracle import Score, load_oracle, oracle_checkpoint
from stability.probes.generation.tokens import Source, score_row
from stability.runs.directory import read_json
from stability.runs.results import collect, write
from stability.runs.schema import GENERATION_COLUMNS
from stability.runs.study import StudyFolder
from stability.training import checkpoint
from tests.conftest import Lab
from tests.probes.test_hugging_face import save, save_words

OBJECTIVES = {
    "mlm": {"name": "mlm"},
    "ar": {"name": "ar"},
    "se": {"name": "score_entropy"},
    "uniform": {"name": "score_entropy", "graph": "uniform"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A pool with a run of each objective, the study of the masked ones, and a run on nucleotides."""
    lab = Lab(tmp_path_factory.mktemp("lab"))
    runs = {name: lab.train(lab.spec(objective=objective)) for name, objective in OBJECTIVES.items()}
    study = StudyFolder.of(lab.pool, "masked")
    study.write([runs["mlm"].run_id, runs["se"].run_id])
    return lab, runs, study


@pytest.fixture(autouse=True)
def fresh(request):
    """No test finds another's samples."""
    yield
    if "trained" in request.fixturenames:
        for directory in request.getfixturevalue("trained")[1].values():
            for path in [*(directory.path / "samples").glob("*"), *(directory.path / "generation").glob("*")]:
                path.unlink()


def spec_of(**changes):
    return validate(GenerateSpec, {"ckpt": "x", "num": 5, "batch": 2, "device": "cpu", **changes})


def run(lab, directory, **changes):
    spec = spec_of(**changes)
    for _ in generate(directory, spec, cache_dir=lab.cache, device="cpu", phase=spec.phase):
        pass
    return spec


def texts(directory, phase="terminal"):
    return [
        json.loads(line)["text"] for line in (directory.path / "samples" / f"{phase}.jsonl").read_text().splitlines()
    ]


def table(directory, phase="terminal"):
    return pd.read_parquet(directory.generation_file(phase))


def slowly(logits_of, tokens):
    """Nats of every token but the first, each from a forward pass of its own over what stands before it, by the
    definition of a softmax."""
    total = 0.0
    for position in range(1, len(tokens)):
        logits = logits_of(torch.tensor([tokens[:position]]))[0, -1].tolist()
        top = max(logits)
        total += top + math.log(sum(math.exp(value - top) for value in logits)) - logits[tokens[position]]
    return total


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_gives_samples_of_its_own_vocabulary_as_long_as_its_positions(trained, name):
    lab, runs, _ = trained
    run(lab, runs[name])
    rows = [json.loads(line) for line in (runs[name].path / "samples" / "terminal.jsonl").read_text().splitlines()]
    assert [row["sample"] for row in rows] == list(range(5))
    assert all(len(row["tokens"]) == 16 and min(row["tokens"]) >= 0 and max(row["tokens"]) < 256 for row in rows), (
        "the mask is 256"
    )
    assert all(row["text"] == bytes(row["tokens"]).decode("utf-8", errors="replace") for row in rows)
    made_by = read_json(samples.meta_file(runs[name], "terminal"))
    digest = read_json(runs[name].checkpoints()[-1] / "manifest.json")["sha256"]["model.safetensors"]
    expected = {"mlm": "top_prob", "ar": "ar", "se": "top_prob", "uniform": "analytic"}[name]
    assert (made_by["sampler"], made_by["temperature"], made_by["seed"], made_by["num"]) == (expected, 1.0, 0, 5)
    assert made_by["checkpoint"] == digest[:12] and made_by["step"] == 12


def test_top_probability_samples_are_those_of_a_loop_written_out(trained):
    """A temperature of 0 leaves no chance: position and token are the largest entry among the masked ones, again and
    again."""
    lab, runs, _ = trained
    run(lab, runs["mlm"], temperature=0, num=1)
    _, model = checkpoint.load(runs["mlm"].checkpoints()[-1])
    tokens = [256] * 16
    for _ in range(16):
        with torch.no_grad():
            probs = model(torch.tensor([tokens]))[0].softmax(-1).tolist()
        certain = {position: max(probs[position]) for position in range(16) if tokens[position] == 256}
        position = min(position for position, top in certain.items() if top >= max(certain.values()) * (1 - 1e-5))
        tokens[position] = probs[position].index(max(probs[position]))
    assert texts(runs["mlm"]) == [bytes(tokens).decode("utf-8", errors="replace")]


def test_our_checkpoint_scores_as_a_slow_loop_in_float64_does(trained):
    lab, runs, _ = trained
    corpus = corpus_of(checkpoint.load(runs["mlm"].checkpoints()[-1])[0], lab.cache)
    oracle = load_oracle(f"ckpt:{runs['ar'].path}", corpus, "cpu")
    model = checkpoint.load(runs["ar"].checkpoints()[-1])[1].double()
    found = [
        Sample(list(b"the graph is ..."), None),
        Sample(list(b"a"), None),
        Sample([], None),
        Sample(list("α_max".encode()), None),
    ]
    scores = [score for some in replace(oracle, model=model).score(found, 3) for score in some]
    for sample, score in zip(found, scores, strict=True):
        assert score.nats == pytest.approx(slowly(model, sample.tokens), rel=1e-10, abs=1e-12)
        assert (score.num_tokens, score.num_bytes) == (max(len(sample.tokens) - 1, 0),) * 2
    single = [score.nats for some in oracle.score(found, 1) for score in some]
    assert single == pytest.approx([score.nats for score in scores], rel=1e-5, abs=1e-6)
    assert oracle.name == f"ckpt:{runs['ar'].run_id}/step_000012"


@pytest.mark.parametrize("tokenizer", ["words", "bytes"])
def test_a_hugging_face_model_scores_as_a_slow_loop_in_float64_does(trained, tmp_path, tokenizer):
    lab, runs, _ = trained
    corpus = corpus_of(checkpoint.load(runs["mlm"].checkpoints()[-1])[0], lab.cache)
    folder = save(tmp_path / "model")
    if tokenizer == "words":
        save_words(folder, lab)
    oracle = load_oracle(f"hf:{folder}", corpus, "cpu")
    oracle.model.double()
    written = ["the window of a stable step", "wide", "", "the graph is smooth and the scores are sharp " * 3]
    scores = [score for some in oracle.score([Sample([], text) for text in written], 2) for score in some]
    words = {word: index + 2 for index, word in enumerate(sorted(set(lab.text.read_text().split())))}
    for text, score in zip(written, scores, strict=True):
        tokens = [words[word] for word in text.split()] if tokenizer == "words" else list(text.encode())
        assert score.num_tokens == max(len(tokens) - 1, 0)
        if len(tokens) <= 32:  # what the model reads at once
            assert score.nats == pytest.approx(
                slowly(lambda tokens: oracle.model(input_ids=tokens).logits, tokens), rel=1e-9, abs=1e-12
            )
    assert (
        oracle.name == ("hf:model" if tokenizer == "words" else "hf:model (on bytes)")
        and str(tmp_path) not in oracle.name
    )


def test_a_long_sample_is_scored_in_stretches_that_share_a_token(trained):
    lab, runs, _ = trained
    corpus = corpus_of(checkpoint.load(runs["mlm"].checkpoints()[-1])[0], lab.cache)
    oracle = load_oracle(f"ckpt:{runs['ar'].path}", corpus, "cpu")
    model = checkpoint.load(runs["ar"].checkpoints()[-1])[1].double()
    tokens = list(b"the window of a stable step is wide where")
    (score,) = next(replace(oracle, model=model).score([Sample(tokens, None)], 1))
    by_hand = sum(slowly(model, part) for part in (tokens[:16], tokens[15:31], tokens[30:]))
    assert score.nats == pytest.approx(by_hand, rel=1e-10) and score.num_tokens == len(tokens) - 1


def test_samples_of_an_autoregressive_model_score_under_itself_as_its_text_does(trained):
    """Its own samples cost its own entropy; a uniform sampler's would cost log 256 or more."""
    lab, runs, _ = trained
    directory = lab.train(lab.spec(objective={"name": "ar"}, steps=60, lr_peak=1e-2, batch=8))
    run(lab, directory, num=64, batch=64, oracle=f"ckpt:{directory.path}")
    val_nll = directory.status()["result"]["val_nll"]
    found = table(directory)
    assert abs(found.nll.mean() - val_nll) < 6 * found.nll.sem() + 0.1 and val_nll < 3.5
    assert list(found.columns) == GENERATION_COLUMNS and set(found.num_tokens) == {15}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mlm", {"seed": 1}),
        ("mlm", {"temperature": 0.5}),
        ("mlm", {"sampler": "random"}),
        ("se", {"sampler": "euler"}),
        ("se", {"sampler": "analytic"}),
        ("se", {"sampler": "analytic", "steps": 3}),
        ("mlm", {"num": 6}),
    ],
)
def test_each_setting_changes_the_samples_and_the_same_ones_give_the_same(trained, name, change):
    lab, runs, _ = trained
    base = run(lab, runs[name])
    before = texts(runs[name])
    assert list_missing_phases(runs[name], base) == []
    other = spec_of(**change)
    assert list_missing_phases(runs[name], other) == ["terminal"]
    run(lab, runs[name], **change)
    assert texts(runs[name]) != before
    run(lab, runs[name])
    assert texts(runs[name]) == before


def test_the_batch_changes_no_sample_and_how_many_steps_it_takes(trained):
    lab, runs, _ = trained
    one, all_at_once = spec_of(batch=1), spec_of(batch=5)
    spec = read_spec(runs["mlm"])
    assert (steps_of_a_phase(spec, one), steps_of_a_phase(spec, all_at_once)) == (5 * 16, 16)
    assert len(list(generate(runs["mlm"], one, cache_dir=lab.cache, device="cpu"))) == 5 * 16
    before = texts(runs["mlm"])
    samples.meta_file(runs["mlm"], "terminal").unlink()
    run(lab, runs["mlm"], batch=5)
    assert texts(runs["mlm"]) == before


def test_a_study_is_sampled_scored_collected_and_printed_and_skipped_the_second_time(trained, capsys):
    lab, runs, study = trained
    words = [f"ckpt={study.path}", "num=3", f"oracle=ckpt:{runs['ar'].path}", "phase=all", "device=cpu"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert (
        f"Oracle: ckpt:{runs['ar'].run_id}/step_000012" in " ".join(said.split())
        and "Generative NLL against learning rate" in said
    )
    collected = pd.read_parquet(study.results / "runs.parquet").set_index("run_id")
    for name in ("mlm", "se"):
        scored = table(runs[name])
        assert collected.gen_nll[runs[name].run_id] == pytest.approx(scored.nll.mean()) and len(scored) == 3
        assert collected.gen_oracle[runs[name].run_id] == f"ckpt:{runs['ar'].run_id}/step_000012"
        assert len(table(runs[name], "earliest")) == 3 and not table(runs[name], "earliest").nll.equals(scored.nll)
    assert len(pd.read_parquet(study.results / "generation.parquet")) == 2 * 2 * 3
    before = {path: path.stat().st_mtime_ns for name in ("mlm", "se") for path in runs[name].path.rglob("*.*")}
    assert main(words) == 0
    assert "skips 2 of 2" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for name in ("mlm", "se") for path in runs[name].path.rglob("*.*")}


def test_another_oracle_scores_the_same_samples_and_other_samples_lose_their_scores(trained, tmp_path):
    lab, runs, _ = trained
    run(lab, runs["mlm"], oracle=f"ckpt:{runs['ar'].path}")
    first, written = table(runs["mlm"]), (runs["mlm"].path / "samples" / "terminal.jsonl").stat().st_mtime_ns
    spec = run(lab, runs["mlm"], oracle=f"hf:{save(tmp_path / 'model')}")
    assert (runs["mlm"].path / "samples" / "terminal.jsonl").stat().st_mtime_ns == written
    assert set(table(runs["mlm"]).oracle) == {"hf:model (on bytes)"} and not np.allclose(
        table(runs["mlm"]).nll, first.nll
    )
    assert is_generated(runs["mlm"], spec) and set(table(runs["mlm"]).oracle_sha256) != set(first.oracle_sha256)
    run(lab, runs["mlm"], seed=7)
    assert not runs["mlm"].generation_file("terminal").exists()


def test_finished_samples_and_scores_are_replaced_only_if_asked_for(trained, tmp_path):
    lab, runs, _ = trained
    oracle, place = f"ckpt:{runs['ar'].path}", f"ckpt={runs['mlm'].path}"
    words = [place, "num=3", "device=cpu", f"oracle={oracle}"]
    assert main(words) == 0
    scored = table(runs["mlm"])
    with pytest.raises(
        ValueError,
        match=r"finished samples with seed=0 \(asked for: 1\) of its terminal checkpoint.*;\noverwrite=true replaces them",
    ):
        main([*words, "seed=1"])
    with pytest.raises(ValueError, match=r"finished samples with num=3 \(asked for: 4\)"):
        main([f"ckpt={runs['mlm'].checkpoints()[-1]}", "num=4", "device=cpu"])
    with pytest.raises(ValueError, match=r"scores of another oracle \(ckpt:\w+/step_000012; asked for: hf:"):
        main([*words[:-1], f"oracle=hf:{save(tmp_path / 'model')}"])
    assert main(words) == 0 and main(words[:-1]) == 0 and table(runs["mlm"]).equals(scored)
    assert main([*words[:-1], f"oracle=hf:{tmp_path / 'model'}", "overwrite=true"]) == 0 and set(
        table(runs["mlm"]).oracle
    ) == {"hf:model (on bytes)"}
    assert main([*words, "seed=1", "overwrite=true"]) == 0 and set(table(runs["mlm"]).seed) == {1}


def test_samples_of_weights_that_have_changed_are_replaced_unasked(trained):
    lab, runs, _ = trained
    run(lab, runs["mlm"])
    file = samples.meta_file(runs["mlm"], "terminal")
    file.write_text(json.dumps({**read_json(file), "checkpoint": "of before"}))
    check_kept([runs["mlm"]], spec_of(seed=1))
    run(lab, runs["mlm"])
    with pytest.raises(ValueError, match="finished samples with seed=0"):
        check_kept([runs["mlm"]], spec_of(seed=1))


def test_an_unknown_token_leaves_no_nats_per_byte(trained, monkeypatch, capsys):
    lab, runs, study = trained
    monkeypatch.setattr(Vocabulary, "unknown", 7)
    monkeypatch.setattr(
        "stability.probes.generation.generating.corpus_of", lambda *given: replace(corpus_of(*given), vocabulary=BYTES)
    )
    assert main([f"ckpt={runs['mlm'].path}", "num=3", "device=cpu", f"oracle=ckpt:{runs['ar'].path}"]) == 0
    assert (
        table(runs["mlm"]).nll_per_byte.isna().all()
        and set(table(runs["mlm"]).num_bytes) == {0}
        and table(runs["mlm"]).nll.notna().all()
    )
    said = capsys.readouterr().out
    assert "nats per token of ckpt:" in said and "per byte" not in said
    write(collect(study.path), study.results)
    (shown,) = generation_tables(load(study.path))
    assert "; none per byte, since" in shown.caption and "per byte" not in shown.rows[0][1].detail


@pytest.mark.parametrize(("keep", "unknown"), [(3, 3), (None, None)])
def test_a_vocabulary_knows_its_unknown_token(keep, unknown):
    from stability.corpora.tokens.split import Sorted, keep_commonest

    side = Sorted(np.array([65, 66, 66, 67], dtype=np.uint16), np.array([0]), np.array([4]), np.array([4]), 0, 0)
    vocabulary = BYTES if keep is None else keep_commonest((side, side), BYTES, keep)[0]
    assert vocabulary.unknown == unknown


def test_an_oracle_may_be_a_study_of_one_run_and_of_no_more(trained):
    lab, runs, study = trained
    alone = StudyFolder.of(lab.pool, "judge")
    alone.write([runs["ar"].run_id])
    assert oracle_checkpoint(str(alone.path)) == oracle_checkpoint(str(runs["ar"].path)) == runs["ar"].checkpoints()[-1]
    with pytest.raises(
        ValueError, match=rf"is a study of 2 runs, and an oracle is one run;\ngive one of them: ckpt:{runs['mlm'].path}"
    ):
        oracle_checkpoint(str(study.path))


def test_equal_samples_are_warned_of(trained, capsys):
    _, runs, _ = trained
    place = f"ckpt={runs['mlm'].path}"
    assert main([place, "num=2", "temperature=0", "device=cpu"]) == 0
    assert (
        "warning: sampler=top_prob with temperature=0" in capsys.readouterr().out and len(set(texts(runs["mlm"]))) == 1
    )
    assert main([place, "num=2", "temperature=0", "sampler=random", "device=cpu", "overwrite=true"]) == 0
    said = capsys.readouterr().out
    assert "warning" not in said and f"1/1 {runs['mlm'].run_id}, " in said and "1/1 1/1" not in said


def test_an_interrupted_generation_leaves_nothing_and_goes_on(trained):
    lab, runs, _ = trained
    spec = spec_of(oracle=f"ckpt:{runs['ar'].path}")
    steps = generate(runs["mlm"], spec, cache_dir=lab.cache, device="cpu")
    for _ in range(20):
        next(steps)
    steps.close()
    assert not list((runs["mlm"].path / "samples").glob("*")) and list_missing_phases(runs["mlm"], spec) == ["terminal"]
    assert len(list(generate(runs["mlm"], spec, cache_dir=lab.cache, device="cpu"))) == num_steps_of(spec)
    assert list_missing_phases(runs["mlm"], spec) == []


def num_steps_of(spec):
    return math.ceil(spec.num / spec.batch) * (16 + 1)


def test_samples_that_a_hand_has_changed_are_made_again(trained):
    lab, runs, _ = trained
    spec = run(lab, runs["mlm"])
    path = runs["mlm"].path / "samples" / "terminal.jsonl"
    before = path.read_text()
    path.write_text(before.replace("sample", "simple"))
    assert not is_generated(runs["mlm"], spec)
    run(lab, runs["mlm"])
    assert path.read_text() == before


def test_nucleotides_are_written_as_fasta_that_reads_back(lab, capsys):
    directory = lab.train(lab.spec(data={"name": "dna"}, evaluation={"every_steps": 12, "sequences": 4}))
    judge = lab.train(
        lab.spec(data={"name": "dna"}, objective={"name": "ar"}, evaluation={"every_steps": 12, "sequences": 4})
    )
    assert main([f"ckpt={directory.path}", "num=4", f"oracle=ckpt:{judge.path}", "device=cpu"]) == 0
    lines = (directory.path / "samples" / "terminal.fasta").read_text().splitlines()
    assert lines[0].startswith(">sample_0 sampler=top_prob temperature=1.0 seed=0 checkpoint=") and len(lines) == 8
    assert all(set(line) <= set("ACGTURYSWKMBDHVN-") and len(line) == 16 for line in lines[1::2])
    corpus = corpus_of(checkpoint.load(directory.checkpoints()[-1])[0], lab.cache)
    assert [sample.text for sample in samples.read(directory, "terminal", corpus)] == lines[1::2]
    assert [corpus.decode(sample.tokens) for sample in samples.read(directory, "terminal", corpus)] == lines[1::2]
    assert "nats per token of ckpt:" in capsys.readouterr().out and len(table(directory)) == 4


def test_a_model_with_a_context_is_sampled_after_held_out_tokens(lab):
    spec = lab.spec(objective={"name": "mlm", "context": 8}, cross="auto")
    directory = lab.train(spec)
    run(lab, directory, num=3)
    assert len(texts(directory)) == 3
    corpus = corpus_of(spec, lab.cache)
    source = Source(
        spec, checkpoint.load(directory.checkpoints()[-1])[1], corpus, spec_of(num=3), "top_prob", torch.device("cpu")
    )
    source.start(range(1, 3))
    assert torch.equal(source.context["context_BJ"], corpus.windows("val", 3, 8)[1:3])


def test_a_model_that_gives_no_numbers_has_no_samples_and_no_nll(trained, monkeypatch):
    lab, runs, study = trained
    monkeypatch.setattr(
        "stability.objectives.mlm.MaskedLanguageModel.clean_probs",
        lambda self, model, tokens_BN: torch.full((*tokens_BN.shape, 256), math.nan),
    )
    spec = run(lab, runs["mlm"], oracle=f"ckpt:{runs['ar'].path}")
    assert is_generated(runs["mlm"], spec) and texts(runs["mlm"]) == [] and len(table(runs["mlm"])) == 0
    assert "not finite" in read_json(samples.meta_file(runs["mlm"], "terminal"))["reason"]
    assert collect(study.path).runs.gen_nll.isna().all()


def test_tables_keep_oracles_apart_and_name_them(trained, tmp_path):
    lab, runs, study = trained
    run(lab, runs["mlm"], oracle=f"ckpt:{runs['ar'].path}")
    run(lab, runs["se"], oracle=f"hf:{save(tmp_path / 'model')}")
    write(collect(study.path), study.results)
    tables = generation_tables(load(study.path))
    assert [table.caption.split(" (weights")[0] for table in tables] == [
        f"Oracle: ckpt:{runs['ar'].run_id}/step_000012",
        "Oracle: hf:model (on bytes)",
    ]
    assert [len(table.header) for table in tables] == [2, 2]
    shown = tables[0].rows[0][1].text
    assert shown == f"{table(runs['mlm']).nll.mean():.3f}"


def test_the_score_of_nothing_is_no_number(trained):
    assert math.isnan(score_row(*vars(Score(0.0, 0, 0)).values())["nll"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["num=3"], "ckpt: a value is missing; give ckpt=…"),
        (["ckpt=MLM"], "num: a value is missing; give num=…"),
        (["ckpt=MLM", "num=0"], "num=0: input should be greater than or equal to 1"),
        (["ckpt=/nothing/there", "num=3"], "no checkpoint at /nothing/there"),
        (
            ["ckpt=MLM", "num=3", "sampler=euler"],
            "sampler=euler does not fit objective=mlm; these do: top_prob, random",
        ),
        (["ckpt=AR", "num=3", "sampler=top_prob"], "sampler=top_prob does not fit objective=ar; these do: ar"),
        (["ckpt=UNIFORM", "num=3", "sampler=top_prob"], "these do: analytic, euler"),
        (
            ["ckpt=MLM", "num=3", "steps=5"],
            "steps=5 belongs to sampler=euler and sampler=analytic; sampler=auto is top_prob here",
        ),
        (
            ["ckpt=MLM", "num=3", "steps=5", "sampler=random"],
            "steps=5 belongs to sampler=euler and sampler=analytic; sampler=random fills one",
        ),
        (["ckpt=MLM", "num=3", "oracle=gpt2-large"], "oracle=gpt2-large: neither hf:NAME_OR_FOLDER nor ckpt:FOLDER"),
        (["ckpt=MLM", "num=3", "oracle=hf:/nothing/there"], "oracle: hf=/nothing/there: no such folder"),
        (["ckpt=MLM", "num=3", "oracle=hf:ENCODER"], "reads the tokens that it would have to predict"),
        (
            ["ckpt=MLM", "num=3", "oracle=ckpt:SE"],
            "was trained with objective=score_entropy, which gives no NLL of a whole text",
        ),
        (
            ["ckpt=MLM", "num=3", "oracle=ckpt:DNA"],
            "reads another vocabulary (17 tokens, nucleotides) than these samples are of (256 tokens, bytes)",
        ),
        (["ckpt=MLM", "num=3", "oracle=ckpt:/nothing/there"], "no checkpoint at /nothing/there"),
        (["ckpt=MLM", "num=3", "orcale=hf:gpt2"], "orcale: unknown key; did you mean 'oracle'"),
    ],
)
def test_mistakes_are_told_in_two_lines_and_nothing_is_written(trained, tmp_path, words, message):
    lab, runs, _ = trained
    places = {name.upper(): str(directory.path) for name, directory in runs.items()}
    if any("ENCODER" in word for word in words):
        places["ENCODER"] = str(encoder(tmp_path / "encoder"))
    if any("DNA" in word for word in words):
        places["DNA"] = str(lab.train(lab.spec(data={"name": "dna"}, objective={"name": "ar"})).path)
    for name, path in places.items():
        words = [word.replace(f"={name}", f"={path}").replace(f":{name}", f":{path}") for word in words]
    with pytest.raises(ValueError) as caught:
        main([*words, *(["device=cpu"] if "num=3" in words else [])])
    assert message in str(caught.value) and len(str(caught.value).splitlines()) <= 2
    assert not any(list((directory.path / "samples").glob("*")) for directory in runs.values())


def encoder(folder):
    """A model that loads as a language model, and sees what it would have to predict."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=260, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertLMHeadModel(config).save_pretrained(folder)
    return folder


def test_the_command_ends_with_exit_code_2_and_no_traceback(trained, entered):
    _, runs, _ = trained
    done = entered("stability.generate", f"ckpt={runs['mlm'].path}", "num=0")
    assert done.returncode == 2 and done.stderr.startswith("error: num=0") and len(done.stderr.splitlines()) <= 2


def test_a_run_that_is_not_finished_is_refused_and_so_is_one_without_a_checkpoint(lab):
    unfinished = lab.train(lab.spec(seed=5), steps=6)
    with pytest.raises(ValueError, match="run its sweep to the end first"):
        main([f"ckpt={unfinished.path}", "num=2"])
    diverged = lab.train(lab.spec(lr_peak=1e30, optimizer={"name": "sgd"}))
    with pytest.raises(ValueError, match="left no checkpoint: there is nothing to sample from"):
        main([f"ckpt={diverged.path}", "num=2"])


def test_auto_is_the_paper_s_sampler_where_there_are_masks(trained):
    _, runs, _ = trained
    specs = {name: checkpoint.load(directory.checkpoints()[-1])[0] for name, directory in runs.items()}
    assert resolve_sampler(specs["uniform"], spec_of(steps=3)) == "analytic"
    assert {name: resolve_sampler(spec, spec_of()) for name, spec in specs.items()} == {
        "mlm": "top_prob",
        "ar": "ar",
        "se": "top_prob",
        "uniform": "analytic",
    }
