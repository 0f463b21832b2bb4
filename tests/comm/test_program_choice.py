import torch

from paceline.comm import LocalGroup
from paceline.comm.program_choice import NUM_TRIALS, ProgramChoice
from paceline.comm.program_group import ProgramGroup
from paceline.programs import Collective, HalvingDoubling, RecursiveDoubling


def choose(seconds, sizes):
    """Run calls of `sizes` bytes on two ranks; `seconds(rank, name, size)` of each. Return what ran, by rank."""

    def run(group):
        now, ran = [0.0], []

        def gather(tensor):
            output = tensor.new_empty(group.size, *tensor.shape)
            group.all_gather(output, tensor, name="times").wait()
            return output

        def execute(program):
            ran.append(program.name)
            now[0] += seconds(group.rank, program.name, size)

        programs = [kind().build(Collective.ALL_REDUCE, 2) for kind in (RecursiveDoubling, HalvingDoubling)]
        choice = ProgramChoice(*programs, gather, clock=lambda: now[0])
        for size in sizes:
            choice.run(size, execute)
        return ran

    return LocalGroup.run(2, run, timeout_s=20)


TURNS = ["recursive_doubling", "halving_doubling"] * NUM_TRIALS


def test_the_faster_program_is_chosen_for_each_size_and_on_all_ranks_alike():
    def seconds(rank, name, size):
        is_early = rank == 0  # it was there early, and its time says nothing
        return 50.0 if is_early else {"recursive_doubling": size / 1000, "halving_doubling": 20.0}[name]

    for ran in choose(seconds, [1_000] * 12 + [900_000] * 12):
        assert ran[:12] == [*TURNS, "recursive_doubling", "recursive_doubling"]
        assert ran[12:] == [*TURNS, "halving_doubling", "halving_doubling"]


def test_one_slow_call_decides_nothing():
    calls = []

    def seconds(rank, name, size):
        calls.append(rank)
        return 100.0 if name == "recursive_doubling" and len(calls) <= 2 else {"r": 1.0, "h": 2.0}[name[0]]

    assert all(ran[-1] == "recursive_doubling" for ran in choose(seconds, [5000] * 11))


def test_large_tensors_are_never_tried():
    assert choose(lambda *_: 1.0, [2**20 + 1] * 3) == [["halving_doubling"] * 3] * 2


def test_the_choice_changes_no_bit():
    """Both add in the order of a tree whose leaves are neighbours; a circle of three would not."""

    def run(group):
        values = torch.randn(1000, generator=torch.Generator().manual_seed(group.rank))
        tuned = ProgramGroup(group, "halving_doubling", is_tuned=True)
        sums = []
        for _ in range(2 * NUM_TRIALS + 1):
            tensor = values.clone()
            tuned.all_reduce(tensor, name="sum").wait()
            sums.append(tensor)
        return sums

    for size in (2, 4, 8):
        every = [tensor for sums in LocalGroup.run(size, run, timeout_s=20) for tensor in sums]
        assert all(torch.equal(tensor, every[0]) for tensor in every)
