"""Pictures of more than 8 bits and of another orientation, against numpy and Pillow; labels of every integer type."""

from __future__ import annotations

import io
import os
import struct

import numpy as np
import pytest
from PIL import Image, ImageOps

from stability.corpora.images.folders import decode_image
from stability.data.images import Images, ImagesConfig

RAMP = np.linspace(0, 65535, 48).astype(np.uint16).reshape(6, 8)


def encoded(picture, kind, **more) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind, **more)
    return stream.getvalue()


def oriented(pixels, orientation, kind="png") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(Image.fromarray(pixels), kind, exif=exif.tobytes())


def tiff_of_12_bits(rows) -> bytes:
    """Write an uncompressed TIFF of 12 bits a pixel by hand: Pillow writes none."""
    bits = "".join(f"{value:012b}" for row in rows for value in row)
    data = int(bits, 2).to_bytes(len(bits) // 8, "big")
    height, width = len(rows), len(rows[0])
    tags = {256: width, 257: height, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: len(data)}
    data += bytes(len(data) % 2)
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(tags)) + entries + bytes(4)


@pytest.mark.parametrize(
    ("pixels", "kind"),
    [
        (RAMP, "png"),
        (RAMP, "tiff"),
        (RAMP.astype(">u2"), "tiff"),
        (RAMP, "ppm"),
        (RAMP.astype(np.int32), "tiff"),
        (RAMP >> 9, "png"),
    ],
)
def test_16_bits_keep_their_upper_8(pixels, kind):
    found = decode_image(encoded(Image.fromarray(pixels), kind), "here")
    assert found.dtype == np.uint8 and np.array_equal(found, np.repeat((pixels >> 8)[..., None], 3, axis=-1))


def test_12_bits_keep_their_upper_8():
    rows = [[0, 4095, 255, 256], [1024, 2048, 3000, 15]]
    found = decode_image(tiff_of_12_bits(rows), "here")
    assert found[..., 0].tolist() == [[value >> 4 for value in row] for row in rows]


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (RAMP.astype(np.float32) / 65535, "here has floating-point pixels, whose range is not known; save it with 8"),
        (RAMP.astype(np.int32) - 1, "here has 32-bit pixels from -1 to 65,534, of which the range is not known"),
        (RAMP.astype(np.int32) + 1, "here has 32-bit pixels from 1 to 65,536, of which"),
        (RAMP.astype(np.int32) >> 8, "here has 32-bit pixels from 0 to 255, of which"),
    ],
)
def test_pixels_of_an_unknown_range_are_refused_by_name(pixels, message):
    with pytest.raises(ValueError) as caught:
        decode_image(encoded(Image.fromarray(pixels), "tiff"), "here")
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["png", "jpeg", "tiff", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_upright_as_their_exif_says(kind, orientation):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    content = oriented(pixels, orientation, kind)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert expected.size == ((6, 8) if orientation > 4 else (8, 6))
    assert np.array_equal(decode_image(content, "here"), np.asarray(expected.convert("RGB")))


def test_16_bits_are_turned_too():
    assert np.array_equal(decode_image(oriented(RAMP, 6), "here")[..., 0], np.rot90(RAMP >> 8, -1))


def test_a_damaged_tag_beside_the_orientation_refuses_no_picture():
    """ImageOps.exif_transpose, which writes all tags anew, raises a TypeError for it."""
    exif = Image.Exif()
    exif[0x0112], exif[0x011A] = 6, 72.0
    content = encoded(Image.fromarray(RAMP.astype(np.uint8)), "jpeg", exif=exif.tobytes())
    hurt = content.replace(struct.pack(">HH", 0x011A, 5), struct.pack(">HH", 0x011A, 2))
    if hurt == content:
        hurt = content.replace(struct.pack("<HH", 0x011A, 5), struct.pack("<HH", 0x011A, 2))
    assert hurt != content
    assert decode_image(hurt, "here").shape == (8, 6, 3)


def test_pictures_that_need_no_turn_and_no_scaling_keep_their_fingerprint(tmp_path):
    """The fingerprint of the code before pictures were turned and scaled: no run id of such a folder moves."""
    for index in range(4):
        file = tmp_path / "pictures" / f"class{index % 2}" / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), 50 * index, np.uint8)).save(file)
    corpus = Images.prepare(ImagesConfig(path=str(tmp_path / "pictures")))
    assert corpus.fingerprint[:12] == "cd723bc2fb77"
    assert Images.prepare(ImagesConfig(path=None)).fingerprint[:12] == "86651ff22527"


def npz(tmp_path, **arrays):
    np.savez(tmp_path / "a.npz", **arrays)
    return tmp_path / "a.npz"


@pytest.mark.parametrize("classes", [None, ["a", "b", "c"]])
@pytest.mark.parametrize("dtype", [f"{kind}{size}" for kind in ("int", "uint") for size in (8, 16, 32, 64)])
@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_labels_of_every_integer_type_number_the_classes(tmp_path, dtype, classes, shape):
    named = {} if classes is None else {"classes": np.array(classes)}
    labels = (np.arange(6) % 3).astype(dtype).reshape(shape)
    images = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 3), dtype=np.uint8)
    corpus = Images.prepare(ImagesConfig(path=str(npz(tmp_path, x=images, y=labels, **named)), hold_out=0.2))
    assert corpus.class_names == tuple(classes or "012")
    assert sorted(np.concatenate([corpus.train.labels_M, corpus.val.labels_M]).tolist()) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"x": (6, 3, 32, 32)},
            "images are 6×3×32×32, channels first; give (number, height, width, channels): x.trans",
        ),
        ({"x": (6, 1, 28, 28)}, "images are 6×1×28×28, channels first"),
        ({"x": (6, 3, 32, 48)}, "images are 6×3×32×48, channels first"),
        ({"x": (6, 4, 32, 32)}, "images are 6×4×32×32, channels first"),
        ({"y": np.eye(3)[np.arange(6) % 3]}, "the labels are 6×3 float64; give the number of its class, a whole one"),
        ({"y": np.eye(3)[np.arange(6) % 3]}, "y.argmax(axis=1), if each row marks its class"),
        ({"y": np.arange(6) % 3 * 1.0}, "the labels are 6 float64; give the number of its class, a whole one from 0"),
        ({"y": np.arange(6) % 2 == 1}, "the labels are 6 bool; give the number"),
        ({"y": np.arange(6) - 1}, "the labels are 6 int64 from -1; give the number"),
        ({"y": np.array(["a"] * 6)}, "the labels are 6 <U1; give the number"),
    ],
)
def test_arrays_of_another_form_are_told_which_they_are(tmp_path, arrays, message):
    given = {"x": (6, 4, 4, 3), "y": np.arange(6) % 3} | arrays
    with pytest.raises(ValueError) as caught:
        Images.prepare(ImagesConfig(path=str(npz(tmp_path, x=np.zeros(given["x"], np.uint8), y=given["y"]))))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(6, 3, 3, 3), (6, 1, 16, 12), (6, 16, 16, 13), (6, 3, 32, 3)])
def test_arrays_that_may_be_channels_last_are_read_so(tmp_path, shape):
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    corpus = Images.prepare(ImagesConfig(path=str(npz(tmp_path, x=images, y=np.arange(6) % 3))))
    assert corpus.image[:3] == shape[1:]


def test_files_beside_the_pictures_are_named(tmp_path):
    for index in range(4):
        file = tmp_path / "pictures" / "train" / f"class{index % 2}" / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), 50 * index, np.uint8)).save(file)
    for name in ("labels.csv", "train/class0/notes.txt", "extra/0.png", "train/class1/.hidden"):
        (tmp_path / "pictures" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "pictures" / name).write_bytes(b"")
    description = Images.prepare(ImagesConfig(path=str(tmp_path / "pictures"))).description
    assert "pictures (left out: extra/0.png, labels.csv, train/class0/notes.txt): " in description


def test_a_folder_beside_the_pictures_that_cannot_be_read_is_passed_over(tmp_path, monkeypatch):
    """As lost+found at the root of a disk."""
    for index in range(4):
        file = tmp_path / "pictures" / "train" / f"class{index % 2}" / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), 50 * index, np.uint8)).save(file)
    (tmp_path / "pictures" / "lost+found").mkdir()
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("lost+found"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert "left out" not in Images.prepare(ImagesConfig(path=str(tmp_path / "pictures"))).description


def test_upper_case_names_of_arrays_are_found(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 3), dtype=np.uint8)
    npz(tmp_path, x=images, y=np.arange(6) % 3).rename(tmp_path / "TRAIN.NPZ")
    assert Images.prepare(ImagesConfig(path=str(tmp_path))).image[:3] == (4, 4, 3)
