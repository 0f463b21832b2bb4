"""Folders of image files: one folder of images for each class, as torchvision has them."""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from textwrap import shorten
from typing import Any, ClassVar

import numpy as np

from paceline.data.formats.base import Format, Scan
from paceline.data.formats.leaves import KEY, Sample, find_image_type, name_image
from paceline.data.formats.manifest import FileRecord
from paceline.data.storage import FileInfo, Storage
from paceline.errors import DataError


class ImageFolder(Format):
    """One folder of images for each class; samples have the leaves ``image`` and ``label``, a class's place by name."""

    name: ClassVar[str] = "folder"
    suffixes: ClassVar[tuple[str, ...]] = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif")
    is_one_shard: ClassVar[bool] = True

    def describe(self, files: Sequence[FileInfo]) -> dict[str, Any]:
        """Return the names of the classes; none if images lie in one folder."""
        classes = list_classes(files)
        return {"classes": classes} if len(classes) > 1 else {}

    def scan(self, storage: Storage, file: FileInfo) -> Scan:
        """Return the whole file as one record."""
        return Scan(np.zeros(1, np.int64), np.array([file.num_bytes]))

    def decode(self, path: str, about: Mapping[str, Any], start: int, content: bytes) -> Sequence[Sample]:
        """Return the sample of a file."""
        place = PurePosixPath(path)
        image = name_image(place.suffix[1:].lower(), content)
        sample: Sample = {KEY: str(place.with_suffix("")), "image": image}
        classes = about.get("classes")
        return [sample | {"label": classes.index(str(place.parent))} if classes else sample]

    def measure(self, samples: Sequence[Sample]) -> int:
        """Return the number of bytes of the images' files."""
        return sum(len(sample[_find_leaves(sample)[0]]) for sample in samples)

    def list_left_out(self, sample: Sample) -> list[str]:
        """Return all leaves but the image and the label."""
        return [name for name in sample if name not in (KEY, *_find_leaves(sample))]

    def write(self, storage: Storage, stem: str, samples: Sequence[Sample]) -> None:
        """Write a file for each sample, in the folder of its label, in the order of the samples within a class."""
        for number, sample in enumerate(samples):
            image, label = _find_leaves(sample)
            folder = f"{sample[label]:05d}/" if label else ""
            ending = find_image_type(sample[image])
            storage.write(f"{folder}{PurePosixPath(stem).name}-{number:06d}.{ending}", sample[image])

    def finish(self, storage: Storage, files: Sequence[FileInfo]) -> None:
        """Look at the names of the classes' folders: reading counts them, and so must return the labels.

        Raises:
            DataError: Labels are not all of 0, 1 and so on, so that others would be read.
        """
        found = list_classes(self.choose(files))
        if found != ["."] and (len(found) < 2 or found != [f"{label:05d}" for label in range(len(found))]):
            raise DataError(
                "labels must be 0, 1 and so on, two or more and none left out, for format folder, which counts its "
                f"folders, but got the folders {shorten(', '.join(found), 200)}; number them anew with --change, or "
                "take tar"
            )


def list_classes(files: Sequence[FileInfo | FileRecord]) -> list[str]:
    """Return the folders that hold files, by name."""
    return sorted({file.path.rpartition("/")[0] or "." for file in files})


def _find_leaves(sample: Sample) -> tuple[str, str]:
    """Return the names of a sample's image and label; an empty one for no label.

    Raises:
        DataError: There is not one image, or there are several whole numbers.
    """
    images = [name for name, value in sample.items() if find_image_type(value)]
    labels = [name for name, value in sample.items() if isinstance(value, int)]
    if len(images) != 1 or len(labels) > 1:
        found = ", ".join(name for name in sample if name != KEY)
        raise DataError(
            f"a sample must have one image and at most one label for format folder, but got {found}; take tar"
        )
    return images[0], labels[0] if labels else ""
