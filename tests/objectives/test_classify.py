"""Image classification: loss, accuracy and augmentations against loops; a run from data to verdict, resumed bit for
bit; what is refused, in which words."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stability.build import build_model, build_objective
from stability.config.curvature import CurvatureSpec
from stability.config.identity import run_id
from stability.config.parse import parse
from stability.config.parts import validate_settings
from stability.config.sweep import SweepSpec
from stability.corpora.cache import load
from stability.corpora.images.corpus import ImageBatch
from stability.models.images import ImageFormat
from stability.objectives._rand_augment import rand_augment
from stability.objectives.classify import Classification, crop
from stability.probes.curvature.alpha_max import measure
from stability.runs.directory import read_jsonl
from stability.runs.schema import RUNS_COLUMNS
from stability.training.checkpoint import load as load_checkpoint
from stability.training.evaluate import Validation
from tests.reading import compose
from tests.within import assert_within

CLASSES = 3


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def classify(height=8, width=8, **settings):
    image = ImageFormat(height, width, 3, CLASSES, (100.0, 110.0, 120.0), (50.0, 60.0, 70.0))
    return Classification(validate_settings("objectives", "classify", settings), image._asdict())


def batch(num=6, height=8, width=8, seed=0):
    pixels = torch.randint(256, (num, height, width, 3), generator=generator(seed), dtype=torch.uint8)
    return ImageBatch(pixels, torch.arange(num) % CLASSES)


@pytest.fixture
def image_file(tmp_path):
    """Three classes that differ in how bright they are, and noise that is stronger than their difference at a single
    pixel."""
    rng = np.random.default_rng(0)
    labels = np.arange(240) % CLASSES
    pixels = np.clip(100 + 25 * labels[:, None, None, None] + rng.normal(0, 40, (240, 8, 8, 3)), 0, 255).astype(
        np.uint8
    )
    np.savez(tmp_path / "made.npz", x=pixels, y=labels, classes=np.array(["dark", "grey", "light"]))
    return tmp_path / "made.npz"


def image_spec(lab, image_file, **changes):
    given = {
        "objective": {"name": "classify", "crop": 1},
        "data": {"name": "images", "path": str(image_file), "hold_out": 0.2},
        "model": {"name": "tiny", "layers": 2, "width": 16, "heads": 2, "positions": 16},
        "batch": 8,
        "evaluation": {"every_steps": 6, "sequences": 48},
        "lr_peak": 3e-3,
    }
    return lab.spec(**(given | changes))


def test_inputs_are_normalised_pixels_and_each_image_counts_once():
    given = batch()
    examples = classify().examples(given, generator())
    for channel, (mean, std) in enumerate(((100, 50), (110, 60), (120, 70))):
        expected = (given.images_BHWC[2, 3, 5, channel].item() - mean) / std
        assert examples.inputs_BN[2, 3, 5, channel].item() == pytest.approx(expected, rel=1e-6)
    assert examples.targets_BN.squeeze(1).tolist() == given.labels_B.tolist()
    assert torch.equal(examples.weights_BN, torch.ones(6, 1))


def test_loss_and_accuracy_are_those_of_a_loop():
    logits = torch.randn(6, 1, CLASSES, generator=generator(3), dtype=torch.float64)
    objective = classify()
    examples = objective.examples(batch(), generator())
    total, count, others = objective.validate(lambda inputs: logits, examples)
    nats, right = 0.0, 0
    for row, label in enumerate(batch().labels_B.tolist()):
        scores = logits[row, 0].tolist()
        nats += math.log(sum(map(math.exp, scores))) - scores[label]
        right += scores.index(max(scores)) == label
    assert total.item() == pytest.approx(nats, rel=1e-6) and count.item() == 6
    assert others["val_accuracy"].item() == right


def test_rand_augment_comes_before_crop_and_mirror_and_without_it_they_draw_what_they_always_drew():
    given = batch(12)
    for num in (0, 2):
        found = classify(crop=2, rand_augment=num).augmented(given, generator(5))
        drawn = generator(5)
        images = rand_augment(given.images_BHWC, num, 14.0, drawn) if num else given.images_BHWC
        images = crop(images, 2, drawn)
        turned = torch.rand(12, generator=drawn) < 0.5
        for image, is_turned, got in zip(images, turned.tolist(), found.images_BHWC, strict=True):
            assert torch.equal(got, image.flip(1) if is_turned else image)
    assert not torch.equal(found.images_BHWC, classify(crop=2).augmented(given, generator(5)).images_BHWC)


def test_rand_augment_is_refused_where_it_would_change_nothing_or_has_no_colours():
    with pytest.raises(
        ValueError, match=r"objective.magnitude=9.0 changes nothing here: it belongs to objective.rand_augment"
    ):
        classify(magnitude=9.0)
    grey = ImageFormat(8, 8, 1, CLASSES, (100.0,), (50.0,))._asdict()
    with pytest.raises(ValueError, match="rand_augment=2 works on colours, and these images have 1 channel; 0: none"):
        Classification(validate_settings("objectives", "classify", {"rand_augment": 2}), grey).require()


def test_a_crop_is_a_window_of_the_image_with_a_black_border():
    given = batch(5, 6, 7).images_BHWC
    found = crop(given, 2, generator(4))
    top, left = torch.randint(5, (2, 5), generator=generator(4)).tolist()
    for b in range(5):
        for y in range(6):
            for x in range(7):
                row, column = y + top[b] - 2, x + left[b] - 2
                expected = given[b, row, column].tolist() if 0 <= row < 6 and 0 <= column < 7 else [0, 0, 0]
                assert found[b, y, x].tolist() == expected


def test_a_crop_as_wide_as_an_image_is_refused():
    classify(8, 9, crop=7).require()
    with pytest.raises(ValueError, match="objective.crop=8 must be below 8, the shorter side of images of 8×9 pixels"):
        classify(8, 9, crop=8).require()


def test_all_windows_are_equally_likely_and_every_second_image_is_mirrored():
    one = torch.zeros(5000, 3, 3, 1, dtype=torch.uint8)
    one[:, 1, 1] = 200
    found = crop(one, 1, generator())[..., 0].flatten(1).argmax(1)
    counts = torch.bincount(found, minlength=9)
    assert (counts > 5000 / 9 - 110).all() and (counts < 5000 / 9 + 110).all(), "4.9 standard deviations"
    edge = torch.zeros(4000, 2, 4, 1, dtype=torch.uint8)
    edge[:, :, 0] = 9
    objective = classify(crop=0)
    mirrored = objective.augmented(ImageBatch(edge, torch.zeros(4000, dtype=torch.long)), generator()).images_BHWC
    assert mirrored[:, 0, 3, 0].bool().double().mean().item() == pytest.approx(0.5, abs=0.04)
    assert torch.equal(mirrored.sum((1, 2, 3)), edge.sum((1, 2, 3)))


def test_without_crop_and_flip_nothing_is_changed_or_drawn():
    drawn = generator(7)
    assert torch.equal(classify(crop=0, flip=False).augmented(batch(), drawn).images_BHWC, batch().images_BHWC)
    assert torch.equal(drawn.get_state(), generator(7).get_state())


def test_validation_sees_the_held_out_images_as_they_are(lab, image_file):
    spec = image_spec(lab, image_file)
    corpus = load(lab.cache, spec.data_fingerprint)
    objective = build_objective(spec, corpus.format)
    [examples] = Validation(spec, corpus, objective, torch.device("cpu"))._chunks
    mean, std = torch.tensor(corpus.image.mean), torch.tensor(corpus.image.std)
    shown = corpus.windows("val", 48, 16)
    assert torch.allclose(examples.inputs_BN * std + mean, shown.images_BHWC.float(), atol=1e-3)


def test_what_class_frequencies_reach_is_their_cross_entropy(lab, tmp_path):
    labels = {"train": [0] * 30 + [1] * 10, "test": [0] * 6 + [1] * 4}
    for side, each in labels.items():
        np.savez(
            tmp_path / f"{side}.npz",
            x=np.zeros((len(each), 4, 4, 3), np.uint8),
            y=np.array(each),
            classes=np.array(["a", "b"]),
        )
    spec = image_spec(
        lab,
        tmp_path / "train.npz",
        data={"name": "images", "path": str(tmp_path / "train.npz")},
        model=tiny(positions=4),
    )
    corpus = load(lab.cache, spec.data_fingerprint)
    found = Validation(spec, corpus, build_objective(spec, corpus.format), torch.device("cpu")).unigram_nll(
        corpus.log_frequencies()
    )
    assert found == pytest.approx(-(6 * math.log(31 / 42) + 4 * math.log(11 / 42)) / 10, rel=1e-6)


def tiny(**changes):
    return {"name": "tiny", "layers": 2, "width": 16, "heads": 2, "positions": 16} | changes


def test_a_run_learns_and_says_its_accuracy_and_its_checkpoint_is_its_model(lab, image_file):
    spec = image_spec(lab, image_file, steps=60, lr_peak=1e-2, evaluation={"every_steps": 30, "sequences": 48})
    directory = lab.train(spec)
    rows = list(read_jsonl(directory.metrics_file))
    assert [row["step"] for row in rows if row.get("val_accuracy") is not None] == [0, 30, 60]
    assert "val_accuracy" not in rows[1]
    result = directory.status()["result"]
    assert directory.status()["state"] == "stable"
    assert result["val_accuracy"] == rows[-1]["val_accuracy"] > 0.6
    assert result["val_nll"] < 0.9 * result["unigram_nll"] and result["unigram_nll"] == pytest.approx(
        math.log(3), rel=0.05
    )
    assert "val_accuracy" in RUNS_COLUMNS
    again, model = load_checkpoint(directory.checkpoints()[-1])
    corpus = load(lab.cache, spec.data_fingerprint)
    assert again == spec
    measured = Validation(spec, corpus, build_objective(spec, corpus.format), torch.device("cpu")).measure(model)
    assert measured == {"val_nll": result["val_nll"], "val_accuracy": result["val_accuracy"]}


@pytest.mark.parametrize(("stop", "settings"), [(5, {}), (11, {}), (5, {"rand_augment": 2})])
def test_a_resumed_image_run_is_an_undisturbed_one_bit_for_bit(lab, image_file, stop, settings):
    spec = image_spec(lab, image_file, objective={"name": "classify", "crop": 1, **settings})
    directory = lab.train(spec)
    rows, result = directory.metrics_file.read_bytes(), directory.status()["result"]
    weights = (directory.checkpoints()[-1] / "model.safetensors").read_bytes()
    import shutil

    shutil.rmtree(directory.path)
    lab.train(spec, steps=stop)
    lab.train(spec)
    assert directory.metrics_file.read_bytes() == rows
    assert (directory.checkpoints()[-1] / "model.safetensors").read_bytes() == weights
    again, clocks = directory.status()["result"], {"wall_s": 0, "step_s": 0}
    assert {**again, **clocks} == {**result, **clocks}


def test_a_run_left_after_its_last_step_still_knows_its_accuracy(lab, image_file):
    spec = image_spec(lab, image_file)
    accuracy = lab.train(spec).status()["result"]["val_accuracy"]
    import shutil

    shutil.rmtree(lab.directory(spec).path)
    lab.train(spec, steps=spec.steps)
    lab.train(spec)
    assert lab.directory(spec).status()["result"]["val_accuracy"] == accuracy


def test_microbatches_add_up_to_the_whole_batch(lab, image_file):
    whole = lab.train(image_spec(lab, image_file, steps=4))
    parts = lab.train(image_spec(lab, image_file, steps=4, microbatch=3))
    for one, other in zip(read_jsonl(whole.metrics_file), read_jsonl(parts.metrics_file), strict=True):
        assert one["loss"] is None or other["loss"] == pytest.approx(one["loss"], rel=1e-5)


@pytest.mark.parametrize("mechanism", ["sa", "sc", "sw", "mix", "attentionx"])
def test_every_mechanism_trains_on_patches_and_alpha_max_is_that_of_differences(lab, image_file, mechanism):
    spec = image_spec(lab, image_file, mechanism={"name": mechanism}, steps=3)
    directory = lab.train(spec)
    curvature = CurvatureSpec(warmup_steps=1, warmup_batches=1, recorded_steps=2, parity_steps=0)
    for _ in measure(directory, curvature, cache_dir=lab.cache, device="cpu"):
        pass
    import pandas as pd

    table = pd.read_parquet(directory.curvature_file("terminal"))
    assert len(table) == 4 and set(table["method"]) == {"taylor"}
    assert_within(table["rel_error"].dropna().max(), 1e-2)


@pytest.mark.parametrize("what", ["spectra", "qk", "pdmm"])
def test_probes_of_layers_read_images_too(lab, image_file, what):
    import pandas as pd

    from stability.config.entries import ProbeSpec
    from stability.probes.layers import measuring as spectra_of_layers
    from stability.probes.layers.observing import list_observable

    spec = image_spec(lab, image_file, mechanism={"name": "mix", "pattern": ["sa", "sc"]}, steps=2)
    directory = lab.train(spec)
    assert list_observable(spec, what).is_there
    for _ in spectra_of_layers.measure(
        directory, ProbeSpec(what=what, ckpt=str(directory.path), sequences=2, device="cpu"), cache_dir=lab.cache
    ):
        pass
    table = pd.read_parquet(directory.probe_file("terminal", spectra_of_layers.TABLES[what][0]))
    assert set(table["mixer"]) == ({"sa", "sc"} if what == "spectra" else {"sa"}) and table["lr"].notna().all()


def test_a_loss_in_chunks_is_the_whole_one(lab, image_file):
    spec = image_spec(lab, image_file)
    corpus = load(lab.cache, spec.data_fingerprint)
    model = build_model(spec, corpus.format)
    losses = []
    for chunk in (None, 5):
        objective = build_objective(
            image_spec(lab, image_file, objective={"name": "classify", "loss_chunk": chunk}), corpus.format
        )
        examples = objective.examples(corpus.batch("train", 12, 16, generator()), generator())
        total, count = objective.loss(model, examples)
        losses.append((total / count).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_model_is_the_seeds_and_the_run_is_the_augmentations(lab, image_file):
    spec = image_spec(lab, image_file)
    corpus = load(lab.cache, spec.data_fingerprint)
    one, same, other = (build_model(each, corpus.format) for each in (spec, spec, image_spec(lab, image_file, seed=1)))
    assert torch.equal(one.embedding.positions_ND, same.embedding.positions_ND)
    assert not torch.equal(one.embedding.patches.weight, other.embedding.patches.weight)
    ids = {
        run_id(image_spec(lab, image_file, objective={"name": "classify", **changed}))
        for changed in ({}, {"crop": 0}, {"flip": False})
    }
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["objective=classify", "data=text", "data.path=README.md"],
            "objective=classify reads images, and data=text gives tokens; objective=classify takes data=images, "
            "data=text takes objective=ar or mlm",
        ),
        (
            ["objective=ar", "mechanism=sa", "data=images"],
            "objective=ar reads tokens, and data=images gives images; objective=ar takes data=dna or hf or",
        ),
        (["data=images"], "objective=mlm reads tokens, and data=images gives images"),
    ],
)
def test_data_of_another_kind_is_refused_when_parsed_with_what_fits(words, message):
    with pytest.raises(ValueError) as caught:
        parse(SweepSpec, {**compose("sweep", words), "name": "x"})
    assert str(caught.value).startswith(message) and len(str(caught.value).splitlines()) == 1


def test_positions_that_are_no_patches_are_refused_before_anything_is_built(lab, image_file):
    spec = image_spec(lab, image_file, model=tiny(positions=20))
    corpus = load(lab.cache, spec.data_fingerprint)
    with pytest.raises(
        ValueError,
        match=r"model\.positions=20: a position is a square patch, and images of 8×8 have as many as 4 .*, 16 .*, 64 ",
    ):
        corpus.require(20)
    with pytest.raises(ValueError, match=r"model\.positions=20"):
        build_model(spec, corpus.format)


def test_nothing_is_sampled_from_a_classifier(lab, image_file):
    from stability.config.generation import GenerationSpec
    from stability.probes.generation.generating import resolve_sampler

    with pytest.raises(ValueError, match="objective=classify predicts nothing that could be sampled"):
        resolve_sampler(image_spec(lab, image_file), GenerationSpec(num=2))
