import pytest
from pydantic import ValidationError

from paceline.programs import Collective, find_algorithm
from paceline.simulator import CodecCost, simulate
from paceline.topology import Switch

B, A, G, S = 12.5e9, 6e-6, 1 / 200e9, 1e8
N = 8
SWITCH = Switch(bandwidth=B, latency_s=A, message_s=0, reduce_speed=1 / G)
E, D = 3e9, 11e9


def exactly(value):
    return pytest.approx(value, rel=1e-9, abs=0)


def cost(codec, collective=Collective.ALL_REDUCE, algorithm="ring", own_pace=False):
    program = find_algorithm(algorithm)().build(collective, N)
    return simulate(program, S, SWITCH, codec=codec, own_pace=own_pace)


def test_a_codec_that_does_nothing_costs_nothing():
    assert cost(CodecCost()) == cost(None)
    assert cost(CodecCost(at_every_hop=True)) == cost(None)


@pytest.mark.parametrize("own_pace", [False, True])
def test_payloads_that_add_are_encoded_once(own_pace):
    """A sum of bf16 or PowerSGD: fewer bytes are sent and added, the whole buffer is encoded and decoded once."""
    linear = CodecCost(compression=2, encode_bytes_per_s=E, decode_bytes_per_s=D)
    found = cost(linear, own_pace=own_pace)
    assert found.transfer_s == exactly(2 * (N - 1) * (A + S / 2 / (N * B)))
    assert found.add_s == exactly((N - 1) / N * S / 2 * G)
    assert found.codec_s == exactly(S / E + S / D)


@pytest.mark.parametrize("own_pace", [False, True])
def test_payloads_that_do_not_add_are_decoded_and_encoded_at_every_hop(own_pace):
    requantised = CodecCost(compression=4, encode_bytes_per_s=E, decode_bytes_per_s=D, at_every_hop=True)
    found = cost(requantised, own_pace=own_pace)
    assert found.transfer_s == exactly(2 * (N - 1) * (A + S / 4 / (N * B)))
    assert found.add_s == exactly((N - 1) / N * S * G), "what is added is dense"
    assert found.codec_s == exactly(2 * (N - 1) * S / N * (1 / E + 1 / D))


@pytest.mark.parametrize(
    ("collective", "encoded", "decoded"),
    [
        (Collective.ALL_REDUCE, 1, 1),
        (Collective.REDUCE_SCATTER, 1, 1 / N),
        (Collective.ALL_GATHER, 1 / N, 1),
        (Collective.BROADCAST, 1, 1),
        (Collective.ALL_TO_ALL, 1 / N, 1 / N),
    ],
)
def test_a_rank_encodes_what_it_has_and_decodes_what_it_gets(collective, encoded, decoded):
    codec = CodecCost(encode_bytes_per_s=E, decode_bytes_per_s=D)
    assert cost(codec, collective).codec_s == exactly(encoded * S / E + decoded * S / D)


def test_a_slow_codec_can_cost_more_than_it_saves():
    fast, slow = (CodecCost(compression=30, encode_bytes_per_s=e, decode_bytes_per_s=e) for e in (1e12, 5e9))
    assert cost(fast).total_s < cost(None).total_s < cost(slow).total_s


@pytest.mark.parametrize("wrong", [{"compression": 0}, {"encode_bytes_per_s": -1}, {"ratio": 4}])
def test_numbers_must_make_sense(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        CodecCost(**wrong)
