import gc
import itertools
import math
import os
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from paceline.comm import SharedMemoryGroup, shared_memory
from paceline.comm.shared_memory import control_segment, segment, transfers
from paceline.comm.shared_memory import group as group_module
from paceline.errors import SettingsError
from paceline.testing import GROUP_CHECKS, check_group, check_words_of_failure, run_processes

pytestmark = pytest.mark.skipif(
    shared_memory.find_obstacle() is not None, reason=f"no shared memory here: {shared_memory.find_obstacle()}"
)

CAMPAIGN = [pytest.mark.slow, pytest.mark.campaign]
LARGE = 100_003
"""Elements that take the way of large operations, the last slice and chunk being shorter than the others."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64)


def open_group(name):
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return SharedMemoryGroup(dist.PrefixStore(name, store), rank, size, timeout_s=20)


def keep_contract(in_pieces):
    """Keep it as it is; or with nothing small, in chunks of a few elements."""
    if in_pieces:
        group_module.SMALL_BYTES = -1
        control_segment._LARGE_BYTES = 64 * int(os.environ["WORLD_SIZE"])
    group = open_group("contract")
    names = check_group(group)
    check_words_of_failure(group)
    return names


@pytest.mark.parametrize(("num_ranks", "in_pieces"), [pytest.param(2, False, marks=CAMPAIGN), (3, True), (5, False)])
def test_keeps_the_contract(num_ranks, in_pieces):
    for result in run_processes(num_ranks, keep_contract, {"in_pieces": in_pieces}):
        assert result.exit_code == 0, result.output
        assert result.value == [check.__name__ for check in GROUP_CHECKS]


def test_keeps_the_contract_alone(monkeypatch):
    with SharedMemoryGroup(dist.HashStore(), 0, 1, timeout_s=20) as group:
        assert len(check_group(group)) == len(GROUP_CHECKS)
        monkeypatch.setattr(group_module, "SMALL_BYTES", -1)
        assert len(check_group(group)) == len(GROUP_CHECKS)


def make_values(rank, num_elements, dtype=torch.float32):
    """Return values of which the sum depends on the order."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(num_elements, generator=generator, dtype=torch.float64) * 50
    return values.to(dtype) if dtype.is_floating_point or dtype.is_complex else values.abs().to(dtype)


def add_in_order(size, num_elements, dtype=torch.float32):
    total = make_values(0, num_elements, dtype)
    for rank in range(1, size):
        total += make_values(rank, num_elements, dtype)
    return total


def sum_large(group):
    """Sum what lies in shared memory, what does not, and both at once; return which are not right bit for bit."""
    wrong = []
    for dtype in DTYPES:
        expected = add_in_order(group.size, LARGE, dtype)
        shared = group.allocate(LARGE + 7, dtype)[7:]
        private = torch.empty(LARGE, dtype=dtype)
        mixed = private.clone() if group.rank == 0 else shared
        for kind, tensor in (("shared", shared), ("private", private), ("mixed", mixed)):
            tensor.copy_(make_values(group.rank, LARGE, dtype))
            group.all_reduce(tensor, name=f"{kind} {dtype}").wait()
            if not torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8)):
                wrong.append(f"{kind} {dtype}")
    return wrong


def copy_large(group):
    rank, size, wrong = group.rank, group.size, []
    shared = group.allocate(LARGE, torch.float32)
    for source in range(size):
        for tensor in (shared, torch.empty(LARGE)):
            tensor.copy_(make_values(rank, LARGE))
            group.broadcast(tensor, source=source, name="copy").wait()
            if not torch.equal(tensor, make_values(source, LARGE)):
                wrong.append(f"broadcast from {source}")
    values = [make_values(other, size * LARGE).view(size, LARGE) for other in range(size)]
    rows = torch.empty(size, LARGE)
    group.all_gather(rows, values[rank][0], name="rows").wait()
    if not torch.equal(rows, torch.stack([value[0] for value in values])):
        wrong.append("all_gather")
    group.all_to_all(rows, values[rank], name="swapped").wait()
    if not torch.equal(rows, torch.stack([value[rank] for value in values])):
        wrong.append("all_to_all")
    for num_rows in (10, 1000):
        turned = make_values(rank, num_rows * 100).view(num_rows, 100).t()
        group.all_reduce(turned, name="dense").wait()
        if not torch.equal(turned, add_in_order(size, num_rows * 100).view(num_rows, 100).t()):
            wrong.append(f"sum of a transposed matrix of {num_rows} rows")
    return wrong


def begin_many(group):
    """Begin far more than rings and recorder hold: small ones, both, large ones; wait at the end. Rank 1 is late."""
    tensors, works = [], []
    for number in range(900):
        time.sleep(0.2 if group.rank == 1 and number in (0, 100, 300) else 0)
        is_small = number < 100 or (number < 300 and number % 7 == 0)
        tensors.append(torch.full((3 if is_small else 5_000,), float(group.rank + number)))
        works.append(group.all_reduce(tensors[-1], name=f"sum {number}"))
    for work in reversed(works):
        work.wait()
    base = group.size * (group.size - 1) / 2
    return [n for n, tensor in enumerate(tensors) if not bool((tensor == base + group.size * n).all())]


def post_and_compute(group):
    """Rank 0 begins two operations and computes until the others are done with both; return whether they were."""
    group.barrier()
    works = [group.all_reduce(torch.ones(4), name="small"), group.all_reduce(torch.ones(LARGE), name="large")]
    if group.rank == 0:
        group.store.wait([f"rank {rank} is done" for rank in range(1, group.size)], timedelta(seconds=20))
    for work in works:
        work.wait()
    group.store.set(f"rank {group.rank} is done", "")
    return True


def count_resources():
    """Return the bytes of shared memory mapped here, and the number of open descriptors."""
    with open("/proc/self/maps") as file:
        spans = [line.split()[0].split("-") for line in file if "memfd:paceline" in line]
    return [sum(int(end, 16) - int(begin, 16) for begin, end in spans), len(os.listdir("/proc/self/fd"))]


def allocate_and_drop(group):
    gc.collect()  # groups that were closed before
    before = count_resources()
    tensors = [group.allocate(LARGE, torch.float32) for _ in range(3)]
    view = tensors[0][10:20]
    group.all_reduce(tensors[1], name="sum").wait()
    kept = count_resources()
    del tensors
    of_a_view = count_resources()
    del view
    gc.collect()
    return {"before": before, "kept": kept, "of_a_view": of_a_view, "after": count_resources()}


def fork_and_drop(group):
    """Return the shared kB that a child holds, forked as a data loader's are, before and after the tensor has gone."""
    tensor = group.allocate(LARGE, torch.float32).fill_(1)
    group.barrier()
    address = tensor.data_ptr() - group.rank * segment.round_to_pages(tensor.nbytes)
    questions, answers = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        tensor.sum()  # in the child's page table too
        while os.read(questions[0], 1) == b"?":
            os.write(answers[1], f"{read_resident_kb(address):8}".encode())
        os._exit(0)

    def ask():
        os.write(questions[1], b"?")
        return int(os.read(answers[0], 8))

    held = [ask()]
    del tensor
    group.barrier()
    held.append(ask())
    os.write(questions[1], b".")
    os.waitpid(child, 0)
    return held


def read_resident_kb(address):
    """Return what of the mapping that begins at `address` is in memory."""
    with open("/proc/self/smaps") as file:
        parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", file.read(), flags=re.MULTILINE)
    (mine,) = [part for part in parts if part.startswith(f"{address:x}-")]
    return int(re.search(r"^Rss:\s+(\d+)", mine, flags=re.MULTILINE).group(1))


def refuse(group):
    """Return what is said of tensors that cannot be, and a sum after all that."""
    attempts = [
        lambda: group.all_reduce(torch.ones(10, 10)[:, ::2], name="holes"),
        lambda: group.all_reduce(torch.ones(3, device="meta"), name="elsewhere"),
        lambda: group.all_reduce(torch.ones(3).to(torch.float8_e4m3fn), name="eight bits"),
        lambda: group.broadcast(torch.ones(3), source=group.size, name="from nobody"),
        lambda: group.all_gather(torch.ones(group.size, 4), torch.ones(3), name="short rows"),
        lambda: group.all_to_all(torch.ones(group.size, 3), torch.ones(group.size + 1, 3), name="many rows"),
    ]
    said = []
    for attempt in attempts:
        try:
            attempt()
        except SettingsError as error:
            said.append(str(error))
    total = torch.ones(1)
    group.all_reduce(total, name="sum").wait()
    return [said, float(total)]


def send_beside(group):
    """Pass a message on while a sum is under way."""
    following, previous = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    got = torch.zeros(5)
    works = [
        group.all_reduce(torch.ones(LARGE), name="sum"),
        group.send(torch.full((5,), float(group.rank)), following, tag=3, name="passing"),
        group.receive(got, previous, tag=3, name="passing"),
    ]
    for work in works:
        work.wait()
    return got.unique().tolist() == [float(previous)]


SCENES = {
    scene.__name__: scene
    for scene in (
        sum_large,
        copy_large,
        begin_many,
        post_and_compute,
        allocate_and_drop,
        fork_and_drop,
        refuse,
        send_beside,
    )
}


def play():
    values = {}
    for name, scene in SCENES.items():
        with open_group(name) as group:
            values[name] = scene(group)
            group.barrier()
    return values


@pytest.fixture(scope="module")
def played():
    """What each scene returned on each of three ranks: one start of processes serves all."""
    results = run_processes(3, play)
    for result in results:
        assert result.exit_code == 0, result.output
    return {name: [result.value[name] for result in results] for name in SCENES}


def test_large_sums_run_in_the_order_of_ranks_in_any_dtype(played):
    assert played["sum_large"] == [[]] * 3


def test_large_copies_arrive_whole(played):
    assert played["copy_large"] == [[]] * 3


def test_any_number_of_operations_can_be_outstanding(played):
    assert played["begin_many"] == [[]] * 3


def test_nobody_waits_for_a_rank_that_has_begun_and_computes(played):
    assert played["post_and_compute"] == [True] * 3


def test_memory_goes_when_its_last_tensor_does(played):
    part = segment.round_to_pages(LARGE * 4)
    for counts in played["allocate_and_drop"]:
        mapped, descriptors = counts["before"]
        assert counts["kept"] == [mapped + 3 * 3 * part, descriptors], "each maps all parts, and keeps no descriptor"
        assert counts["of_a_view"] == [mapped + 3 * part, descriptors]
        assert counts["after"] == [mapped, descriptors]


def test_children_forked_meanwhile_hold_no_memory(played):
    for before, after in played["fork_and_drop"]:
        assert before >= LARGE * 4 // 1024
        assert after == 0


def test_what_cannot_be_done_is_refused_before_others_wait_for_it(played):
    words = ("call contiguous() first", "on a CPU", "can be added", "rank of 0..2, but got 3", "3 of 12 bytes", "3 of ")
    for said, total in played["refuse"]:
        assert len(said) == len(words)
        assert all(word in message for message, word in zip(said, words, strict=True)), said
        assert total == 3.0


def test_messages_pass_beside_collectives(played):
    assert played["send_beside"] == [True] * 3


def test_slices_cover_a_buffer_once():
    for num_bytes in (0, 1, 63, 64, 65, 1000, 4097):
        for num_slices in (1, 2, 3, 7, 100):
            bounds = [transfers._slice_bounds(num_bytes, num_slices, index) for index in range(num_slices)]
            assert (bounds[0][0], bounds[-1][1]) == (0, num_bytes)
            assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
            assert max(end - begin for begin, end in bounds) <= math.ceil(num_bytes / num_slices / 64) * 64


def test_one_boot_and_network_are_one_host():
    key = shared_memory.host_key()
    with open("/proc/sys/kernel/random/boot_id") as file:
        assert key.startswith(file.read().strip())
    assert key.endswith(f":{os.stat('/proc/self/ns/net').st_ino}")
