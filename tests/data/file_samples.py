"""Samples and files that tests of formats share."""

import io

import numpy as np
from PIL import Image

from paceline.data.formats import find_format
from paceline.data.formats.index import write_index
from paceline.data.formats.opening import open_place
from paceline.data.storage import LocalStorage

KINDS = ("PNG", "JPEG", "GIF", "BMP", "WEBP")


def draw_image(seed, side=12, kind="PNG"):
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def make_images(num_samples=24, num_classes=3):
    """Return labelled images in the order of their classes, as a folder has them."""
    labels = sorted(number % num_classes for number in range(num_samples))
    return [
        {"__key__": f"{number:03d}", "image": draw_image(number), "label": labels[number]}
        for number in range(num_samples)
    ]


def write_shards(folder, name, samples, num_shards=2, *, indexed=True):
    form, storage = find_format(name, ()), LocalStorage(folder)
    bounds = np.linspace(0, len(samples), num_shards + 1).astype(int)
    for number in range(num_shards):
        form.write(storage, f"shard-{number:02d}", samples[bounds[number] : bounds[number + 1]])
    form.finish(storage, storage.list_files())
    if indexed:
        write_index(open_place(folder), name)
    return folder
