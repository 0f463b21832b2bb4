import random
from itertools import combinations_with_replacement, permutations, product

import numpy as np
import pytest
from interleavings import is_right_in_every_order, is_right_in_one_order
from tables import EVERYTHING, build, drops, like, mutants, rows_of, table

from paceline.errors import ProgramError
from paceline.programs import Collective, Program, list_algorithms
from paceline.programs.base import RankRound
from paceline.programs.verify import verify

SMALL = {"double_tree": 3, "naive": 2}
"""Chunks of programs that are changed in every place; the others take as many as ranks."""


def small(name, collective, num_ranks):
    is_free = collective != Collective.ALL_TO_ALL
    fields = {"num_chunks": SMALL.get(name, num_ranks)} if is_free else {}
    return build(name, collective, num_ranks, root=num_ranks - 1, **fields)


def refusal(program):
    with pytest.raises(ProgramError) as caught:
        verify(program)
    return str(caught.value)


def is_accepted(program):
    try:
        verify(program)
    except ProgramError:
        return False
    return True


@pytest.mark.parametrize(("name", "collective"), EVERYTHING)
def test_every_program_is_right_for_any_ranks_chunks_and_root(name, collective):
    for num_ranks in range(1, 18):
        chunks = {None, 1, max(num_ranks - 1, 1), 3 * num_ranks + 1} if collective != Collective.ALL_TO_ALL else {None}
        for num_chunks in sorted(chunks, key=str):
            program = build(name, collective, num_ranks, num_chunks=num_chunks, root=num_ranks // 2)
            summary = verify(program)
            assert summary.num_rounds == program.num_rounds
            assert num_ranks > 4 or is_right_in_one_order(program, seed=num_ranks)


@pytest.mark.parametrize(
    ("fields", "num_ranks"),
    [
        ({"name": "hierarchical", "ranks_per_host": 1}, 5),
        ({"name": "hierarchical", "ranks_per_host": 5}, 15),
        ({"name": "hierarchical", "ranks_per_host": 8}, 16),
        ({"name": "torus", "num_rows": 2}, 14),
        ({"name": "torus", "num_rows": 6}, 6),
    ],
    ids=str,
)
def test_grids_of_any_shape_are_right(fields, num_ranks):
    algorithm = list_algorithms()[fields["name"]].model_validate(fields)
    for collective in sorted(algorithm.collectives):
        verify(algorithm.build(collective, num_ranks, root=3))


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(("name", "collective"), EVERYTHING)
def test_programs_are_right_in_every_order_of_events(name, collective, num_ranks):
    program = small(name, collective, num_ranks)
    verify(program)
    assert is_right_in_every_order(program)
    assert is_right_in_every_order(program, eager=True)


def check_mutants(program):
    """What is accepted must be right in every order; what sends too little or too much is never accepted."""
    accepted = []
    for kind, mutant in mutants(program):
        if is_accepted(mutant):
            accepted.append(mutant)
            assert kind not in ("dropped", "doubled", "add or copy"), (kind, rows_of(mutant))
    for mutant in accepted:
        assert is_right_in_every_order(mutant), rows_of(mutant)
        assert is_right_in_one_order(mutant, seed=0, eager=True), rows_of(mutant)
    return accepted


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(("name", "collective"), EVERYTHING)
def test_no_wrong_mutant_is_accepted(name, collective, num_ranks):
    accepted = check_mutants(small(name, collective, num_ranks))
    if num_ranks == 3 or name != "recursive_doubling":
        assert accepted, "a transfer with a round of its own changes nothing, unless two must swap"


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("ring", "all_reduce"),
        ("ring", "broadcast"),
        ("direct", "broadcast"),
        ("halving_doubling", "all_reduce"),
        ("double_tree", "all_reduce"),
        ("hierarchical", "all_gather"),
        ("naive", "reduce_scatter"),
    ],
)
def test_no_wrong_mutant_of_four_ranks_is_accepted(name, collective):
    check_mutants(small(name, collective, 4))


def test_no_wrong_program_two_changes_away_is_accepted():
    generator = random.Random(0)
    num_accepted = 0
    for name, collective in EVERYTHING:
        once = [mutant for _, mutant in mutants(small(name, collective, 3))]
        for mutant in generator.sample(once, 4):
            twice = [again for _, again in mutants(mutant)]
            for again in generator.sample(twice, min(10, len(twice))):
                if is_accepted(again):
                    num_accepted += 1
                    assert is_right_in_every_order(again), rows_of(again)
    assert num_accepted > 10


def is_right_and_lean(program):
    return is_right_in_every_order(program) and not any(is_right_in_every_order(less) for less in drops(program))


@pytest.mark.parametrize(
    ("name", "collective"), [pair for pair in EVERYTHING if pair[1] not in ("all_reduce", "reduce_scatter")]
)
def test_where_nothing_is_added_verify_accepts_exactly_what_is_right_and_lean(name, collective):
    """Sums may be refused for their rounding; of copies every refusal must have its reason too."""
    for _, mutant in mutants(small(name, collective, 3)):
        assert is_accepted(mutant) == is_right_and_lean(mutant), rows_of(mutant)


def tiny_programs():
    """All programs of two ranks and one chunk that are short, and the shortest ones of three ranks."""
    for num_ranks in (2, 3):
        rows = [(*pair, 0, 1, adds) for pair in permutations(range(num_ranks), 2) for adds in (True, False)]
        single = [[row] for row in rows]
        double = [list(pair) for pair in combinations_with_replacement(rows, 2)]
        several = [*product(single, repeat=3), *product(single + double, repeat=2)] if num_ranks == 2 else []
        for rounds in [(), *product(single + double), *product(single, repeat=2), *several]:
            for collective in ("all_reduce", "reduce_scatter", "broadcast", "all_gather"):
                yield table(collective, num_ranks, 1, rounds, root=1, owners=np.array([0]))


def test_of_all_tiny_programs_exactly_those_are_accepted_that_are_right_and_lean():
    accepted = []
    for program in tiny_programs():
        if is_accepted(program) != is_right_and_lean(program):
            assert refusal(program).startswith("round 0: chunk 0"), rows_of(program)
            assert "must be the only one to arrive" in refusal(program), "two terms at once: right but for rounding"
        elif is_accepted(program):
            accepted.append((program.num_ranks, str(program.collective)))
    assert {collective for _, collective in accepted} == {"all_reduce", "reduce_scatter", "broadcast", "all_gather"}
    assert {num_ranks for num_ranks, _ in accepted} == {2, 3}


def test_the_oracle_knows_wrong_from_right():
    """It would prove nothing if it took everything: of the mutants it refuses most, and for the reasons it should."""
    program = small("ring", "all_reduce", 3)
    verdicts = [is_right_in_one_order(mutant, seed=1) for _, mutant in mutants(program)]
    assert 0 < sum(verdicts) < len(verdicts) / 2
    assert not is_right_in_every_order(RACE)
    assert any(is_right_in_one_order(RACE, seed) for seed in range(20)), "a race comes out right at times"
    assert not is_right_in_every_order(Shifted(program))


RACE = table("broadcast", 3, 1, [[(0, 1, 0, 1, False)], [(0, 2, 0, 1, False), (1, 2, 0, 1, True)]])
"""Right if the copy comes last."""


def test_a_race_is_told_with_its_place():
    assert refusal(RACE) == (
        "round 1: chunk 0 from rank 0 to rank 2 must be the only one to arrive there in its round, but another does "
        "too: a race; move either"
    )


def test_a_round_sends_what_was_there_before_it():
    swap = table("all_reduce", 2, 1, [[(0, 1, 0, 1, True), (1, 0, 0, 1, True)]])
    assert verify(swap).num_rounds == 1
    assert is_right_in_every_order(swap)
    assert is_right_in_every_order(swap, eager=True)
    replaced = table("all_reduce", 2, 1, [[(0, 1, 0, 1, True), (1, 0, 0, 1, False)]])
    assert "must end with the right chunk 0, but" in refusal(replaced)
    assert not is_right_in_every_order(replaced)


def test_two_additions_to_a_chunk_in_a_round_are_a_race():
    both = table("all_reduce", 3, 2, [[(1, 0, 0, 2, True), (2, 0, 1, 1, True)]])
    assert refusal(both).startswith("round 0: chunk 1 from rank 1 to rank 0 must be the only one to arrive there")


class Shifted(Program):
    """A program whose ranks all receive one round later than they send."""

    def __init__(self, program):
        super().__init__(
            program.collective, "shifted", program.num_ranks, program.num_chunks, program.num_rounds + 1, program.round
        )
        self.program = program

    def of_rank(self, rank):
        nothing = self.program.round(0).select(np.array([], np.intp))
        sends = [own.sends for own in self.program.of_rank(rank)]
        receives = [own.receives for own in self.program.of_rank(rank)]
        return [RankRound(*pair) for pair in zip([*sends, nothing], [nothing, *receives], strict=True)]


def test_a_deadlock_is_told_with_who_waits_for_whom():
    """The classic one: everybody sends to the next rank, and only then receives."""
    message = refusal(Shifted(small("ring", "all_reduce", 3)))
    assert message == (
        "ranks must not wait for each other, but this is a deadlock: "
        "rank 0 is in round 0 until chunk 2 from rank 0 to rank 1 is received in round 1 of rank 1; "
        "rank 1 is in round 0 until chunk 0 from rank 1 to rank 2 is received in round 1 of rank 2; "
        "rank 2 is in round 0 until chunk 1 from rank 2 to rank 0 is received in round 1 of rank 0; "
        "reorder their rounds"
    )


class OneMoved(Program):
    """A program with one side of one transfer in another round."""

    def __init__(self, program, rank, side, index, place, other):
        super().__init__(
            program.collective, "moved", program.num_ranks, program.num_chunks, program.num_rounds, program.round
        )
        self.owners, self.root = program.owners, program.root
        self.moved = (rank, side, index, place, other)

    def of_rank(self, rank):
        own = super().of_rank(rank)
        mover, side, index, place, other = self.moved
        if rank != mover:
            return own
        tables = [list(zip(*vars(getattr(round_, side)).values(), strict=True)) for round_ in own]
        tables[other].append(tables[index].pop(place))
        moved = [table(self.collective, 9, 9, [rows]).round(0) for rows in tables]
        kept = [round_.receives if side == "sends" else round_.sends for round_ in own]
        pairs = zip(moved, kept, strict=True) if side == "sends" else zip(kept, moved, strict=True)
        return [RankRound(*pair) for pair in pairs]


def moves(program):
    """Every way to do one side of one transfer in another round."""
    for rank in range(program.num_ranks):
        for index, own in enumerate(program.of_rank(rank)):
            for side in ("sends", "receives"):
                for place in range(len(getattr(own, side))):
                    for other in {*range(program.num_rounds)} - {index}:
                        yield OneMoved(program, rank, side, index, place, other)


@pytest.mark.parametrize(("name", "has_deadlocks"), [("naive", True), ("halving_doubling", True), ("ring", False)])
def test_a_send_or_receive_in_another_round_is_refused(name, has_deadlocks):
    """In a ring all messages go to one rank: the next one takes the place of that which is late."""
    deadlocks = 0
    for moved in moves(small(name, Collective.ALL_REDUCE, 3)):
        if "this is a deadlock" in refusal(moved):
            deadlocks += 1
            assert not is_right_in_one_order(moved, seed=0)
    assert bool(deadlocks) == has_deadlocks


class Cut(Program):
    """A program of which one rank does only its sends, or only its receives."""

    def __init__(self, program, rank, side):
        super().__init__(
            program.collective, "cut", program.num_ranks, program.num_chunks, program.num_rounds, program.round
        )
        self.cut = (rank, side)

    def of_rank(self, rank):
        nothing = self.round(0).select(np.array([], np.intp))
        own = super().of_rank(rank)
        return [RankRound(**{**vars(one), self.cut[1]: nothing}) for one in own] if rank == self.cut[0] else own


def test_a_send_without_a_receive_is_told():
    program = small("ring", "all_reduce", 3)
    expected = "a send must have a receive, but round 0: chunk 2 from rank 0 to rank 1 has none; add it"
    assert refusal(Cut(program, 1, "receives")) == expected
    expected = "a receive must have a send, but round 0: chunk 0 from rank 1 to rank 2 has none; add it"
    assert refusal(Cut(program, 1, "sends")) == expected


# One rank adds ((0 + 1) + 2) + 3, another (0 + 1) + (2 + 3): right for whole numbers, different in floating point.
TWO_ORDERS = [
    [(1, 0, 0, 1, True)],
    [(0, 1, 0, 1, False)],
    [(2, 0, 0, 1, True)],
    [(3, 0, 0, 1, True)],
    [(3, 2, 0, 1, True)],
    [(2, 1, 0, 1, True)],
    [(1, 2, 0, 1, False), (1, 3, 0, 1, False)],
]


def test_sums_that_round_differently_are_refused():
    program = table("all_reduce", 4, 1, TWO_ORDERS)
    assert is_right_in_every_order(program)
    assert refusal(program) == (
        "chunk 0 must be added up in one order, but rank 1 has another than rank 0 and rounds differently; "
        "let one add and the others copy"
    )


def test_a_sum_with_its_terms_swapped_is_the_same():
    """a + b = b + a to the last bit: that two ranks each add the other's half of a sum is accepted."""
    rows = [[(1, 2, 0, 1, False)], [(0, 1, 0, 1, True)], [(2, 0, 0, 1, True)]]
    program = table("all_reduce", 3, 1, [[(2, 1, 0, 1, True)], *rows, [(0, 2, 0, 1, False)]])
    assert is_right_in_every_order(program)
    assert verify(program).num_rounds == 5


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            table("all_reduce", 2, 2, [[(0, 0, 0, 1, True)]]),
            "round 0: chunk 0 from rank 0 to rank 0 must go to another rank; correct it",
        ),
        (
            table("all_reduce", 2, 2, [[(0, 1, 1, 2, True)]]),
            "round 0: chunks 1 to 2 from rank 0 to rank 1 must carry chunks from 0 to 1; correct it",
        ),
        (
            table("all_reduce", 2, 2, [[(0, 5, 1, 1, True)]]),
            "round 0: chunk 1 from rank 0 to rank 5 must be between ranks from 0 to 1; correct it",
        ),
        (
            table("all_reduce", 2, 2, [[(0, 1, 1, 0, True)]]),
            "round 0: chunks 1 to 0 from rank 0 to rank 1 must carry a chunk; correct it",
        ),
        (
            table("all_reduce", 3, 1, [[(0, 1, 0, 1, True)], [(0, 1, 0, 1, True)]]),
            "round 1: chunk 0 from rank 0 to rank 1 must count every rank once, but rank 0 is in both terms; drop one",
        ),
        (
            table("broadcast", 3, 1, [[(1, 2, 0, 1, False)]]),
            "round 0: chunk 0 from rank 1 to rank 2 must be held by its source, but it is not there yet; send it later",
        ),
        (
            table("broadcast", 2, 1, [[(0, 1, 0, 1, True)]]),
            "round 0: chunk 0 from rank 0 to rank 1 must be added to something, but nothing is there; copy it instead",
        ),
        (
            table("broadcast", 2, 1, [[(0, 1, 0, 1, False)]] * 2),
            "round 1: chunk 0 from rank 0 to rank 1 must bring something new, but its destination has the same; "
            "drop it",
        ),
        (
            table("all_reduce", 2, 1, [[(0, 1, 0, 1, True)]]),
            "rank 0 must end with the right chunk 0, but the part of rank 1 does not reach it; add a transfer",
        ),
        (
            table("all_to_all", 2, 4, [[(0, 1, 0, 2, False), (1, 0, 2, 1, False)]]),
            "round 0: chunk 0 from rank 0 to rank 1 must be of use, but no result depends on it; drop it",
        ),
        (
            table("reduce_scatter", 2, 1, [[(0, 1, 0, 1, True)]], owners=np.array([2])),
            "owners must be a rank for each of 1 chunks, but got [2]; correct them",
        ),
    ],
    ids=lambda value: None if isinstance(value, Program) else value.partition("must")[2][:24],
)
def test_what_is_wrong_is_told_with_its_place(program, message):
    assert refusal(program) == message


def test_more_ranks_than_a_word_has_bits_are_proven_piece_by_piece(monkeypatch):
    monkeypatch.setattr("paceline.programs.verify._MOST_WORDS", 70 * 5 * 9)  # nine chunks at a time
    program = build("halving_doubling", "all_reduce", 70)
    assert verify(program).sent == pytest.approx(2 * 69 / 70)
    rounds = rows_of(program)
    source, destination, first, count, adds = rounds[3].pop(40)
    message = refusal(like(program, rounds))
    assert "does not reach it" in message
    rounds[9].append((source, destination, first, count, adds))
    assert refusal(like(program, rounds)).startswith("round 9: chunk"), "the sum it should be in has moved on"
