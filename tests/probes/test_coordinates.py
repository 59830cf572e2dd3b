"""The coordinate check: its numbers against a loop written out, its verdict on right and on wrong factors."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
import torch

from analysis.numbers.coordinates import judged_slopes, verdict
from analysis.sections.coordinates import kinds
from stability import build
from stability.cli.coordinates import WHAT, list_models, read_recipe
from stability.cli.words import Invocation
from stability.models.passes import generator_for
from stability.objectives import Examples
from stability.parametrizations.complete_p import CompleteP
from stability.parametrizations.mup import Mup
from stability.probe import main
from stability.probes.layers.attention import attention_logits
from stability.probes.layers.coordinates import Coordinates, tensor_classes
from stability.runs.results import graph_frame
from stability.runs.study import StudyFolder

SMALL = ["model.positions=32", "seeds=2"]
WIDTHS = ["model.width=[32,64,128]", "model.ffn_multiple=2", "steps=4", "lr=2e-2"]  # larger rates show faults sooner
DEPTHS = ["model.layers=[1,2,4,8]", "model.width=32", "steps=4", "lr=2e-2"]
MUP, COMPLETE_P = "parametrization=[mup]", "parametrization=[complete_p]"


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    return f"runs_dir={tmp_path_factory.mktemp('pool')}"


def check(pool, *words):
    """Verdict and slopes of each parametrization, by its name."""
    models, corpus = list_models(read_recipe(Invocation.of([f"what={WHAT}", pool, *SMALL, *words])))
    checks = [Coordinates(run, corpus, torch.device("cpu")) for run in models]
    for each in checks:
        list(each.steps())
    rows = [own | row for each in checks for own in models[each.run] for row in each.rows]
    found = {name: judged_slopes(own) for name, own in kinds(graph_frame(WHAT, rows)).items()}
    return {name: (verdict(slopes)[0], {(s.quantity, s.measure): s for s in slopes}) for name, slopes in found.items()}


def without_rates(part):
    true = part.factors.__func__

    def factors(cls, config, name, size, growth):
        return replace(true(cls, config, name, size, growth), lr=1.0)

    return classmethod(factors)


def biases_as_matrices(part):
    true = part.factors.__func__

    def factors(cls, config, name, size, growth):
        found = true(cls, config, name, size, growth)
        return (
            replace(found, lr=1 / size.fan_in)
            if size.module == "linear" and len(size.shape) == 1 and size.kind == "vector"
            else found
        )

    return classmethod(factors)


def test_mup_is_flat_and_the_standard_parametrization_grows(pool):
    found = check(pool, *WIDTHS, "parametrization=[standard,mup]")
    assert found["mup"][0] == "flat" and found["standard"][0] == "grows"
    assert found["standard"][1]["blocks.0.mixer", "change"].mean > 0.5
    assert {("logits", "change"), ("blocks.1.mixer logits", "size"), ("bias", "update")} <= found["mup"][1].keys()
    assert ("logits", "size") not in found["mup"][1], "under mup they start as width^−½"


def test_rates_without_factors_make_activations_grow(pool, monkeypatch):
    monkeypatch.setattr(Mup, "factors", without_rates(Mup))
    word, slopes = check(pool, *WIDTHS, MUP)["mup"]
    assert word == "grows" and slopes["blocks.0.mixer", "change"].verdict == "grows"


def test_a_head_without_its_multiplier_makes_logits_grow(pool, monkeypatch):
    monkeypatch.setattr(Mup, "readout", classmethod(lambda cls, config, growth: 1.0))
    word, slopes = check(pool, *WIDTHS, MUP)["mup"]
    assert word == "grows" and slopes["logits", "change"].verdict == "grows"
    assert slopes["final stream", "size"].verdict == "flat"


def test_factors_on_biases_are_seen_in_their_updates_alone(pool, monkeypatch):
    """Activations hardly feel a bias that moves too little; its own update does."""
    monkeypatch.setattr(Mup, "factors", biases_as_matrices(Mup))
    word, slopes = check(pool, *WIDTHS, MUP)["mup"]
    assert word == "shrinks" and slopes["bias", "update"].mean == pytest.approx(-1, abs=0.15)
    assert slopes["final stream", "change"].verdict == slopes["logits", "change"].verdict == "flat"


def test_complete_p_is_flat_over_depth_and_the_standard_parametrization_is_not(pool):
    found = check(pool, *DEPTHS, "parametrization=[standard,mup,complete_p]")
    assert found["complete_p"][0] == "flat" and found["standard"][0] != "flat"
    streams = [found[name][1]["final stream", "change"].mean for name in ("standard", "complete_p")]
    assert streams[0] - streams[1] > 0.25
    assert found["mup"] == found["standard"], "mup has no factors of depth"
    of_blocks = [key for key in found["mup"][1] if key[0].startswith("blocks.")]
    assert of_blocks and all("blocks.0." in name and measure == "size" for name, measure in of_blocks)


def test_initial_values_that_fall_with_the_depth_a_second_time_are_seen_at_the_start(pool, monkeypatch):
    true = build.initialise
    monkeypatch.setattr(build, "initialise", lambda model, num, *more: true(model, 2 * len(model.blocks), *more))
    word, slopes = check(pool, *DEPTHS, COMPLETE_P)["complete_p"]
    assert word == "shrinks" and slopes["blocks.0.mixer", "size"].mean == pytest.approx(-0.5, abs=0.1)


def test_branches_without_the_factor_of_depth_make_the_stream_grow(pool, monkeypatch):
    monkeypatch.setattr(CompleteP, "branch", classmethod(lambda cls, config, growth: 1.0))
    word, slopes = check(pool, *DEPTHS, COMPLETE_P)["complete_p"]
    assert word == "grows" and slopes["final stream", "change"].verdict == "grows"


def forward(model, examples):
    """Every activation of two blocks of softmax attention, without hooks."""
    x = model.embedding(examples.inputs_BN)
    seen = {"embedding": x}
    for number, block in enumerate(model.blocks):
        for norm, branch in (("mixer_norm", "mixer"), ("ffn_norm", "ffn")):
            normed = getattr(block, norm)(x)
            y = getattr(block, branch)(normed)
            seen |= {f"blocks.{number}.{norm}": normed, f"blocks.{number}.{branch}": y}
            x = x + y
    hidden = model.final_norm(x)
    logits = model.head(hidden / 4)  # width 128 over 32
    return seen | {"final stream": x, "final_norm": hidden, "logits": logits}


def test_numbers_are_those_of_a_loop_written_out(pool):
    """AdamW of torch, whose rate is 1/m for the matrices in the blocks, on the same batch."""
    words = [f"what={WHAT}", pool, *SMALL, *WIDTHS, MUP, "optimizer.adamw.epsilon=1e-6"]
    models, corpus = list_models(read_recipe(Invocation.of(words)))
    run = next(run for run in models if run.model.width == 128)
    measured = Coordinates(run, corpus, torch.device("cpu"))
    list(measured.steps())
    model = build.build_model(run, corpus.format)
    tokens = corpus.batch("train", 8, 33, generator_for(0, "train", 1))
    examples = Examples(tokens[:, :-1], tokens[:, 1:], torch.ones(8, 32))
    matrices = [p for name, p in model.blocks.named_parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is each for each in matrices)]
    groups = [{"params": matrices, "lr": 2e-2 / 4}, {"params": others, "lr": 2e-2}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0, eps=1e-6 / 4)
    start, begun = None, [p.detach().clone() for p in model.parameters()]
    frame = pd.DataFrame(measured.rows).set_index(["step", "measure", "quantity"])["value"]
    classes = tensor_classes(run, corpus.format)
    for step in range(run.steps + 1):
        seen = forward(model, examples)
        start = start or seen
        for name, x in seen.items():
            assert frame[step, "size", name] == pytest.approx(float(x.detach().abs().mean()), rel=1e-3), name
            change = float((x - start[name]).detach().abs().mean())
            assert frame[step, "change", name] == pytest.approx(change, rel=2e-3, abs=1e-6), (step, name)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(seen["logits"].flatten(0, 1), examples.targets_BN.flatten()).backward()
        for kind, one in (("output", model.head.weight), ("finite", model.head.bias)):
            assert classes.count(kind) == 1
            rms = float(one.grad.square().mean().sqrt())
            assert frame[step, "gradient", kind] == pytest.approx(rms, rel=2e-3)
        place = [name for name, _ in model.named_parameters()].index("head.weight")
        moved = (model.head.weight.detach() - begun[place]).square().mean().sqrt()
        assert frame[step, "update", "output"] == pytest.approx(float(moved), rel=2e-3, abs=1e-7)
        optimizer.step()


def test_nothing_is_dropped(pool):
    sizes = ["model.layers=1", "model.width=[32,64]", "batch=2", "steps=3", f"what={WHAT}", pool, *SMALL]
    rows = []
    for words in ([], ["model.dropout=0.5"]):
        models, corpus = list_models(read_recipe(Invocation.of([*sizes, *words])))
        measured = Coordinates(next(iter(models)), corpus, torch.device("cpu"))
        list(measured.steps())
        rows.append([row["value"] for row in measured.rows])
    assert rows[0] == rows[1]


def test_logits_of_attention_are_those_of_visible_pairs(pool):
    """Causal attention, written out for one head: i sees j ≤ i."""
    run = next(iter(list_models(read_recipe(Invocation.of([f"what={WHAT}", pool, *SMALL, *WIDTHS, MUP])))[0]))
    model = build.build_model(run, 256)
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    found = attention_logits(model, lambda: model(tokens))
    assert sorted(found) == ["blocks.0.mixer", "blocks.1.mixer"]
    mixer = model.blocks[0].mixer
    q, k, _ = mixer.split(mixer.qkv(model.blocks[0].mixer_norm(model.embedding(tokens))))
    expected = [
        q[b, h, i] @ k[b, h, j] / 4 for b in range(2) for h in range(2) for i in range(32) for j in range(i + 1)
    ]
    assert torch.allclose(found["blocks.0.mixer"], torch.stack(expected), atol=1e-5)


def test_classes_of_tensors_are_found_by_what_grows_with_the_width(pool):
    run = next(iter(list_models(read_recipe(Invocation.of([f"what={WHAT}", pool, *SMALL, *WIDTHS, MUP])))[0]))
    model = build.build_model(run, 256)
    found = dict(zip((name for name, _ in model.named_parameters()), tensor_classes(run, 256), strict=True))
    assert found["embedding.weight"] == "embedding" and found["head.weight"] == "output"
    assert found["head.bias"] == "finite" and found["blocks.0.mixer.qkv.bias"] == "bias"
    assert found["blocks.0.ffn_norm.weight"] == "vector" and found["blocks.0.mixer.out.weight"] == "matrix"


def test_the_optimizer_has_no_decay_and_a_tiny_epsilon_unless_typed():
    sizes = ["what=coordinates", "model.width=[32,64]"]
    (plain,) = read_recipe(Invocation.of(sizes)).optimizer
    assert (plain.settings.weight_decay, plain.settings.epsilon) == (0.0, 1e-12)
    (typed,) = read_recipe(Invocation.of([*sizes, "optimizer.adamw.epsilon=1e-8"])).optimizer
    assert (typed.settings.weight_decay, typed.settings.epsilon) == (0.0, 1e-8)
    (muon,) = read_recipe(Invocation.of([*sizes, "optimizer=[muon]"])).optimizer
    assert (muon.settings.weight_decay, muon.settings.rest_epsilon) == (0.0, 1e-12)


def test_it_prints_verdicts_and_slopes_and_draws_a_figure(pool, tmp_path, capsys):
    words = [pool, *SMALL, "model.layers=1", "model.width=[32,64]", "parametrization=[standard,mup]", "batch=2"]
    assert main([f"what={WHAT}", *words, f"reports_dir={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert "standard: " in said and "mup: " in said and "blocks.0.mixer logits" in said
    assert (tmp_path / "coordinates.pdf").read_bytes().startswith(b"%PDF")


def test_a_study_keeps_the_numbers_for_its_report(pool, lab, tmp_path, capsys):
    study = StudyFolder.of(lab.pool, "sizes")
    study.write([lab.train(lab.spec()).run_id])
    words = [pool, *SMALL, "model.layers=1", "model.width=[32,64]", "batch=2", f"ckpt={study.path}"]
    assert main([f"what={WHAT}", *words, f"reports_dir={tmp_path / 'reports'}"]) == 0
    assert "stability.report" in capsys.readouterr().out and not (tmp_path / "reports").exists()
    frame = pd.read_parquet(study.results / "coordinates.parquet")
    assert set(frame["size"]) == {32, 64} and set(frame["measure"]) == {"size", "change", "gradient", "update"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give several widths or depths, model.width=[64,128,256,512] or model.layers=[2,4,8,16]"),
        (["model.width=[64]"], "give several widths or depths"),
        (["model.width=[32,64]", "model.layers=[1,2]"], "given: model.width, model.layers"),
        (["batch=[4,8]"], "given: batch"),
        (["model.width=[32,64]", "lr=[1e-3,1e-2]"], "takes one learning rate"),
        (["model.width=[32,64]", "lr=edge"], "takes one learning rate"),
        (["model.width=[32,64]", "seeds=1"], "seeds=1: what=coordinates needs an interval over seeds"),
        (["model.width=[32,64]", "steps=2"], "steps=2: what=coordinates judges changes from step 3 on"),
        (["model.width=[32,64]", "study=text_mini"], "study=text_mini: what=coordinates does not take study"),
        (["modle.width=[32,64]"], "did you mean 'model'?"),
        (["model.widht=[32,64]"], "did you mean 'model.width'?"),
        (["model.width=[32,64]", "mechanism=sc"], "sc goes with objective=mlm"),
        (["model.width=[32,40]"], "model.head_width=16 must divide model.width=40"),
        (["model.width=[32,64]", "parametrization=[mupp]"], "did you mean 'mup'?"),
        (["model.width=[32,64]", "optimizer=[lamb]", "parametrization=[mup]"], "optimizer=lamb has no factors"),
    ],
)
def test_bad_words_are_refused_in_one_line(words, message):
    with pytest.raises(ValueError, match=".*") as error:
        list_models(read_recipe(Invocation.of([f"what={WHAT}", *words])))
    assert message in str(error.value) and "\n" not in str(error.value)
