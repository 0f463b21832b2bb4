"""Files as a source of samples: index, manifest, ranges and what has changed."""

import json
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from blake3 import blake3
from file_samples import make_images, write_shards

import paceline
from paceline.comm import LocalGroup
from paceline.data import FileSource, Loader, NoIndexWarning
from paceline.data.formats.index import write_index
from paceline.data.formats.manifest import BLOCK_BYTES, DataManifest, FileRecord
from paceline.data.formats.opening import open_place
from paceline.data.formats.records import RecordTable, pack_rows
from paceline.data.storage import FileInfo, LocalStorage
from paceline.errors import BadSample, DataError, SettingsError, UnknownNameError


def test_one_sample_of_one_file(tmp_path):
    write_shards(tmp_path, "tar", make_images(1, 1), num_shards=1)
    source = FileSource(tmp_path)
    assert (len(source), source.shard_sizes) == (1, [1])
    assert source.read_trees(np.arange(1)) == [make_images(1, 1)[0]]


def test_samples_are_read_in_any_order_by_their_ranges(tmp_path):
    samples = make_images(10)
    write_shards(tmp_path, "tar", samples, num_shards=3)
    source = FileSource(tmp_path)
    order = [7, 0, 9, 3, 3]
    assert source.read_trees(np.array(order)) == [samples[index] for index in order]
    assert source.shard_sizes == [3, 3, 4]
    extents = source.locate(np.array([0, 3, 9]))
    assert [extent.path for extent in extents] == ["shard-00.tar", "shard-01.tar", "shard-02.tar"]
    assert all(extent.num_bytes <= 3 * 512 + 1024 for extent in extents), "never a whole shard for one sample"
    batch = source.read(np.array([1, 2]))
    assert batch["image"].shape == (2, 3, 12, 12)
    assert batch["image"].dtype == torch.uint8
    assert batch["label"].tolist() == [samples[1]["label"], samples[2]["label"]]
    assert torch.equal(source[1]["image"], batch["image"][0])
    with pytest.raises(IndexError, match="have no sample 10"):
        source[10]


def test_one_file_is_data_too(tmp_path):
    write_shards(tmp_path, "tar", make_images(6), num_shards=2, indexed=False)
    write_index(open_place(tmp_path / "shard-01.tar"), "auto")
    source = FileSource(tmp_path / "shard-01.tar")
    assert len(source) == 3
    assert source.fingerprint.startswith("b3-")


def test_a_file_url_is_a_path_of_this_machine(tmp_path):
    write_shards(tmp_path, "tar", make_images(6), num_shards=2)
    assert FileSource(f"file://{tmp_path}").fingerprint == FileSource(tmp_path).fingerprint
    write_index(open_place(tmp_path / "shard-01.tar"), "auto")
    assert len(FileSource(f"file://{tmp_path}/shard-01.tar")) == 3


def test_without_an_index_a_warning_says_what_that_means(tmp_path):
    write_shards(tmp_path, "tar", make_images(4), indexed=False)
    with pytest.warns(NoIndexWarning, match="only sizes of files identify its content; make one: paceline data index"):
        source = FileSource(tmp_path)
    assert source.fingerprint.startswith("size-")
    assert source.manifest.digests("shard-00.tar") is None
    write_index(open_place(tmp_path), "tar")
    again = FileSource(tmp_path)
    assert again.read_trees(np.arange(4)) == source.read_trees(np.arange(4))


def test_the_manifest_has_the_digest_of_each_block_and_survives_json(tmp_path):
    content = np.random.default_rng(0).bytes(BLOCK_BYTES + 10)
    (tmp_path / "a.txt").write_bytes(content)
    manifest = write_index(open_place(tmp_path), "text")
    from blake3 import blake3

    assert manifest.digests("a.txt") == [
        blake3(content[:BLOCK_BYTES]).hexdigest(),
        blake3(content[BLOCK_BYTES:]).hexdigest(),
    ]
    assert manifest.files[0].digest == blake3(content).hexdigest()
    again = DataManifest.from_json(manifest.to_json(), manifest.blocks, "here")
    assert again == manifest
    assert again.fingerprint == manifest.fingerprint
    assert manifest.digests("b.txt") is None


@pytest.mark.parametrize("is_of_today", [True, False])
@pytest.mark.parametrize("name", ["tar", "jsonl_gz"])
def test_an_index_whose_numbers_have_changed_is_refused(tmp_path, name, is_of_today):
    """The fingerprint does not have them, and an index of an earlier Paceline has no digest of its document."""
    write_shards(tmp_path, name, make_images(8))
    path = tmp_path / ".paceline/manifest.json"
    document = json.loads(path.read_text())
    if not is_of_today:
        del document["digest"]
    path.write_text(json.dumps(document))
    assert len(FileSource(tmp_path)) == 8
    for key, value in (("num_samples", 3), ("num_records", 7)):
        before, document["files"][0][key] = document["files"][0][key], value
        path.write_text(json.dumps(document))
        with pytest.raises(DataError, match=r"must be whole, but .*damaged; make it again: paceline data index"):
            FileSource(tmp_path)
        document["files"][0][key] = before
    if is_of_today:
        document["about"]["largest"]["label"] = 9
        path.write_text(json.dumps(document))
        with pytest.raises(DataError, match=r"must be whole, but is damaged"):
            FileSource(tmp_path)


@pytest.mark.parametrize("change", [lambda content: b"\7" + content[1:], lambda content: content[:-3]])
def test_numbers_of_samples_that_are_damaged_are_refused(tmp_path, change):
    write_shards(tmp_path, "jsonl_gz", make_images(8))
    path = tmp_path / ".paceline/counts.bin"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=r"must be whole, but its numbers of (samples|records) are damaged"):
        FileSource(tmp_path)


@pytest.mark.parametrize("part", ["manifest.json", "records.bin", "blocks.bin"])
def test_a_damaged_index_is_refused(tmp_path, part):
    write_shards(tmp_path, "tar", make_images(4))
    file = tmp_path / ".paceline" / part
    content = bytearray(file.read_bytes())
    place = content.index(b"num_bytes") + 13 if part == "manifest.json" else len(content) // 2
    content[place] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"damaged|when the data was indexed"):
        FileSource(tmp_path)


def test_fingerprints_tell_files_apart_by_name_and_content():
    one = DataManifest("tar", [FileRecord("a", 1, 1, 1, "00")])
    others = [
        DataManifest("mds", one.files),
        DataManifest("tar", [FileRecord("b", 1, 1, 1, "00")]),
        DataManifest("tar", [FileRecord("a", 1, 1, 1, "01")]),
        DataManifest("tar", [FileRecord("a", 2, 1, 1, "00")]),
        DataManifest("tar", [FileRecord("a", 1, 1, 1)]),
    ]
    assert len({one.fingerprint, *(other.fingerprint for other in others)}) == 6
    one.check_files([FileInfo("a", 1)], "here")
    with pytest.raises(DataError, match=r"here/a must have 1 bytes, as when the data was indexed, but is missing"):
        one.check_files([], "here")


def test_a_file_that_changed_since_is_named(tmp_path):
    write_shards(tmp_path, "tar", make_images(4))
    with open(tmp_path / "shard-01.tar", "ab") as file:
        file.write(bytes(512))
    with pytest.raises(DataError, match=r"shard-01\.tar must have \d+ bytes, as when the data was indexed, but has"):
        FileSource(tmp_path)
    os.unlink(tmp_path / "shard-01.tar")
    with pytest.raises(DataError, match=r"shard-01\.tar .* but is missing"):
        FileSource(tmp_path)


def test_a_snapshot_pins_the_content(tmp_path):
    write_shards(tmp_path, "tar", make_images(4))
    fingerprint = FileSource(tmp_path).fingerprint
    FileSource(tmp_path, snapshot=fingerprint[:12])
    with pytest.raises(DataError, match="must hold the data of snapshot b3-00000000"):
        FileSource(tmp_path, snapshot="b3-00000000")
    with pytest.raises(DataError, match="8 characters or more"):
        FileSource(tmp_path, snapshot=fingerprint[:5])


def test_blocks_are_verified_when_they_are_first_touched(tmp_path):
    write_shards(tmp_path, "tar", make_images(40), num_shards=1)
    plain, verified = FileSource(tmp_path), FileSource(tmp_path, verify=True)
    assert verified.read_trees(np.arange(40)) == plain.read_trees(np.arange(40))
    file = tmp_path / "shard-00.tar"
    content = bytearray(file.read_bytes())
    content[plain.locate(np.array([5]))[0].start + 512 + 40] ^= 4  # inside an image
    file.write_bytes(content)
    assert plain.read_trees(np.array([5])) != make_images(40)[5:6]
    with pytest.raises(
        DataError, match=r"shard-00\.tar must be as when it was indexed, but bytes 0 to \d+ have changed"
    ):
        FileSource(tmp_path, verify=True).read_trees(np.array([5]))


def test_all_blocks_of_a_large_sample_are_verified(tmp_path):
    write_shards(tmp_path, "tar", [{"a": bytes(5 << 19)}], num_shards=1)
    content = bytearray((tmp_path / "shard-00.tar").read_bytes())
    content[-20000] ^= 4  # in the last of its three blocks
    (tmp_path / "shard-00.tar").write_bytes(content)
    assert FileSource(tmp_path).read_leaves(np.array([0]))[0]["a"] != bytes(5 << 19)
    with pytest.raises(DataError, match=r"bytes 2097152 to \d+ have changed"):
        FileSource(tmp_path, verify=True).read_leaves(np.array([0]))


def test_formats_are_found_by_the_names_of_files(tmp_path):
    (tmp_path / "one.xyz").write_bytes(b"x")
    with pytest.raises(DataError, match="files must be of a known format, but end in xyz; give one of tar, "):
        FileSource(tmp_path)
    with pytest.raises(UnknownNameError, match="format must be a known name, but got 'tarr'; did you mean 'tar'"):
        FileSource(tmp_path, format="tarr")
    with pytest.raises(DataError, match=r"must hold files of format tar \(\.tar\), but got none"):
        FileSource(tmp_path, format="tar")
    with pytest.raises(DataError, match="must hold files of data, but there are none"):
        FileSource(tmp_path / "nowhere")


def test_a_transform_makes_samples_and_its_error_names_the_sample(tmp_path):
    write_shards(tmp_path, "tar", make_images(4))

    def transform(tree):
        if tree["__key__"] == "002":
            raise DataError("it is ugly")
        return torch.tensor(tree["label"])

    source = FileSource(tmp_path, transform=transform)
    assert source.read(np.array([0, 3])).tolist() == [0, 2]
    with pytest.raises(BadSample, match=r"sample '002' of .* must be readable, but: it is ugly") as caught:
        source.read(np.array([2]))
    assert (caught.value.key, caught.value.reason) == ("002", "it is ugly")


def test_a_loader_reads_each_sample_once_in_processes_too(tmp_path):
    write_shards(tmp_path, "tar", make_images(20))
    seen = {}
    for num_processes in (0, 2):
        loader = Loader(
            FileSource(tmp_path), global_batch=6, num_epochs=1, num_processes=num_processes, group=LocalGroup()
        )
        seen[num_processes] = [key for batch in loader for key in batch.data["image"].flatten(1).tolist()]
    assert seen[0] == seen[2]
    assert len({tuple(image) for image in seen[0]}) == 20


def test_workers_with_different_data_are_refused_before_the_first_step(tmp_path):
    """One host's copy differs in one bit, and its index says so."""
    for rank in range(2):
        samples = make_images(8)
        samples[3]["label"] += rank
        write_shards(tmp_path / str(rank), "tar", samples)

    def train(group):
        source = FileSource(tmp_path / str(group.rank), transform=lambda tree: torch.tensor([float(tree["label"])]))
        loader = paceline.Loader(source, global_batch=4, num_steps=1, group=group)
        group.membership.loaders.add(loader)  # as it does by itself where processes have joined a group
        model = torch.nn.Linear(1, 1)
        replica = paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), group=group)
        loss = replica(torch.ones(1, 1)).mean()
        with pytest.raises(SettingsError, match=r"rank 0 has .* of data b3-.*, and rank 1 .* of data b3-"):
            replica.backward(loss, weight=1)

    LocalGroup.run(2, train)


def test_a_checkpoint_is_of_its_data(tmp_path):
    write_shards(tmp_path, "tar", make_images(8))
    loader = Loader(FileSource(tmp_path), global_batch=4, num_epochs=1, group=LocalGroup())
    state = loader.state_dict()
    loader.load_state_dict(state)
    samples = make_images(8)
    samples[0]["label"] = 2
    write_shards(tmp_path, "tar", samples)
    changed = Loader(FileSource(tmp_path), global_batch=4, num_epochs=1, group=LocalGroup())
    with pytest.raises(
        DataError, match=r"the data must be that of the checkpoint, b3-.*, but is b3-.*: files were added"
    ):
        changed.load_state_dict(state)


def test_the_table_of_records_takes_no_memory_of_its_own():
    """Rows are read when needed: they are in no array and in no mapping of the process."""
    starts = np.arange(1000, dtype=np.int64) * 7
    table = RecordTable.from_parts(
        [pack_rows(starts[:400], starts[:400] + 1), pack_rows(starts[400:], starts[400:] + 1)]
    )
    assert table.num_rows == 1000
    assert table.look_up(np.array([999, 0, 400])).tolist() == [[6993, 6994], [0, 1], [2800, 2801]]
    assert not [value for value in vars(table).values() if isinstance(value, np.ndarray | bytes | list)]


MEMORY = """
import sys
from paceline.data import FileSource, Loader
for batch in Loader(FileSource(sys.argv[1]), 64, num_steps=30, num_threads=2):
    assert set(batch.data["a"].tolist()) == {1}
with open("/proc/self/smaps_rollup") as file:
    print(next(line.split()[1] for line in file if line.startswith("Pss:")))
"""


def index_lines(folder, num_lines):
    """Write a file of equal lines and its index, which reading each of them would make."""
    folder.mkdir()
    line = b'{"a":1}\n'
    with open(folder / "all.jsonl", "wb") as file:
        for _ in range(num_lines // 10_000):
            file.write(line * 10_000)
    starts = np.arange(num_lines) * len(line)
    table = pack_rows(starts, np.full(num_lines, len(line) - 1))
    size = num_lines * len(line)
    file = FileRecord("all.jsonl", size, num_lines, num_lines, digest=blake3(b"whole").hexdigest())
    blocks = bytes(32 * -(-size // (1 << 20)))
    manifest = DataManifest("jsonl", [file], {"largest": {"a": 1}}, blake3(table).hexdigest(), blocks)
    storage = LocalStorage(folder)
    for name, content in (("records.bin", table), ("blocks.bin", blocks), ("manifest.json", manifest.to_json())):
        storage.write(f".paceline/{name}", content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ten_million_samples_take_no_more_memory_than_ten_thousand(tmp_path):
    sizes = []
    for num_lines in (10_000, 10_000_000):
        folder = index_lines(tmp_path / str(num_lines), num_lines)
        done = subprocess.run([sys.executable, "-c", MEMORY, folder], capture_output=True, text=True, check=True)
        sizes.append(int(done.stdout))
    assert sizes[1] <= 1.1 * sizes[0]


def test_a_replaced_file_is_read_anew(tmp_path):
    storage = LocalStorage(tmp_path)
    storage.write("a", b"123")
    assert storage.read("a") == b"123"
    storage.write("a", b"4567")
    assert storage.read("a") == b"4567"
    assert storage.read_ranges("a", [(3, 1), (0, 2)]) == [b"7", b"45"]


def test_files_that_are_no_part_of_the_data_are_told(tmp_path):
    def told(path, **given):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            FileSource(path, **given)
        return [str(one.message) for one in caught if not isinstance(one.message, NoIndexWarning)]

    write_shards(tmp_path / "rows", "jsonl", [{"__key__": "0", "n": 1}], 1)
    (tmp_path / "rows" / "README.md").write_text("rows")
    (tmp_path / "rows" / "plot.png").write_bytes(b"")
    assert told(tmp_path / "rows") == []
    for name in ("late.jsonl", "more.jsonl.gz"):
        (tmp_path / "rows" / name).write_bytes(b"")
    (warning,) = told(tmp_path / "rows")
    assert "are no part of its jsonl data; index it again, or move them: late.jsonl, more.jsonl.gz" in warning
    assert told(tmp_path / "rows", grows=True) == []
    write_shards(tmp_path / "images", "folder", make_images(4), 1, indexed=False)
    for number in range(5):
        (tmp_path / "images" / f"{number}.tiff").write_bytes(b"II*")
    (warning,) = told(tmp_path / "images")
    assert "0.tiff, 1.tiff, 2.tiff and 2 more" in warning
    write_shards(tmp_path / "split", "hf", [{"n": 1}], 1)
    (tmp_path / "split" / "cache-1f.arrow").write_bytes(b"")
    assert told(tmp_path / "split") == []
    (tmp_path / "tokens").mkdir()
    for name, size in (("a.bin", 100), ("b.bin", 20), ("c.bin", 0)):
        (tmp_path / "tokens" / name).write_bytes(bytes(size))
    (warning,) = told(tmp_path / "tokens", sequence_length=20)
    assert warning.endswith("give no sample, as they are shorter than one; lower sequence_length, or join them: b.bin")
