"""Folders of image files: one folder of images for each class, as torchvision has them."""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, ClassVar

import numpy as np

from paceline.data.formats.base import Format, Scan
from paceline.data.formats.leaves import KEY, Sample, find_image_type, name_image
from paceline.data.storage import FileInfo, Storage
from paceline.errors import DataError


class ImageFolder(Format):
    """One folder of images for each class; samples have the leaves ``image`` and ``label``, a class's place by name."""

    name: ClassVar[str] = "folder"
    suffixes: ClassVar[tuple[str, ...]] = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
    is_one_shard: ClassVar[bool] = True

    def describe(self, files: Sequence[FileInfo]) -> dict[str, Any]:
        """Return the names of the classes; none if images lie in one folder."""
        classes = sorted({str(PurePosixPath(file.path).parent) for file in files})
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

    def write(self, storage: Storage, stem: str, samples: Sequence[Sample]) -> None:
        """Write a file for each sample, in the folder of its label, in the order of the samples within a class."""
        for number, sample in enumerate(samples):
            images = [(name, value) for name, value in sample.items() if find_image_type(value)]
            labels = [value for name, value in sample.items() if isinstance(value, int)]
            if len(images) != 1 or len(labels) > 1:
                found = ", ".join(name for name in sample if name != KEY)
                raise DataError(
                    f"a sample must have one image and at most one label for format folder, but got {found}; take tar"
                )
            folder = f"{labels[0]:05d}/" if labels else ""
            ending = find_image_type(images[0][1])
            storage.write(f"{folder}{PurePosixPath(stem).name}-{number:06d}.{ending}", images[0][1])
