"""Images to classify: scikit-learn's digits, IDX files (MNIST and others), folders of image files.

Shapes: B images of a batch, N of a source, C channels, H and W pixels, S pixels of a side after resizing.
"""

import gzip
import hashlib
import math
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from paceline.data.base import Data, Source, Spec, Splits
from paceline.data.image_decoding import Decoder, check_pillow, decode_image, open_simplejpeg
from paceline.data.local_path import LocalPath
from paceline.data.orders import Indices
from paceline.errors import BadSample, DataError, missing_extra
from paceline.registry import register

_Samples = list[tuple[Path, int]]
_Bytes = np.ndarray[tuple[Any, ...], np.dtype[np.uint8]]

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
IDX_UINT8 = 0x08
HALF_RANGE = 127.5
"""Pixels 0..255 become (pixel / 255 - 0.5) / 0.5 = pixel / 127.5 - 1."""


@register("images")
class Images(Data):
    """Labelled images, resized to a square (whatever their own proportions), with values from -1 to 1.

    Data without held-out images of its own is split by the hashes of the images' names or numbers, so that
    the same images are held out in every run.
    """

    path: LocalPath | None = None
    """Folder with ``train-images*-idx3-ubyte[.gz]`` and ``train-labels*-idx1-ubyte[.gz]``, or that images
    file itself (held out: ``t10k-`` or ``test-`` beside it, if present); or a folder with one folder of png,
    jpg, jpeg, bmp or webp files per class (held out: if it has ``train`` and ``val`` or ``test``,
    each with the class folders, the latter). None: scikit-learn's 1,797 digits."""
    size: int = Field(16, ge=8)
    """Height and width of an image in pixels."""
    decoder: Decoder = "pillow"
    """Decoder of JPEG files: simplejpeg takes half the time, and is an extra; the two differ in rounding."""
    held_out_fraction: float = Field(0.1, gt=0, lt=1)
    """Fraction of the images that is held out, if the data has no test images of its own."""

    def open(self) -> Splits:
        """Open the images.

        Raises:
            DataError: The images are missing, empty, damaged or of fewer than two classes.
            MissingExtraError: scikit-learn or Pillow is needed and not installed.
        """
        if self.path is None:
            return self._open_arrays("the bundled digits", _load_digits(), None)
        path = self.path.expanduser()
        try:
            idx = _find_idx(path)
            if idx is None:
                return self._open_folder(path)
            test = _find_test_idx(idx)
            return self._open_arrays(str(path), _read_idx_pair(idx), _read_idx_pair(test) if test else None)
        except OSError as error:
            found = error.strerror or error
            raise DataError(
                f"{error.filename or path} must be readable, but got: {found}; check --data.path"
            ) from error

    def _open_arrays(self, name: str, train: "_Arrays", test: "_Arrays | None") -> Splits:
        labels = train.labels_N if test is None else torch.cat([train.labels_N, test.labels_N])
        num_classes = int(labels.max()) + 1
        _require_classes(name, int((labels.bincount() > 0).sum()))
        if test is None:
            kept, held_out = _split([str(i) for i in range(len(labels))], self.held_out_fraction)
            train, test = train.take(kept), train.take(held_out)
        return Splits(ArrayImages(train, num_classes, self.size), ArrayImages(test, num_classes, self.size))

    def _open_folder(self, folder: Path) -> Splits:
        check_pillow()
        if self.decoder == "simplejpeg":
            open_simplejpeg()
        train, test = _list_splits(folder)
        classes = _list_classes(train)
        samples = _list_files(train, classes)
        if test is not None:
            if _list_classes(test) != classes:
                raise DataError(
                    f"{test} must have the class folders of {train}, but these are in only one of the two: "
                    f"{', '.join(sorted(set(classes) ^ set(_list_classes(test))))}; add or remove them"
                )
            return self._file_splits(samples, _list_files(test, classes), classes)
        kept, held_out = _split([str(path.relative_to(train)) for path, _ in samples], self.held_out_fraction)
        return self._file_splits([samples[i] for i in kept], [samples[i] for i in held_out], classes)

    def _file_splits(self, train: _Samples, held_out: _Samples, classes: Sequence[str]) -> Splits:
        open_side = partial(FileImages, classes=classes, size=self.size, decoder=self.decoder)
        return Splits(open_side(train), open_side(held_out))


@dataclass(frozen=True)
class _Arrays:
    images_NHW: Tensor
    """uint8."""
    labels_N: Tensor
    """int64."""

    def take(self, indices: Sequence[int]) -> "_Arrays":
        return _Arrays(self.images_NHW[indices], self.labels_N[indices])


class ArrayImages(Source):
    """Grey images held in memory as bytes, resized when read."""

    is_thread_safe = True

    def __init__(self, arrays: _Arrays, num_classes: int, size: int):
        self.spec = Spec(num_classes, (1, size, size))
        self._arrays = arrays

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._arrays.labels_N)

    def read(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return images_BCSS (float32, -1..1) and labels_B."""
        which = torch.from_numpy(indices)
        images = self._arrays.images_NHW[which, None].float()
        size = self.spec.input_shape[-2:]
        if images.shape[-2:] != size and len(indices):
            images = F.interpolate(images, size, mode="bilinear", antialias=True)
        return normalise(images), self._arrays.labels_N[which]


class FileImages(Source):
    """Image files, decoded as RGB and resized when read."""

    is_thread_safe = decodes_samples = True

    def __init__(self, samples: _Samples, classes: Sequence[str], size: int, decoder: Decoder = "pillow"):
        self.spec = Spec(len(classes), (3, size, size), tuple(classes))
        self._decoder = decoder
        self._paths = [path for path, _ in samples]
        self._labels_N = torch.tensor([label for _, label in samples])

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._paths)

    def read(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return images_BCSS (float32, -1..1) and labels_B.

        Raises:
            BadSample: A file is no image, or is damaged.
        """
        return self.collate(self.decode(self.fetch(indices)))

    def fetch(self, indices: Indices) -> tuple[Indices, list[bytes]]:
        """Return the indices, and the bytes of their files.

        Raises:
            BadSample: A file cannot be read.
        """
        return indices, [_read_file(self._paths[index]) for index in indices]

    def decode(
        self, fetched: tuple[Indices, list[bytes]], seeds: Sequence[int] | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Return an image (3, S, S) of bytes and a label of each file; see `read`."""
        indices, files = fetched
        size = self.spec.input_shape[-1]
        pixels = np.empty((len(files), size, size, 3), dtype=np.uint8)
        for row, (index, file) in enumerate(zip(indices, files, strict=True)):
            pixels[row] = decode_image(file, size, name=str(self._paths[index]), decoder=self._decoder)
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        return list(zip(images, self._labels_N[torch.from_numpy(indices)], strict=True))

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return images (float32, -1..1) and labels of images of bytes, all of one size.

        NumPy computes, in this thread alone: the threads of torch's operations would wait for those that decode.
        """
        shape = samples[0][0].shape if samples else self.spec.input_shape
        images = np.empty((len(samples), *shape), dtype=np.float32)
        for row, (image, _) in zip(images, samples, strict=True):
            np.copyto(row, image.numpy())
            row /= HALF_RANGE
            row -= 1
        labels = torch.tensor([int(label) for _, label in samples], dtype=torch.int64)
        return torch.from_numpy(images), labels


def normalise(images: Tensor) -> Tensor:
    """Return pixels from -1 to 1, of bytes as floats, which are changed."""
    return images.div_(HALF_RANGE).sub_(1)


def _split(names: Sequence[str], fraction: float) -> tuple[list[int], list[int]]:
    """Return the indices to train on and to hold out, each in order; neither is empty."""
    num_held_out = min(max(round(len(names) * fraction), 1), len(names) - 1)
    hashes = [hashlib.blake2b(os.fsencode(name), digest_size=8).digest() for name in names]
    shuffled = sorted(range(len(names)), key=hashes.__getitem__)
    return sorted(shuffled[num_held_out:]), sorted(shuffled[:num_held_out])


def _require_classes(name: str, num_classes: int) -> None:
    if num_classes < 2:
        raise DataError(f"{name} must have at least 2 classes, but got {num_classes}; there is nothing to tell apart")


def _load_digits() -> _Arrays:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise missing_extra("scikit-learn", "vision", "training on the bundled digits (data.path=None)") from error
    digits = load_digits()
    pixels = torch.from_numpy(digits.images).mul(255 / 16).round().to(torch.uint8)
    return _Arrays(pixels, torch.from_numpy(digits.target).long())


def _list_splits(root: Path) -> tuple[Path, Path | None]:
    """Return the training folder, and the held-out one or None."""
    tests = [root / name for name in ("val", "test") if (root / name).is_dir()]
    has_train = (root / "train").is_dir() and any(child.is_dir() for child in (root / "train").iterdir())
    return (root / "train", tests[0]) if tests and has_train else (root, None)


def _list_classes(folder: Path) -> list[str]:
    classes = sorted(child.name for child in folder.iterdir() if child.is_dir() and child.name[0] != ".")
    _require_classes(f"{folder} (a folder of images for each class, or IDX files)", len(classes))
    return classes


def _list_files(folder: Path, classes: Sequence[str]) -> _Samples:
    samples: _Samples = []
    for label, name in enumerate(classes):
        files = [file for file in sorted((folder / name).iterdir()) if file.suffix.lower() in IMAGE_SUFFIXES]
        if not files:
            kinds = ", ".join(sorted(IMAGE_SUFFIXES))
            raise DataError(f"{folder / name} must hold images ({kinds}), but got none; add some or remove the folder")
        samples += [(file, label) for file in files]
    return samples


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadSample(
            f"{path} must be readable, but got: {error.strerror}; replace or remove it",
            path=str(path),
            reason=str(error.strerror),
        ) from error


def _find_idx(path: Path) -> Path | None:
    """Return the IDX file of training images, or None if `path` is a folder without one."""
    if path.is_file():
        return path
    # iterdir, not glob: it raises if the folder is missing or unreadable.
    names = sorted(child.name for child in path.iterdir() if child.name.startswith("train-images"))
    found = [name for name in names if name.removesuffix(".gz").endswith("idx3-ubyte")]
    return path / found[0] if found else None


def _find_test_idx(images: Path) -> Path | None:
    names = [images.name.replace("train-", other) for other in ("t10k-", "test-") if "train-" in images.name]
    return next((found for name in names if (found := _packed_or_not(images.with_name(name)))), None)


def _packed_or_not(path: Path) -> Path | None:
    bare = path.with_name(path.name.removesuffix(".gz"))
    return next((file for file in (path, bare, bare.with_name(f"{bare.name}.gz")) if file.is_file()), None)


def _read_idx_pair(images: Path) -> _Arrays:
    expected = images.with_name(images.name.replace("images", "labels").replace("idx3", "idx1"))
    labels = _packed_or_not(expected)
    if labels is None or labels == images:
        raise DataError(
            f"the labels of {images} must lie beside it, with labels for images, idx1 for idx3, "
            f"but got {'one name for both' if expected == images else f'no {expected}'}; check --data.path"
        )
    images_NHW, labels_N = _read_idx(images, num_dims=3), _read_idx(labels, num_dims=1)
    if len(images_NHW) != len(labels_N):
        raise DataError(
            f"{images} and {labels} must hold as many images as labels, but got {len(images_NHW)} and "
            f"{len(labels_N)}; fetch both again"
        )
    return _Arrays(images_NHW, labels_N.long())


def _read_idx(path: Path, num_dims: int) -> Tensor:
    """Return the array of an IDX file: two zeros, a type, the number of dims, each dim as big-endian uint32."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} must be a whole gzip file, but got: {error}; fetch it again") from error
    magic, header = bytes([0, 0, IDX_UINT8, num_dims]), 4 + 4 * num_dims
    if data[:4] != magic or len(data) < header:
        raise DataError(
            f"{path} must be an IDX file of bytes in {num_dims} dims, which starts with 0x{magic.hex()}, but "
            f"got 0x{data[:4].hex()} and {len(data)} bytes; check --data.path"
        )
    dims = [int(dim) for dim in np.frombuffer(data, dtype=">u4", count=num_dims, offset=4)]
    if len(data) != header + math.prod(dims) or not math.prod(dims):
        product = f"{header} + {' * '.join(str(dim) for dim in dims)} = {header + math.prod(dims)}"
        raise DataError(
            f"{path} must hold one sample or more, and {product} bytes as its first bytes say, but got "
            f"{len(data)}; fetch it again"
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=header).view(dims)
