"""Sampled proteins against loops written out: which place of which track is filled with what, what the contexts are,
what lies on disk and reads back."""

from __future__ import annotations

import json
import math
import shutil

import pandas as pd
import pytest
import torch

from stability.build import build_model
from stability.corpora.proteins.alphabets import LETTERS
from stability.generate import main
from stability.models import BOS, EOS, MASK
from stability.models.passes import generator_for
from stability.models.tracks import TrackInputs
from stability.plan.runs import read_spec
from stability.probes.checkpoints import corpus_of
from stability.probes.generation import samples as stored_samples
from stability.probes.generation.generating import (
    equal_samples,
    generate,
    is_generated,
    list_missing_phases,
    steps_of_a_phase,
)
from stability.probes.generation.protein_source import ProteinSource
from stability.runs.directory import read_json
from stability.runs.study import StudyFolder
from stability.training import checkpoint
from tests.probes.proteins import POSITIONS, ProteinLab, forget, generate_spec, sample


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A pool and its runs: both tracks with contexts and without, and each alone."""
    lab = ProteinLab(tmp_path_factory.mktemp("proteins"))
    specs = {
        "given": lab.spec(contexts=("ss", "sasa")),
        "bare": lab.spec(),
        "letters": lab.spec(sources=("sequence",)),
        "folds": lab.spec(sources=("structure",)),
    }
    return lab, {name: lab.train(spec) for name, spec in specs.items()}


@pytest.fixture(autouse=True)
def fresh(request):
    """No test finds another's samples."""
    yield
    if "trained" in request.fixturenames:
        forget(request.getfixturevalue("trained")[1].values())


def rows(directory):
    return [json.loads(line) for line in (directory.path / "samples" / "terminal.jsonl").read_text().splitlines()]


def files(directory):
    return {
        path.relative_to(directory.path): path.read_bytes()
        for path in sorted((directory.path / "samples").rglob("*"))
        if path.is_file()
    }


def probabilities(model, tracks, sizes):
    """Of one protein, as lists: for each track and position the softmax, by its definition, of the content's logits."""
    inputs = TrackInputs(tuple(torch.tensor([[BOS, *tokens, EOS]]) for tokens in tracks))
    with torch.no_grad():
        logits = model(inputs, mask_BN=torch.ones(1, len(tracks[0]) + 2, dtype=torch.bool))[0, 1:-1].double().tolist()
    found, start = [], 0
    for size in sizes:
        exps = [[math.exp(value) for value in row[start : start + size]] for row in logits]
        found.append([[value / sum(row) for value in row] for row in exps])
        start += size
    return found


def slowly(model, length, sizes, index, order, temperature):
    """One protein without batch or padding; the same uniform numbers, read off the weights one after the other."""
    draws, tracks = generator_for(3, "generate", index), [[MASK] * length for _ in sizes]
    while places := [(track, at) for track in range(len(sizes)) for at in range(length) if tracks[track][at] == MASK]:
        probs = probabilities(model, tracks, sizes)
        if order == "random":
            place = places[int(float(torch.rand((), generator=draws, dtype=torch.float64)) * len(places))]
        else:
            top = max(max(probs[track][at]) for track, at in places)
            place = next((track, at) for track, at in places if max(probs[track][at]) >= top * (1 - 1e-5))
        own = probs[place[0]][place[1]]
        left = float(torch.rand((), generator=draws, dtype=torch.float64))
        weights = [float(p == max(own)) for p in own] if temperature == 0 else [p ** (1 / temperature) for p in own]
        left *= sum(weights)
        token = 0
        while left >= weights[token]:
            left -= weights[token]
            token += 1
        tracks[place[0]][place[1]] = 5 + token
    return tracks


@pytest.mark.parametrize("name", ["bare", "letters", "folds"])
@pytest.mark.parametrize(("order", "temperature"), [("top_prob", 0.0), ("top_prob", 0.7), ("random", 1.0)])
def test_samples_are_those_of_a_slow_loop_over_all_places_of_all_tracks(trained, name, order, temperature):
    lab, runs = trained
    sample(lab, runs[name], num=3, batch=3, sampler=order, temperature=temperature, seed=3)
    _, model = checkpoint.load(runs[name].checkpoints()[-1])
    sizes = {"bare": (25, 175), "letters": (25,), "folds": (175,)}[name]
    for index, row in enumerate(rows(runs[name])):
        held_out = lab.corpus.chains("val")[index]
        found = slowly(model, min(len(held_out), POSITIONS - 2), sizes, index, order, temperature)
        assert row["protein"] == held_out.id
        if name != "folds":
            assert row["text"] == "".join(LETTERS[token - 5] for token in found[0])
        if name != "letters":
            assert row["structure"] == [token - 5 for token in found[-1]]
        assert (row["text"] is None, row["structure"] is None) == (name == "folds", name == "letters")


def test_proteins_are_as_long_as_the_held_out_ones_cropped_and_from_the_front_again(trained):
    lab, runs = trained
    chains = lab.corpus.chains("val")
    sample(lab, runs["bare"], num=len(chains) + 2, batch=4)
    lengths = [min(len(chain), POSITIONS - 2) for chain in chains]
    assert len(set(lengths)) > 1 and POSITIONS - 2 in lengths
    assert (
        [len(row["text"]) for row in rows(runs["bare"])]
        == lengths + lengths[:2]
        == [len(row["structure"]) for row in rows(runs["bare"])]
    )
    assert all(
        set(row["text"]) <= set(LETTERS) and 0 <= min(row["structure"]) <= max(row["structure"]) < 175
        for row in rows(runs["bare"])
    )


def test_empty_contexts_sample_exactly_what_the_same_weights_without_contexts_do(trained):
    lab, runs = trained
    given, model = checkpoint.load(runs["given"].checkpoints()[-1])
    bare = build_model(lab.spec(), corpus_of(given, lab.cache).format).eval()
    weights = model.state_dict()
    bare.load_state_dict(
        {
            name: weights[name if name in weights else name.replace("embedding.", "embedding.sources.")]
            for name in bare.state_dict()
        }
    )
    found = {}
    for name, run, net, contexts in (
        ("off", lab.spec(), bare, "empty"),
        ("empty", given, model, "empty"),
        ("given", given, model, "given"),
    ):
        source = ProteinSource(
            run, net, corpus_of(run, lab.cache), generate_spec(contexts=contexts), "top_prob", torch.device("cpu")
        )
        drawing = source.draw(range(4))
        with pytest.raises(StopIteration) as done:
            while True:
                next(drawing)
        found[name] = done.value.value
    assert found["empty"] == found["off"] != found["given"]


def test_given_contexts_are_those_of_the_held_out_proteins_with_nothing_hidden(trained, monkeypatch):
    lab, runs = trained
    from stability.objectives.multitrack import MultitrackMaskedModel

    seen, original = [], MultitrackMaskedModel.track_probs
    monkeypatch.setattr(
        MultitrackMaskedModel,
        "track_probs",
        lambda self, model, inputs, mask: seen.append(inputs) or original(self, model, inputs, mask),
    )
    sample(lab, runs["given"], num=2, contexts="given")
    ss, sasa = seen[0].contexts
    for row in range(2):
        own = lab.corpus.chains("val")[row].crop(0, POSITIONS - 2)
        known = [False, *own.ss_mask_N.tolist(), False]
        assert ss.mask[row, : len(known)].tolist() == known and not ss.mask[row, len(known) :].any() and any(known)
        assert ss.tokens[row, 1 : len(own) + 1][own.ss_mask_N].tolist() == own.ss_N[own.ss_mask_N].tolist()
        assert (
            sasa.tokens[row, 1 : len(own) + 1].tolist() == own.sasa_bins_N.tolist()
            and sasa.mask[row, 1 : len(own) + 1].all()
        )
    assert all(torch.equal(each.contexts[0].mask, ss.mask) for each in seen) and len(seen) >= 24


def test_the_same_settings_give_the_same_files_and_another_seed_or_batch_others_or_the_same_proteins(trained):
    lab, runs = trained
    sample(lab, runs["bare"])
    first, proteins = files(runs["bare"]), rows(runs["bare"])
    shutil.rmtree(runs["bare"].path / "samples")
    sample(lab, runs["bare"])
    assert files(runs["bare"]) == first and len(first) == 5 + 3
    shutil.rmtree(runs["bare"].path / "samples")
    sample(lab, runs["bare"], batch=5)
    assert rows(runs["bare"]) == proteins
    sample(lab, runs["bare"], seed=1)
    assert rows(runs["bare"]) != proteins


def test_letters_lie_as_fasta_beside_and_a_track_that_is_not_predicted_leaves_no_file(trained):
    lab, runs = trained
    for name, kept in (
        ("bare", {"terminal", "terminal.fasta"}),
        ("letters", {"terminal.fasta"}),
        ("folds", {"terminal"}),
    ):
        sample(lab, runs[name], num=2)
        assert {path.name for path in (runs[name].path / "samples").iterdir()} == {
            "terminal.json",
            "terminal.jsonl",
            *kept,
        }
    records = (runs["letters"].path / "samples" / "terminal.fasta").read_text().split(">")[1:]
    assert ["".join(record.splitlines()[1:]) for record in records] == [row["text"] for row in rows(runs["letters"])]
    assert records[0].startswith("sample_0 sampler=top_prob temperature=1.0 seed=0 checkpoint=")


def test_what_is_there_is_kept_and_what_is_missing_is_made_again(trained, capsys):
    _, runs = trained
    words = [f"ckpt={runs['given'].path}", "num=3", "device=cpu"]
    assert main(words) == 0
    first = files(runs["given"])
    assert main(words) == 0 and "skips 1 of 1" in capsys.readouterr().out
    with pytest.raises(
        ValueError, match=r"finished samples with contexts=empty \(asked for: given\).*;\noverwrite=true replaces them"
    ):
        main([*words, "contexts=given"])
    shutil.rmtree(runs["given"].path / "samples" / "terminal")
    assert list_missing_phases(runs["given"], generate_spec(num=3)) == ["terminal"]
    assert main(words) == 0 and files(runs["given"]) == first
    assert main([*words, "contexts=given", "overwrite=true"]) == 0 and files(runs["given"]) != first


@pytest.mark.parametrize("left_after", [3, -2])
def test_an_interrupted_generation_leaves_nothing_and_goes_on(trained, left_after):
    """In the middle of the sampling, and of the structures."""
    lab, runs = trained
    spec = generate_spec(num=3)
    whole = len(list(generate(runs["bare"], spec, cache_dir=lab.cache, device="cpu")))
    first = files(runs["bare"])
    shutil.rmtree(runs["bare"].path / "samples")
    assert whole <= steps_of_a_phase(read_spec(runs["bare"]), spec)
    steps = generate(runs["bare"], spec, cache_dir=lab.cache, device="cpu")
    for _ in range(left_after % whole):
        next(steps)
    steps.close()
    assert not is_generated(runs["bare"], spec) and not any("cif" in str(path) for path in files(runs["bare"]))
    sample(lab, runs["bare"], num=3)
    assert files(runs["bare"]) == first


def test_a_model_that_gives_no_numbers_has_no_samples_and_no_nll(trained, monkeypatch):
    lab, runs = trained
    nowhere = "stability.objectives.multitrack.MultitrackMaskedModel.track_probs"
    monkeypatch.setattr(
        nowhere,
        lambda self, model, inputs, mask_BN: [
            torch.full((*mask_BN.shape, 25), math.nan),
            torch.full((*mask_BN.shape, 175), math.nan),
        ],
    )
    spec = sample(lab, runs["bare"], oracle=f"ckpt:{runs['bare'].path}")
    assert (
        is_generated(runs["bare"], spec)
        and rows(runs["bare"]) == []
        and not list((runs["bare"].path / "samples" / "terminal").iterdir())
    )
    assert "not finite" in read_json(stored_samples.meta_file(runs["bare"], "terminal"))["reason"]
    assert len(pd.read_parquet(runs["bare"].generation_file("terminal"))) == 0
    study = StudyFolder.of(lab.pool, "nan")
    study.write([runs["bare"].run_id])
    from stability.runs.results import collect

    assert collect(study.path).runs.gen_nll.isna().all()


def test_equally_long_samples_at_temperature_0_are_warned_of(trained):
    lab, _ = trained
    run = lab.spec(contexts=("ss",))
    assert equal_samples(run, generate_spec(temperature=0)) == "samples of a checkpoint that are equally long"
    for changes in (
        {"temperature": 0.1},
        {"temperature": 0, "sampler": "random"},
        {"temperature": 0, "contexts": "given"},
        {"temperature": 0, "num": 1},
    ):
        assert equal_samples(run, generate_spec(**changes)) == ""
