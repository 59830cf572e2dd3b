"""Images: what each layout is read as (against hand-made files), what is held out, how batches are drawn, and what bad
files are told."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from stability.config.parts import part
from stability.corpora.cache import load, prepare, prepare_for_plan
from stability.corpora.images import cifar as _cifar
from stability.corpora.images import folders as _pictures
from stability.corpora.images import synthetic
from stability.corpora.images.corpus import ImageCorpus
from stability.corpora.tokens.corpus import Corpus
from stability.data.images import Images, ImagesConfig

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "images"


def pixels(num, seed=0, size=(8, 6)):
    return np.random.default_rng(seed).integers(0, 256, (num, *size, 3), dtype=np.uint8)


def read(path, **settings):
    return Images.prepare(ImagesConfig(path=None if path is None else str(path), **settings))


def refused(path, **settings) -> str:
    with pytest.raises(ValueError) as caught:
        read(path, **settings)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def write_npz(file, num=20, seed=0, **more):
    np.savez(file, **({"x": pixels(num, seed), "y": np.arange(num) % 3, "classes": np.array(["a", "b", "c"])} | more))
    return file


def python2_batch(label_key=b"labels", num=7, seed=0, protocol=2, **changes):
    """As CIFAR's authors pickle it: byte strings, a plane a channel in each row of `data`."""
    data = np.random.default_rng(seed).integers(0, 256, (num, 3072), dtype=np.uint8)
    return pickle.dumps(
        {b"data": data, label_key: [index % 10 for index in range(num)], b"batch_label": b"made by hand"} | changes,
        protocol,
    ), data


def write_cifar10(folder, **changes):
    folder.mkdir()
    for number, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        (folder / name).write_bytes(python2_batch(seed=number, **changes)[0])
    (folder / "batches.meta").write_bytes(
        pickle.dumps({b"label_names": [f"class {index}".encode() for index in range(10)], b"num_vis": 3072}, 2)
    )
    return folder


def write_folders(root, sides=("train", "val"), num=3, size=(6, 8)):
    """``side/class/number.png``; returns the pixels by (side, class, number)."""
    written = {}
    for side in sides:
        for label, name in enumerate(("bee", "ant")):
            for number in range(num):
                written[side, name, number] = pixels(1, seed=100 * ord(side[0]) + 10 * label + number, size=size[::-1])[
                    0
                ]
                file = root / side / name / f"{number}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(written[side, name, number]).save(file)
    return written


def test_npz_pair_is_read_as_it_stands(tmp_path):
    write_npz(tmp_path / "my_train.npz", 20, 1)
    write_npz(tmp_path / "my_test.npz", 5, 2)
    corpus = read(tmp_path / "my_train.npz")
    assert np.array_equal(corpus.train.images_MHWC, pixels(20, 1)) and np.array_equal(
        corpus.val.images_MHWC, pixels(5, 2)
    )
    assert corpus.train.labels_M.tolist() == [index % 3 for index in range(20)]
    assert corpus.class_names == ("a", "b", "c")
    assert "20 training and 5 held-out images of 8×6 pixels, 3 classes" in corpus.description
    assert read(tmp_path).fingerprint == corpus.fingerprint, "a folder with one training file means this file"


def test_jpeg_bytes_with_offsets_give_the_pixels_that_pillow_gives_for_each(tmp_path):
    encoded = []
    for image in pixels(12, size=(16, 16)):
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, "jpeg", quality=90)
        encoded.append(stream.getvalue())
    offsets = np.cumsum([0, *map(len, encoded)])
    np.savez(
        tmp_path / "train.npz",
        jpeg=np.frombuffer(b"".join(encoded), np.uint8),
        offsets=offsets,
        labels=np.arange(12) % 2,
        classes=np.array(["a", "b"]),
    )
    corpus = read(tmp_path / "train.npz", hold_out=0.25)
    assert len(corpus.val.labels_M) == 3
    expected = {np.asarray(Image.open(io.BytesIO(data))).tobytes() for data in encoded}
    assert {image.tobytes() for side in (corpus.train, corpus.val) for image in side.images_MHWC} == expected


def test_held_out_images_are_the_same_whatever_their_order_and_are_not_trained_on(tmp_path):
    images, labels = pixels(200), np.arange(200) % 3
    order = np.random.default_rng(1).permutation(200)
    one, other = (
        write_npz(tmp_path / "one.npz", x=images, y=labels),
        write_npz(tmp_path / "other.npz", x=images[order], y=labels[order]),
    )
    corpus = read(one)
    assert len(corpus.val.labels_M) == 2 and read(other).fingerprint == corpus.fingerprint
    train = {image.tobytes() for image in corpus.train.images_MHWC}
    assert not train & {image.tobytes() for image in corpus.val.images_MHWC}
    assert len(read(one, hold_out=0.2).val.labels_M) == 40


def test_python_batches_are_decoded_plane_by_plane(tmp_path):
    folder = write_cifar10(tmp_path / "cifar-10-batches-py")
    corpus = read(folder)
    for number in range(5):
        _, data = python2_batch(seed=number)
        for row in range(7):
            image = corpus.train.images_MHWC[7 * number + row]
            for channel, y, x in ((0, 0, 0), (1, 3, 17), (2, 31, 30)):
                assert image[y, x, channel] == data[row, 1024 * channel + 32 * y + x]
    assert np.array_equal(corpus.val.images_MHWC[4, :, :, 1].ravel(), python2_batch(seed=5)[1][4, 1024:2048])
    assert corpus.train.labels_M.tolist() == [0, 1, 2, 3, 4, 5, 6] * 5 and corpus.class_names[3] == "class 3"
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(folder, "cifar-10-batches-py")
    assert read(tmp_path / "cifar-10-python.tar.gz").fingerprint == corpus.fingerprint
    assert read(tmp_path).fingerprint == corpus.fingerprint, "the folder that holds the batches' folder"


def test_cifar_100_has_its_fine_labels(tmp_path):
    for name in ("train", "test"):
        (tmp_path / name).write_bytes(python2_batch(b"fine_labels", coarse_labels=[0] * 7)[0])
    (tmp_path / "meta").write_bytes(
        pickle.dumps({b"fine_label_names": [str(index).encode() for index in range(100)]}, 2)
    )
    corpus = read(tmp_path)
    assert corpus.image.classes == 100 and corpus.train.labels_M.tolist() == list(range(7))


class Evil:
    def __reduce__(self):
        return (print, ("this ran",))


@pytest.mark.parametrize("place", ["data_batch_3", "batches.meta"])
def test_a_pickle_with_code_in_it_is_refused_and_nothing_runs(tmp_path, capsys, place):
    folder = write_cifar10(tmp_path / "batches")
    (folder / place).write_bytes(pickle.dumps({b"data": Evil(), b"labels": [], b"label_names": []}, 2))
    assert "asks for builtins.print to be called, which no data needs: it was not run" in refused(folder).replace(
        "__builtin__", "builtins"
    )
    assert "this ran" not in capsys.readouterr().out


def test_the_unpickler_admits_only_what_an_array_needs():
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    for protocol in (0, 1, 2, 3, 4):
        found = _cifar.unpickle(pickle.dumps({b"a": array, b"b": [1, "two"]}, protocol), "here")
        assert np.array_equal(found[b"a"], array) and found[b"b"][0] == 1
    for harmful in (
        b"cos\nsystem\n(S'true'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cnumpy.core.multiarray\nscalar\n.",
    ):
        with pytest.raises(ValueError, match="asks for .* to be called"):
            _cifar.unpickle(harmful, "here")
    with pytest.raises(ValueError, match="asks for .*zlib"):
        _cifar.unpickle(b"c_codecs\nencode\n(S'x'\nS'zlib'\ntR.", "here")


def test_folders_of_pictures_are_read_by_class_and_side(tmp_path):
    written = write_folders(tmp_path)
    corpus = read(tmp_path)
    assert corpus.class_names == ("ant", "bee")
    for side, pile in (("train", corpus.train), ("val", corpus.val)):
        expected = [written[side, name, number] for name in ("ant", "bee") for number in range(3)]
        assert np.array_equal(pile.images_MHWC, np.stack(expected)) and pile.labels_M.tolist() == [0, 0, 0, 1, 1, 1]
    alone = read(tmp_path / "train")
    assert len(alone.train.labels_M) == 5 and len(alone.val.labels_M) == 1


def test_grey_and_transparent_pictures_become_rgb(tmp_path):
    write_folders(tmp_path, num=2)
    grey = np.arange(48, dtype=np.uint8).reshape(8, 6)
    Image.fromarray(grey).save(tmp_path / "train" / "ant" / "0.png")
    assert np.array_equal(read(tmp_path).train.images_MHWC[0], np.stack([grey] * 3, -1))


def test_mean_and_deviation_are_those_of_the_training_pixels(tmp_path):
    write_npz(tmp_path / "train.npz", 30, 3)
    write_npz(tmp_path / "test.npz", 30, 4)
    image = read(tmp_path).image
    flat = pixels(30, 3).reshape(-1, 3).astype(np.float64)
    assert image.mean == pytest.approx(flat.mean(0), rel=1e-12) and image.std == pytest.approx(flat.std(0), rel=1e-9)
    constant = read(write_npz(tmp_path / "flat.npz", x=np.full((9, 4, 4, 1), 7, np.uint8), y=np.arange(9) % 3)).image
    assert constant.mean == (7.0,) and constant.std == (1.0,), "a constant channel is not divided by zero"


def test_the_cache_gives_back_what_was_prepared(tmp_path):
    data = part("data", {"name": "images", "path": str(write_npz(tmp_path / "a.npz")), "hold_out": 0.3})
    first = prepare(data, tmp_path / "cache")
    assert isinstance(first, ImageCorpus) and isinstance(first.train.images_MHWC.base, np.memmap | np.ndarray)
    again = load(tmp_path / "cache", first.fingerprint)
    assert (
        again.image == first.image and again.description == first.description and again.class_names == first.class_names
    )
    assert all(
        np.array_equal(a, b)
        for sides in ((again.train, first.train), (again.val, first.val))
        for a, b in zip(*sides, strict=True)
    )
    assert json.loads(json.dumps(again.format)) == again.format, "a checkpoint's manifest keeps it"
    other = tmp_path / "elsewhere"
    other.mkdir()
    moved = part("data", {"name": "images", "path": str(write_npz(other / "a.npz")), "hold_out": 0.3})
    assert Images.cache_key(moved.settings) == Images.cache_key(data.settings)
    file = tmp_path / "cache" / first.fingerprint / "train.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"train\.npy is missing or damaged"):
        load(tmp_path / "cache", first.fingerprint)


def test_a_folder_of_a_kind_that_nobody_prepares_says_so(tmp_path):
    corpus = prepare(part("data", {"name": "images", "path": str(write_npz(tmp_path / "a.npz"))}), tmp_path / "cache")
    meta = tmp_path / "cache" / corpus.fingerprint / "corpus.json"
    from stability.corpora.io import disk as _disk

    values = json.loads(meta.read_text())
    values.pop("sha256")
    _disk.write_meta(meta.parent, values | {"kind": "sounds"})
    with pytest.raises(ValueError, match="holds sounds, which no data source here prepares"):
        load(tmp_path / "cache", corpus.fingerprint)


def test_tokens_keep_the_folder_that_they_always_had(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("line\n" * 3000 + "other\n" * 3000)
    corpus = prepare(part("data", {"name": "text", "path": str(file)}), tmp_path / "cache")
    assert isinstance(corpus, Corpus) and corpus.format == corpus.vocab_size
    assert "kind" not in json.loads((tmp_path / "cache" / corpus.fingerprint / "corpus.json").read_text())


def test_batches_depend_on_the_generator_alone_and_windows_on_nothing(tmp_path):
    corpus = read(write_npz(tmp_path / "a.npz", 100), hold_out=0.3)
    draws = [corpus.batch("train", 64, 4, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)]
    assert torch.equal(draws[0].images_BHWC, draws[1].images_BHWC) and not torch.equal(
        draws[0].images_BHWC, draws[2].images_BHWC
    )
    of_image = {
        image.tobytes(): label for image, label in zip(corpus.train.images_MHWC, corpus.train.labels_M, strict=True)
    }
    assert [of_image[image.numpy().tobytes()] for image in draws[0].images_BHWC] == draws[0].labels_B.tolist()
    shown = corpus.windows("val", 7, 4)
    places = [index * 29 // 6 for index in range(7)]
    assert np.array_equal(shown.images_BHWC.numpy(), corpus.val.images_MHWC[places])
    assert len(corpus.windows("val", 500, 4).labels_B) == 30
    assert [len(piece.labels_B) for piece in shown.split(3)] == [3, 3, 1]


def test_class_frequencies_are_counted_with_one_more_each(tmp_path):
    write_npz(tmp_path / "train.npz", x=pixels(4), y=np.array([0, 0, 0, 2]))
    write_npz(tmp_path / "test.npz", 3)
    assert read(tmp_path).log_frequencies().exp().tolist() == pytest.approx([4 / 7, 1 / 7, 2 / 7])


def test_synthetic_images_are_the_same_on_every_machine():
    found = [(image, label) for image, label in synthetic.images(20, 0)]
    assert [label for _, label in found] == [*range(10)] * 2
    assert found[0][0].shape == (32, 32, 3) and found[0][0].dtype == np.uint8
    assert [int(image.astype(np.int64).sum()) for image, _ in found[:3]] == SUMS


SUMS = [392692, 400052, 391816]


def test_a_synthetic_class_is_its_direction_and_period():
    """Along its own direction a noiseless grating has its period, so that averaging over the class's phases keeps the
    power there."""
    for label in (0, 1, 2, 3):
        images = [image.astype(float) - 128 for image, own in synthetic.images(2000, 3) if own == label]
        power = sum(np.abs(np.fft.fft2(image[..., 0])) ** 2 for image in images)
        power[0, 0] = 0
        y, x = np.unravel_index(power.argmax(), power.shape)
        frequency = min(x, 32 - x) if label < 2 else min(y, 32 - y)
        assert (x if label >= 2 else y) == 0 and frequency == round(32 / (6, 12)[label % 2])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda tmp: tmp / "absent", "no such file or folder; give an .npz file"),
        (
            lambda tmp: (tmp / "empty").mkdir() or tmp / "empty",
            "holds no images; give an .npz file, CIFAR's python batches",
        ),
        (lambda tmp: (tmp / "a.csv").write_text("x") and tmp / "a.csv", "the name ends in none of .npz, .tar.gz"),
        (lambda tmp: (tmp / "a.npz").write_bytes(b"PK\3\4 cut") and tmp / "a.npz", "is cut short or no .npz file"),
        (
            lambda tmp: (tmp / "a.tar.gz").write_bytes(b"\x1f\x8b cut") and tmp / "a.tar.gz",
            "is cut short or no tar archive",
        ),
        (lambda tmp: write_npz(tmp / "a.npz", y=np.arange(3)), "one for each of 3 labels"),
        (lambda tmp: write_npz(tmp / "a.npz", y=np.array([[1]])), "one for each of 1 labels; they are 20×8×6×3 uint8"),
        (lambda tmp: write_npz(tmp / "a.npz", x=pixels(20).astype(np.float32)), "images must be uint8"),
        (lambda tmp: write_npz(tmp / "a.npz", y=np.full(20, 9)), "label 9, where there are 3 classes"),
        (
            lambda tmp: write_npz(tmp / "a.npz", y=np.zeros(20, int), classes=np.array(["one"])),
            "1 class; at least 2 are needed",
        ),
        (
            lambda tmp: write_npz(tmp / "a.npz", x=np.array([Evil()], dtype=object), y=np.zeros(1, int)),
            "holds no numbers",
        ),
        (lambda tmp: write_npz(tmp / "a.npz", 1), "holds 1 image; at least 2 are needed"),
    ],
)
def test_a_bad_path_is_told_what_would_be_right(tmp_path, spoil, message):
    assert message in refused(spoil(tmp_path))


def test_a_data_set_that_is_named_is_what_the_path_must_hold(tmp_path):
    folder = write_cifar10(tmp_path / "cifar-10-batches-py")
    assert read(folder, dataset="cifar10").fingerprint == read(folder).fingerprint
    with pytest.raises(
        ValueError, match="data.dataset=cifar100 has 100 classes, and data.path=.* has 10; give its own"
    ):
        read(folder, dataset="cifar100")
    with pytest.raises(ValueError, match="data.dataset=cifar100 needs data.path, its python batches"):
        read(None, dataset="cifar100")


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_a_plan_has_images_of_the_named_data_set_without_its_files(tmp_path, name, classes):
    corpus, is_read = prepare_for_plan(part("data", {"name": "images", "dataset": name}), tmp_path)
    assert not is_read and (corpus.image.height, corpus.image.width, corpus.image.channels) == (32, 32, 3)
    assert corpus.image.classes == classes and "random images" in corpus.description
    assert not list(tmp_path.iterdir())


def test_mixed_sizes_broken_pictures_and_strange_classes_are_named(tmp_path):
    write_folders(tmp_path)
    (tmp_path / "val" / "cat").mkdir()
    Image.fromarray(pixels(1)[0]).save(tmp_path / "val" / "cat" / "0.png")
    assert "val/ has the class 'cat', which train/ lacks" in refused(tmp_path)
    (tmp_path / "val" / "cat" / "0.png").unlink()
    Image.fromarray(pixels(1, size=(8, 7))[0]).save(tmp_path / "train" / "bee" / "1.png")
    assert "1.png has 8×7×3 and the first one 8×6×3 (height, width, channels)" in refused(tmp_path)
    (tmp_path / "train" / "bee" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n cut")
    assert "1.png is cut short or no picture" in refused(tmp_path)


def test_incomplete_and_damaged_batches_are_named(tmp_path):
    folder = write_cifar10(tmp_path / "batches")
    whole = (folder / "data_batch_2").read_bytes()
    (folder / "data_batch_2").write_bytes(whole[:-3000])
    assert "data_batch_2 is cut short or no pickle of CIFAR" in refused(folder)
    (folder / "data_batch_2").write_bytes(python2_batch(data=1)[0].replace(b"labels", b"lables"))
    assert "data_batch_2 is no batch of CIFAR: b'labels' must be a list" in refused(folder)
    (folder / "data_batch_2").unlink()
    assert "data_batch_2 of CIFAR-10 is missing" in refused(folder)
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(Path(__file__), "other.py")
    assert "holds no python batches of CIFAR" in refused(tmp_path / "a.tar.gz")


def test_a_share_to_hold_out_is_refused_where_there_is_a_test_side(tmp_path):
    write_npz(tmp_path / "train.npz")
    write_npz(tmp_path / "test.npz", 5)
    assert "data.hold_out=0.1 changes nothing here" in refused(tmp_path, hold_out=0.1)
    assert "data.hold_out=0.1 changes nothing here: the synthetic images have" in refused(None, hold_out=0.1)


def test_without_pillow_it_is_named_and_uint8_files_are_read(tmp_path, monkeypatch):
    write_folders(tmp_path / "pictures")
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(RuntimeError, match=r"Pillow, which is not installed; pip install 'stability-lab\[images\]'"):
        _pictures.decode_image(tmp_path / "pictures" / "train" / "ant" / "0.png", "a picture")
    assert len(read(write_npz(tmp_path / "a.npz")).train.labels_M) == 19


def test_shared_cifar_thousand_is_read():
    file = SHARED / "cifar10_1k_uint8.npz"
    if not file.exists():
        pytest.skip("shared/data/images is not here")
    corpus = read(file, hold_out=0.2)
    assert (
        corpus.image[:4] == (32, 32, 3, 10) and len(corpus.val.labels_M) == 200 and corpus.class_names[0] == "airplane"
    )
    stored = np.load(file)
    assert {image.tobytes() for image in corpus.val.images_MHWC} <= {image.tobytes() for image in stored["x"]}
