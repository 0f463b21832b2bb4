"""Contract of every `Group`: checks that all ranks run together, each on its own member of one group.

A new kind of group is tested by running `check_group` on every rank, and `check_words_of_failure` last of all.
"""

import time
from collections.abc import Callable

import torch
from pydantic import JsonValue

from paceline.comm.group import Group, Work
from paceline.errors import CommunicationError
from paceline.testing.message_contract import MESSAGE_CHECKS
from paceline.testing.patterns import LARGE, SHAPES, expect_equal, pattern, random_values

Check = Callable[[Group], None]

CAUSE = "the disk is full"
DOCUMENTS: tuple[JsonValue, ...] = (
    None,
    "",
    "Zoë 🚲 読む \u0000 end",
    {"name": "ß" * 10_000, "nested": [1, 2.5, None, True, {}]},
    [],
)


def check_group(group: Group) -> list[str]:
    """Run every check of `GROUP_CHECKS` and return their names.

    Raises:
        AssertionError: The group breaks the contract; the message begins with the check's name.
    """
    for check in GROUP_CHECKS:
        try:
            check(group)
        except Exception as error:
            raise AssertionError(f"{check.__name__}: {str(error) or repr(error)}") from error
    return [check.__name__ for check in GROUP_CHECKS]


def sums_are_exact(group: Group) -> None:
    """A sum that the dtype can represent exactly is exact, for any shape."""
    for dtype in LARGE:
        for shape in SHAPES:
            tensor = pattern(group.rank, shape, dtype, group.device)
            group.all_reduce(tensor, name="exact sum").wait()
            first = pattern(0, shape, dtype, group.device)
            expected = first * group.size + group.size * (group.size - 1) // 2
            expect_equal(tensor, expected, f"sum of {shape} {dtype}")


def sums_have_the_same_bits_on_every_rank(group: Group) -> None:
    """Rounding depends on the order of summation, so the order must be the same on all ranks; and it is a true sum."""
    for num_elements in (1, 2, 1031):
        parts = [random_values(rank, num_elements, group.device) for rank in range(group.size)]
        mine = parts[group.rank].clone()
        group.all_reduce(mine, name="sum").wait()
        everybody = torch.zeros(group.size, num_elements, device=group.device)
        group.all_gather(everybody, mine, name="sums").wait()
        for rank in range(group.size):
            expect_equal(everybody[rank].view(torch.int32), mine.view(torch.int32), f"bits of rank {rank}'s sum")
        exact = torch.stack([part.double() for part in parts]).sum(0)
        magnitude = torch.stack([part.double().abs() for part in parts]).sum(0)
        bound = (group.size - 1) * torch.finfo(torch.float32).eps * magnitude
        assert bool(((mine.double() - exact).abs() <= bound).all()), (
            "a float32 sum is further off than rounding takes it"
        )


def sums_keep_nan_and_infinity(group: Group) -> None:
    """An element that is not finite on one rank is not finite in the sum."""
    last = group.size - 1
    tensor = torch.zeros(3, device=group.device)
    if group.rank == last:
        tensor[0], tensor[1] = float("nan"), float("inf")
    group.all_reduce(tensor, name="not finite").wait()
    assert str(tensor.tolist()) == "[nan, inf, 0.0]", f"got {tensor.tolist()}"


def operations_leave_the_rest_of_a_buffer_alone(group: Group) -> None:
    """A slice of a buffer can take part without a copy, and nothing beside it changes."""
    buffer = torch.arange(10, dtype=torch.float64, device=group.device)
    group.all_reduce(buffer[3:6], name="slice").wait()
    expected = torch.arange(10, dtype=torch.float64, device=group.device)
    expected[3:6] *= group.size
    expect_equal(buffer, expected, "buffer around a summed slice")


def many_operations_can_be_in_flight(group: Group) -> None:
    """Operations of every kind run concurrently, and may be awaited in any order."""
    here, size = float(group.rank), group.size
    sums = [torch.full((100 + number,), here + number, device=group.device) for number in range(8)]
    copies = [torch.full((5,), here, device=group.device) for _ in range(size)]
    gathered = torch.zeros(size, 2, device=group.device)
    works = [group.all_reduce(tensor, name=f"sum {number}") for number, tensor in enumerate(sums)]
    works += [group.broadcast(tensor, source=rank, name=f"copy {rank}") for rank, tensor in enumerate(copies)]
    works.append(group.all_gather(gathered, torch.full((2,), here, device=group.device), name="rows"))
    for work in reversed(works):
        work.wait()
    for number, tensor in enumerate(sums):
        expected = torch.full_like(tensor, size * (size - 1) / 2 + size * number)
        expect_equal(tensor, expected, f"sum {number} of 8 in flight")
    for rank, tensor in enumerate(copies):
        expect_equal(tensor, torch.full_like(tensor, rank), f"copy of rank {rank} in flight")
    expect_equal(gathered[:, 0], torch.arange(float(size), device=group.device), "rows gathered in flight")


def broadcast_copies_each_source(group: Group) -> None:
    """Every rank can be the source; its own tensor stays as it is."""
    for source in range(group.size):
        for dtype in (*LARGE, torch.bool):
            for shape in SHAPES:
                tensor = pattern(group.rank, shape, dtype, group.device)
                group.broadcast(tensor, source=source, name="copy").wait()
                expected = pattern(source, shape, dtype, group.device)
                expect_equal(tensor, expected, f"copy of {shape} {dtype} from rank {source}")


def all_gather_keeps_the_order_of_ranks(group: Group) -> None:
    """``output[r]`` is rank r's tensor, and the tensor given is unchanged."""
    for dtype in LARGE:
        for shape in SHAPES:
            mine = pattern(group.rank, shape, dtype, group.device)
            output = torch.zeros(group.size, *shape, dtype=dtype, device=group.device)
            group.all_gather(output, mine, name="rows").wait()
            for rank in range(group.size):
                expected = pattern(rank, shape, dtype, group.device)
                expect_equal(output[rank], expected, f"row {rank} of {shape} {dtype}")
            expect_equal(mine, pattern(group.rank, shape, dtype, group.device), "the tensor that was gathered")


def all_to_all_swaps_rows(group: Group) -> None:
    """``output[r]`` is the row that rank r has for this one, and the tensor given is unchanged."""
    for dtype in LARGE:
        for shape in SHAPES:
            rows = [pattern(10 * group.rank + rank, shape, dtype, group.device) for rank in range(group.size)]
            mine = torch.stack(rows)
            output = torch.zeros_like(mine)
            group.all_to_all(output, mine, name="swap").wait()
            for rank in range(group.size):
                expected = pattern(10 * rank + group.rank, shape, dtype, group.device)
                expect_equal(output[rank], expected, f"row from rank {rank} of {shape} {dtype}")
            expect_equal(mine, torch.stack(rows), "the tensor whose rows were sent")


def documents_of_any_length_arrive_whole(group: Group) -> None:
    """JSON documents of different lengths and types, with any Unicode, come back in the order of ranks."""
    for shift in range(len(DOCUMENTS)):
        expected = [DOCUMENTS[(rank + shift) % len(DOCUMENTS)] for rank in range(group.size)]
        gathered = group.gather_documents(expected[group.rank], name="documents")
        assert gathered == expected, f"expected {expected}, but got {gathered}"


def barrier_holds_everybody_until_the_last(group: Group) -> None:
    """No rank leaves the barrier before the last has entered it; clocks are those of one host."""
    for late in range(group.size):
        if group.rank == late:
            time.sleep(0.05)
        came_s = time.monotonic()
        group.barrier()
        times = group.gather_documents([came_s, time.monotonic()], name="times")
        assert min(left for _, left in times) >= max(came for came, _ in times), f"with rank {late} late: {times}"


def members_know_their_place(group: Group) -> None:
    """Ranks are 0..size-1, and size and epoch the same on all."""
    places = group.gather_documents([group.rank, group.size, group.epoch], name="places")
    assert places == [[rank, group.size, group.epoch] for rank in range(group.size)], f"got {places}"


def allocated_buffers_are_zeroed_and_take_part(group: Group) -> None:
    """Buffers are flat, zeroed, of the requested length and dtype, and not shared between two calls."""
    first, second = group.allocate(5, torch.float64), group.allocate(5, torch.float64)
    expect_equal(first, torch.zeros(5, dtype=torch.float64, device=group.device), "new buffer")
    first.fill_(group.rank)
    group.all_reduce(first, name="buffer").wait()
    expect_equal(first, torch.full_like(first, group.size * (group.size - 1) / 2), "sum of buffers")
    expect_equal(second, torch.zeros_like(second), "the other buffer")


def ranks_of_a_host_see_each_others_memory(group: Group) -> None:
    """All ranks of a host read what one writes into its shared buffer; without shared memory there is no buffer."""
    sizes = {rank: 0 if rank % 3 == 2 else 5000 + rank for rank in group.host_ranks}
    buffers = group.share(sizes)
    documents = group.gather_documents([group.host_ranks, sorted(buffers)], name="shares")
    assert group.rank in group.host_ranks
    assert all(documents[rank] == documents[group.rank] for rank in group.host_ranks), f"{documents}"
    if buffers:
        assert [len(buffers[rank]) for rank in sizes] == list(sizes.values())
        assert not any(bool(buffer.any()) for buffer in buffers.values())
    group.barrier()
    if buffers:
        buffers[group.rank].fill_(group.rank + 1)
    group.barrier()
    for rank, buffer in buffers.items():
        expect_equal(buffer, torch.full_like(buffer, rank + 1), f"buffer of rank {rank}")


def subgroups_are_apart(group: Group) -> None:
    """A subgroup has the requested ranks, in their order; its sums are over them alone, whatever its name."""
    ranks = list(range(group.rank % 2, group.size, 2))
    subgroups = [group.subgroup(ranks, f"of {ranks[0]} and each second") for _ in range(2)]
    for subgroup in subgroups:
        members_know_their_place(subgroup)
    works = []
    for subgroup in subgroups if group.rank % 4 < 2 else reversed(subgroups):
        for num_elements in (3, 100_000):
            values = torch.full((num_elements,), float(group.rank), device=group.device)
            works.append((values, subgroup.all_reduce(values, name=f"sum of {num_elements}")))
    for values, work in works:
        work.wait()
        expect_equal(values, torch.full_like(values, sum(ranks)), f"sum over ranks {ranks}")
    for subgroup in subgroups:
        subgroup.close()


def links_carry_messages_both_ways(group: Group) -> None:
    """Every pair can open a link, on which the lower rank is 0."""
    peers = [peer for peer in range(group.size) if peer != group.rank and group.device.type == "cpu"]
    links = {peer: group.link(peer, "contract") for peer in peers}
    for peer, link in links.items():
        assert (link.size, link.rank) == (2, int(peer < group.rank)), f"link to {peer}: {link.rank} of {link.size}"
        received = torch.zeros(5)
        works = [
            link.send(torch.full((5,), float(group.rank)), 1 - link.rank, tag=3, name="over a link"),
            link.receive(received, 1 - link.rank, tag=3, name="over a link"),
        ]
        for work in works:
            work.wait()
        expect_equal(received, torch.full((5,), float(peer)), f"what rank {peer} sent")
    group.barrier()
    for link in links.values():
        link.close()


GROUP_CHECKS: tuple[Check, ...] = (
    sums_are_exact,
    sums_have_the_same_bits_on_every_rank,
    sums_keep_nan_and_infinity,
    operations_leave_the_rest_of_a_buffer_alone,
    many_operations_can_be_in_flight,
    broadcast_copies_each_source,
    all_gather_keeps_the_order_of_ranks,
    all_to_all_swaps_rows,
    documents_of_any_length_arrive_whole,
    barrier_holds_everybody_until_the_last,
    members_know_their_place,
    allocated_buffers_are_zeroed_and_take_part,
    ranks_of_a_host_see_each_others_memory,
    subgroups_are_apart,
    links_carry_messages_both_ways,
    *MESSAGE_CHECKS,
)


def check_words_of_failure(group: Group) -> None:
    """Check that a rank which closes the group with an error ends the others' operations at once, with its message.

    The same holds in duplicates, for messages to it and from it, and in a subgroup, where it has the same name as
    here. The group cannot be used afterwards.
    """
    last = group.size - 1
    upper = range(1, group.size)
    subgroup = group.subgroup(upper, "of failure") if group.rank in upper and group.size > 2 else None
    duplicates = [group.duplicate(f"of failure {number}") for number in range(2)]
    if group.rank == last:
        group.close(ValueError(CAUSE))
        return
    nothing = torch.zeros(3, device=group.device)
    works: dict[str, Callable[[], Work]] = {
        "sum without the last": lambda: group.all_reduce(nothing, name="sum without the last"),
        "message from the last": lambda: duplicates[0].receive(nothing, last, tag=0, name="message from the last"),
        "message to the last": lambda: duplicates[1].send(nothing, last, tag=0, name="message to the last"),
    }
    if subgroup is not None:
        works["sum of a part"] = lambda: subgroup.all_reduce(nothing, name="sum of a part")
    errors = [_words_of(begin) for begin in works.values()]
    group.close(CommunicationError(errors[0]))
    for name, words in zip(works, errors, strict=True):
        for part in (f"rank {last} ", "ValueError", CAUSE, repr(name)):
            assert part in words, f"the error must say {part!r}, but says: {words or 'nothing, as there was none'}"


def _words_of(begin: Callable[[], Work]) -> str:
    """Return the error message of an operation; empty without an error."""
    try:
        begin().wait()
    except CommunicationError as error:
        return str(error)
    return ""
