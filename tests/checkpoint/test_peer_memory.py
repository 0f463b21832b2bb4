import errno
import itertools
import os
import shutil

import numba
import pytest
import torch

from paceline.checkpoint import TensorBlock, numba_galois
from paceline.checkpoint.peer_memory import PeerMemory
from paceline.checkpoint.recall import recall
from paceline.comm import LocalGroup
from paceline.errors import SettingsError, StorageError
from paceline.training.state_in_memory import PeerMemorySettings


def full_state(num_ranks, step):
    """A matrix of which each rank has rows, as many as its number and one, and odds and ends of some ranks."""
    num_rows = num_ranks * (num_ranks + 1) // 2
    return {
        "cut": torch.arange(num_rows * 37.0).view(num_rows, 37) + step,
        "half": torch.full((5,), step, dtype=torch.bfloat16),
        "number": torch.tensor(step),
        "empty": torch.empty(0, 3),
    }


def blocks_of(rank, num_ranks, step):
    whole = full_state(num_ranks, step)
    first = rank * (rank + 1) // 2
    blocks = {"cut": [TensorBlock(whole["cut"][first : first + rank + 1], tuple(whole["cut"].shape), (first, 0))]}
    if rank == num_ranks - 1:
        others = {name: tensor for name, tensor in whole.items() if name != "cut"}
        blocks |= {n: [TensorBlock(t, tuple(t.shape), (0,) * t.dim())] for n, t in others.items()}
    return blocks


def keep(folder, num_ranks, num_data, num_parity, steps=(1,)):
    def work(group):
        memory = PeerMemory(folder, num_data, num_parity)
        return [memory.keep(blocks_of(group.rank, num_ranks, s), {"step": s}, s, group) for s in steps][-1]

    return LocalGroup.run(num_ranks, work, timeout_s=20)


@pytest.mark.parametrize(("num_data", "num_parity"), [(1, 1), (2, 2)])
def test_the_kernel_of_parity_is_compiled_before_the_first_copy(tmp_path, monkeypatch, num_data, num_parity):
    kernel = numba.njit(numba_galois.combine.py_func, nogil=True)
    monkeypatch.setattr(numba_galois, "combine", kernel)
    PeerMemory(tmp_path, num_data, num_parity)
    assert kernel.signatures, "compiled for some arrays"
    kernel.disable_compile()  # for others it would fail
    keep(tmp_path, 4, num_data, num_parity)


def find(folder, num_ranks=1, newer_than=-1):
    reasons = []

    def work(group):
        found = recall(folder, group, newer_than=newer_than, on_damaged=lambda path, why: reasons.append(path.name))
        assert found is None or group.rank == 0
        return found

    return LocalGroup.run(num_ranks, work, timeout_s=20)[0], reasons


def assert_state(found, num_ranks, step):
    assert found.step == step
    assert found.read_document() == {"step": step}
    expected = full_state(num_ranks, step)
    assert {n: (tuple(s.shape), s.dtype) for n, s in found.list_tensors().items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in expected.items()
    }
    for name, tensor in expected.items():
        assert torch.equal(found.read(name), tensor)


@pytest.mark.parametrize(
    ("num_ranks", "num_data", "num_parity"), [(2, 1, 1), (4, 1, 1), (3, 2, 1), (5, 3, 2), (7, 2, 1), (4, 1, 3)]
)
def test_whoever_is_lost_the_state_is_restored(tmp_path, num_ranks, num_data, num_parity):
    keep(tmp_path / "kept", num_ranks, num_data, num_parity)
    for lost in itertools.combinations(range(num_ranks), num_parity):
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "kept", copy)
        for rank in lost:
            shutil.rmtree(copy / f"rank-{rank:05d}")
        found, reasons = find(copy, num_ranks=2)
        assert_state(found, num_ranks, 1)
        assert not reasons
        shutil.rmtree(copy)


def test_more_losses_are_none(tmp_path):
    keep(tmp_path, 3, 2, 1)
    for rank in (0, 2):
        shutil.rmtree(tmp_path / f"rank-{rank:05d}")
    assert find(tmp_path) == (None, [])
    assert find(tmp_path / "absent") == (None, [])


def test_copies_take_turns_and_the_newest_that_all_have_finished_counts(tmp_path):
    keep(tmp_path, 3, 2, 1, steps=(1, 2, 3))
    assert_state(find(tmp_path)[0], 3, 3)
    assert sorted(path.name for path in (tmp_path / "rank-00000").iterdir()) == ["slot-0", "slot-1"]
    for rank in (0, 1):  # as if they had died before they finished it
        (tmp_path / f"rank-{rank:05d}" / "slot-0" / "index.json").unlink()
    assert_state(find(tmp_path, num_ranks=3)[0], 3, 2)
    assert find(tmp_path, newer_than=2)[0] is None


def test_a_process_that_goes_on_replaces_the_older_copy(tmp_path):
    keep(tmp_path, 2, 1, 1, steps=(1, 2, 3))
    assert find(tmp_path)[0].step == 3
    keep(tmp_path, 2, 1, 1, steps=(4,))
    assert_state(find(tmp_path)[0], 2, 4)
    shutil.rmtree(tmp_path / "rank-00000" / "slot-1")
    shutil.rmtree(tmp_path / "rank-00001" / "slot-1")
    assert_state(find(tmp_path)[0], 2, 3)


@pytest.mark.parametrize("file", ["part", "parity", "index.json"])
@pytest.mark.parametrize("damage", ["bit", "cut", "missing", "stale", "other"])
def test_a_damaged_file_is_as_if_it_were_lost(tmp_path, file, damage):
    keep(tmp_path, 3, 2, 1, steps=(1, 2))
    path = tmp_path / "rank-00001" / "slot-1" / file
    content = path.read_bytes()
    changed = {
        "bit": content[:20] + bytes([content[20] ^ 4]) + content[21:],
        "cut": content[: len(content) // 2],
        "stale": (path.parent.parent / "slot-0" / file).read_bytes(),
        "other": (tmp_path / "rank-00002" / "slot-1" / file).read_bytes(),
    }
    path.unlink()
    if damage != "missing":
        path.write_bytes(changed[damage])
    assert_state(find(tmp_path)[0], 3, 2)
    if file != "parity":  # and what another rank needs for itself may not be gone too
        shutil.rmtree(tmp_path / "rank-00002")
        found, _ = find(tmp_path)
        assert found is None or damage != "other" or found.step == 1


def test_memory_and_traffic_are_as_stated(tmp_path):
    rows = 4096
    tensor = torch.randn(rows, 64)

    def work(group):
        mine = tensor[group.rank * rows // 4 : (group.rank + 1) * rows // 4]
        block = TensorBlock(mine, (rows, 64), (group.rank * rows // 4, 0))
        memory = PeerMemory(tmp_path, 3, 1)
        memory.keep({"a": [block]}, {}, 1, group)
        copy = memory.keep({"a": [block]}, {}, 2, group)
        group.barrier()
        memory.forget()
        return copy

    for copy in LocalGroup.run(4, work, timeout_s=20):
        assert copy.part_bytes == pytest.approx(tensor.nbytes / 4, rel=0.01)
        assert copy.memory_bytes == pytest.approx(2 * (1 + 1 / 3) * tensor.nbytes / 4, rel=0.01)
    assert not tmp_path.exists()


def test_full_memory_is_an_error_that_says_so(tmp_path, monkeypatch):
    def fail(descriptor, start, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(StorageError, match=r"slot-0 could not be written: No space left on device; free space there"):
        keep(tmp_path, 2, 1, 1)


def test_too_few_ranks_are_refused(tmp_path):
    with pytest.raises(SettingsError, match="start more, or lower one of the two"):
        keep(tmp_path, 2, 2, 1)


def test_a_copy_of_a_directory_has_memory_of_its_own(tmp_path):
    (tmp_path / "run").mkdir()
    (group,), settings = LocalGroup.create(1), PeerMemorySettings(interval=1, folder=str(tmp_path))
    folder = settings.open(tmp_path / "run", group).folder
    assert settings.open(tmp_path / "run", group).folder == folder
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert settings.open(tmp_path / "copy", group).folder != folder, "or it would remove the original's at its end"


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000, "5", '{"directory": 5}'])
def test_a_run_finds_its_memory_again_unless_the_record_is_damaged(tmp_path, content):
    (group,), settings = LocalGroup.create(1), PeerMemorySettings(interval=1)

    def find():
        return settings.open(tmp_path, group).folder

    found = find()
    assert find() == found
    (tmp_path / "peer_memory.json").write_text(content)
    assert found != (other := find())
    assert find() == other
