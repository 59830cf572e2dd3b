"""What a user's image files are told that are almost right, and folders of pictures deeper than one level."""

from __future__ import annotations

import io
import pickle
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pytest
from PIL import Image

from stability.corpora.images import cifar as _cifar
from stability.data.images import Images, ImagesConfig


def pixels(num):
    return np.random.default_rng(0).integers(0, 256, (num, 8, 6, 3), dtype=np.uint8)


def read(path, **settings):
    return Images.prepare(ImagesConfig(path=str(path), **settings))


def refused(path) -> str:
    with pytest.raises(ValueError) as caught:
        read(path)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def written_npz(file, **arrays):
    np.savez(file, **({"x": pixels(4), "y": np.arange(4) % 2} | arrays))
    return file


def written(file, content: bytes):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def picture(shade: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), shade, np.uint8)).save(stream, "png")
    return stream.getvalue()


def as_npz(file, array):
    stream = io.BytesIO()
    np.save(stream, array)
    return written(file, stream.getvalue())


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"y": np.array([0, 1, 70_000, 2])},
            "label 70000; labels number the classes from 0, and there may be 65,536 at most",
        ),
        ({"y": np.array([0, 1, 10**8, 2])}, "label 100000000; labels number the classes from 0"),
        ({"classes": np.array("ab")}, "'classes' must be a list of names, one for each class; it has 0 axes"),
    ],
)
def test_an_npz_file_with_a_strange_array_is_told_which(tmp_path, arrays, message):
    assert message in refused(written_npz(tmp_path / "a.npz", **arrays))


@pytest.mark.parametrize("offsets", [3, [0.0, 5.0, 10.0], [0, -5, 10], [0, 5, 11], [0, 10], [[0, 5, 10]]])
def test_offsets_that_do_not_cut_the_bytes_into_images_are_refused(tmp_path, offsets):
    np.savez(tmp_path / "a.npz", jpeg=np.zeros(10, np.uint8), offsets=np.array(offsets), labels=np.array([0, 1]))
    assert "'offsets' 3 rising integers up to 10: where each of 2 images begins" in refused(tmp_path / "a.npz")


def test_one_array_called_npz_and_an_array_larger_than_memory_are_named(tmp_path):
    assert "holds one array without labels, as np.save writes it; np.savez(file, x=images, y=labels)" in refused(
        as_npz(tmp_path / "a.npz", pixels(3))
    )
    vast = io.BytesIO()
    np.lib.format.write_array_header_1_0(vast, {"descr": "|u1", "fortran_order": False, "shape": (10**15,)})
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("x.npy", vast.getvalue())
        archive.write(as_npz(tmp_path / "y.npy", np.arange(4) % 2), "y.npy")
    assert "its array 'x' is cut short" in refused(tmp_path / "b.npz")


def test_what_is_no_tar_archive_is_told_so_in_one_line(tmp_path):
    with tarfile.open(tmp_path / "whole.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("other"), io.BytesIO())
    whole = (tmp_path / "whole.tar.gz").read_bytes()
    for name, content in (
        ("a.tar.gz", b"nope"),
        ("a.tar", b""),
        ("b.tar.gz", whole[:30]),
        ("c.tar.gz", whole[:12] + b"\0\0\0\0" + whole[16:]),
    ):
        assert "is cut short or no tar archive, plain or packed by gzip (" in refused(written(tmp_path / name, content))
    with tarfile.open(tmp_path / "none.tar", "w"):
        pass
    assert "holds no python batches of CIFAR" in refused(tmp_path / "none.tar")


def test_a_pickle_of_a_few_bytes_takes_no_gigabytes():
    tracemalloc.start()
    try:
        # LONG_BINPUT and PUT of number 2²⁴: 268 MB in the unpickler that is in C
        for code in (b"\x80\x04Nr\x00\x00\x00\x01.", b"Np16777216\n."):
            assert _cifar.unpickle(code, "here") is None
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
    for broken in (b"\x80\x04T\xff", b"\x80\x04\x95\x01", b"\x80\x02J\x01", b"\xff", b"\x80\x02]q"):
        with pytest.raises(ValueError, match="here is cut short or no pickle of CIFAR"):
            _cifar.unpickle(broken, "here")
    assert _cifar.unpickle(pickle.dumps([b"a"] * 3, 2), "here") == [b"a"] * 3


def test_pictures_below_a_class_are_read_folder_by_folder(tmp_path):
    """As torchvision's make_dataset: os.walk of each class folder sorted by the paths of the folders, the names within
    each sorted."""
    files = [
        "train/cat/z.png",
        "train/cat/b/2.png",
        "train/cat/b/1.png",
        "train/cat/b/c/0.png",
        "train/cat/b-x/3.png",
        "train/dog/deep/er/4.png",
    ]
    for shade, name in enumerate(files):
        written(tmp_path / name, picture(shade))
    written(tmp_path / "val" / "dog" / "one" / "5.png", picture(99))
    for hidden in ("train/cat/.trash/7.png", "train/cat/._z.png"):
        written(tmp_path / hidden, b"no picture")
    corpus = read(tmp_path)
    assert corpus.train.images_MHWC[:, 0, 0, 0].tolist() == [0, 2, 1, 4, 3, 5], "cat, cat/b, cat/b-x, cat/b/c"
    assert corpus.train.labels_M.tolist() == [0] * 5 + [1] and corpus.val.images_MHWC[:, 0, 0, 0].tolist() == [99]


def test_pictures_of_one_name_below_a_class_are_told_apart(tmp_path):
    for name in ("cat/a/1.png", "cat/b/1.png", "dog/1.png"):
        written(tmp_path / "one" / name, picture(len(name)))
    before = Images.cache_key(ImagesConfig(path=str(tmp_path / "one")))
    written(tmp_path / "one" / "cat" / "a" / "1.png", picture(200))
    assert Images.cache_key(ImagesConfig(path=str(tmp_path / "one"))) != before


def test_a_class_called_train_and_sides_under_other_names_are_refused(tmp_path):
    for name in ("train/1.png", "car/1.png", "bus/1.png"):
        written(tmp_path / "flat" / name, picture(1))
    assert (
        "train/ holds pictures but no folders of classes; give train/<class>/*.png (a class cannot be called 'train')"
        in refused(tmp_path / "flat")
    )
    for name in ("training/ant/1.png", "testing/ant/1.png", "training/bee/1.png", "testing/bee/1.png"):
        written(tmp_path / "sides" / name, picture(1))
    assert (
        "testing/ and training/ both hold a folder 'ant': if they are the sides, call them train/ and val/ or test/"
        in refused(tmp_path / "sides")
    )


def test_so_few_held_out_images_that_accuracy_is_coarse_are_described(tmp_path):
    of = {"x": np.random.default_rng(0).integers(0, 256, (400, 4, 4, 3), dtype=np.uint8), "y": np.arange(400) % 2}
    file = written_npz(tmp_path / "a.npz", **of)
    assert read(file).describe(4).endswith("; 4 held-out images: accuracy in steps of 25 %")
    assert read(file, hold_out=0.25).describe(4).endswith("a patch of 2×2 a position")
