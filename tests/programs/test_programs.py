from collections import Counter
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import EVERYTHING, build, rows_of

from paceline.errors import ProgramError, SettingsError, UnknownNameError
from paceline.programs import (
    Collective,
    Hierarchical,
    Program,
    Ring,
    Round,
    Torus,
    chunk_bounds,
    find_algorithm,
    list_algorithms,
)
from paceline.programs.verify import verify

RANKS = range(2, 18)


def measure(name, collective, num_ranks, **fields):
    summary = verify(build(name, collective, num_ranks, **fields))
    return summary.num_rounds, summary.sent


@pytest.mark.parametrize("name", ["ring", "direct"])
def test_ring_and_direct_exchange_cost_what_the_closed_form_says(name):
    for n in RANKS:
        half = (n - 1) / n
        for collective, factor in (("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 1)):
            num_rounds, sent = measure(name, collective, n)
            assert num_rounds == factor * (n - 1)
            assert sent == pytest.approx(factor * half), "the same for every rank"


def test_halving_doubling_takes_the_least_rounds_and_bytes_for_any_number_of_ranks():
    for n in RANKS:
        for collective, factor in (("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 1)):
            num_rounds, sent = measure("halving_doubling", collective, n)
            assert num_rounds == factor * ceil(log2(n))
            assert sent == pytest.approx(factor * (n - 1) / n)
        assert measure("halving_doubling", "broadcast", n)[0] == ceil(log2(n))
        assert measure("halving_doubling", "all_to_all", n)[0] == ceil(log2(n))


def test_halving_doubling_swaps_between_corners_of_a_cube_at_powers_of_two():
    for index, round_ in enumerate(build("halving_doubling", "all_reduce", 8).rounds()):
        assert (round_.sources ^ round_.destinations == [1, 2, 4, 4, 2, 1][index]).all(), "nearest first"
        assert (round_.counts == [4, 2, 1, 1, 2, 4][index]).all(), "first the largest part goes, and it goes back last"
        assert round_.adds.all() == (index < 3)
    assert build("halving_doubling", "reduce_scatter", 8).owners.tolist() == [0, 4, 2, 6, 1, 5, 3, 7]


def test_recursive_doubling_takes_the_least_rounds():
    for n in RANKS:
        num_rounds, sent = measure("recursive_doubling", "all_reduce", n)
        cube = 1 << (n.bit_length() - 1)
        assert num_rounds == log2(cube) + 2 * (n > cube)
        folded = n - cube
        ends = [log2(cube) + 1] * folded + [log2(cube)] * (cube - folded) + [1] * folded
        assert sent == pytest.approx(ends)


def test_naive_puts_everything_through_the_root():
    for n in RANKS:
        num_rounds, sent = measure("naive", "all_reduce", n, root=1)
        assert num_rounds == n
        assert sent.tolist() == [n - 1 if rank == 1 else 1 for rank in range(n)]
        assert measure("naive", "broadcast", n)[0] == 1
        for collective in ("reduce_scatter", "all_gather"):
            assert sum(measure("naive", collective, n)[1]) < sum(sent)


def test_the_double_tree_sends_twice_the_buffer_and_keeps_both_trees_busy():
    for n in [*RANKS, 32, 33]:
        for num_chunks in (1, 2, 9, 32):
            program = build("double_tree", "all_reduce", n, num_chunks=num_chunks)
            num_rounds, sent = program.num_rounds, verify(program).sent
            assert num_rounds <= 4 * ceil(log2(n)) + num_chunks
            assert np.mean(sent) == pytest.approx(2 * (n - 1) / n)
            assert num_chunks % 2 or sent.max() <= 2, "inner in one tree and a leaf in the other"
            num_rounds, sent = measure("double_tree", "broadcast", n, num_chunks=num_chunks, root=n - 1)
            assert num_rounds <= 2 * ceil(log2(n)) + num_chunks
            assert num_chunks % 2 or sent.max() <= 1


@pytest.mark.parametrize("num_ranks", [2, 3, 6, 11, 16, 64, 65])
def test_a_rank_of_the_double_tree_has_one_message_each_way_in_a_round(num_ranks):
    for round_ in build("double_tree", "all_reduce", num_ranks).rounds():
        for going_up in (True, False):
            for ends in (round_.sources, round_.destinations):
                assert max(Counter(ends[round_.adds == going_up].tolist()).values(), default=0) <= 1
        assert (round_.counts == 1).all()


@pytest.mark.parametrize(("hosts", "ranks_per_host"), [(1, 6), (2, 4), (3, 3), (5, 2), (6, 1)])
def test_hierarchical_sends_little_between_hosts(hosts, ranks_per_host):
    n = hosts * ranks_per_host
    program = build("hierarchical", "all_reduce", n, ranks_per_host=ranks_per_host)
    summary = verify(program)
    assert summary.num_rounds == 2 * (ranks_per_host - 1) + 2 * (hosts - 1)
    inside, between = 0, 0
    for round_ in program.rounds():
        is_inside = round_.sources // ranks_per_host == round_.destinations // ranks_per_host
        inside += round_.counts[is_inside].sum() / program.num_chunks / n
        between += round_.counts[~is_inside].sum() / program.num_chunks / n
    assert inside == pytest.approx(2 * (ranks_per_host - 1) / ranks_per_host)
    assert between == pytest.approx(2 * (hosts - 1) / hosts / ranks_per_host)
    assert summary.sent == pytest.approx(2 * (n - 1) / n)
    all_to_all = build("hierarchical", "all_to_all", n, ranks_per_host=ranks_per_host)
    assert all_to_all.num_rounds == ranks_per_host - 1 + hosts - 1


@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 7), (2, 4), (3, 3), (4, 4), (5, 2)])
def test_the_torus_sends_to_neighbours_in_both_directions_at_once(num_rows, num_columns):
    n = num_rows * num_columns
    program = build("torus", "all_reduce", n, num_rows=num_rows)
    summary = verify(program)
    assert summary.num_rounds == 2 * (num_rows - 1 + num_columns - 1)
    assert summary.sent == pytest.approx(2 * (n - 1) / n)
    for round_ in program.rounds():
        rows, columns = np.divmod(np.stack([round_.sources, round_.destinations]), num_columns)
        is_right = (rows[0] == rows[1]) & ((columns[0] + 1) % num_columns == columns[1])
        is_down = (columns[0] == columns[1]) & ((rows[0] + 1) % num_rows == rows[1])
        assert (is_right | is_down).all()
        if num_rows == num_columns:
            assert is_right.sum() == is_down.sum() == n, "no link waits"


@pytest.mark.parametrize(
    ("name", "num_rounds", "sent"),
    [
        ("ring", lambda n: n - 1, lambda n: (n - 1) / 2),
        ("direct", lambda n: n - 1, lambda n: (n - 1) / n),
        ("halving_doubling", lambda n: ceil(log2(n)), lambda n: sum(i.bit_count() for i in range(n)) / n),
    ],
    ids=["ring", "direct", "halving_doubling"],
)
def test_all_to_all_costs_what_the_closed_form_says(name, num_rounds, sent):
    for n in RANKS:
        assert measure(name, "all_to_all", n)[0] == num_rounds(n)
        assert measure(name, "all_to_all", n)[1] == pytest.approx(sent(n)), "a part crosses one link for each bit"


def test_broadcasts_cost_what_the_closed_form_says():
    for n in RANKS:
        num_rounds, sent = measure("ring", "broadcast", n, num_chunks=7, root=n - 1)
        assert num_rounds == n - 2 + 7
        assert sent.tolist() == [0 if rank == (n - 2) else 1 for rank in range(n)]
        num_rounds, sent = measure("direct", "broadcast", n, num_chunks=5 * (n - 1))
        assert num_rounds == n - 1
        assert sent == pytest.approx(np.array([1, *[(n - 2) / (n - 1)] * (n - 1)]))


def degenerate_pairs():
    for n in (2, 5, 8):
        for collective in ("all_reduce", "reduce_scatter", "all_gather"):
            ring = rows_of(build("ring", collective, n))
            for ranks_per_host in (1, n):
                yield rows_of(build("hierarchical", collective, n, ranks_per_host=ranks_per_host)), ring
    for name in ("direct", "halving_doubling"):
        yield rows_of(build(name, "all_reduce", 2)), rows_of(build("ring", "all_reduce", 2))
    yield rows_of(build("hierarchical", "all_to_all", 4, ranks_per_host=4)), rows_of(build("direct", "all_to_all", 4))


def test_degenerate_programs_are_what_they_degenerate_to():
    for program, other in degenerate_pairs():
        assert [sorted(rows) for rows in program] == [sorted(rows) for rows in other]


@pytest.mark.parametrize(("name", "collective"), EVERYTHING)
def test_classes_of_rounds_equal_the_full_expansion(name, collective):
    for num_ranks in (1, 2, 3, 4, 6, 9, 16):
        for num_chunks in (None, 5) if collective != Collective.ALL_TO_ALL else (None,):
            program = build(name, collective, num_ranks, num_chunks=num_chunks)
            kinds = [frozenset(Counter((s, d, c, a) for s, d, _, c, a in rows).items()) for rows in rows_of(program)]
            from_classes = Counter()
            for index, multiplicity in program.round_classes():
                from_classes[kinds[index]] += multiplicity
            assert from_classes == Counter(kinds)


def test_rounds_of_a_ring_are_of_two_classes():
    assert build("ring", "all_reduce", 9).round_classes() == [(0, 8), (8, 8)]
    assert len(build("ring", "all_reduce", 9, num_chunks=10).round_classes()) == 16, "blocks differ: so do rounds"


@pytest.mark.parametrize("name", ["ring", "halving_doubling", "double_tree", "hierarchical", "torus"])
def test_4096_ranks_are_no_burden(name):
    """Built and walked in full: the ring has 33 million transfers."""
    program = build(name, "all_reduce", 4096)
    num_sent = sum(int(program.round(index).counts.sum()) * many for index, many in program.round_classes())
    assert num_sent == 2 * 4095 * program.num_chunks
    assert num_sent == sum(int(round_.counts.sum()) for round_ in program.rounds())


@pytest.mark.parametrize(("name", "collective"), EVERYTHING)
def test_ranks_have_the_transfers_of_the_table_in_its_order(name, collective):
    program = build(name, collective, 6)
    for index, rows in enumerate(rows_of(program)):
        for rank in range(6):
            own = program.of_rank(rank)
            assert len(own) == program.num_rounds
            for side, end in ((own[index].sends, 0), (own[index].receives, 1)):
                columns = (side.sources, side.destinations, side.firsts, side.counts, side.adds)
                mine = list(zip(*(column.tolist() for column in columns), strict=True))
                assert mine == [row for row in rows if row[end] == rank]


@pytest.mark.parametrize(("name", "collective"), EVERYTHING)
def test_tables_hold_integers_of_one_type_and_no_empty_transfers(name, collective):
    for num_ranks in (2, 5):
        for round_ in build(name, collective, num_ranks, num_chunks=None).rounds():
            integers = (round_.sources, round_.destinations, round_.firsts, round_.counts)
            assert {column.dtype for column in integers} == {np.dtype(np.int64)}
            assert round_.adds.dtype == np.bool_
            assert {len(column) for column in integers} == {len(round_.adds)} == {len(round_)}
            assert len(round_) > 0
            assert (round_.counts > 0).all()


@pytest.mark.parametrize(
    "name", sorted(name for name, kind in list_algorithms().items() if "reduce_scatter" in kind.collectives)
)
@settings(deadline=None, derandomize=True, max_examples=30)
@given(num_ranks=st.integers(1, 24), num_chunks=st.none() | st.integers(1, 90))
def test_owners_have_equal_parts(name, num_ranks, num_chunks):
    for collective in ("reduce_scatter", "all_gather"):
        program = build(name, collective, num_ranks, num_chunks=num_chunks)
        parts = np.bincount(program.owners, minlength=num_ranks)
        allowed = 2 if name == "torus" and num_chunks else 1 if num_chunks else 0
        assert parts.max() - parts.min() <= allowed
        assert parts.sum() == program.num_chunks
        if name not in ("halving_doubling", "hierarchical", "torus"):
            assert (np.diff(program.owners) >= 0).all(), "chunks are owned in the order of ranks"


@settings(deadline=None, derandomize=True)
@given(num_elements=st.integers(0, 10**12), num_chunks=st.integers(1, 300))
def test_chunks_are_as_equal_as_can_be(num_elements, num_chunks):
    bounds = chunk_bounds(num_elements, num_chunks)
    assert (bounds[0], bounds[-1]) == (0, num_elements)
    assert set(np.diff(bounds)) <= {num_elements // num_chunks, -(-num_elements // num_chunks)}


def test_every_collective_is_had_from_ring_direct_and_halving_doubling():
    for name in ("ring", "direct", "halving_doubling"):
        assert find_algorithm(name).collectives == frozenset(Collective)


def refusal(make):
    with pytest.raises(SettingsError) as caught:
        make()
    return str(caught.value)


def test_what_cannot_be_built_is_refused_with_what_can():
    assert "must be a known name, but got 'rings'; did you mean 'ring'?" in refusal(lambda: find_algorithm("rings"))
    with pytest.raises(UnknownNameError):
        find_algorithm("rings")
    assert refusal(lambda: build("torus", "broadcast", 4)) == (
        "a torus program must be one of all_gather, all_reduce, reduce_scatter, but got broadcast; choose another"
    )
    assert refusal(lambda: build("ring", "all_reduce", 0)).startswith("num_ranks must be at least 1, but got 0")
    assert refusal(lambda: build("ring", "broadcast", 3, root=3)).startswith("root must be a rank below 3, but got 3")
    assert refusal(lambda: build("ring", "all_to_all", 3, num_chunks=5)) == (
        "num_chunks of an all-to-all must be 3**2 = 9, but got 5; leave it out"
    )
    assert refusal(lambda: Hierarchical(ranks_per_host=4).build(Collective.ALL_REDUCE, 14)) == (
        "num_ranks must be a multiple of ranks_per_host, but got 14 = 3 * 4 + 2; change either"
    )
    assert refusal(lambda: Torus(num_rows=4).build(Collective.ALL_REDUCE, 14)) == (
        "num_ranks must be a multiple of num_rows, but got 14 = 3 * 4 + 2; change either"
    )


def test_settings_survive_json():
    for fields in (
        {"name": "ring", "num_chunks": 5},
        {"name": "hierarchical", "num_chunks": None, "ranks_per_host": 8},
    ):
        algorithm = find_algorithm(fields["name"]).model_validate(fields)
        assert algorithm.model_dump() == fields
    assert Ring(num_chunks=9).build(Collective.ALL_REDUCE, 4).num_chunks == 9


@pytest.mark.parametrize(
    ("made", "collective", "told"),
    [
        (build("naive", "broadcast", 4), "all_reduce", "ring must build .* all_reduce for 4 ranks, but .* broadcast"),
        (build("ring", "all_reduce", 2), "all_reduce", "all_reduce for 4 ranks, but it is of all_reduce for 2 ranks"),
        (build("ring", "broadcast", 4, root=3), "broadcast", "4 ranks from rank 1, but .* 4 ranks from rank 3"),
        ([1, 2], "all_reduce", r"ring must build a Program of all_reduce for 4 ranks, but got \[1, 2\]"),
    ],
)
def test_what_an_algorithm_builds_is_what_was_asked(monkeypatch, made, collective, told):
    monkeypatch.setattr(Ring, "_build", lambda *_: made)
    with pytest.raises(ProgramError, match=told):
        Ring().build(Collective(collective), 4, root=1)


def test_a_program_has_a_chunk_and_rounds_of_arrays():
    with pytest.raises(ProgramError, match="at least one rank and one chunk, but mine has 2 ranks and 0 chunks"):
        Program(Collective.ALL_REDUCE, "mine", 2, 0, 0, lambda index: None)
    program = Program(Collective.ALL_REDUCE, "mine", 2, 1, 1, lambda _: Round([1], [0], [0], [1], [True]))
    with pytest.raises(ProgramError, match="round 0 must be a Round of arrays of one length, but got Round"):
        verify(program)
