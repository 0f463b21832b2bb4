"""Conversion of a data set into shards of any format: balanced, in parallel, and resumable after a kill.

Two passes. First, parts of the input of one fixed size are read, given to hooks and kept as bytes; the sizes are then
known, and a plan says which sample stands in which shard. Then each shard is written. Parts, plan and shards depend on
the input and the settings alone, so that the output has the same bytes at any number of processes. What is finished
stays when the process is killed; the next call with the same input and settings goes on.
"""

import json
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from paceline.data.formats import Format, find_format
from paceline.data.formats.index import find_index, write_index
from paceline.data.formats.leaves import KEY, Sample, decode_leaves, encode_leaves, flatten, nest
from paceline.data.formats.manifest import DataManifest
from paceline.data.formats.opening import INDEX_FOLDER, open_place
from paceline.data.formats.parallel import map_in_processes
from paceline.data.formats.source import FileSource
from paceline.data.storage import LocalStorage
from paceline.errors import DataError, SettingsError

PART_SAMPLES = 1024
"""Samples of the input that are read, given to hooks and kept as one part."""
_TRIED_SAMPLES = 64
"""Samples of a part that are encoded to learn the size of the output's files."""
_LENGTHS = struct.Struct("<II")
_WORK = f"{INDEX_FOLDER}/prepare"
_MARK = f"{_WORK}/settings.json"
"""File that says what is being made; it is the last that is removed."""
_DONE = "made"
"""Key in the mark of what has been made, once all of it is there."""
_BALANCE = 1.1
"""Largest ratio of the largest to the smallest shard that a plan in the samples' order may have."""

Hook = Callable[[list[dict[str, Any]]], Iterable[dict[str, Any]]]
"""A function that makes samples of samples: a filter, or for instance what turns text into tokens."""


@dataclass(frozen=True)
class Prepared:
    """What a conversion has made."""

    manifest: DataManifest
    num_read: int
    """Samples of the input."""
    num_samples: int
    """Samples of the output."""
    balance: tuple[float, float]
    """Bytes, and number of samples, of the largest shard over those of the smallest."""
    left_out: Sequence[str]
    """Names of leaves that the format does not hold."""


@dataclass(frozen=True)
class _KeptPart:
    """Samples of the input that have been read and kept."""

    sizes: NDArray[np.int64]
    """Size of each sample as it is kept."""
    kept_bytes: int
    """Size of some of them beyond the first one, as they are kept."""
    file_bytes: int
    """Size of the same in a file of the output's format."""
    left_out: Sequence[str]


def prepare(
    source: FileSource,
    out: Path,
    format: str,
    shard_bytes: int,
    *,
    num_processes: int = 1,
    hook: Hook | None = None,
    hook_name: str = "",
) -> Prepared:
    """Convert a data set.

    Args:
        source: Samples to convert.
        out: Folder for the shards, which must be empty or hold an unfinished conversion of the same.
        format: Name of the output's format.
        shard_bytes: Size of a shard's file, about.
        num_processes: Number of processes that read, convert and write.
        hook: Function that makes samples of each 1,024 samples.
        hook_name: Name of the hook, by which an unfinished conversion is told from others; it tells its code too.

    Raises:
        DataError: Samples are damaged, or the format cannot hold them.
        SettingsError: `out` holds something else.
    """
    form = find_format(format, ())
    versions = blake3(json.dumps(source.list_versions()).encode()).hexdigest()
    identity: dict[str, Any] = {"data": source.fingerprint, "files": versions, "hook": hook_name}
    identity |= {"format": format, "shard_bytes": shard_bytes}
    storage = LocalStorage(out)
    if (facts := _open_out(out, identity)) is not None:
        return _finish(out, format, facts)
    parts = range(-(-len(source) // PART_SAMPLES))
    read = partial(_read_part, source, storage, form, hook)
    found = list(map_in_processes(read, parts, num_processes))
    sizes = np.concatenate([part.sizes for part in found])
    if not len(sizes):
        raise DataError(f"samples must be left for {out}, but the hook has left none of {len(source)}; change it")
    kept_bytes, file_bytes = (
        sum(numbers) for numbers in zip(*((p.kept_bytes, p.file_bytes) for p in found), strict=True)
    )
    wanted = shard_bytes * kept_bytes / file_bytes if kept_bytes and file_bytes else shard_bytes
    shards = plan_shards(sizes, wanted, keeps_order=form.is_one_shard or form.is_strided)
    write = partial(_write_shard, storage, format, np.cumsum([len(part.sizes) for part in found]), shards)
    list(map_in_processes(write, range(len(shards)), num_processes))
    place = open_place(storage)
    form.finish(storage, place.list_files())
    manifest = write_index(place, format, num_processes=num_processes)
    files = [file.num_bytes for file in manifest.files]
    num_there = sum(file.num_samples for file in manifest.files)
    if not form.is_strided and num_there != len(sizes):
        raise DataError(
            f"{out} must hold the {len(sizes)} samples that were written, but {num_there} are read of it: format "
            f"{format} does not tell them apart; take another format, or rename samples with a hook"
        )
    by_bytes = [int(sizes[shard].sum()) for shard in shards] if form.is_one_shard else files
    facts = {
        "num_read": len(source),
        "num_samples": len(sizes),
        "balance": (max(by_bytes) / max(1, min(by_bytes)), max(map(len, shards)) / min(map(len, shards))),
        "left_out": sorted({name for part in found for name in part.left_out}),
    }
    storage.write(_MARK, json.dumps(identity | {_DONE: facts}, sort_keys=True).encode())
    return _finish(out, format, facts)


def _finish(out: Path, format: str, facts: dict[str, Any]) -> Prepared:
    """Remove what was kept, its mark last, and return what has been made."""
    storage = LocalStorage(out)
    kept = [file.path for file in storage.list_files(f"{_WORK}/") if file.path != _MARK]
    storage.remove([*kept, _MARK])
    shutil.rmtree(out / _WORK)
    manifest = find_index(open_place(storage), format, None).manifest
    return Prepared(manifest, **facts | {"balance": tuple(facts["balance"])})


def plan_shards(sizes: NDArray[np.int64], shard_bytes: float, *, keeps_order: bool = False) -> list[NDArray[np.int64]]:
    """Return the samples of each shard, in their order.

    Shards have the same number of samples, but for one. Samples stay in their order where that balances bytes to a
    tenth. Otherwise they are dealt in rounds by size, the largest of a round to the shard that is lightest so far.

    Args:
        sizes: Size of each sample in bytes.
        shard_bytes: Size of a shard, about.
        keeps_order: Whether samples stay in their order in any case.
    """
    num_shards = int(min(max(1, round(sizes.sum() / shard_bytes)), len(sizes)))
    if num_shards > 1 and len(sizes) // num_shards < 10:  # one sample more would be more than a tenth
        num_shards = max(1, max((n for n in range(1, num_shards + 1) if len(sizes) % n == 0), default=1))
    in_order = np.array_split(np.arange(len(sizes)), num_shards)
    weights = [int(sizes[shard].sum()) for shard in in_order]
    if keeps_order or max(weights) <= _BALANCE * min(weights):
        return in_order
    by_size = np.argsort(-sizes, kind="stable")
    loads = np.zeros(num_shards, dtype=np.int64)
    owner = np.empty(len(sizes), dtype=np.int64)
    for begin in range(0, len(sizes), num_shards):
        dealt = by_size[begin : begin + num_shards]
        lightest = np.argsort(loads, kind="stable")[: len(dealt)]
        owner[dealt] = lightest
        loads[lightest] += sizes[dealt]
    return [np.flatnonzero(owner == shard) for shard in range(num_shards)]


def _open_out(out: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """Mark the output, which is empty or holds an unfinished conversion of the same, and remove files torn by kills.

    Returns:
        What has been made, if a conversion of the same was killed once all was there; else None.

    Raises:
        SettingsError: The folder holds something else.
    """
    out.mkdir(parents=True, exist_ok=True)
    storage = LocalStorage(out)
    is_begun = storage.find(_MARK) is not None
    if not is_begun and any(path.is_file() and not _is_torn(path) for path in out.rglob("*")):
        raise SettingsError(f"the folder for prepared data must be empty, but {out} is not; give another")
    known = json.loads(storage.read(_MARK)) if is_begun else dict(identity)
    made: dict[str, Any] | None = known.pop(_DONE, None)
    if known != identity:
        raise SettingsError(
            f"{out} must hold an unfinished conversion with these settings to go on, but holds one with "
            f"{json.dumps(known, sort_keys=True)}; remove it, or give another folder"
        )
    for path in filter(_is_torn, list(out.rglob("*"))):
        path.unlink()
    if not is_begun:
        storage.write(_MARK, json.dumps(identity, sort_keys=True).encode())
    return made


def _is_torn(path: Path) -> bool:
    """Return whether a file is one that a killed process was writing: see `LocalStorage.write`."""
    return path.name.startswith(".") and path.suffix == ".part" and path.is_file()


def _read_part(source: FileSource, storage: LocalStorage, form: Format, hook: Hook | None, number: int) -> _KeptPart:
    """Keep the samples of a part of the input, after the hook.

    Some of them are encoded as the output will be, so that a format that cannot hold them says so at once, and the
    size of its files is known.
    """
    path = f"{_WORK}/part-{number:06d}"
    if storage.find(f"{path}.sizes") is None:
        indices = np.arange(number * PART_SAMPLES, min((number + 1) * PART_SAMPLES, len(source)))
        samples: list[Sample] = source.read_leaves(indices)
        if hook is not None:
            samples = [flatten(sample) for sample in hook([nest(sample) for sample in samples])]
        some = samples[:: max(1, -(-len(samples) // _TRIED_SAMPLES))]
        facts = {
            "kept_bytes": sum(len(_pack(sample)) for sample in some[1:]),
            "file_bytes": form.measure(some) - form.measure(some[:1]) if some else 0,
            "left_out": sorted({name for sample in samples for name in form.list_left_out(sample)}),
        }
        kept = [_pack(sample) for sample in samples]
        storage.write(f"{path}.samples", b"".join(kept))
        storage.write(f"{path}.facts", json.dumps(facts).encode())
        storage.write(f"{path}.sizes", np.array([len(one) for one in kept], dtype="<i8").tobytes())
    sizes = np.frombuffer(storage.read(f"{path}.sizes"), dtype="<i8")
    return _KeptPart(sizes, **json.loads(storage.read(f"{path}.facts")))


def _write_shard(
    storage: LocalStorage, format: str, ends: NDArray[np.int64], shards: Sequence[NDArray[np.int64]], number: int
) -> None:
    mark = f"{_WORK}/shard-{number:06d}.written"
    if storage.find(mark) is None:
        samples = list(_read_kept(storage, ends, shards[number]))
        find_format(format, ()).write(storage, f"shard-{number:06d}", samples)
        storage.write(mark, b"")


def _read_kept(storage: LocalStorage, ends: NDArray[np.int64], indices: NDArray[np.int64]) -> Iterator[Sample]:
    """Yield samples of the parts."""
    parts = np.searchsorted(ends, indices, side="right")
    begins = np.concatenate([[0], ends])
    for part in np.unique(parts).tolist():
        path = f"{_WORK}/part-{part:06d}"
        sizes = np.frombuffer(storage.read(f"{path}.sizes"), dtype="<i8")
        places = np.concatenate([[0], np.cumsum(sizes)])
        rows = (indices[parts == part] - begins[part]).tolist()
        contents = storage.read_ranges(f"{path}.samples", [(int(places[row]), int(sizes[row])) for row in rows])
        yield from map(_unpack, contents)


def _pack(sample: Sample) -> bytes:
    key = str(sample.get(KEY, "")).encode()
    parts = [struct.pack("<I", len(key)), key]
    for name, content in encode_leaves(sample):
        encoded = name.encode()
        parts += [_LENGTHS.pack(len(encoded), len(content)), encoded, content]
    return b"".join(parts)


def _unpack(content: bytes) -> Sample:
    (size,) = struct.unpack_from("<I", content)
    key, place, fields = content[4 : 4 + size].decode(), 4 + size, []
    while place < len(content):
        length, num_bytes = _LENGTHS.unpack_from(content, place)
        place += _LENGTHS.size
        fields.append((content[place : place + length].decode(), content[place + length : place + length + num_bytes]))
        place += length + num_bytes
    sample = decode_leaves(fields)
    return {KEY: key, **sample} if key else sample
