"""Exchanges of many blocks: what shares a message with what."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from paceline.comm import LocalGroup
from paceline.compression import OneBit, PowerSGD, TopK
from paceline.compression.exchange import exchange_blocks
from paceline.testing.codec_contract import every_codec, values_that_are_not_finite_are_reported
from scripted_time import ScriptedTime

CODECS = {name: codec for name, codec in every_codec().items() if not codec.carries_momentum}


def exchange(codec, values_of, size=3):
    """Exchange blocks with flags, rank r's of ``values_of(r)``; return what each rank got and which collectives ran."""

    def worker(group):
        called = []

        def run(kind, collective, *arguments, name):
            called.append(kind)
            return collective(*arguments, name=name)

        for kind in ("all_reduce", "all_gather", "all_to_all"):
            setattr(group, kind, partial(run, kind, getattr(group, kind)))
        tail = torch.tensor([1.0, float(group.rank == 1), 0.0, 0.0])
        done = exchange_blocks(codec, values_of(group.rank), {}, group, step=0, name="test", tail=tail)
        return tail.tolist(), called, {block: exchanged.total for block, exchanged in done.items()}

    return LocalGroup.run(size, worker, timeout_s=20)


def make_values(rank, bad=0.0):
    generator = torch.Generator().manual_seed(rank)
    values = {"matrix": torch.randn(48, 64, generator=generator), "bias": torch.randn(7, generator=generator)}
    values["matrix"][1, 3] += bad
    return values


@pytest.mark.parametrize("name", sorted(CODECS))
def test_flags_are_summed_and_workers_that_are_not_finite_counted(name):
    codec = CODECS[name].model_copy(update={"dense_below": 100})
    for bad, count in ((0.0, 0.0), (math.nan, 2.0), (math.inf, 2.0)):
        for tail, _, _ in exchange(codec, lambda rank, bad=bad: make_values(rank, bad if rank else 0.0)):
            assert tail == [3.0, 1.0, 0.0, count]


def test_a_small_block_that_is_not_finite_is_counted_too():
    def values_of(rank):
        return make_values(rank) | {"bias": torch.full((7,), math.nan if rank == 2 else 1.0)}

    for name, codec in CODECS.items():
        for tail, _, _ in exchange(codec.model_copy(update={"dense_below": 100}), values_of):
            assert tail[-1] == 1.0, name


@pytest.mark.parametrize(
    ("codec", "collectives"),
    [
        (OneBit(), ["all_to_all", "all_gather"]),
        (TopK(), ["all_reduce", "all_gather"]),
        (PowerSGD(), ["all_reduce", "all_reduce"]),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_small_blocks_and_flags_need_no_messages_of_their_own(codec, collectives):
    for _, called, totals in exchange(codec, make_values):
        assert called == collectives
        expected = sum(make_values(rank)["bias"] for rank in range(3))
        assert torch.allclose(totals["bias"], expected)


def test_flags_travel_alone_where_a_codec_does_not_say_in_time_whether_its_value_is_finite():
    class Late(TopK):
        def exchange(self, value, state, context):
            exchange = super().exchange(value, state, context)
            request = next(exchange)
            answer = yield type(request)(request.payload)
            try:
                exchange.send(answer)
            except StopIteration as end:
                return end.value

    values = exchange(Late(), lambda rank: make_values(rank, math.nan if rank == 1 else 0.0))
    for tail, called, _ in values:
        assert tail == [3.0, 1.0, 0.0, 1.0]
        assert called == ["all_reduce", "all_gather", "all_reduce"]


def test_the_contract_refuses_a_codec_whose_last_request_says_that_nan_is_finite():
    class Blind(TopK):
        def exchange(self, value, state, context):
            exchange = super().exchange(value, state, context)
            answer = yield replace(next(exchange), is_finite=True)
            try:
                exchange.send(answer)
            except StopIteration as end:
                return end.value

    with pytest.raises(AssertionError, match="the last request says that it is finite"):
        values_that_are_not_finite_are_reported(Blind(dense_below=0))


def test_a_collective_that_ends_before_its_call_returns_is_timed_too(monkeypatch):
    """As those of a program that runs in the thread of the caller."""
    clock = ScriptedTime()
    monkeypatch.setattr("paceline.compression.exchange.time", clock)

    class Slow(LocalGroup):
        def all_gather(self, output, tensor, *, name):
            clock.sleep(5.0)
            return super().all_gather(output, tensor, name=name)

    timed = []
    exchange_blocks(OneBit(), make_values(0), {}, Slow(), step=0, name="test", timed=timed)
    assert [each.ended_s - each.began_s for each in timed] == [0.0, 5.0]
