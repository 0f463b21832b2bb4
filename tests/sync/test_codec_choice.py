"""Predictions of step times by codec, on numbers."""

import math

import pytest
import torch

from paceline.comm.link_speed import LinkSpeed
from paceline.compression import BF16, Int8, NoCodec, OneBit, PowerSGD, RandomK, TopK
from paceline.sync.codec_choice import LOSSES, CodecPrice, StepNumbers, find_link, price_codec, rank_codecs

SHAPES = [torch.Size((1024, 1024)), torch.Size((512, 512)), torch.Size((512,))]
CODECS = (NoCodec(), BF16(), Int8(), OneBit(), PowerSGD(), TopK())


def price(codec, is_adaptive=True, **changed):
    return price_codec(codec, SHAPES, 4, is_adaptive=is_adaptive, copy_bytes_per_s=1e10, **changed)


def rank(mbit, *, is_adaptive=True, latency_s=1e-4, max_loss=1.02, steps_refused="", codecs=CODECS, **given):
    numbers = StepNumbers(
        compute_s=0.1,
        gradient_overlap_s=0.03,
        step_overlap_s=0.03,
        link=LinkSpeed(latency_s, mbit * 1e6 / 8),
        is_adaptive=is_adaptive,
        steps_refused=steps_refused,
    )
    is_coding_steps = is_adaptive and not steps_refused
    return rank_codecs([price(codec, is_coding_steps) for codec in codecs], numbers, max_loss=max_loss, **given)


def test_prices_are_those_of_the_codecs():
    made = price(OneBit())
    assert made.sent_bytes == sum(OneBit().wire_bytes(shape, 4) for shape in SHAPES)
    assert made.codec_of == "step"
    assert price(OneBit(), is_adaptive=False).codec_of == price(Int8()).codec_of == "gradient"
    assert price(NoCodec()).encode_s == 0 < price(OneBit()).encode_s < price(PowerSGD()).encode_s
    num_bytes = 4 * sum(shape.numel() for shape in SHAPES)
    assert price(NoCodec(), bucket_bytes=num_bytes).num_messages == 2, "the first bucket is small"
    assert price(NoCodec(), bucket_bytes=num_bytes // 4 + 1).num_messages == 4


@pytest.mark.parametrize(
    ("mbit", "is_adaptive", "expected"),
    [(40000, True, "none"), (10, True, "power_sgd"), (40000, False, "none"), (10, False, "int8")],
)
def test_a_fast_link_needs_no_codec_and_a_slow_one_the_smallest_that_the_optimizer_bears(mbit, is_adaptive, expected):
    assert rank(mbit, is_adaptive=is_adaptive)[0].name == expected


def test_where_latency_is_all_fewer_messages_win():
    assert rank(1e6, latency_s=0.2)[0].name == "none"


def test_step_times_are_what_cannot_hide():
    slow = {each.name: each for each in rank(8, latency_s=0.0)}
    dense = price(NoCodec())
    assert slow["none"].step_s == pytest.approx(0.1 + dense.sent_bytes / 1e6 - 0.03 * (dense.num_buckets > 1), rel=0.03)
    fast = {each.name: each for each in rank(1e9, latency_s=0.0)}
    assert fast["none"].step_s == pytest.approx(0.1, rel=1e-3)


def test_a_loss_counts_as_steps_and_too_large_a_one_refuses():
    by_name = {each.name: each for each in rank(10)}
    assert by_name["none"].steps_factor == by_name["int8"].steps_factor == 1
    assert by_name["top_k"].steps_factor > by_name["one_bit"].steps_factor > 1
    assert by_name["one_bit"].cost_s == by_name["one_bit"].step_s * by_name["one_bit"].steps_factor
    assert "1.088" in by_name["top_k"].refused
    assert rank(10)[-1].name == "top_k", "last, though it sends little"
    assert not {each.name: each.refused for each in rank(10, max_loss=1.1)}["top_k"]
    names = [each.name for each in rank(10, max_loss=1.0) if not each.refused]
    assert sorted(names) == ["bf16", "int8", "none", "power_sgd"]


def test_what_cannot_code_steps_or_was_not_measured_is_kept_out_with_words():
    refused = {each.name: each.refused for each in rank(10, steps_refused="with fp16", codecs=(*CODECS, RandomK()))}
    assert "was not measured" in refused["one_bit"]
    assert "was not measured" in refused["random_k"]
    assert not refused["int8"]
    assert "kept out: its loss" in next(each for each in rank(10) if each.name == "top_k").explain()


def test_settings_whose_loss_was_not_measured_are_kept_out():
    codecs = (NoCodec(), PowerSGD(low_rank=1), OneBit(error_feedback=False), OneBit(dense_below=0))
    refused = [each.refused for each in sorted(rank(10, codecs=codecs), key=lambda each: str(each.price.codec))]
    assert sorted(map(bool, refused)) == [False, False, True, True]
    assert "default settings" in max(refused)


def test_a_measured_step_time_corrects_the_prediction():
    best, second = rank(10)[:2]
    corrected = rank(10, corrections={best.name: 3.0})
    assert corrected[0].name == second.name
    assert next(each for each in corrected if each.name == best.name).step_s == pytest.approx(3 * best.step_s)


def test_a_link_is_what_bytes_took_beyond_latency():
    one = CodecPrice(OneBit(), "step", sent_bytes=10**6, num_messages=5, num_buckets=1, encode_s=0.0)
    assert find_link(one, wire_s=1.5, latency_s=0.1).bytes_per_s == pytest.approx(1e6)
    assert find_link(one, wire_s=0.5, latency_s=0.1).bytes_per_s == pytest.approx(1e6 / 0.05), "no faster than 10 times"


def test_each_loss_has_a_source_and_is_of_a_codec():
    assert {name for name, _, _ in LOSSES} == {"none", "bf16", "fp16", "int8", "one_bit", "top_k", "power_sgd"}
    assert all(loss.source and math.isfinite(loss.ratio) for loss in LOSSES.values())
