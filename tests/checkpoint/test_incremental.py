import errno
import os
import random
import shutil

import pytest
import torch

from paceline.checkpoint import Checkpoint, CheckpointStore
from paceline.checkpoint.incremental import CHUNK_BYTES
from paceline.errors import SettingsError, StorageError

ROWS = 4 * CHUNK_BYTES // 256  # rows of 64 numbers, in four chunks


def state(step):
    """A tensor that stays, one that changes at odd steps, a table of which one row changes, and two that change."""
    table = torch.arange(ROWS * 64, dtype=torch.float32).view(ROWS, 64)
    table[:1] += step
    tensors = {
        "frozen": torch.arange(1000.0),
        "slow": torch.full((100,), (step + 1) // 2),
        "table": table,
        "moved": torch.full((300,), float(step)),
        "number": torch.tensor(step),
    }
    return tensors, {"step": step}


def save(store, step, **options):
    return store.save(*state(step), step, **options)


def assert_complete(checkpoint):
    expected, document = state(checkpoint.step)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    checkpoint.load(loaded)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert checkpoint.read_document() == document


def newest(directory, reasons=None):
    reasons = [] if reasons is None else reasons
    return CheckpointStore(directory).find_newest_valid(lambda path, why: reasons.append((path.name, why)))


def names(directory):
    return [path.name for path in CheckpointStore(directory).list_checkpoints()]


def test_only_chunks_that_changed_are_written(tmp_path):
    with CheckpointStore(tmp_path, incremental=3) as store:
        full, second, third = (save(store, step) for step in (1, 2, 3))
    assert full.shared_bytes == 0
    assert CHUNK_BYTES < second.num_bytes < full.num_bytes / 3.5
    assert second.shared_bytes == pytest.approx(full.num_bytes, rel=0.01)
    on_disk = {file.stat().st_ino: file.stat().st_size for file in tmp_path.rglob("*.safetensors")}
    written = sum(one.num_bytes - (one.path / "state.json").stat().st_size for one in (full, second, third))
    assert sum(on_disk.values()) == written
    for saved in (full, second, third):
        checkpoint = Checkpoint.open(saved.path)
        checkpoint.verify()
        assert_complete(checkpoint)


def test_each_is_whole_without_the_others(tmp_path):
    with CheckpointStore(tmp_path / "store", incremental=9) as store:
        for step in (1, 2, 3):
            last = save(store, step)
    shutil.move(last.path, tmp_path / "moved")
    shutil.rmtree(tmp_path / "store")
    checkpoint = Checkpoint.open(tmp_path / "moved")
    checkpoint.verify()
    assert_complete(checkpoint)


def test_nothing_shared_when_nothing_stays(tmp_path):
    with CheckpointStore(tmp_path, incremental=9) as store:
        for step in (1, 2):
            saved = store.save({"a": torch.full((1000,), float(step))}, {}, step)
    assert saved.shared_bytes == 0
    assert sorted(file.name for file in saved.path.glob("*.safetensors")) == ["tensors-00000-00000.safetensors"]


def test_other_shapes_and_dtypes_are_written_anew(tmp_path):
    with CheckpointStore(tmp_path, incremental=9) as store:
        store.save({"a": torch.zeros(4, 5), "b": torch.zeros(8)}, {}, 1)
        saved = store.save({"a": torch.zeros(20), "b": torch.zeros(8, dtype=torch.int32)}, {}, 2)
    assert saved.shared_bytes == 0
    assert Checkpoint.open(saved.path).read("a").shape == (20,)


def test_a_full_one_comes_after_the_given_number(tmp_path):
    with CheckpointStore(tmp_path, keep=None, incremental=2) as store:
        shared = [save(store, step).shared_bytes > 0 for step in range(1, 8)]
    assert shared == [False, True, True, False, True, True, False]
    with CheckpointStore(tmp_path, keep=None, incremental=2) as store:
        assert save(store, 8).shared_bytes == 0, "the first one of a process is full"


def test_fewer_than_none_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"incremental must be at least 0, but got -1; use 0"):
        CheckpointStore(tmp_path, incremental=-1)


class TestKeep:
    def test_removal_takes_nothing_from_those_that_stay(self, tmp_path):
        with CheckpointStore(tmp_path, keep=2, incremental=3) as store:
            for step in range(1, 12):
                save(store, step, is_best=step == 2)
                for path in store.list_checkpoints():
                    Checkpoint.open(path).verify()
                    assert_complete(Checkpoint.open(path))
                assert len(names(tmp_path)) <= 4
        assert names(tmp_path) == ["step-00000011", "step-00000010", "step-00000008", "step-00000002"]

    def test_one_damaged_file_does_not_spoil_all(self, tmp_path):
        with CheckpointStore(tmp_path, keep=2, incremental=9) as store:
            save(store, 1)
        with CheckpointStore(tmp_path, keep=2, incremental=9) as store:
            for step in range(2, 9):
                save(store, step)
        flip(tmp_path / "step-00000008" / "shared-00000.safetensors", -1)
        reasons = []
        assert newest(tmp_path, reasons).step == 1
        assert [name for name, _ in reasons] == ["step-00000008", "step-00000007"]

    def test_with_one_alone_only_that_stays(self, tmp_path):
        with CheckpointStore(tmp_path, keep=1, incremental=9) as store:
            for step in (1, 2, 3):
                save(store, step)
        assert names(tmp_path) == ["step-00000003"]
        assert_complete(newest(tmp_path))


def flip(file, offset, value=1):
    content = bytearray(file.read_bytes())
    content[offset] ^= value
    file.write_bytes(content)  # in place: every name of the file


class TestFailures:
    def test_without_hard_links_each_is_full_and_a_warning_says_so(self, tmp_path, monkeypatch):
        def refuse(*names):
            raise PermissionError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
        with CheckpointStore(tmp_path, incremental=9) as store:
            save(store, 1)
            with pytest.warns(UserWarning, match=r"has no hard links \(Operation not permitted\), so that each"):
                assert save(store, 2).shared_bytes == 0
        assert_complete(newest(tmp_path))

    def test_a_base_that_is_gone_makes_a_full_one(self, tmp_path):
        with CheckpointStore(tmp_path, incremental=9) as store:
            shutil.rmtree(save(store, 1).path)
            assert save(store, 2).shared_bytes == 0

    def test_a_base_without_its_marker_is_shared_with_by_none(self, tmp_path):
        with CheckpointStore(tmp_path, incremental=9) as store:
            (save(store, 1).path / "COMMITTED").unlink()
            assert save(store, 2).shared_bytes == 0

    def test_a_file_of_the_base_that_is_gone_fails_one_save(self, tmp_path):
        with CheckpointStore(tmp_path, incremental=9) as store:
            save(store, 1)
            (save(store, 2).path / "shared-00000.safetensors").unlink()
            with pytest.raises(StorageError, match=r"step-00000003 could not be written: No such file"):
                save(store, 3)
            assert save(store, 4).shared_bytes == 0
        assert names(tmp_path)[0] == "step-00000004"

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
    @pytest.mark.parametrize("operation", ["link", "fsync", "rename"])
    def test_an_error_at_any_operation_fails_that_save_alone(self, tmp_path, monkeypatch, operation, number):
        original, num_calls, failing = getattr(os, operation), 0, 0

        def fail(*arguments, **options):
            nonlocal num_calls
            num_calls += 1
            if num_calls == failing:
                raise OSError(number, os.strerror(number))
            return original(*arguments, **options)

        monkeypatch.setattr(os, operation, fail)
        num_failed = 0
        for failing in range(1, 30):
            home = tmp_path / str(failing)
            with CheckpointStore(home, incremental=9) as store:
                num_calls = -1000
                save(store, 1)
                save(store, 2)
                num_calls = 0
                try:
                    save(store, 3)
                except StorageError:
                    num_failed += 1
                num_calls = -1000
                assert newest(home).step in (2, 3)
                assert_complete(newest(home))
                assert not (home / "step-00000003").exists() or newest(home).step == 3
                save(store, 4)
            assert newest(home).step == 4
            assert_complete(newest(home))
            shutil.rmtree(home)
            if failing > num_failed:
                break
        assert num_failed >= {"link": 2, "fsync": 7, "rename": 1}[operation]

    @pytest.mark.parametrize("step", [3, 4])
    def test_between_any_two_disk_operations_the_newest_valid_one_is_complete(self, tmp_path, monkeypatch, step):
        """Step 4 is a full one, which ends a chain, and removes parts of it."""
        home = tmp_path / "store"
        store = CheckpointStore(home, keep=2, incremental=2)
        for earlier in range(1, step):
            save(store, earlier)
        found = []
        originals = {name: getattr(os, name) for name in ("mkdir", "link", "fsync", "rename", "unlink", "rmdir")}

        def watch(name):
            def watched(*arguments, **options):
                result = originals[name](*arguments, **options)
                with monkeypatch.context() as unwatched:
                    for other, original in originals.items():
                        unwatched.setattr(os, other, original)
                    copy = tmp_path / "copy"
                    shutil.copytree(home, copy)
                    assert_complete(newest(copy))
                    found.append((name, newest(copy).step))
                    shutil.rmtree(copy)
                return result

            return watched

        for name in originals:
            monkeypatch.setattr(os, name, watch(name))
        save(store, step)
        monkeypatch.undo()
        store.close()
        commit = [name for name, _ in found].index("rename")
        assert [newest for _, newest in found] == [step - 1] * commit + [step] * (len(found) - commit)
        assert (("link", step - 1) in found) == (step == 3)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A full one of before, and a chain of three: the newest has links to files of the other two."""
    home = tmp_path_factory.mktemp("chain")
    with CheckpointStore(home, keep=None) as store:
        save(store, 1)
    with CheckpointStore(home, keep=None, incremental=9) as store:
        for step in (2, 3, 4):
            save(store, step)
    return home


class TestDamage:
    """A chain after an older checkpoint: whatever happens to a file of it, the newest whole one is found."""

    @pytest.fixture
    def files(self, chain):
        """Files of the newest by their contents; put back after the test."""
        contents = {file: file.read_bytes() for file in sorted((chain / "step-00000004").iterdir())}
        assert sum("shared" in file.name for file in contents) == 2
        yield contents
        for file, content in contents.items():
            if file.is_symlink() or not file.exists() or file.read_bytes() != content:
                file.unlink(missing_ok=True)
                file.write_bytes(content)

    def assert_found(self, chain, steps, file):
        reasons = []
        found = newest(chain, reasons)
        assert found.step in steps, reasons
        assert_complete(found)
        assert reasons[0][0] == "step-00000004"

    def test_any_changed_bit_of_a_chunk_or_small_file(self, chain, files):
        """250 bits: what a chunk needs is under a digest, and all that shares the file is passed over."""
        generator = random.Random(0)
        manifest = Checkpoint.open(chain / "step-00000004").manifest
        chunks = [chunk for stored in manifest.tensors.values() for chunk in stored.chunks]
        for number in range(250):
            if number % 5:
                chunk = chunks[generator.randrange(len(chunks))]
                file = chain / "step-00000004" / chunk.file
                offset = chunk.start + generator.randrange(chunk.num_bytes)
            else:
                small = [file for file in files if file.suffix != ".safetensors"]
                file = small[generator.randrange(len(small))]
                offset = generator.randrange(len(files[file]))
            with open(file, "r+b") as handle:
                handle.seek(offset)
                byte = handle.read(1)[0]
                handle.seek(offset)
                handle.write(bytes([byte ^ 1 << generator.randrange(8)]))
            self.assert_found(chain, (1, 2, 3), file)
            with open(file, "r+b") as handle:
                handle.seek(offset)
                handle.write(bytes([byte]))
        assert newest(chain).step == 4

    def test_a_file_cut_short_missing_swapped_or_stale(self, chain, files):
        stale = {file.name: file for file in (chain / "step-00000001").iterdir()}
        for file, content in files.items():
            others = [other for other in files if other != file] + [stale.get(file.name, stale["state.json"])]
            for replacement in (
                *[content[: int(share * len(content))] for share in (0, 0.3, 0.999)],
                content + b" ",
                *[other.read_bytes() for other in others],
                None,
            ):
                if replacement == content:
                    continue
                file.unlink()  # this name alone, as a copy of the directory would have it
                if replacement is not None:
                    file.write_bytes(replacement)
                self.assert_found(chain, (3,), file)
                file.unlink(missing_ok=True)
                file.write_bytes(content)
        assert newest(chain).step == 4
