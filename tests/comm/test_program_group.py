import itertools
import random
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch

from paceline.comm import LocalGroup, join, proven_program
from paceline.comm.program_group import ProgramGroup
from paceline.errors import CommunicationError, ProgramError, SettingsError
from paceline.programs import Algorithm, Naive, Program, Ring, list_algorithms
from paceline.programs.base import Collective, make_round
from paceline.replica import Replica
from paceline.sync import EveryStep
from paceline.testing import GROUP_CHECKS, check_group, check_words_of_failure, faults, run_processes

KEPT = []
"""Groups that live until their process ends."""
BUILDS = itertools.count()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("check", GROUP_CHECKS, ids=lambda check: check.__name__)
def test_keeps_the_contract(check, size):
    LocalGroup.run(size, lambda group: check(ProgramGroup(group, Ring())), timeout_s=20)


@pytest.mark.parametrize("size", [2, 4])
def test_a_failure_reaches_the_others_with_its_words(size):
    LocalGroup.run(size, lambda group: check_words_of_failure(ProgramGroup(group, Ring())), timeout_s=20)


@pytest.mark.parametrize("name", sorted(set(list_algorithms()) - {"ring"}))
def test_every_algorithm_keeps_the_contract(name):
    LocalGroup.run(4, lambda group: check_group(ProgramGroup(group, name)), timeout_s=20)


# Where operations end before they return, a rank cannot begin a second one while the others are late for the first.
@pytest.mark.parametrize(
    "check",
    [check for check in GROUP_CHECKS if check.__name__ != "duplicates_are_apart"],
    ids=lambda check: check.__name__,
)
def test_keeps_the_contract_in_the_thread_of_the_caller(check):
    LocalGroup.run(3, lambda group: check(ProgramGroup(group, "direct", runs_here=True)), timeout_s=20)


def test_an_operation_in_the_thread_of_the_caller_is_done_at_once_and_has_no_other_thread():
    def run(group):
        programs = ProgramGroup(group, Ring(), runs_here=True)
        tensor = torch.ones(3)
        programs.all_reduce(tensor, name="sum")
        duplicate = programs.duplicate("more")
        duplicate.all_reduce(tensor, name="sum")
        return tensor.tolist()

    before = {thread.name for thread in threading.enumerate() if thread.name == "paceline-ring"}
    assert LocalGroup.run(2, run, timeout_s=20) == [[4.0] * 3] * 2
    assert {thread.name for thread in threading.enumerate() if thread.name == "paceline-ring"} <= before, (
        "another test's may end meanwhile"
    )


class NoSumGroup(LocalGroup):
    """Its own all-reduce is out of order."""

    def all_reduce(self, tensor, *, name):
        raise AssertionError("not by the group itself")


def test_programs_never_fall_back_and_what_there_is_none_of_is_the_groups():
    def run(group):
        wrapped = ProgramGroup(NoSumGroup(group.rank, group._room), Naive())
        tensor = torch.ones(3)
        wrapped.all_reduce(tensor, name="sum").wait()
        output = torch.zeros(2, 3)
        assert Collective.ALL_TO_ALL not in wrapped.algorithm.collectives
        wrapped.all_to_all(output, torch.full((2, 3), float(group.rank)), name="swap").wait()
        return tensor.tolist(), output[:, 0].tolist()

    assert LocalGroup.run(2, run, timeout_s=20) == [([2, 2, 2], [0, 1])] * 2


def test_what_is_needed_and_missing_is_an_error_when_the_group_is_made():
    group = LocalGroup.create(2)[0]
    with pytest.raises(SettingsError, match=r"a naive program must be one of .*, but got all_to_all"):
        ProgramGroup(group, "naive", needs={Collective.ALL_TO_ALL})


def test_names_that_there_are_none_of_are_refused_with_the_known_ones():
    with pytest.raises(SettingsError, match=r"known: .*ring"):
        ProgramGroup(LocalGroup(), "rings")


def test_the_caller_computes_while_programs_run_in_order():
    others_have_begun = threading.Barrier(3, timeout=20)  # and need not wait for rank 1

    def run(group):
        wrapped = ProgramGroup(group, Ring())
        tensors = [torch.full((1000,), float(number)) for number in range(10)]
        if group.rank == 1:
            others_have_begun.wait()
        works = [wrapped.all_reduce(tensor, name=f"sum {number}") for number, tensor in enumerate(tensors)]
        if group.rank != 1:
            others_have_begun.wait()
        works[-1].wait()
        for work in works:
            work.wait()
        ended = [work.ended_s for work in works]
        assert ended == sorted(ended)
        assert [tensor[0].item() for tensor in tensors] == [3 * number for number in range(10)]

    LocalGroup.run(3, run)


def test_closing_leaves_the_group_to_its_owner():
    def run(group):
        with ProgramGroup(group, Ring()) as wrapped:
            wrapped.barrier()
        tensor = torch.ones(1)
        group.all_reduce(tensor, name="after").wait()
        with pytest.raises(CommunicationError, match="must be open"):
            wrapped.all_reduce(tensor, name="closed")
        return tensor.item()

    assert LocalGroup.run(2, run, timeout_s=20) == [2, 2]


def test_a_wrong_tensor_is_refused_at_once_and_spoils_nothing():
    def run(group):
        wrapped = ProgramGroup(group, Ring())
        with pytest.raises(SettingsError, match="with a row for each rank"):
            wrapped.all_gather(torch.zeros(3, 2), torch.zeros(2), name="rows")
        wrapped.barrier()

    LocalGroup.run(2, run, timeout_s=20)


def keep_contract(num_elements):
    """Check the contract over real connections, then sums of several algorithms, with few elements and many."""
    group = join(timeout_s=20, device="cpu", transport="network")
    names = check_group(ProgramGroup(group, "ring"))
    sums_are_right(group, num_elements)
    check_words_of_failure(ProgramGroup(group, "ring"))
    return names


def sums_are_right(group, num_elements):
    for name in sorted(list_algorithms()):
        wrapped = ProgramGroup(group, name, segment_bytes=2**16)
        for count in (0, 1, group.size - 1, 1001, num_elements):
            tensor = (torch.arange(count) % 1000 + group.rank).float()
            expected = (torch.arange(count) % 1000 * group.size + group.size * (group.size - 1) // 2).float()
            wrapped.all_reduce(tensor, name=f"{name} {count}").wait()
            assert torch.equal(tensor, expected), (name, count)
        mine = torch.rand(10_007, generator=torch.Generator().manual_seed(group.rank))
        wrapped.all_reduce(mine, name=f"{name} floats").wait()
        bits = torch.zeros(group.size, 10_007)
        group.all_gather(bits, mine, name="bits").wait()
        assert (bits.view(torch.int32) == mine.view(torch.int32)).all(), name
        wrapped.close()


def sums_only(num_elements):
    group = join(timeout_s=20, device="cpu", transport="network")
    sums_are_right(group, num_elements)


def test_real_processes_keep_the_contract():
    for result in run_processes(3, keep_contract, {"num_elements": 300_001}):
        assert result.exit_code == 0, result.output
        assert result.value == [check.__name__ for check in GROUP_CHECKS]


@pytest.mark.parametrize("num_ranks", [2, 5, pytest.param(8, marks=[pytest.mark.slow, pytest.mark.campaign])])
def test_more_real_processes_sum_right(num_ranks):
    for result in run_processes(num_ranks, sums_only, {"num_elements": 100_003}):
        assert result.exit_code == 0, result.output


def sum_until_the_end(script, name):
    """Sum until a rank is struck, which another thread does in the middle of one."""
    group = join(timeout_s=30, device="cpu", transport="network")
    KEPT.append(group)
    wrapped = ProgramGroup(group, name, segment_bytes=2**12)
    wrapped.barrier()
    threading.Timer(0.3, faults.strike, (script,), {"rank": group.rank, "step": 0}).start()
    try:
        for number in range(100_000):
            wrapped.all_reduce(torch.ones(2**18), name=f"sum {number}").wait()
    except CommunicationError as error:
        wrapped.close(error)
        time.sleep(2)  # others must not need this process's end to notice
        return {"error": type(error).__name__, "message": str(error)}
    return None


@pytest.mark.parametrize(
    "name", ["ring", pytest.param("halving_doubling", marks=[pytest.mark.slow, pytest.mark.campaign])]
)
def test_a_rank_killed_in_the_middle_is_named_by_all_others(name):
    script = [faults.kill(rank=2, step=0).model_dump()]
    results = run_processes(4, sum_until_the_end, {"script": script, "name": name})
    assert results[2].exit_code == -9
    for rank in (0, 1, 3):
        assert results[rank].exit_code == 0, results[rank].output
        message = results[rank].value["message"]
        assert message.startswith("message 'sum "), message
        blamed = message.partition(" lost its peers: ")[2]
        assert blamed.startswith("rank 2 "), f"the dead rank comes first: {message}"
        assert blamed.count("is dead or frozen") == 1, f"survivors are not called dead: {message}"
        assert results[rank].value["error"] == "CommunicationError", "before time is out"


class Star(Algorithm):
    """Rank 0 adds up all parts, by default in the order of ranks, and sends the sum to everybody."""

    name = "star"
    collectives = frozenset({Collective.ALL_REDUCE})
    num_left_out: int = 0

    def _build(self, collective, num_ranks, root):
        return Program(collective, self.name, num_ranks, 1, num_ranks - self.num_left_out, self.make(num_ranks))

    def make(self, num_ranks):
        last = num_ranks - 1 - self.num_left_out

        def make(index):
            if index < last:
                return make_round(index + 1, 0, 0, 1, adds=True)
            return make_round(0, np.arange(1, num_ranks), 0, 1, adds=False)

        return make


def sum_with(algorithm, size=4):
    def run(group):
        tensor = torch.tensor([float(group.rank)])
        with ProgramGroup(group, algorithm, needs={Collective.ALL_REDUCE}) as wrapped:
            wrapped.all_reduce(tensor, name="sum").wait()
        return tensor.item()

    return LocalGroup.run(size, run, timeout_s=20)


def test_a_program_of_a_users_own_runs_if_it_is_right():
    assert sum_with(Star()) == [6.0] * 4


def test_a_wrong_program_is_refused_on_all_ranks_before_it_runs():
    def run(group):
        with pytest.raises(ProgramError) as caught:
            ProgramGroup(group, Star(num_left_out=1), needs={Collective.ALL_REDUCE})
        return str(caught.value)

    words = LocalGroup.run(4, run, timeout_s=20)
    assert words == [words[0]] * 4
    assert words[0].startswith("star all_reduce for 4 ranks: rank 0 must end with the right chunk 0, but the part of")


def test_a_wrong_program_that_nobody_announced_is_refused_when_it_is_first_used():
    def run(group):
        wrapped = ProgramGroup(group, Star(num_left_out=1))
        with pytest.raises(ProgramError, match="rank 0 must end with the right chunk 0"):
            wrapped.all_reduce(torch.ones(1), name="sum")
        wrapped.close()

    LocalGroup.run(3, run, timeout_s=20)


class Shuffled(Star):
    """Adds up in an order that each process draws for itself."""

    name = "shuffled"

    def make(self, num_ranks):
        make = super().make(num_ranks)
        order = [*random.Random(threading.get_ident()).sample(range(num_ranks - 1), num_ranks - 1), num_ranks - 1]
        return lambda index: make(order[index])


class FailsOnce(Star):
    """Fails in one of the processes that build it."""

    name = "fails_once"

    def _build(self, collective, num_ranks, root):
        if next(BUILDS) == 1:
            raise ValueError("no file")
        return super()._build(collective, num_ranks, root)


def test_a_program_that_one_rank_cannot_build_is_refused_on_all():
    def run(group):
        with pytest.raises(ProgramError, match=r"fails_once .*its code must not fail, but raised ValueError: no file"):
            ProgramGroup(group, FailsOnce(), needs={Collective.ALL_REDUCE})

    LocalGroup.run(3, run, timeout_s=20)


def test_ranks_that_build_different_programs_are_refused():
    with pytest.raises(ProgramError, match=r"shuffled all_reduce for 8 ranks: .*but that of rank \d has other rounds"):
        sum_with(Shuffled(), 8)


class Unsure(Star):
    """Sums when its rounds are first read, and never again; with more rounds than a program remembers."""

    name = "unsure"

    def _build(self, collective, num_ranks, root):
        reads, make = Counter(), self.make(num_ranks)

        def read(index):
            reads[index] += 1
            return (
                make(max(0, index - 200)) if index >= 200 and reads[index] == 1 else make_round(0, 1, 0, 0, adds=True)
            )

        return Program(collective, self.name, num_ranks, 1, 200 + num_ranks, read)


def test_what_runs_is_what_was_proved():
    assert sum_with(Unsure(), 3) == [3.0] * 3


@pytest.mark.parametrize("codec", ["none", "fp16"])
def test_a_wrong_program_is_refused_when_the_replica_is_made(codec):
    def run(group):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ProgramError, match="does not reach it"):
            Replica(model, optimizer, group=group, sync=EveryStep(codec=codec, program=Star(num_left_out=1)))

    LocalGroup.run(3, run, timeout_s=20)


def test_paceline_proves_nothing_of_its_own(monkeypatch):
    monkeypatch.setattr(proven_program, "verify", lambda program: pytest.fail("it takes time at every start"))
    assert sum_with("ring") == [6.0] * 4
