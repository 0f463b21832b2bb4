"""A bit that is flipped in a random place of a file: never trained on where the index, or the format, has a digest."""

import warnings
from collections import Counter

import numpy as np
import pytest
from file_samples import make_images, write_shards

from paceline.data import FileSource, NoIndexWarning
from paceline.data.formats.verified import VerifiedStorage
from paceline.data.storage import LocalStorage
from paceline.errors import DataError

FORMATS = ["folder", "tar", "parquet", "arrow", "hf", "mds", "tfrecord", "jsonl", "jsonl_gz", "jsonl_zst", "tokens"]
ALWAYS_NOTICED = ["tfrecord", "jsonl_gz", "jsonl_zst"]
"""Formats that hold digests of all their content."""


def make_folder(folder, name, *, indexed):
    if name == "tokens":
        folder.mkdir()
        np.save(folder / "a.npy", np.random.default_rng(0).integers(0, 200, 3000, dtype=np.uint16))
        if indexed:
            from paceline.data.formats.index import write_index
            from paceline.data.formats.opening import open_place

            write_index(open_place(folder), "tokens", 16)
        return folder
    return write_shards(folder, name, make_images(12), indexed=indexed)


def open_source(folder, name):
    return FileSource(folder, format=name, sequence_length=16 if name == "tokens" else None)


def read_all(source):
    def show(value):
        return (str(value.dtype), value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value

    rows = source.read_leaves(np.arange(len(source)))
    return [{leaf: show(value) for leaf, value in row.items()} for row in rows]


def flip_bits(folder, num_places, seed=0):
    """Flip one bit of all files in turn; in between, each is as it was."""
    draw = np.random.default_rng(seed)
    files = sorted(file for file in folder.rglob("*") if file.is_file() and ".paceline" not in file.parts)
    contents = [file.read_bytes() for file in files]
    sizes = np.array([len(content) for content in contents])
    for place in draw.integers(0, sizes.sum(), num_places):
        number = int(np.searchsorted(np.cumsum(sizes), place, side="right"))
        within = int(place - sizes[:number].sum())
        spoilt = bytearray(contents[number])
        spoilt[within] ^= 1 << int(draw.integers(8))
        files[number].write_bytes(spoilt)
        yield files[number], within
        files[number].write_bytes(contents[number])


def count_with_index(folder, name, num_places):
    """Return how many flipped bits an index notices."""
    source = open_source(folder, name)
    listed = {file.path for file in source.manifest.files}
    counts = Counter()
    for file, _ in flip_bits(folder, num_places):
        if file.relative_to(folder).as_posix() not in listed:  # such as index.json of MDS, whose index here replaces it
            counts["not of the data"] += 1
            continue
        source.storage = VerifiedStorage(LocalStorage(folder), source.manifest)
        source._kept.clear()
        try:
            read_all(source)
            counts["silent"] += 1
        except DataError:
            counts["noticed"] += 1
    return counts


def count_without_index(folder, name, num_places):
    """Return how many flipped bits are noticed, change no sample, or change one silently."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoIndexWarning)
        expected, counts = read_all(open_source(folder, name)), Counter()
        for _ in flip_bits(folder, num_places):
            try:
                found = read_all(open_source(folder, name))
            except DataError:
                counts["noticed"] += 1
                continue
            counts["harmless" if found == expected else "silent"] += 1
    return counts


def check(tmp_path, name, num_places):
    with_index = count_with_index(make_folder(tmp_path / "indexed", name, indexed=True), name, num_places)
    assert not with_index["silent"], with_index
    assert with_index["noticed"] > num_places / 2
    without = count_without_index(make_folder(tmp_path / "bare", name, indexed=False), name, num_places)
    assert sum(without.values()) == num_places
    print(f"{name}: with an index {dict(with_index)}; without {dict(without)}")
    if name in ALWAYS_NOTICED:
        assert not without["silent"], without


@pytest.mark.parametrize("name", FORMATS)
def test_a_few_flipped_bits_are_noticed(tmp_path, name):
    check(tmp_path, name, 12)


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", FORMATS)
def test_a_thousand_flipped_bits_are_noticed(tmp_path, name):
    check(tmp_path, name, 1000)
