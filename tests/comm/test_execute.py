from random import Random

import numpy as np
import pytest
import torch

from paceline.comm import LocalGroup
from paceline.comm import execute as execute_module
from paceline.comm.execute import Scratch, execute
from paceline.comm.group import Work
from paceline.errors import CommunicationError, SettingsError
from paceline.programs import Ring, list_algorithms
from paceline.programs.base import Collective, Program, Round, chunk_bounds

SIZES = ((0, 8), (5, 4), (37, 16), (1031, 512))
"""Elements, and bytes of a segment."""
CAMPAIGN = [pytest.mark.slow, pytest.mark.campaign]
PAIRS = [(name, collective) for name, known in list_algorithms().items() for collective in sorted(known.collectives)]


class MessageGroup(LocalGroup):
    """A group that has nothing but messages, so that no program can be handed to a collective."""

    def all_reduce(self, tensor, *, name):
        raise AssertionError("a program must not use the group's own collectives")

    broadcast = all_gather = all_to_all = all_reduce


@pytest.fixture
def tight(monkeypatch):
    """Let windows and sends on their way be as few as given; orders made for others are forgotten before and after."""

    def set_only(window_bytes, ahead_segments):
        monkeypatch.setattr(execute_module, "WINDOW_BYTES", window_bytes)
        monkeypatch.setattr(execute_module, "AHEAD_SEGMENTS", ahead_segments)
        execute_module._order.cache_clear()

    yield set_only
    execute_module._order.cache_clear()


def values(rank, shape, dtype=torch.float32):
    """Small integers, different by rank and place, whose sums every dtype here holds exactly."""
    places = torch.arange(int(np.prod(shape))).view(shape)
    return ((places * 7 + rank * 3) % 11).to(dtype)


def run_collective(group, program, num_elements, segment_bytes, scratch=None):
    """Run a program on `values` and assert that its result is the collective's."""
    options = {"name": "sum", "segment_bytes": segment_bytes, "scratch": scratch}
    everybody = [values(rank, (num_elements,)) for rank in range(group.size)]
    mine = everybody[group.rank].clone()
    bounds = chunk_bounds(num_elements, program.num_chunks)
    if program.collective == Collective.ALL_REDUCE:
        execute(program, mine, group, **options)
        assert torch.equal(mine, sum(everybody))
    elif program.collective == Collective.BROADCAST:
        execute(program, mine, group, **options)
        assert torch.equal(mine, everybody[program.root])
    elif program.collective == Collective.REDUCE_SCATTER:
        execute(program, mine, group, **options)
        for chunk in np.flatnonzero(program.owners == group.rank):
            own = slice(bounds[chunk], bounds[chunk + 1])
            assert torch.equal(mine[own], sum(everybody)[own])
    elif program.collective == Collective.ALL_GATHER:
        output = torch.full((group.size, num_elements), -1.0)
        execute(program, mine, group, output=output, **options)
        assert torch.equal(output, torch.stack(everybody))
        assert torch.equal(mine, everybody[group.rank]), "what was gathered is unchanged"
        whole, here = values(0, (num_elements,)), torch.full((num_elements,), -1.0)
        for chunk in np.flatnonzero(program.owners == group.rank):
            own = slice(bounds[chunk], bounds[chunk + 1])
            here[own] = whole[own]
        execute(program, here, group, **options)
        assert torch.equal(here, whole)
    else:
        rows = values(10 * group.rank, (group.size, num_elements))
        sent = rows.clone()
        output = torch.full_like(rows, -1)
        execute(program, rows, group, output=output, **options)
        expected = [values(10 * rank, (group.size, num_elements))[group.rank] for rank in range(group.size)]
        assert torch.equal(output, torch.stack(expected))
        assert torch.equal(rows, sent), "what was sent is unchanged"


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 6, 8, *(pytest.param(num, marks=CAMPAIGN) for num in (4, 7, 9))])
@pytest.mark.parametrize(("name", "collective"), PAIRS)
def test_every_program_computes_its_collective(name, collective, num_ranks):
    algorithm = list_algorithms()[name]()
    roots = {0, num_ranks - 1} if collective == Collective.BROADCAST else {0}
    programs = [algorithm.build(collective, num_ranks, root=root) for root in sorted(roots)]

    def run(group):
        group = MessageGroup(group.rank, group._room)
        for program in programs:
            for num_elements, segment_bytes in SIZES:
                run_collective(group, program, num_elements, segment_bytes)

    LocalGroup.run(num_ranks, run, timeout_s=20)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", [name for name, collective in PAIRS if collective == Collective.ALL_REDUCE])
def test_float_sums_have_the_same_bits_on_every_rank(name, seed):
    num_ranks = 2 + 2 * seed + seed % 2
    program = list_algorithms()[name]().build(Collective.ALL_REDUCE, num_ranks)
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(num_ranks, 501, generator=generator) * 10 ** torch.linspace(-6, 6, 501)

    def run(group):
        mine = parts[group.rank].clone()
        execute(program, mine, group, name="sum", segment_bytes=64)
        return mine

    sums = LocalGroup.run(num_ranks, run, timeout_s=20)
    for result in sums[1:]:
        assert torch.equal(result.view(torch.int32), sums[0].view(torch.int32))
    bound = num_ranks * torch.finfo(torch.float32).eps * parts.double().abs().sum(0)
    assert bool(((sums[0].double() - parts.double().sum(0)).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes_that_torch_can_add_are_summed(dtype):
    program = Ring().build(Collective.ALL_REDUCE, 3)

    def run(group):
        mine = values(group.rank, (4, 5), dtype)
        execute(program, mine, group, name="sum", segment_bytes=7)
        assert torch.equal(mine, sum(values(rank, (4, 5), dtype) for rank in range(3)))

    LocalGroup.run(3, run, timeout_s=20)


def random_program(random):
    """A program with no sense: anything may be sent, added and replaced in any round, by many at once."""
    num_ranks, num_chunks = random.randint(2, 5), random.randint(1, 6)
    rounds = []
    for _ in range(random.randint(1, 6)):
        rows = []
        for _ in range(random.randint(1, 2 * num_ranks)):
            source, destination = random.sample(range(num_ranks), 2)
            first = random.randrange(num_chunks)
            rows.append((source, destination, first, random.randint(1, num_chunks - first), random.random() < 0.5))
        columns = [np.array(column) for column in zip(*rows, strict=True)]
        rounds.append(Round(*columns))
    return Program(Collective.ALL_REDUCE, "random", num_ranks, num_chunks, len(rounds), rounds.__getitem__)


def run_by_rounds(program, buffers):
    """Do what a program says, round by round: each sends what its source held before the round."""
    bounds = chunk_bounds(buffers.shape[1], program.num_chunks)
    for transfers in program.rounds():
        before = buffers.clone()
        columns = (transfers.sources, transfers.destinations, transfers.firsts, transfers.counts, transfers.adds)
        for source, destination, first, count, adds in zip(*columns, strict=True):
            span = slice(bounds[first], bounds[first + count])
            buffers[destination, span] = before[source, span] + (buffers[destination, span] if adds else 0)
    return buffers


@pytest.mark.parametrize("seed", range(100))
def test_any_program_does_what_its_rounds_say(tight, seed):
    random = Random(seed)
    program = random_program(random)
    num_elements, segment_bytes = random.randint(0, 20), 8 * random.randint(1, 4)
    tight(segment_bytes * random.randint(2, 4), random.choice([0, 1, 3, 100]))
    buffers = torch.tensor([[random.randrange(100) for _ in range(num_elements)] for _ in range(program.num_ranks)])
    expected = run_by_rounds(program, buffers.clone())

    def run(group):
        for _ in range(2):  # the second time beside the end of the first, on ranks that are behind
            mine = buffers[group.rank].clone()
            execute(program, mine, group, name="random", segment_bytes=segment_bytes)
            assert torch.equal(mine, expected[group.rank])

    LocalGroup.run(program.num_ranks, run)


@pytest.mark.parametrize("num_ranks", [3, 8])
@pytest.mark.parametrize(("name", "collective"), PAIRS)
def test_the_smallest_windows_are_enough(tight, name, collective, num_ranks):
    tight(2 * 8, 0)
    program = list_algorithms()[name]().build(collective, num_ranks)
    LocalGroup.run(num_ranks, lambda group: run_collective(group, program, 45, 8), timeout_s=20)


class CountingScratch(Scratch):
    """Counts what is taken at once."""

    def __init__(self):
        super().__init__()
        self.num_taken = self.most_taken = self.num_made = 0

    def take(self, like, num_elements):
        self.num_taken += 1
        self.most_taken = max(self.most_taken, self.num_taken)
        self.num_made += not self._free.get((like.dtype, like.device, num_elements))
        return super().take(like, num_elements)

    def give_back(self, tensor):
        self.num_taken -= 1
        super().give_back(tensor)


def test_scratch_memory_is_a_window_and_used_again(tight):
    tight(4 * 32, 2)
    program = Ring().build(Collective.ALL_REDUCE, 4)

    def run(group):
        scratch = CountingScratch()
        for _ in range(3):
            run_collective(group, program, 800, 32, scratch)
        assert scratch.num_taken == 0
        assert scratch.most_taken == 4, "25 segments a round"
        assert scratch.num_made == 4, "the same in all runs"

    LocalGroup.run(4, run, timeout_s=20)


class WatchedWork(Work):
    def __init__(self, work, unwaited):
        self.work, self.unwaited = work, unwaited
        unwaited.add(self)

    def wait(self):
        self.work.wait()
        self.unwaited.discard(self)


class WatchedGroup(LocalGroup):
    """It knows which messages nobody has waited for."""

    def __init__(self, *place):
        super().__init__(*place)
        self.unwaited = set()

    def _post_message(self, *arguments, **options):
        return WatchedWork(super()._post_message(*arguments, **options), self.unwaited)


@pytest.mark.parametrize("name", ["ring", "naive", "double_tree"])
def test_every_message_is_waited_for(name):
    program = list_algorithms()[name]().build(Collective.ALL_REDUCE, 3)

    def run(group):
        group = WatchedGroup(group.rank, group._room)
        run_collective(group, program, 100, 32)
        return len(group.unwaited)

    assert LocalGroup.run(3, run, timeout_s=20) == [0, 0, 0]


def test_tags_are_not_used_again_before_all_others():
    program = Ring().build(Collective.ALL_REDUCE, 3)

    def run(group):
        before = group.next_tag
        run_collective(group, program, 30, 8)
        used = group.next_tag - before
        group.next_tag = execute_module.MAX_TAG - used // 2  # the next run goes over the end
        run_collective(group, program, 30, 8)
        return used, group.next_tag

    (used, after), *others = LocalGroup.run(3, run, timeout_s=20)
    assert used == 3 * 4 * 5, "messages of all ranks: 4 rounds of 10 elements in segments of 2"
    assert after == used - used // 2 - 1
    assert others == [(used, after)] * 2


@pytest.mark.parametrize("late", range(4))
def test_a_rank_that_fails_ends_the_others_with_its_words(late):
    program = Ring().build(Collective.ALL_REDUCE, 4)

    def run(group):
        group = FailingGroup(group.rank, group._room)
        group.left = 5 if group.rank == late else 10**6
        try:
            execute(program, torch.zeros(400), group, name="bucket 3", segment_bytes=40)
        except OSError:
            return "failed"
        except CommunicationError as error:
            return str(error)
        return "done"

    words = LocalGroup.run(4, run, timeout_s=20)
    assert words[late] == "failed"
    for rank in set(range(4)) - {late}:
        assert "'bucket 3' ended: rank " in words[rank], words
    after = (late + 1) % 4  # it waits for the one that failed
    assert f"rank {late} stopped: OSError: no more" in words[after]


class FailingGroup(LocalGroup):
    """It fails after some messages."""

    left = 0

    def send(self, tensor, destination, *, tag, name):
        self.left -= 1
        if self.left < 0:
            raise OSError("no more")
        return super().send(tensor, destination, tag=tag, name=name)


def refused(collective, tensor, output=None, num_ranks=2, **options):
    program = Ring(num_chunks=options.pop("num_chunks", None)).build(collective, num_ranks)
    (group, _) = LocalGroup.create(2)
    with pytest.raises(SettingsError) as caught:
        execute(program, tensor, group, output=output, name="refused", **options)
    return str(caught.value)


def test_what_cannot_be_run_is_refused_before_anything_is_sent():
    rows = torch.zeros(2, 3)
    assert "but got one for 3 in a group of 2" in refused(Collective.ALL_REDUCE, rows, num_ranks=3)
    assert "must be contiguous" in refused(Collective.ALL_REDUCE, torch.zeros(3, 2).T)
    assert "segment_bytes must be at least 1" in refused(Collective.ALL_REDUCE, rows, segment_bytes=0)
    assert "all_reduce must have no output" in refused(Collective.ALL_REDUCE, rows, rows)
    assert "all_to_all must have an output" in refused(Collective.ALL_TO_ALL, rows)
    assert "with a row for each rank, but got (3, 3)" in refused(Collective.ALL_TO_ALL, rows, torch.zeros(3, 3))
    assert "got (2, 3) torch.int64" in refused(Collective.ALL_GATHER, rows[0], rows.long())
    assert "with a row for each rank, but got (2, 3)" in refused(Collective.ALL_GATHER, torch.zeros(4), rows)
    assert "3 for 2 ranks; leave num_chunks out" in refused(Collective.ALL_GATHER, rows[0], rows, num_chunks=3)
