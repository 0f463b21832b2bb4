import errno
import gc
import os
import shutil
import subprocess

import pytest
import torch

from paceline.checkpoint import Checkpoint, CheckpointStore
from paceline.checkpoint.manifest import Chunk
from paceline.errors import CheckpointError, SettingsError, StorageError


def state(step):
    """Tensors and document from which it can be told whether a checkpoint is complete."""
    return {"a": torch.full((50,), float(step)), "b": torch.full((3, 4), step)}, {"step": step}


def save(store, step):
    return store.save(*state(step), step)


def names(store):
    return [path.name for path in store.list_checkpoints()]


def assert_complete(checkpoint):
    tensors = {"a": torch.zeros(50), "b": torch.zeros(3, 4, dtype=torch.int64)}
    checkpoint.load(tensors)
    expected, document = state(checkpoint.step)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert checkpoint.read_document() == document


def newest(directory):
    return CheckpointStore(directory).find_newest_valid(lambda path, why: None)


def test_saved_says_what_was_made(tmp_path):
    saved = save(CheckpointStore(tmp_path / "new" / "place"), 7)
    assert saved.path == tmp_path / "new" / "place" / "step-00000007"
    assert saved.step == 7
    on_disk = sum(file.stat().st_size for file in saved.path.glob("*s*t*"))  # tensors and state, and the manifest
    assert on_disk - (saved.path / "manifest.json").stat().st_size == saved.num_bytes
    assert saved.duration_s > 0
    assert_complete(Checkpoint.open(saved.path))


@pytest.mark.parametrize("incremental", [0, 1])
def test_records_of_chunks_are_kept_only_for_what_will_share_them(tmp_path, incremental):
    before = {id(one) for one in gc.get_objects() if type(one) is Chunk}
    store = CheckpointStore(tmp_path, incremental=incremental)
    save(store, 1)
    gc.collect()
    kept = [one for one in gc.get_objects() if type(one) is Chunk and id(one) not in before]
    assert bool(kept) == bool(incremental)


def test_an_empty_or_absent_store_has_none(tmp_path):
    assert newest(tmp_path / "absent") is None
    assert CheckpointStore(tmp_path / "absent").list_checkpoints() == []
    assert not (tmp_path / "absent").exists()


def test_newest_is_the_highest_step_then_the_latest_attempt(tmp_path):
    store = CheckpointStore(tmp_path, keep=None)
    for step in (9, 100_000_000, 10, 9, *[5] * 11):
        save(store, step)
    fives = [f"step-00000005-{attempt}" for attempt in range(11, 1, -1)] + ["step-00000005"]
    assert names(store) == ["step-100000000", "step-00000010", "step-00000009-2", "step-00000009", *fives]
    assert newest(tmp_path).step == 100_000_000


def test_nothing_is_overwritten(tmp_path):
    store = CheckpointStore(tmp_path)
    first = save(store, 4)
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in first.path.iterdir()}
    second = save(store, 4)
    assert second.path.name == "step-00000004-2"
    assert before == {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in first.path.iterdir()}


def test_a_name_taken_by_something_else_is_left_alone(tmp_path):
    (tmp_path / "step-00000004").write_text("a file")
    assert save(CheckpointStore(tmp_path), 4).path.name == "step-00000004-2"
    assert (tmp_path / "step-00000004").read_text() == "a file"


class TestKeep:
    def test_the_newest_n_stay(self, tmp_path):
        store = CheckpointStore(tmp_path, keep=2)
        for step in range(1, 6):
            save(store, step)
            assert names(store) == [f"step-{kept:08d}" for kept in range(step, max(step - 2, 0), -1)]
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-00000004", "step-00000005"]

    def test_none_keeps_all(self, tmp_path):
        store = CheckpointStore(tmp_path, keep=None)
        for step in range(6):
            save(store, step)
        assert len(names(store)) == 6

    def test_less_than_one_is_refused(self, tmp_path):
        with pytest.raises(SettingsError, match=r"keep must be at least 1, but got 0; use None"):
            CheckpointStore(tmp_path, keep=0)

    def test_one_just_written_stays_even_below_others(self, tmp_path):
        store = CheckpointStore(tmp_path, keep=1)
        save(store, 100)
        saved = save(store, 50)
        assert saved.path.exists()
        assert_complete(Checkpoint.open(saved.path))

    def test_one_known_to_be_damaged_does_not_count(self, tmp_path):
        store = CheckpointStore(tmp_path, keep=2)
        for step in (1, 2):
            save(store, step)
        (tmp_path / "step-00000002" / "state.json").write_text("{}")
        assert store.find_newest_valid(lambda path, why: None).step == 1
        save(store, 3)
        assert names(store) == ["step-00000003", "step-00000002", "step-00000001"]
        save(store, 4)
        assert names(store) == ["step-00000004", "step-00000003"]

    def test_unfinished_ones_do_not_count_and_go_when_a_newer_one_is_there(self, tmp_path):
        store = CheckpointStore(tmp_path, keep=2)
        for step in (1, 3):
            save(store, step)
        for name in ("step-00000002", "step-00000003-2", "step-00000009"):
            shutil.copytree(tmp_path / "step-00000003", tmp_path / name)
            (tmp_path / name / "COMMITTED").unlink()
        save(store, 4)
        left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
        assert left == {"step-00000004", "step-00000003", "step-00000009"}  # 9 is of a run that was ahead
        save(store, 10)
        assert not (tmp_path / "step-00000009").exists()

    def test_what_is_not_a_checkpoint_is_never_removed(self, tmp_path):
        store = CheckpointStore(tmp_path, keep=1)
        (tmp_path / "elsewhere").mkdir()
        foreign = [
            tmp_path / name for name in ("step-1", "best", "step-00000001-1", "step-00000001.bak", "xstep-00000001")
        ]
        for path in foreign:
            path.mkdir()
            (path / "COMMITTED").write_text("mine")
        (tmp_path / "step-00000000").symlink_to(tmp_path / "elsewhere")
        save(store, 1)
        (tmp_path / "step-00000001" / "notes.txt").write_text("keep me")
        save(store, 2)
        assert names(store) == ["step-00000002"]
        assert all((path / "COMMITTED").read_text() == "mine" for path in foreign)
        assert (tmp_path / "step-00000000").is_symlink()
        assert [file.name for file in (tmp_path / "step-00000001").iterdir()] == ["notes.txt"]

    def test_one_that_cannot_be_removed_is_a_warning(self, tmp_path, monkeypatch):
        def refuse(path):
            raise PermissionError(errno.EACCES, "Permission denied")

        store = CheckpointStore(tmp_path, keep=1)
        save(store, 1)
        monkeypatch.setattr("paceline.checkpoint.store.remove_checkpoint", refuse)
        with pytest.warns(UserWarning, match=r"step-00000001 could not be removed: Permission denied"):
            save(store, 2)
        assert newest(tmp_path).step == 2


class TestLock:
    def test_a_second_writer_is_refused_and_the_holder_named(self, tmp_path):
        store, second = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
        save(store, 1)
        with pytest.raises(CheckpointError, match=rf"must have one writer, but process {os.getpid()} on .* is writing"):
            save(second, 2)
        assert newest(tmp_path).step == 1  # reading needs no lock
        store.close()
        save(second, 2)

    def test_leaving_a_with_block_or_dropping_the_store_frees_it(self, tmp_path):
        with CheckpointStore(tmp_path) as store:
            save(store, 1)
            with pytest.raises(CheckpointError, match="must have one writer"):
                save(CheckpointStore(tmp_path), 2)
        dropped = CheckpointStore(tmp_path)
        save(dropped, 2)
        with pytest.raises(CheckpointError, match="must have one writer"):
            save(CheckpointStore(tmp_path), 3)
        del dropped
        save(CheckpointStore(tmp_path), 3)
        assert newest(tmp_path).step == 3

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_a_forked_process_does_not_keep_it(self, tmp_path):
        store = CheckpointStore(tmp_path)
        save(store, 1)
        go_on, done = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            os.write(done[1], b"x")
            os.read(go_on[0], 1)
            os._exit(0)
        try:
            os.read(done[0], 1)
            with pytest.raises(CheckpointError, match="one writer"):  # the fork did not free it either
                save(CheckpointStore(tmp_path), 2)
            store.close()
            save(CheckpointStore(tmp_path), 2)
        finally:
            os.write(go_on[1], b"x")
            os.waitpid(child, 0)
            for descriptor in (*go_on, *done):
                os.close(descriptor)

    def test_a_file_system_without_locks_is_a_warning(self, tmp_path, monkeypatch):
        def refuse(descriptor, operation):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr("fcntl.flock", refuse)
        with pytest.warns(UserWarning, match=r"cannot be locked \(No locks available\)"):
            assert save(CheckpointStore(tmp_path), 1).step == 1


class TestFailures:
    @pytest.fixture
    def mount(self, tmp_path):
        """A file system of 1 MiB."""
        place = tmp_path / "mount"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a small file system needs root and CAP_SYS_ADMIN")
        try:
            yield place
        finally:
            subprocess.run(["umount", "--lazy", str(place)], check=True)

    def test_a_full_disk_is_a_clear_error_and_leaves_the_rest_as_it_was(self, mount):
        with CheckpointStore(mount) as store:
            save(store, 1)
            with pytest.raises(StorageError) as caught:
                store.save({"a": torch.zeros(500_000)}, {}, step=2)
            message = str(caught.value)
            assert "step-00000002 could not be written: No space left on device; free 9" in message
            assert "it needs 2,000,002, and 1,0" in message
            assert isinstance(caught.value.__cause__, OSError)
            assert names(store) == ["step-00000001"]
            assert {path.name for path in mount.iterdir()} == {".lock", "step-00000001"}
            assert_complete(newest(mount))
            save(store, 3)  # and it can go on
            assert_complete(newest(mount))

    def test_a_read_only_disk_is_a_clear_error(self, mount):
        with CheckpointStore(mount) as store:
            save(store, 1)
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        with pytest.raises(CheckpointError, match=r"Read-only file system; make the directory writable, or choose"):
            save(CheckpointStore(mount), 2)
        assert_complete(newest(mount))

    @pytest.mark.parametrize(
        ("number", "advice"),
        [
            (errno.ENOSPC, "free space there, or choose another directory: it needs 3.* takes whole blocks of"),
            (errno.EDQUOT, "raise the quota"),
            (errno.EACCES, "make the directory writable"),
            (errno.EIO, "check the disk"),
        ],
    )
    def test_every_failing_fsync_fails_the_save_and_nothing_else(self, tmp_path, monkeypatch, number, advice):
        store = CheckpointStore(tmp_path)
        save(store, 1)
        fsync, calls = os.fsync, []

        def fail_at(call):
            def failing(descriptor):
                calls.append(descriptor)
                if len(calls) == call:
                    raise OSError(number, os.strerror(number))
                fsync(descriptor)

            return failing

        for call in range(1, 8):  # tensors, document, manifest, directory, store, marker, directory
            calls.clear()
            monkeypatch.setattr(os, "fsync", fail_at(call))
            with pytest.raises(StorageError, match=f"step-00000002 could not be written: .*{advice}"):
                save(store, 2)
            assert names(store) == ["step-00000001"]
            assert not (tmp_path / "step-00000002").exists()
        monkeypatch.setattr(os, "fsync", fsync)
        assert_complete(newest(tmp_path))
        assert save(store, 2).path.name == "step-00000002"

    def test_a_store_that_is_a_file_is_a_clear_error(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(StorageError, match=r"file could not be written: File exists"):
            save(CheckpointStore(tmp_path / "file"), 1)
        with pytest.raises(CheckpointError, match=r"file must be a directory of checkpoints, but Not a directory"):
            newest(tmp_path / "file")


def test_between_any_two_disk_operations_the_newest_valid_one_is_complete(tmp_path, monkeypatch):
    """After each operation the store is copied, as a kill at that instant would leave it, and looked at."""
    home = tmp_path / "store"
    store = CheckpointStore(home, keep=2)
    for step in (1, 2):
        save(store, step)
    seen = []

    def watch(name):
        operation = getattr(os, name)

        def watched(*arguments, **options):
            result = operation(*arguments, **options)
            with monkeypatch.context() as unwatched:
                for other, original in originals.items():
                    unwatched.setattr(os, other, original)
                copy = tmp_path / f"copy{len(seen)}"
                shutil.copytree(home, copy)
                checkpoint = newest(copy)
                assert_complete(checkpoint)
                seen.append((name, checkpoint.step, [path.name for path in CheckpointStore(copy).list_checkpoints()]))
                shutil.rmtree(copy)
            return result

        return watched

    originals = {name: getattr(os, name) for name in ("mkdir", "fsync", "rename", "unlink", "rmdir")}
    for name in originals:
        monkeypatch.setattr(os, name, watch(name))
    save(store, 3)
    monkeypatch.undo()
    steps = [step for _, step, _ in seen]
    commit = [name for name, *_ in seen].index("rename")
    assert steps == [2] * commit + [3] * (len(seen) - commit)
    assert seen[-1] == ("rmdir", 3, ["step-00000003", "step-00000002"])
    # Of the one that is removed the marker goes first: no later copy lists it.
    first_unlink = [name for name, *_ in seen].index("unlink")
    assert all("step-00000001" not in listed for *_, listed in seen[first_unlink:])
    assert [name for name, *_ in seen][first_unlink:] == [
        "unlink",
        "fsync",
        "unlink",
        "unlink",
        "unlink",
        "rmdir",
    ]


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    assert store.find_best() is None
    for step in (1, 2, 3):
        store.save({}, {}, step, is_best=step == 2)
    assert store.find_best() == tmp_path / "step-00000002"
    assert [path.name for path in store.list_checkpoints()] == ["step-00000003", "step-00000002"]
    store.save({}, {}, 4, is_best=True)
    assert [path.name for path in store.list_checkpoints()] == ["step-00000004"]
    assert CheckpointStore(tmp_path).find_best() == tmp_path / "step-00000004"
    store.close()


def test_a_best_checkpoint_that_is_gone_is_none_and_a_damaged_name_is_told(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save({}, {}, 1, is_best=True)
    (tmp_path / "step-00000001" / "COMMITTED").unlink()
    assert store.find_best() is None
    for content in ("", "[]", "{}", "[" * 100_000):
        (tmp_path / "best.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"best\.json must name the best checkpoint"):
            store.find_best()
    (tmp_path / "best.json").write_text('{"checkpoint": "../elsewhere"}')
    assert store.find_best() is None
    store.close()
