import pytest
from torch import Size

from paceline.benchmarks.link_price import Link, price_training
from paceline.comm.pacing import HEADERS
from paceline.compression import Int8
from paceline.registry import list_variants
from paceline.sync import (
    ASGD,
    DPSGD,
    DiLoCo,
    EveryStep,
    HierarchicalLocalSGD,
    LocalSGD,
    ParameterServer,
    PostLocalSGD,
    Rule,
    StreamingDiLoCo,
)
from paceline.topology import BytesPerSecond

SHAPES = [Size([1000, 1000])]
NUM_BYTES = 4e6
LINK = Link(4, BytesPerSecond(1e6 * HEADERS), 0.0)
ALL_REDUCE_S = 6.0
"""2 * 3/4 of the bytes, at the bandwidth without headers."""


def price(rule, num_steps=1, compute_s=0.0, link=LINK):
    return price_training(rule, SHAPES, link, compute_s, num_steps)


def about(seconds):
    """Switches add microseconds a message, and adding costs time too."""
    return pytest.approx(seconds, rel=1e-3)


def test_backward_hides_gradients_but_not_steps():
    assert price(EveryStep()) == about(ALL_REDUCE_S)
    assert price(EveryStep(), compute_s=3.0) == about(3 + ALL_REDUCE_S - 2)
    assert price(EveryStep(), compute_s=30.0) == about(30 + ALL_REDUCE_S / 2), "the last of two buckets"
    small = [Size([100, 100])]
    one_bucket = price_training(EveryStep(), small, LINK, 30.0, 1)
    assert one_bucket == about(30 + 0.06), "it is ready when backward ends"
    coded = EveryStep(codec="one_bit", codec_of="step")
    assert price(coded, compute_s=3.0) == about(3 + price(coded))


def test_a_codec_shrinks_what_is_exchanged():
    assert price(EveryStep(codec=Int8())) == about(ALL_REDUCE_S * Int8().wire_bytes(SHAPES[0], 4) / (1.5 * NUM_BYTES))


def test_workers_that_step_alone_wait_once_in_a_period():
    assert price(LocalSGD(period=10), 20, compute_s=1.0) == about(20 + 2 * ALL_REDUCE_S)
    assert price(LocalSGD(period=10), 5, compute_s=1.0) == about(5 + ALL_REDUCE_S / 2)
    streaming = StreamingDiLoCo(period=10, num_fragments=1, delay=2)
    assert price(streaming, 10, compute_s=1.0) == about(10 + ALL_REDUCE_S - 2)
    assert price(DiLoCo(period=10), 10, compute_s=1.0) == about(10 + ALL_REDUCE_S)


def test_exchanges_that_travel_at_the_same_time_share_the_link():
    """Each of four fragments, of a quarter of the bytes, has 2 steps to arrive in, but their turns are a step apart."""
    streaming = StreamingDiLoCo(period=4, num_fragments=4, delay=2)
    assert price(streaming, 100, compute_s=1.0) == about(25 * ALL_REDUCE_S)
    assert price(streaming, 100, compute_s=2.0) == about(200)


def test_synchronous_steps_are_priced_as_such():
    rule = PostLocalSGD(synchronous_steps=10, period=10)
    assert price(rule, 10) == about(10 * ALL_REDUCE_S)
    assert price(rule, 20) == about(11 * ALL_REDUCE_S)


def test_messages_to_neighbours_travel_while_the_next_step_computes():
    assert price(DPSGD(graph="ring")) == 8
    assert price(DPSGD(graph="ring"), compute_s=3.0) == 8
    assert price(DPSGD(graph="ring"), compute_s=9.0) == 9


def test_servers_carry_the_messages_of_all():
    assert price(ParameterServer(), compute_s=1.0) == 1 + 2 * 3 * 4
    assert price(ParameterServer(num_servers=3), compute_s=1.0) == 1 + 2 * 4
    assert price(ASGD(), compute_s=1.0) == 3 * 4, "pushes and pulls go opposite ways"
    assert price(ASGD(num_servers=3), compute_s=1.0) == 1 + 2 * 4, "a worker's own messages, one after the other"


def test_a_worker_alone_on_its_host_exchanges_nothing_there():
    assert price(HierarchicalLocalSGD(host_size=2, period=10), 10) == about(ALL_REDUCE_S)


def test_latency_and_limits_count():
    slow = Link(4, BytesPerSecond(1e6 * HEADERS), 0.5)
    # The halves, then the quarters, and both ways.
    assert price(EveryStep(), link=slow) == about(ALL_REDUCE_S + 4 * 0.5)
    assert price(DPSGD(graph="ring"), link=slow) == 8.5
    assert price(EveryStep(max_bandwidth=5e5 * HEADERS)) == about(2 * ALL_REDUCE_S)
    assert price(EveryStep(max_bandwidth=5e6 * HEADERS)) == about(ALL_REDUCE_S)


@pytest.mark.parametrize("name", list_variants(Rule))
def test_every_rule_has_a_price_that_grows_with_steps(name):
    rule = list_variants(Rule)[name]()
    ten, twenty = price(rule, 10, compute_s=0.1), price(rule, 20, compute_s=0.1)
    assert 1.0 <= ten < twenty
    assert price(rule, 10, compute_s=1000.0) == pytest.approx(10_000, rel=0.03), "computing hides most"


def test_a_link_is_told_in_words():
    assert str(Link(4, BytesPerSecond.parse("50mbit"), 0.0)) == "on 4 hosts at 50 Mbit/s"
