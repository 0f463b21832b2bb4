"""Contract of messages and duplicates of every `Group`: a part of the group's contract."""

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.comm.group import MAX_TAG, Group, Work
from paceline.errors import CommunicationError, SettingsError
from paceline.testing.patterns import LARGE, SHAPES, expect_equal, pattern


def messages_arrive_whole(group: Group) -> None:
    """Messages of any dtype and size pass around a ring, and the sent tensors are unchanged."""
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for dtype in (*LARGE, torch.bool) if group.size > 1 else ():
        for tag, shape in enumerate((*SHAPES, (300_007,))):
            mine = pattern(group.rank, shape, dtype, group.device)
            received = torch.zeros_like(mine)
            works = [
                group.receive(received, before, tag=tag, name="message"),
                group.send(mine, after, tag=tag, name="message"),
            ]
            _wait(works)
            expect_equal(received, pattern(before, shape, dtype, group.device), f"message of {shape} {dtype}")
            expect_equal(mine, pattern(group.rank, shape, dtype, group.device), "the tensor that was sent")


def messages_meet_by_tag(group: Group) -> None:
    """Messages reach the receive with their tag, in whatever order the two ends begin and wait."""
    tags = [0, 1, 7, 2**16, MAX_TAG - 1, MAX_TAG]
    received, works = {}, []
    for peer in _others(group):
        works += [group.send(_number(group, [group.rank, tag]), peer, tag=tag, name=f"message {tag}") for tag in tags]
    for peer in _others(group):
        for tag in reversed(tags):
            received[peer, tag] = _number(group, [-1, -1])
            works.append(group.receive(received[peer, tag], peer, tag=tag, name=f"message {tag}"))
    _wait(works[1::2] + works[::2])
    for (peer, tag), tensor in received.items():
        expect_equal(tensor, _number(group, [peer, tag]), f"message with tag {tag} from rank {peer}")


def messages_of_one_tag_keep_their_order(group: Group) -> None:
    """The first message under a tag is received first, also when tags are used again."""
    for is_receive_first in (False, True):
        received = {peer: [_number(group, [-1]) for _ in range(5)] for peer in _others(group)}

        def send() -> list[Work]:
            return [
                group.send(_number(group, [place]), peer, tag=3, name="numbered")
                for peer in _others(group)
                for place in range(5)
            ]

        def receive(received: dict[int, list[Tensor]] = received) -> list[Work]:
            return [
                group.receive(tensor, peer, tag=3, name="numbered")
                for peer in _others(group)
                for tensor in received[peer]
            ]

        _wait(receive() + send() if is_receive_first else send() + receive())
        for peer in _others(group):
            for place, tensor in enumerate(received[peer]):
                expect_equal(tensor, _number(group, [place]), f"message {place} of one tag from rank {peer}")


def messages_leave_the_rest_of_a_buffer_alone(group: Group) -> None:
    """Slices of one buffer are sent and received without a copy, and nothing beside them changes."""
    for peer in _others(group):
        buffer = torch.arange(10.0, device=group.device) + 100 * group.rank
        expected = buffer.clone()
        expected[6:9] = torch.arange(1.0, 4.0, device=group.device) + 100 * peer
        _wait(
            [
                group.receive(buffer[6:9], peer, tag=0, name="slice"),
                group.send(buffer[1:4], peer, tag=0, name="slice"),
            ]
        )
        expect_equal(buffer, expected, "buffer around a received slice")


def messages_that_cannot_be_are_refused(group: Group) -> None:
    """Missing peers and tags out of range raise `SettingsError` at once, at either end."""
    peer = (group.rank + 1) % group.size
    wrong = [(group.rank, 0), (group.size, 0), (-1, 0)] + [(peer, -1), (peer, MAX_TAG + 1)] * (group.size > 1)
    for operation in (group.send, group.receive):
        for other, tag in wrong:
            try:
                operation(torch.zeros(1, device=group.device), other, tag=tag, name="wrong")
            except SettingsError:
                continue
            raise AssertionError(f"{operation.__name__} to rank {other} with tag {tag} must be refused, but was not")


def duplicates_are_apart(group: Group) -> None:
    """Operations and tags of a duplicate never mix with those of the group or of another duplicate."""
    groups = [group, group.duplicate("second"), group.duplicate("third")]
    sums = [_number(group, [10.0**place]) for place in range(3)]
    order = range(3) if group.rank % 2 else reversed(range(3))
    works = [groups[place].all_reduce(sums[place], name="sum") for place in order]
    received = {(peer, place): _number(group, [-1]) for peer in _others(group) for place in range(3)}
    for peer, place in received:
        works.append(groups[place].send(_number(group, [place]), peer, tag=0, name="message"))
        works.append(groups[2 - place].receive(received[peer, 2 - place], peer, tag=0, name="message"))
    _wait(works)
    for place in range(3):
        expect_equal(sums[place], _number(group, [group.size * 10.0**place]), f"sum in group {place}")
    for (peer, place), tensor in received.items():
        expect_equal(tensor, _number(group, [place]), f"message of rank {peer} in group {place}")
    for place, duplicate in enumerate(groups[1:], 1):
        assert (duplicate.rank, duplicate.size, duplicate.epoch) == (group.rank, group.size, group.epoch), (
            f"group {place} must have the place of the first"
        )
        duplicate.close()


def duplicates_run_in_other_threads(group: Group) -> None:
    """A group and its duplicate are used by two threads at once, each at its own pace on every rank."""
    duplicate = group.duplicate("other thread")
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work(duplicate, 1, late=group.rank % 2 == 1)
        except BaseException as error:  # raised again below
            errors.append(error)

    def work(used: Group, factor: int, *, late: bool) -> None:
        try:
            _work_through(used, factor, late=late)
        except CommunicationError as error:  # a group may notice by itself that operations of two threads met
            raise AssertionError(f"operations of a group must not meet those of its duplicate, but: {error}") from error

    thread = threading.Thread(target=run)
    thread.start()
    work(group, 2, late=group.rank % 2 == 0)
    thread.join()
    duplicate.close()
    if errors:
        raise errors[0]


MESSAGE_CHECKS: tuple[Callable[[Group], None], ...] = (
    messages_arrive_whole,
    messages_meet_by_tag,
    messages_of_one_tag_keep_their_order,
    messages_leave_the_rest_of_a_buffer_alone,
    messages_that_cannot_be_are_refused,
    duplicates_are_apart,
    duplicates_run_in_other_threads,
)


def _work_through(group: Group, factor: int, *, late: bool) -> None:
    """Run sums and messages, one after another."""
    for number in range(20):
        if late and number % 5 == 0:
            time.sleep(0.01)
        tensor = _number(group, [factor * number] * 1000)
        group.all_reduce(tensor, name=f"sum {number}").wait()
        expect_equal(tensor, _number(group, [factor * number * group.size] * 1000), f"sum {number} beside a thread")
        received = [_number(group, [-1]) for _ in _others(group)]
        works = [
            group.receive(tensor, peer, tag=number, name="number")
            for peer, tensor in zip(_others(group), received, strict=True)
        ]
        works += [
            group.send(_number(group, [factor * number]), peer, tag=number, name="number") for peer in _others(group)
        ]
        _wait(works)
        for tensor in received:
            expect_equal(tensor, _number(group, [factor * number]), f"message {number} beside a thread")


def _others(group: Group) -> list[int]:
    return [rank for rank in range(group.size) if rank != group.rank]


def _number(group: Group, values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=group.device)


def _wait(works: list[Work]) -> None:
    for work in works:
        work.wait()
