"""Every registered codec keeps the contract, and the contract notices codecs that do not."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.compression import Codec, Int8, NoCodec, OneBit, RandomK
from paceline.compression.codec import (
    RESIDUALS,
    Algebra,
    AllGather,
    AllReduce,
    AllToAll,
    Exchanged,
    dense_payloads,
    exchange_dense,
)
from paceline.compression.message import encode_blocks
from paceline.registry import list_variants
from paceline.testing import codec_contract
from paceline.testing.codec_contract import CODEC_CHECKS, check_codec, every_codec, make_value
from paceline.testing.lockstep import exchange_all

CODECS = every_codec()
NAMES = sorted(CODECS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", CODEC_CHECKS, ids=lambda check: check.__name__)
def test_a_codec_keeps_the_contract(check, name):
    check(CODECS[name])


def test_the_codecs_are_those_that_are_documented():
    assert set(list_variants(Codec)) == {
        "none", "fp16", "bf16", "int8", "one_bit", "top_k", "random_k", "power_sgd", "dgc"
    }  # fmt: skip


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.sampled_from((1, 2, 3, 7, 13, 31)), max_size=3)
    | st.sampled_from(([0], [511], [513], [2047], [2053], [0, 3])),
    size=st.integers(1, 4),
    exponent=st.integers(-25, 25),
    share_of_zeros=st.sampled_from((0.0, 0.5, 1.0)),
    seed=st.integers(0, 5),
    bad=st.none() | st.sampled_from((float("nan"), float("inf"), float("-inf"))),
)
@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_any_shape_and_scale_arrive(name, shape, size, exponent, share_of_zeros, seed, bad):
    codec = CODECS[name]
    generator = torch.Generator().manual_seed(seed)
    states = [{}] * size
    for step in range(3):
        values = [torch.randn(shape, generator=generator) * 10.0**exponent for _ in range(size)]
        values = [value * (torch.rand(shape, generator=generator) >= share_of_zeros) for value in values]
        has_bad = bad is not None and step == 1 and values[-1].numel() > 0
        if has_bad:
            values[-1].view(-1)[seed % values[-1].numel()] = bad
        requests = []
        results = exchange_all(codec, values, states, step=step, seed=seed, requests=requests)
        said = codec.payloads(torch.Size(shape), size)
        assert [(type(request), request.payload.nbytes) for request in requests] == said
        assert [result.is_finite for result in results] == [not (has_bad and rank == size - 1) for rank in range(size)]
        if has_bad:
            continue  # the step is skipped, with the state that it led to
        states = [result.state for result in results]
        for result in results:
            assert torch.equal(result.total, results[0].total)
            assert result.total.shape == torch.Size(shape)
            assert bool(result.total.isfinite().all())
            assert all(bool(kept.isfinite().all()) for kept in result.state.values())


class Deaf(OneBit):
    """Forgets what it kept."""

    def exchange(self, value, state, context):
        return super().exchange(value, {}, context)


class Identity(Codec):
    """Sums, and does wrong what a test tells it to."""

    name = "identity"
    algebra = Algebra.LINEAR
    is_exact = True
    fault: str = ""

    def exchange(self, value, state, context):
        payload = value.flatten().clone()
        if self.fault == "draws":
            payload += torch.rand(1) * 1e-8
        if self.fault == "writes to the value":
            value.mul_(1.0)
            value.view(-1)[:1] += 1
        total = (yield AllReduce(payload)).view(value.shape)
        if self.fault == "another round":
            yield AllReduce(payload.clone())
        if self.fault == "rank":
            total += context.rank * 1e-3
        if self.fault == "shape":
            total = total.view(-1)
        if self.fault == "loses":
            total = total * 0.999
        if self.fault == "alias":
            return Exchanged(total, {"worker": total - total, "warm": value}, bool(value.isfinite().all()))
        if self.fault == "residual":
            return Exchanged(total, {"worker": torch.ones_like(value)}, bool(value.isfinite().all()))
        if self.fault == "offset":
            total = total + 1
        return Exchanged(total, {}, True if self.fault == "blind" else bool(value.isfinite().all()))

    def payloads(self, shape, num_workers):
        return [(AllReduce, 4 * shape.numel())]


class Leaky(Codec):
    """Sends the means of rows only, and keeps nothing."""

    name = "leaky"
    algebra = Algebra.LINEAR

    def exchange(self, value, state, context):
        if value.dim() < 2:
            return (yield from exchange_dense(value))
        total = yield AllReduce(value.flatten(1).mean(1))
        total = total.view(-1, *[1] * (value.dim() - 1)).expand_as(value).clone()
        return Exchanged(total, {}, bool(value.isfinite().all()))

    def payloads(self, shape, num_workers):
        return dense_payloads(shape if len(shape) < 2 else shape[:1])


class Scaling(RandomK):
    """Multiplies sums, and keeps nothing."""

    name = "scaling"
    error_feedback: bool = False
    density: float = 0.5
    fault: float = 7.0

    def exchange(self, value, state, context):
        result = yield from super().exchange(value, state, context)
        return dataclasses.replace(result, total=result.total * self.fault)


class Careless(Scaling):
    """Multiplies sums, and says nothing of feedback in its settings, though it keeps residuals."""

    name = "careless"
    error_feedback: bool = True

    def model_dump(self, **options):
        return {key: value for key, value in super().model_dump(**options).items() if key != "error_feedback"}


class Forgetful(NoCodec):
    """Loses the state when workers come or go."""

    name = "forgetful"
    error_feedback: bool = True

    def exchange(self, value, state, context):
        finite = bool(value.isfinite().all())
        wanted = value + state.get("worker", torch.zeros_like(value))
        total = yield AllReduce((wanted / 2).flatten())
        return Exchanged(total.view(value.shape), {"worker": wanted - wanted / 2}, finite)

    def resize(self, saved, shape, rank, num_workers):
        return saved[rank] if len(saved) == num_workers else {}


@pytest.mark.parametrize(
    ("codec", "check"),
    [
        (Identity(fault="rank"), "totals_have_the_same_bits_on_every_worker"),
        (Identity(fault="shape"), "totals_have_the_same_bits_on_every_worker"),
        (Deaf(dense_below=0), "what_was_sent_and_what_is_kept_is_what_came_in"),
        (Identity(fault="loses"), "what_was_sent_and_what_is_kept_is_what_came_in"),
        (Identity(fault="residual"), "what_was_sent_and_what_is_kept_is_what_came_in"),
        (Careless(dense_below=0), "what_was_sent_and_what_is_kept_is_what_came_in"),
        (Leaky(dense_below=0), "what_is_not_kept_comes_close_to_the_sum"),
        (Scaling(dense_below=0), "what_is_not_kept_comes_close_to_the_sum"),
        (Scaling(dense_below=0, fault=0.01), "what_is_not_kept_comes_close_to_the_sum"),
        (Identity(fault="writes to the value"), "an_exchange_can_be_repeated"),
        (Identity(fault="alias"), "results_share_no_memory"),
        (Identity(fault="draws"), "the_global_random_generator_is_left_alone"),
        (Identity(fault="another round"), "payloads_are_what_they_were_said_to_be"),
        (Identity(fault="blind"), "values_that_are_not_finite_are_reported"),
        (Identity(fault="offset"), "zeros_stay_zeros"),
        (Identity(fault="offset"), "the_error_of_one_exchange_is_no_larger_than_the_value"),
        (Forgetful(), "another_number_of_workers_takes_over_what_was_held_back"),
    ],
    ids=lambda part: part if isinstance(part, str) else f"{part.name} {part.model_dump().get('fault', '')}".strip(),
)
def test_a_codec_that_breaks_the_contract_is_caught(codec, check):
    check_codec_alone = getattr(codec_contract, check)
    with pytest.raises(AssertionError):
        check_codec_alone(codec)


def test_a_residual_that_outlives_its_feedback_is_caught():
    class Clinging(OneBit):
        def exchange(self, value, state, context):
            result = yield from super().exchange(value, state, context)
            return dataclasses.replace(result, state={"worker": torch.zeros_like(value)})

    with pytest.raises(AssertionError, match="worker"):
        codec_contract.the_setting_error_feedback_is_obeyed(Clinging(dense_below=0, error_feedback=False))


def test_the_name_of_a_broken_rule_begins_the_message():
    with pytest.raises(AssertionError, match=r"^totals_have_the_same_bits_on_every_worker: totals of "):
        check_codec(Identity(fault="rank"))


def test_a_check_that_does_not_apply_is_reported_as_skipped_with_the_reason():
    lines = check_codec(CODECS["int8 without feedback"])
    assert [line.split()[1] for line in lines] == [check.__name__ for check in CODEC_CHECKS]
    assert "skipped: what_was_sent_and_what_is_kept_is_what_came_in (it keeps no residual)" in lines
    assert "passed: what_is_not_kept_comes_close_to_the_sum" in lines


class Talker(Codec):
    """Yields a request that each rank makes in its own way."""

    name = "talker"
    algebra = Algebra.GATHER
    make: object

    def exchange(self, value, state, context):
        request = self.make(context)
        if request is not None:
            yield request
        return Exchanged(value)

    def payloads(self, shape, num_workers):
        return []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda context: AllGather(torch.zeros(context.rank + 1, dtype=torch.uint8)), "must ask for the same"),
        (lambda context: AllGather(torch.zeros(2)), "must be uint8"),
        (lambda context: AllReduce(torch.zeros(2, 2)), "must be 1-dim"),
        (lambda context: AllToAll(torch.zeros(3, 4, dtype=torch.uint8)), "a row for each of 2 workers"),
        (lambda context: None if context.rank else AllReduce(torch.zeros(2)), "are done while"),
    ],
    ids=["sizes", "dtype", "dimensions", "rows", "rounds"],
)
def test_workers_that_are_not_in_step_are_caught(make, words):
    with pytest.raises(AssertionError, match=words):
        exchange_all(Talker(make=make), [torch.zeros(2)] * 2)


def test_small_blocks_are_summed_as_they_are():
    for name, codec in CODECS.items():
        values = [make_value((2047,), 0, rank) for rank in range(3)]
        whole = type(codec).model_validate(codec.model_dump(exclude={"name"}) | {"dense_below": 2048})
        requests = []
        results = exchange_all(whole, values, requests=requests)
        assert torch.equal(results[0].total, values[0] + values[1] + values[2]), name
        by_owners = codec.algebra is Algebra.REQUANTISE  # in the messages of the other blocks
        assert [type(request) for request in requests] == ([AllToAll, AllGather] if by_owners else [AllReduce]), name
        padding = whole.wire_bytes(torch.Size([2047]), 3) - NoCodec().wire_bytes(torch.Size([2047]), 3)
        assert 0 <= padding < 4 * 2 * 3 if by_owners else padding == 0, name


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValidationError, match="dense_below"):
        OneBit(dense_below=-1)
    with pytest.raises(ValidationError, match="rounding"):
        Int8(rounding="up")


@pytest.mark.parametrize("name", NAMES)
def test_settings_survive_json(name):
    codec = CODECS[name]
    assert Codec.model_validate_json(codec.model_dump_json()) == codec


def test_compilers_are_imported_only_when_something_is_encoded():
    script = "import paceline.compression, sys; print([m for m in ('numba', 'triton') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "none"},
        {"name": "bf16"},
        {"name": "int8"},
        {"name": "one_bit"},
        {"name": "top_k", "density": 0.01},
        {"name": "top_k", "density": 0.3},
        {"name": "top_k", "density": 1.0},
        {"name": "random_k", "density": 0.1},
        {"name": "power_sgd", "low_rank": 4},
    ],
    ids=str,
)
def test_its_contraction_is_that_of_normal_values(fields):
    codec = Codec.model_validate({"dense_below": 0, **fields})
    value = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    states = {}
    for step in range(20):  # PowerSGD finds the largest directions by and by
        _, done = encode_blocks(codec, {"w": value}, states, step=step)
        states = {"w": {name: kept for name, kept in done["w"].state.items() if name not in RESIDUALS}}
    left = float((value - done["w"].total).square().sum() / value.square().sum())
    assert 1 - left == pytest.approx(codec.contraction(value.shape), rel=0.25)
    assert codec.model_copy(update={"dense_below": 10_000}).contraction(value.shape) == 1
