import functools
import threading
import time

import pytest
import torch

from paceline.comm import LocalGroup
from paceline.errors import CommunicationError, MismatchError, PeerTimeoutError
from paceline.testing import GROUP_CHECKS, check_words_of_failure


@pytest.mark.parametrize("size", range(1, 6))
@pytest.mark.parametrize("check", GROUP_CHECKS, ids=lambda check: check.__name__)
def test_keeps_the_contract(check, size):
    LocalGroup.run(size, check, timeout_s=20)


@pytest.mark.parametrize("size", range(2, 6))
def test_a_failure_reaches_the_others_with_its_words(size):
    LocalGroup.run(size, check_words_of_failure, timeout_s=20)


def test_operations_return_before_the_others_have_come():
    first, second = LocalGroup.create(2, timeout_s=0.01)
    mine, theirs = torch.ones(3), torch.full((3,), 2.0)
    works = [first.all_reduce(mine, name="sum"), second.all_reduce(theirs, name="sum")]
    for work in works:
        work.wait()
    assert mine.tolist() == theirs.tolist() == [3, 3, 3]


def test_sums_have_the_same_bits_at_every_run():
    def add(group, late):
        if group.rank == late:
            time.sleep(0.01)
        generator = torch.Generator().manual_seed(group.rank)
        tensor = torch.randn(100, generator=generator) * 10 ** torch.arange(-8, 8, 0.16)
        group.all_reduce(tensor, name="sum").wait()
        return tensor

    sums = [result for late in range(5) for result in LocalGroup.run(5, functools.partial(add, late=late))]
    assert all(torch.equal(result, sums[0]) for result in sums), "whoever comes last"


def test_different_operations_are_refused_by_name():
    def run(group):
        group.all_reduce(torch.zeros(1), name=f"sum of rank {group.rank}").wait()

    with pytest.raises(MismatchError, match=r"operation 1 must be the same .*'sum of rank [01]'"):
        LocalGroup.run(2, run)


def test_a_time_out_names_who_is_missing_and_where_it_is():
    came, both_have_begun = threading.Event(), threading.Barrier(2, timeout=30)

    def run(group):
        group.barrier(name="first")
        if group.rank == 1:
            came.wait(30)
            return
        try:
            work = group.all_reduce(torch.zeros(1), name="second")
            both_have_begun.wait()
            group._room.timeout_s = 0.2  # until here all have as long as they need
            work.wait()
        finally:
            came.set()

    with pytest.raises(PeerTimeoutError) as caught:
        LocalGroup.run(3, run)
    message = str(caught.value)
    assert message.startswith("operation 2 'second' must finish within 0.2 s")
    assert "rank 1 did not begin it: rank 1 has begun operation 1 'first'" in message
    assert "rank 0" not in message
    assert "rank 2" not in message


def test_a_rank_that_left_is_named_when_it_is_missed():
    def run(group):
        if group.rank == 0:
            group.close()
        else:
            group.barrier()

    with pytest.raises(PeerTimeoutError, match="rank 0 has left"):
        LocalGroup.run(2, run, timeout_s=0.2)


def test_the_first_error_is_the_one_that_is_raised():
    def run(group):
        if group.rank == 2:
            raise KeyError("mine")
        group.barrier()

    with pytest.raises(KeyError, match="mine"):
        LocalGroup.run(4, run)


def test_leaving_a_with_block_by_an_error_ends_the_others():
    first, second = LocalGroup.create(2, timeout_s=20)
    with pytest.raises(ZeroDivisionError), first:
        raise ZeroDivisionError("nothing to divide by")
    with pytest.raises(CommunicationError, match="rank 0 stopped: ZeroDivisionError: nothing to divide by"):
        second.barrier()


def test_an_operation_that_finished_before_a_failure_is_good():
    first, second = LocalGroup.create(2, timeout_s=20)
    mine, theirs = torch.ones(1), torch.ones(1)
    work = first.all_reduce(mine, name="sum")
    second.all_reduce(theirs, name="sum").wait()
    second.close(ValueError("later"))
    work.wait()
    assert mine.item() == 2


def test_a_bad_tensor_on_one_rank_fails_everybody():
    def run(group):
        group.all_reduce(torch.zeros(2 + group.rank), name="sum").wait()

    with pytest.raises(RuntimeError, match="size of tensor"):
        LocalGroup.run(3, run, timeout_s=20)


def test_a_world_of_one_needs_no_one_else():
    group = LocalGroup()
    tensor = torch.tensor([1.0, 2.0])
    group.all_reduce(tensor, name="sum").wait()
    group.broadcast(tensor, name="copy").wait()
    group.barrier()
    assert (group.rank, group.size, tensor.tolist()) == (0, 1, [1, 2])
