import gzip
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from paceline.data.base import Data, Source, Spec
from paceline.data.images import Images
from paceline.errors import DataError, MissingExtraError

MNIST = Path(__file__).resolve().parents[2].parent / "shared/data/mnist"
PIXELS = np.random.default_rng(0).integers(0, 256, (20, 12, 10), dtype=np.uint8)
LABELS = (np.arange(20) % 4).astype(np.uint8)


def idx(array: np.ndarray, dtype: int = 0x08) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, dtype, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder: Path, prefix: str = "train", suffix: str = "", size: int = 20, labels: int | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    pack = gzip.compress if suffix else bytes
    images = folder / f"{prefix}-images-idx3-ubyte{suffix}"
    images.write_bytes(pack(idx(PIXELS[:size])))
    (folder / f"{prefix}-labels-idx1-ubyte{suffix}").write_bytes(pack(idx(LABELS[: labels or size])))
    return images


def write_images(folder: Path, colours: dict[str, Sequence[tuple[int, int, int]]], suffix: str = ".png") -> Path:
    for name, colours_of_class in colours.items():
        (folder / name).mkdir(parents=True)
        for i, colour in enumerate(colours_of_class):
            Image.new("RGB", (20, 30), colour).save(folder / name / f"{i}{suffix}")
    return folder


def read_all(source: Source) -> tuple[torch.Tensor, torch.Tensor]:
    return source.read(np.arange(len(source)))


def rows(images: torch.Tensor) -> set[tuple[float, ...]]:
    return {tuple(image.flatten().tolist()) for image in images}


def test_the_default_is_the_bundled_digits() -> None:
    splits = Images(size=8).open()
    assert splits.train.spec == splits.held_out.spec == Spec(num_classes=10, input_shape=(1, 8, 8))
    assert (len(splits.train), len(splits.held_out)) == (1617, 180)
    images, labels = read_all(splits.held_out)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert images.aminmax() == (-1, 1)
    assert labels.bincount().min() >= 5, "every digit is held out"
    again = read_all(Images(size=8).open().held_out)
    assert torch.equal(images, again[0])


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"scikit-learn; pip install 'paceline\[vision\]'"):
        Images().open()


def test_without_pillow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtraError, match=r"pillow; pip install 'paceline\[vision\]'"):
        Images(path=tmp_path).open()


@pytest.mark.parametrize(("suffix", "size"), [("", 16), (".gz", 8)])
def test_idx_files_are_split_by_sample(tmp_path: Path, suffix: str, size: int) -> None:
    splits = Images(path=write_idx(tmp_path, suffix=suffix), size=size, held_out_fraction=0.25).open()
    assert splits.train.spec == Spec(num_classes=4, input_shape=(1, size, size))
    train, held_out = read_all(splits.train), read_all(splits.held_out)
    assert (len(train[0]), len(held_out[0])) == (15, 5)
    assert not rows(train[0]) & rows(held_out[0])
    pixels = torch.from_numpy(PIXELS)[:, None] / 127.5 - 1
    resized = F.interpolate(pixels, (size, size), mode="bilinear", antialias=True)
    numbers = []
    for images, labels in (train, held_out):
        for image, label in zip(images, labels, strict=True):
            distance = (resized - image).abs().amax((1, 2, 3))
            assert distance.min() < 1e-5
            numbers.append(int(distance.argmin()))
            assert LABELS[numbers[-1]] == label
    assert sorted(numbers) == list(range(20))
    assert max(numbers[15:]) - min(numbers[15:]) > 4, "held out from all over, not from one end"


def test_idx_files_of_the_size_asked_for_keep_their_pixels(tmp_path: Path) -> None:
    square = np.ascontiguousarray(PIXELS[:, :10, :10])
    path = write_idx(tmp_path)
    path.write_bytes(idx(square))
    images, _ = Images(path=path, size=10).open().train.read(np.array([0]))
    assert ((images[0, 0] + 1) * 127.5).round().to(torch.uint8).tolist() in square.tolist()


@pytest.mark.parametrize("test", ["t10k", "test"])
@pytest.mark.parametrize("is_folder", [True, False])
def test_idx_files_to_test_with_are_what_is_held_out(tmp_path: Path, test: str, is_folder: bool) -> None:
    images = write_idx(tmp_path, suffix=".gz")
    write_idx(tmp_path, test, size=3)
    splits = Images(path=tmp_path if is_folder else images).open()
    assert (len(splits.train), len(splits.held_out)) == (20, 3)
    assert splits.held_out.read(np.array([2, 0]))[1].tolist() == [2, 0]
    assert splits.held_out.spec.num_classes == 4


def changed(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None


IMAGES, LABELS_FILE = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            changed(IMAGES, lambda data: data[:-1]),
            r"idx3-ubyte must .* 16 \+ 20 \* 12 \* 10 = 2416 bytes .* got 2415",
        ),
        (changed(IMAGES, lambda data: data + b"x"), "got 2417"),
        (changed(IMAGES, lambda data: idx(LABELS)), "starts with 0x00000803, but got 0x00000801"),
        (changed(IMAGES, lambda data: idx(PIXELS, dtype=0x0D)), "but got 0x00000d03"),
        (changed(IMAGES, lambda data: data[:9]), "but got 0x00000803 and 9 bytes"),
        (changed(IMAGES, lambda data: b""), "but got 0x and 0 bytes"),
        (changed(IMAGES, lambda data: idx(PIXELS[:0])), "must hold one sample or more"),
        (changed(LABELS_FILE, lambda data: idx(LABELS[:7])), "as many images as labels, but got 20 and 7"),
        (changed(LABELS_FILE, lambda data: idx(LABELS * 0 + 3)), "at least 2 classes, but got 1"),
        (lambda folder: (folder / LABELS_FILE).unlink(), f"labels .* but got no .*{LABELS_FILE}"),
    ],
)
def test_damaged_idx_files_are_refused(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    write_idx(tmp_path)
    spoil(tmp_path)
    with pytest.raises(DataError, match=message):
        Images(path=tmp_path).open()


@pytest.mark.parametrize("change", [lambda data: data[:-20], lambda data: b"no gzip", lambda data: data[:99] + data])
def test_damaged_gzip_files_are_refused(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    path = write_idx(tmp_path, suffix=".gz")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=r"idx3-ubyte\.gz must be a whole gzip file"):
        Images(path=tmp_path).open()


def test_an_image_is_no_data_set(tmp_path: Path) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "cat.png")
    with pytest.raises(DataError, match=r"the labels of .*cat\.png must lie beside it"):
        Images(path=tmp_path / "cat.png").open()


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere must be readable, but got: No such file"):
        Images(path=tmp_path / "nowhere").open()


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".JPEG", ".bmp", ".webp"])
def test_a_folder_of_a_folder_for_each_class(tmp_path: Path, suffix: str) -> None:
    write_images(tmp_path, {"red": [(255, 0, 0)] * 6, "blue": [(0, 0, 255)] * 4}, suffix)
    (tmp_path / "red" / "notes.txt").write_text("no image")
    (tmp_path / ".cache").mkdir()
    splits = Images(path=tmp_path, size=12, held_out_fraction=0.3).open()
    assert splits.train.spec == splits.held_out.spec == Spec(num_classes=2, input_shape=(3, 12, 12))
    assert (len(splits.train), len(splits.held_out)) == (7, 3)
    expected = torch.tensor([[-1.0, -1, 1], [1, -1, -1]])  # blue is class 0
    for source in (splits.train, splits.held_out):
        images, labels = read_all(source)
        colour = expected[labels][:, :, None, None].expand_as(images)
        torch.testing.assert_close(images, colour, rtol=0, atol=0.03)  # webp's colours are 3 of 255 off


def test_images_are_read_in_the_order_asked_for(tmp_path: Path) -> None:
    write_images(tmp_path, {"a": [(i * 20, 0, 0) for i in range(6)], "b": [(0, i * 20, 9) for i in range(6)]})
    source = Images(path=tmp_path).open().train
    images, labels = read_all(source)
    order = np.array([5, 0, 5, 3])
    picked = source.read(order)
    assert torch.equal(picked[0], images[order])
    assert torch.equal(picked[1], labels[order])
    assert len(rows(images)) == len(source), "the colours differ"


def test_an_image_stays_on_its_side_wherever_the_folder_lies(tmp_path: Path) -> None:
    colours = {"a": [(i * 20, 0, 0) for i in range(6)], "b": [(0, i * 20, 9) for i in range(6)]}
    one, other = (read_all(Images(path=write_images(tmp_path / name, colours)).open().train)[0] for name in "xy")
    assert torch.equal(one, other)


@pytest.mark.parametrize("test", ["val", "test"])
def test_folders_to_train_and_test_with(tmp_path: Path, test: str) -> None:
    write_images(tmp_path / "train", {"a": [(0, 0, 0)] * 3, "b": [(0, 0, 0)]})
    write_images(tmp_path / test, {"a": [(255, 0, 0)], "b": [(255, 0, 0)] * 2})
    splits = Images(path=tmp_path).open()
    assert splits.train.spec.num_classes == 2
    assert read_all(splits.train)[1].tolist() == [0, 0, 0, 1]
    images, labels = read_all(splits.held_out)
    assert labels.tolist() == [0, 1, 1]
    assert images[:, 0].min() == 1
    (tmp_path / test / "c").mkdir()
    with pytest.raises(DataError, match=f"{test} must have the class folders of .*in only one of the two: c;"):
        Images(path=tmp_path).open()


def test_folders_without_two_classes_of_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must have at least 2 classes, but got 0"):
        Images(path=tmp_path).open()
    write_images(tmp_path, {"a": [(0, 0, 0)]})
    with pytest.raises(DataError, match="must have at least 2 classes, but got 1"):
        Images(path=tmp_path).open()
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match=r"b must hold images \(\.bmp, .*, but got none"):
        Images(path=tmp_path).open()


@pytest.mark.parametrize("change", [lambda data: b"", lambda data: b"no image", lambda data: data[: len(data) // 2]])
def test_a_damaged_image_is_named_when_it_is_read(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    write_images(tmp_path, {"a": [(0, 0, 0)] * 5, "b": [(0, 0, 0)] * 5})
    source = Images(path=tmp_path).open().train
    labels = read_all(source)[1].numpy()
    for path in (tmp_path / "b").iterdir():
        path.write_bytes(change(path.read_bytes()))
    assert source.read(np.flatnonzero(labels == 0))[0].shape[1:] == (3, 16, 16)
    with pytest.raises(DataError, match=r"b/\d\.png must be a whole image, but got: .+; replace or remove it"):
        source.read(np.flatnonzero(labels == 1))


def test_grey_palette_and_16_bit_images_become_rgb(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("L", (9, 9), 128).save(tmp_path / name / "grey.png")
        Image.new("RGBA", (9, 9), (128, 128, 128, 255)).save(tmp_path / name / "alpha.png")
        Image.new("RGB", (9, 9), (128, 128, 128)).quantize(2).save(tmp_path / name / "palette.png")
        Image.fromarray(np.full((9, 9), 128 * 256, dtype=np.uint16)).save(tmp_path / name / "16_bits.png")
    splits = Images(path=tmp_path).open()
    for source in (splits.train, splits.held_out):
        torch.testing.assert_close(read_all(source)[0], torch.full((len(source), 3, 16, 16), 128 / 127.5 - 1))


def test_settings_come_from_a_name_and_fields() -> None:
    assert Data.model_validate({"name": "images", "size": 8}) == Images(size=8)
    for bad in ({"size": 7}, {"held_out_fraction": 0.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Images.model_validate(bad)


@pytest.mark.skipif(not MNIST.exists(), reason=f"needs {MNIST}")
def test_mnist() -> None:
    splits = Images(path=MNIST, size=28).open()
    assert (len(splits.train), len(splits.held_out)) == (60_000, 10_000)
    images, labels = splits.train.read(np.arange(1000))
    assert labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert images.mean().item() == pytest.approx(2 * 0.1307 - 1, abs=0.01)


def test_both_decoders_of_jpegs_agree_but_for_rounding(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(3):
            smooth = Image.fromarray(generator.integers(0, 256, (5, 5, 3), dtype=np.uint8)).resize((60, 50))
            smooth.save(tmp_path / name / f"{number}.jpg", quality=95)
            smooth.save(tmp_path / name / f"{number}.png")
    both = [Images(path=tmp_path, size=24, decoder=decoder).open().train for decoder in ("pillow", "simplejpeg")]
    first, second = (read_all(source)[0] for source in both)
    assert (first - second).abs().max() < 0.15
    broken = tmp_path / "a" / "0.jpg"
    broken.write_bytes(broken.read_bytes()[:20])
    with pytest.raises(DataError, match=r"0\.jpg must be a whole image"):
        list(map(read_all, (both[1], Images(path=tmp_path, size=24, decoder="simplejpeg").open().held_out)))
