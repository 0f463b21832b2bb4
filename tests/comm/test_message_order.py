import numpy as np
import pytest

from paceline.comm.message_order import Places, order_messages
from paceline.programs import HalvingDoubling, Naive, RecursiveDoubling, Ring, list_algorithms
from paceline.programs.base import Collective, Program, Round, chunk_bounds

PAIRS = [(name, collective) for name, known in list_algorithms().items() for collective in sorted(known.collectives)]


def orders(program, num_elements, *, segment=4, window=4, ahead=1000):
    bounds = chunk_bounds(num_elements, program.num_chunks)
    places = Places(bounds[:-1], np.diff(bounds), is_sequence=True)
    return [
        order_messages(program, rank, places, segment=segment, window=window, ahead=ahead)
        for rank in range(program.num_ranks)
    ]


def all_reduce(algorithm, num_ranks):
    return algorithm.build(Collective.ALL_REDUCE, num_ranks)


def began(order):
    """Return the step at which each send begins."""
    return {send: number for number, step in enumerate(order.steps) for send in step.sends}


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
@pytest.mark.parametrize(("name", "collective"), PAIRS)
def test_both_ends_of_every_message_agree(name, collective, num_ranks):
    of_rank = orders(list_algorithms()[name]().build(collective, num_ranks), 203)
    sent = {
        (rank, send.peer, send.begin, send.end, send.tag) for rank in range(num_ranks) for send in of_rank[rank].sends
    }
    received = {
        (receive.peer, rank, receive.begin, receive.end, receive.tag)
        for rank in range(num_ranks)
        for receive in of_rank[rank].receives
    }
    assert sent == received
    assert sorted(message[-1] for message in sent) == list(range(of_rank[0].num_tags)), "every tag is used once"
    assert {order.num_tags for order in of_rank} == {len(sent)}
    assert max(end - begin for _, _, begin, end, _ in sent) <= 4


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize(("name", "collective"), [pair for pair in PAIRS if pair[0] != "recursive_doubling"])
def test_everything_is_done_once_and_receives_are_posted_in_order_within_the_window(name, collective, window):
    for order in orders(list_algorithms()[name]().build(collective, 5), 203, window=window):
        posted = [receive for step in order.steps for receive in (*step.posts, *step.late_posts)]
        assert posted == sorted(posted) == list(range(len(order.receives)))
        assert sorted(began(order)) == list(range(len(order.sends)))
        num_posted = 0
        for taken, step in enumerate(order.steps):
            num_posted += len(step.posts) + len(step.late_posts)
            assert num_posted - taken <= window
            assert num_posted > taken or taken == len(order.receives), "the next receive is posted"


def test_a_segment_travels_on_while_the_next_is_under_way():
    (order, *_) = orders(all_reduce(Ring(), 4), 400, segment=10)
    steps = began(order)
    assert [steps[send] for send in range(10)] == [0] * 10, "the first round needs nothing"
    assert [steps[send] for send in range(10, 20)] == list(range(1, 11)), "then each follows what it is the sum of"


def test_sums_are_received_into_scratch_and_copies_where_they_belong():
    (order, *_) = orders(all_reduce(Ring(), 4), 400, segment=10)
    assert [receive.is_direct for receive in order.receives] == [not receive.adds for receive in order.receives]
    assert order.num_scratch == 10


def test_a_copy_is_posted_only_when_what_lies_there_has_left():
    (_, leaf) = orders(all_reduce(Naive(), 2), 8, segment=4)
    assert [step.sends for step in leaf.steps] == [[0, 1], [], []]
    assert [step.posts for step in leaf.steps] == [[], [], []]
    assert [step.late_posts for step in leaf.steps] == [[0, 1], [], []]
    assert [receive.overwrites for receive in leaf.receives] == [(0,), (1,)]


def test_sends_of_a_later_round_wait_until_those_before_have_likely_left():
    program = all_reduce(HalvingDoubling(), 4)  # 80 elements to one rank, 40 to another, and back
    eager, paced = (orders(program, 160, segment=4, ahead=ahead)[2] for ahead in (1000, 16))
    assert [began(eager)[send] for send in range(20, 30)] == list(range(1, 11)), "what is there first goes at once"
    assert [began(paced)[send] for send in range(20, 30)] == [16, 17, 18, 19, 20, 20, 20, 20, 20, 20]
    assert [began(paced)[send] for send in range(20)] == [0] * 20, "in its round nothing waits"


def test_what_is_read_and_written_in_one_round_is_received_into_scratch():
    for order in orders(all_reduce(RecursiveDoubling(), 2), 40, window=2):
        assert not any(receive.is_direct for receive in order.receives)
        assert [receive.overwrites for receive in order.receives] == [(number,) for number in range(10)]
        assert order.steps[0].posts == list(range(10)), "all are there from the start, or both would wait for ever"


def test_overlapping_receives_of_one_round_keep_the_order_of_the_transfers():
    columns = ([1, 2], [0, 0], [0, 1], [2, 2], [True, True])
    program = Program(Collective.ALL_REDUCE, "x", 3, 3, 1, lambda _: Round(*(np.array(column) for column in columns)))
    order = orders(program, 30, segment=5)[0]
    assert [(receive.peer, receive.begin) for receive in order.receives] == [
        *((1, begin) for begin in (0, 5, 10, 15)),
        *((2, begin) for begin in (10, 15, 20, 25)),
    ]


def test_transfers_of_one_round_take_turns_where_they_can():
    columns = ([1, 2], [0, 0], [0, 0], [2, 2], [True, True])
    program = Program(Collective.ALL_REDUCE, "x", 3, 2, 1, lambda _: Round(*(np.array(column) for column in columns)))
    order = orders(program, 10, segment=5)[0]
    assert [(receive.peer, receive.begin) for receive in order.receives] == [(1, 0), (2, 0), (1, 5), (2, 5)]
