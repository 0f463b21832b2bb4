import json
import os
import random
import shutil

import pytest
import torch

from paceline.checkpoint import Checkpoint, CheckpointStore, DamagedError, SafetensorsWriter
from paceline.checkpoint.manifest import Manifest, commit, read_manifest
from paceline.checkpoint.storage import save_tensors
from paceline.errors import CheckpointError

TENSORS = {
    "weight": torch.arange(120.0).view(10, 12),
    "bias": torch.arange(7).to(torch.bfloat16),
    "flag": torch.tensor([True, False]),
    "scalar": torch.tensor(5),
    "empty": torch.empty(0, 3),
}
PARTS = [
    "COMMITTED",
    "manifest.json",
    "state.json",
    "tensors-00000-00000.safetensors",
    "tensors-00000-00001.safetensors",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two steps; the newer one, in several files, is what the tests damage in a copy."""
    directory = tmp_path_factory.mktemp("whole")
    with CheckpointStore(directory) as store:
        store.save(TENSORS, {"step": 1}, step=1)
    newest = directory / "step-00000002"
    newest.mkdir()
    save_tensors(TENSORS, SafetensorsWriter(newest, b'{"step": 2}', step=2, max_file_bytes=490), None)
    assert sorted(file.name for file in newest.iterdir()) == sorted(PARTS)
    return directory


@pytest.fixture
def store(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "store")
    return CheckpointStore(tmp_path / "store")


def assert_passed_over(store, reason):
    reported = []
    found = store.find_newest_valid(lambda path, why: reported.append((path.name, why)))
    assert [name for name, _ in reported] == ["step-00000002"]
    assert reason in reported[0][1]
    assert found.step == 1
    assert found.read_document() == {"step": 1}
    return reported[0][1]


def test_the_newest_is_found_when_nothing_is_damaged(store):
    found = store.find_newest_valid(lambda path, why: pytest.fail(why))
    assert found.step == 2
    assert found.read_document() == {"step": 2}
    assert found.num_bytes == sum((found.path / part).stat().st_size for part in PARTS[2:])


def test_any_changed_byte_of_any_file_is_detected(store):
    """Every file is hit, at offsets drawn over all bytes of all files together, with any other value."""
    generator = random.Random(0)
    files = [store.directory / "step-00000002" / part for part in PARTS]
    places = [(file, offset) for file in files for offset in range(file.stat().st_size)]
    chosen = [(file, generator.randrange(file.stat().st_size)) for file in files] + generator.sample(places, 200)
    for file, offset in chosen:
        content = file.read_bytes()
        flip = generator.randrange(1, 256)
        file.write_bytes(content[:offset] + bytes([content[offset] ^ flip]) + content[offset + 1 :])
        assert_passed_over(store, file.name)
        file.write_bytes(content)
    assert store.find_newest_valid(lambda path, why: pytest.fail(why)).step == 2


def test_a_changed_byte_is_detected_while_loading_too(store):
    checkpoint = Checkpoint.open(store.directory / "step-00000002")
    for name in ("weight", "bias", "flag", "scalar"):
        chunk = json.loads((checkpoint.path / "manifest.json").read_text())["tensors"][name]["chunks"][0]
        file = checkpoint.path / chunk["file"]
        content = file.read_bytes()
        changed = bytearray(content)
        changed[chunk["start"]] ^= 1
        file.write_bytes(changed)
        into = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
        with pytest.raises(DamagedError, match=f"tensor '{name}' in {file.name} does not match its digest"):
            checkpoint.load(into)
        assert not into[name].any()
        with pytest.raises(DamagedError, match=f"tensor '{name}' in {file.name} does not match its digest"):
            checkpoint.read(name)
        assert torch.equal(checkpoint.read("empty"), TENSORS["empty"]), "what is not read is not checked"
        file.write_bytes(content)
    checkpoint.load(into)
    assert all(torch.equal(into[name], TENSORS[name]) for name in TENSORS)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_file_cut_short_is_detected(store, part, share):
    file = store.directory / "step-00000002" / part
    content = file.read_bytes()
    file.write_bytes(content[: min(int(share * len(content)), len(content) - 1)])
    assert_passed_over(store, part)


@pytest.mark.parametrize("part", PARTS)
def test_a_file_that_grew_is_detected(store, part):
    with open(store.directory / "step-00000002" / part, "ab") as file:
        file.write(b" ")
    assert_passed_over(store, part)


@pytest.mark.parametrize("part", PARTS[1:])
def test_a_missing_file_is_named(store, part):
    (store.directory / "step-00000002" / part).unlink()
    assert_passed_over(store, f"{part} is missing")


def test_a_file_that_is_a_directory_is_named(store):
    file = store.directory / "step-00000002" / PARTS[-1]
    file.unlink()
    file.mkdir()
    assert_passed_over(store, file.name)


@pytest.mark.parametrize("part", PARTS)
def test_a_pipe_in_place_of_a_file_is_named_and_not_waited_for(store, part):
    file = store.directory / "step-00000002" / part
    file.unlink()
    os.mkfifo(file)
    assert "it is no regular file" in assert_passed_over(store, part)


@pytest.mark.parametrize("name", ["step-00000004", "step-00000004-2"])
def test_a_checkpoint_under_the_name_of_another_step_is_passed_over(store, name):
    shutil.copytree(store.directory / "step-00000002", store.directory / name)
    reported = []
    found = store.find_newest_valid(lambda path, why: reported.append((path.name, why)))
    assert reported == [(name, "its name says step 4 and manifest.json 2")]
    assert found.path.name == "step-00000002"
    moved = store.directory / "copy"
    (store.directory / name).rename(moved)
    assert Checkpoint.open(moved).step == 2, "other names say nothing of a step"


def test_one_without_a_marker_was_never_finished(store):
    (store.directory / "step-00000002" / "COMMITTED").unlink()
    assert_passed_over(store, "it was never finished")
    with pytest.raises(CheckpointError, match=r"step-00000002 must be whole, but it was never finished; load another"):
        Checkpoint.open(store.directory / "step-00000002")


def test_parts_of_another_checkpoint_are_detected(store):
    """Each is whole in itself; only the digests above it tell."""
    for part in PARTS[:4]:
        file = store.directory / "step-00000002" / part
        content = file.read_bytes()
        shutil.copy(store.directory / "step-00000001" / part, file)
        assert_passed_over(store, part if part != "COMMITTED" else "manifest.json")
        file.write_bytes(content)


@pytest.mark.parametrize("where", ["../elsewhere/", "a/"])
@pytest.mark.parametrize("what", ["files", "chunks"])
def test_a_manifest_that_fits_its_marker_and_leads_elsewhere_is_refused(store, where, what):
    directory = store.directory / "step-00000002"
    manifest = read_manifest(directory)
    name = manifest.files[0].name
    (directory / where).mkdir(exist_ok=True)
    shutil.copy(directory / name, directory / where)
    elsewhere = f"{where}{name}"
    text = manifest.model_dump_json()
    field = {"files": f'"name":"{name}"', "chunks": f'"file":"{name}"'}[what]
    changed = Manifest.model_validate_json(text.replace(field, field.replace(name, elsewhere)))
    for part in ("manifest.json", "COMMITTED"):
        (directory / part).unlink()
    commit(directory, changed)
    assert_passed_over(store, f"manifest.json names {elsewhere!r}, which is none of its files")


def test_a_format_of_the_future_is_named(store):
    file = store.directory / "step-00000002" / "COMMITTED"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 9}))
    assert_passed_over(store, "COMMITTED says format 9, and this version reads 1")


def test_all_damaged_means_none(store):
    for path in store.list_checkpoints():
        (path / "state.json").unlink()
    reported = []
    assert store.find_newest_valid(lambda path, why: reported.append(path.name)) is None
    assert reported == ["step-00000002", "step-00000001"]


def test_opening_what_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"must be a directory, but got .*nowhere; check the path"):
        Checkpoint.open(tmp_path / "nowhere")
