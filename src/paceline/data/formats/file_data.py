"""Settings of data in files of any format, and what makes a model's samples of their leaves.

Shapes: C channels, S pixels of a side after resizing, T tokens of a sample (`sequence_length`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from paceline.data.base import Data, Spec, Splits
from paceline.data.batch import LABELS
from paceline.data.formats.held_out import PartOfSource
from paceline.data.formats.leaves import KEY, flatten, is_image
from paceline.data.formats.source import FileSource
from paceline.data.image_decoding import Decoder, decode_image
from paceline.data.images import normalise
from paceline.data.padding import Padding
from paceline.data.storage import StoreSettings
from paceline.errors import BadSample, DataError, SettingsError
from paceline.registry import register

NOT_ASKED = -100
"""Target of a place that is no token."""
NUM_BYTES = 256
_MOST_TRIES = 100
"""Samples that are tried to learn what they hold."""
_TARGETS = (*LABELS, "cls", "class", "y")


@register("files")
class FileData(Data):
    """Samples of files of any format that Paceline reads, by their index: see `FileSource`.

    The first sample says what they are: images to classify, rows of tokens, text (its bytes are the tokens), or arrays
    to classify. The same samples in the same order train alike, whatever format they are kept in.
    """

    path: str
    """Folder or file of the data, or its URL."""
    format: str = "auto"
    """Format of the files: tar, parquet, arrow, hf, tfrecord, mds, jsonl, jsonl_gz, jsonl_zst, folder, tokens, text;
    auto for what their names say."""
    input: str = ""
    """Leaf that the model gets; by default the first image, else tokens, text or an array."""
    target: str = ""
    """Leaf of the labels; by default label, labels, target, targets, cls, class or y."""
    size: int = Field(16, ge=8)
    """Height and width of an image in pixels."""
    decoder: Decoder = "pillow"
    """Decoder of JPEG files: pillow, or simplejpeg, which takes half the time."""
    sequence_length: int = Field(128, ge=1)
    """Number of tokens of a sample."""
    padding: Literal["sequence_length", "longest"] = "sequence_length"
    """Length that tokens and text are padded to: sequence_length, or that of the longest sample of a batch, which takes
    less time where many are short; both cut longer ones."""
    vocab_size: int = Field(NUM_BYTES, ge=1)
    """Number of different tokens: 256 for bytes, more for most token files."""
    num_classes: int | None = Field(None, ge=2)
    """Number of classes; by default the index's largest label and one."""
    classes: tuple[str, ...] = ()
    """Names of the classes in the order of their numbers, for a folder of images for each class, of which some may be
    missing; by default the folders of `path`, sorted. Held-out data has the same."""
    held_out: str = ""
    """Folder or file of held-out data of the same format; by default a part of the data itself."""
    held_out_fraction: float = Field(0.1, gt=0, lt=1)
    """Fraction of the samples that is held out, drawn at random by their indices, where `held_out` is not given."""
    snapshot: str = ""
    """Fingerprint of the data, or its first 8 characters or more, without which a run does not start."""
    store: StoreSettings = StoreSettings()
    """Time limits and caches of a store that an URL names."""
    grows: bool = False
    """Whether files may be added to `path` while a run trains, with names behind those that are there: they are taken
    at an epoch's end."""
    verify: bool = False
    """Whether each block of 1 MiB is compared with its digest in the index when it is first touched."""

    def open(self) -> Splits:
        """Open the files.

        Raises:
            DataError: Files are missing, changed, damaged, of no known format, or without labels.
            SettingsError: The number of classes is unknown.
        """
        source = self._open(self.path, self.snapshot, self.classes)
        named = tuple(source.manifest.about.get("classes", ()))
        if self.classes and (self.classes != named or len(set(named)) < len(named)):
            raise SettingsError(
                f"data.classes must be different names, for a folder of images for each class, but got "
                f"{', '.join(self.classes)} for {self.path}; leave it out, or name each class once"
            )
        if self.held_out:
            return Splits(source, self._open(self.held_out, "", named))
        fraction = self.held_out_fraction
        return Splits(PartOfSource(source, fraction, held_out=False), PartOfSource(source, fraction, held_out=True))

    def _open(self, path: str, snapshot: str, classes: tuple[str, ...]) -> FileSource:
        source = FileSource(
            path,
            format=self.format,
            sequence_length=self.sequence_length,
            snapshot=snapshot,
            verify=self.verify,
            classes=classes,
            grows=self.grows and path == self.path,
            store=self.store,
        )
        first = {name: value for name, value in flatten(_read_first(source)).items() if name != KEY}
        name = self.input or _guess_input(first, path)
        value = _find_leaf(first, name, "input", path)
        if isinstance(value, str) or _is_row_of_tokens(name, value):
            is_padded = self.padding == "sequence_length"
            transform: Any = NextTokens(name, self.sequence_length, self.vocab_size, is_padded=is_padded)
            if not is_padded:
                source = source.with_collate(Padding(label_value=NOT_ASKED))
            spec = Spec(self.vocab_size, (self.sequence_length,))
        else:
            target = self.target or next((leaf for leaf in _TARGETS if leaf in first), "")
            _find_leaf(first, target, "target", path)
            shape = (3, self.size, self.size) if is_image(value) else np.asarray(value).shape
            names = source.manifest.about.get("classes", ()) if target == "label" else ()
            spec = Spec(self._count_classes(source, target), shape, tuple(names))
            size = self.size if is_image(value) else None
            transform = Labelled(name, target, size, self.decoder, spec.num_classes)
        source.spec = spec
        return source.transformed(transform, is_thread_safe=True)

    def _count_classes(self, source: FileSource, target: str) -> int:
        about = source.manifest.about
        if self.num_classes is not None:
            return self.num_classes
        if target == "label" and "classes" in about:
            return len(about["classes"])
        largest = about.get("largest", {}).get(target)
        if largest is None:
            raise SettingsError(
                f"data.num_classes must be given for {self.path}, whose index does not tell it for {target}; give "
                f"--data.num_classes, or make an index: paceline data index {self.path}"
            )
        return max(2, int(largest) + 1)


@dataclass(frozen=True)
class Labelled:
    """What makes a pair of an input and its label of a tree of leaves."""

    input: str
    target: str
    size: int | None
    """Height and width of images; None if the input is an array."""
    decoder: Decoder
    num_classes: int

    def __call__(self, tree: Mapping[str, Any]) -> tuple[Tensor, int]:
        """Return x_CSS from -1 to 1, or the array as floats, and the label."""
        leaves = flatten(tree)
        label = _read_label(_find_leaf(leaves, self.target, "target", "a sample"), self.target, self.num_classes)
        value = _find_leaf(leaves, self.input, "input", "a sample")
        if self.size is None:
            return torch.from_numpy(np.array(value, dtype=np.float32)), label
        pixels = decode_image(value, self.size, name=self.input, decoder=self.decoder)
        return normalise(torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32))), label


def _read_label(value: Any, name: str, num_classes: int) -> int:
    """Return the number of a class.

    Raises:
        DataError: The label is no whole number, so that another class would be trained, or that of no class.
    """
    number = np.asarray(value)
    if number.size != 1 or number.dtype.kind not in "biuf" or not float(number.item()).is_integer():
        raise DataError(
            f"labels must be whole numbers, but leaf {name} is {value!r:.80}; give another leaf as --data.target, or "
            "number the classes by paceline data prepare --change"
        )
    label = int(number.item())
    if not 0 <= label < num_classes:
        raise DataError(
            f"labels must be from 0 to below data.num_classes = {num_classes}, but leaf {name} is {label}; raise "
            "--data.num_classes, or number the classes by paceline data prepare --change"
        )
    return label


@dataclass(frozen=True)
class NextTokens:
    """What makes inputs_T and targets_T of a row of tokens or of text; what shorter ones lack asks nothing.

    Where rows are not padded here, T is theirs, at least 1.
    """

    input: str
    sequence_length: int
    vocab_size: int
    is_padded: bool = True

    def __call__(self, tree: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return tokens and the next ones, int64.

        Raises:
            DataError: A token is not below the vocabulary's size.
        """
        value = _find_leaf(flatten(tree), self.input, "input", "a sample")
        found = np.frombuffer(value.encode(), np.uint8) if isinstance(value, str) else np.asarray(value)
        found = found[: self.sequence_length + 1].astype(np.int64)
        if found.size and not 0 <= found.min() <= found.max() < self.vocab_size:
            raise DataError(
                f"tokens must be from 0 to below data.vocab_size = {self.vocab_size}, but got {found.min()} to "
                f"{found.max()}; set data.vocab_size to {found.max() + 1} or more"
            )
        length = self.sequence_length + 1 if self.is_padded else max(2, len(found))
        row = np.full(length, NOT_ASKED, dtype=np.int64)
        row[: len(found)] = found
        both = torch.from_numpy(row)
        return both[:-1].clamp_min(0), both[1:].clone()


def _is_row_of_tokens(name: str, value: Any) -> bool:
    is_row = isinstance(value, np.ndarray | list) and np.asarray(value).ndim == 1
    return is_row and name.rpartition(".")[2] in ("tokens", "input_ids") and np.asarray(value).dtype.kind in "iu"


def _read_first(source: FileSource) -> dict[str, Any]:
    """Return the first sample that can be read, as a run may tolerate bad ones.

    Raises:
        BadSample: None of the first ones can be read.
    """
    for index in range(num_tried := min(len(source), _MOST_TRIES)):
        try:
            return source.read_trees(np.array([index]))[0]
        except BadSample:
            if index == num_tried - 1:
                raise
    raise AssertionError("a source of files has samples")


def _guess_input(first: Mapping[str, Any], path: str) -> str:
    """Return the leaf that a model most likely gets."""
    kinds = (
        lambda name, value: is_image(value),
        _is_row_of_tokens,
        lambda name, value: isinstance(value, str),
        lambda name, value: isinstance(value, np.ndarray | list) and math.prod(np.asarray(value).shape) > 0,
    )
    for is_kind in kinds:
        for name, value in first.items():
            if is_kind(name, value) and name not in _TARGETS:
                return name
    raise DataError(
        f"samples of {path} must hold an image, tokens, text or an array, but hold {', '.join(first) or 'nothing'}; "
        "name the leaf that the model gets with --data.input"
    )


def _find_leaf(leaves: Mapping[str, Any], name: str, setting: str, path: str) -> Any:
    if name not in leaves:
        raise DataError(
            f"{path} must have the leaf data.{setting}={name or '(none found)'}, but has {', '.join(leaves)}; give "
            f"--data.{setting} one of these"
        )
    return leaves[name]
