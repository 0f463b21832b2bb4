"""Messages between two: the receiver decodes what the sender believes to have sent, from as many bytes as is said."""

import pytest
import torch
from torch import Size

from paceline.compression import Codec
from paceline.compression.message import decode_blocks, encode_blocks, message_bytes
from paceline.registry import list_variants

SHAPES = {
    "matrix": Size((70, 50)),
    "vector": Size((5000,)),
    "bias": Size((13,)),
    "scalar": Size(()),
    "empty": Size((0,)),
}


def _values(step):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("name", sorted(list_variants(Codec)))
def test_the_receiver_decodes_what_was_sent(name):
    codec = list_variants(Codec)[name](dense_below=100)
    states = {}
    for step in range(4):
        message, done = encode_blocks(codec, _values(step), states, step=step, seed=5)
        assert message.dtype == torch.uint8
        assert len(message) == message_bytes(codec, SHAPES)
        decoded = decode_blocks(codec, message, SHAPES, step=step, seed=5)
        for block, exchanged in done.items():
            assert torch.equal(decoded[block], exchanged.total), block
            assert decoded[block].any() or not SHAPES[block].numel()
        states = {block: exchanged.state for block, exchanged in done.items()}


@pytest.mark.parametrize("name", sorted(list_variants(Codec)))
def test_a_wider_default_dtype_changes_no_bit(name):
    def send():
        codec = list_variants(Codec)[name](dense_below=100)
        message, done = encode_blocks(codec, values, {}, step=3, seed=5)
        decoded = decode_blocks(codec, message, SHAPES, step=3, seed=5)
        return [message, *decoded.values(), *(exchanged.total for exchanged in done.values())]

    values = _values(3)
    narrow = send()
    torch.set_default_dtype(torch.float64)
    try:
        wide = send()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(narrow, wide, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["int8", "one_bit", "top_k", "power_sgd"])
def test_with_feedback_nothing_is_lost(name):
    codec = list_variants(Codec)[name](dense_below=100)
    states, arrived = {}, torch.zeros(70, 50, dtype=torch.float64)
    given = arrived.clone()
    for step in range(10):
        value = {"matrix": _values(step)["matrix"]}
        message, done = encode_blocks(codec, value, states, step=step)
        arrived += decode_blocks(codec, message, {"matrix": SHAPES["matrix"]}, step=step)["matrix"]
        given += value["matrix"]
        states = {block: exchanged.state for block, exchanged in done.items()}
    kept = codec.held_back([states["matrix"]], SHAPES["matrix"])
    assert torch.allclose(arrived + kept, given, atol=1e-4)
    assert not torch.allclose(arrived, given, atol=1e-4)


def test_a_message_of_int8_is_a_quarter_of_its_blocks():
    codec = list_variants(Codec)["int8"]()
    assert message_bytes(codec, {"a": Size((512, 512))}) == 512 * 512 + 4 * 512
