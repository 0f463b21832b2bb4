"""Contract of every `Codec`: checks that run over any codec.

A new codec is tested the day it is registered: `every_codec` finds it, and `check_codec` runs all of `CODEC_CHECKS`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Size, Tensor

from paceline.compression import Codec
from paceline.compression.codec import AllReduce, Exchanged, Request, State
from paceline.registry import list_variants
from paceline.testing.checks import run_checks
from paceline.testing.lockstep import exchange_all

Check = Callable[[Codec], str | None]
"""Check of a codec: raises if the codec fails it; returns the reason if it does not apply to the codec."""

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (0,), (13, 3), (2, 3, 5, 7), (67, 31), (4099,))
"""Shapes of values: 0-dim, one element, empty, primes, partial tiles, matrices and kernels of convolutions."""
WORKERS = (1, 2, 3, 5)
SCALES = (1e-25, 1.0, 1e25)
NUM_STEPS = 4
NUM_DRAWS = 32
"""Exchanges, each with its own seed and values, over which totals are compared with true sums."""


def every_codec() -> dict[str, Codec]:
    """Return each registered codec, with and without feedback if it has the choice, set to encode all blocks."""
    codecs: dict[str, Codec] = {}
    for name, variant in list_variants(Codec).items():  # type: ignore[type-abstract]
        codecs[name] = variant(dense_below=0)
        if "error_feedback" in variant.model_fields:
            codecs[f"{name} without feedback"] = variant.model_validate({"dense_below": 0, "error_feedback": False})
    return codecs


def check_codec(codec: Codec) -> list[str]:
    """Run every check of `CODEC_CHECKS`; return a line of each: ``passed: NAME`` or ``skipped: NAME (reason)``.

    Raises:
        AssertionError: The codec breaks the contract; the message begins with the check's name.
    """
    return run_checks(CODEC_CHECKS, codec)


def totals_have_the_same_bits_on_every_worker(codec: Codec) -> None:
    """All workers decode the same bytes in the same order, and the total has the shape of the value."""
    for shape in SHAPES:
        for size in WORKERS:
            for results in run_steps(codec, shape, size):
                for result in results:
                    assert result.total.shape == shape, f"a total of a block of {shape} has shape {result.total.shape}"
                    _expect_same_bits(result.total, results[0].total, f"totals of {shape} over {size} workers")
                    assert result.is_finite, f"finite values of {shape} over {size} workers are reported as not finite"


def what_was_sent_and_what_is_kept_is_what_came_in(codec: Codec) -> str | None:
    """Error feedback conserves values: over any number of steps nothing is lost, nothing counted twice.

    Sums are in float64, up to the rounding of fp32, and of the dtype in which payloads are added in transit.
    """
    if reason := _why_not_conserved(codec):
        return reason
    for shape in SHAPES:
        for size in WORKERS:
            for scale in SCALES:
                _check_conservation(codec, Size(shape), size, scale)
    return None


def what_is_not_kept_comes_close_to_the_sum(codec: Codec) -> str | None:
    """Without conservation, totals follow the sum, and no part of a value is left out for good.

    The share of the sum that arrives is <total, sum> / <sum, sum>, on average over seeds and values. A codec that
    sends 1 % of the elements reaches 0.01, so the least share depends on the bytes sent. The differences of values and
    totals are exchanged too: a codec that always drops the same directions sends nothing of them.
    """
    if not _why_not_conserved(codec):
        return "what it keeps makes up for what it leaves out, which another check compares"
    for shape in SHAPES:
        if num_elements := Size(shape).numel():
            num_bytes = sum(size for _, size in codec.payloads(Size(shape), 3))
            least = 0.25 * min(1.0, num_bytes / (4 * num_elements))
            share, share_of_rest = _find_shares(codec, shape)
            assert least <= share <= 1.5, (
                f"the share of the sum of {shape} that arrives must be {least:.2g} to 1.5 for the bytes sent, but is "
                f"{share:.2g}; keep what is left out as state 'worker', or send more of it"
            )
            assert share_of_rest >= least / 10, (
                f"of what one exchange of {shape} leaves out, others must send a share of {least / 10:.2g}, but send "
                f"{share_of_rest:.2g}; keep it as state 'worker', or leave out something else each time"
            )
    return None


def the_setting_error_feedback_is_obeyed(codec: Codec) -> str | None:
    """A codec set to error feedback keeps a residual of some shape, and one set to none keeps none."""
    is_wanted = codec.model_dump().get("error_feedback")
    if is_wanted is None:
        return "it has no setting error_feedback"
    assert _keeps_residuals(codec) == is_wanted, (
        f"residuals must be kept if error_feedback is true, but it is {is_wanted} and state 'worker' or 'owner' is "
        f"{'missing' if is_wanted else 'there'}"
    )
    return None


def the_error_of_one_exchange_is_no_larger_than_the_value(codec: Codec) -> str | None:
    """||x - Q(x)|| <= ||x||, which error feedback needs to converge. A codec may promise more."""
    if not (codec.is_exact or _keeps_residuals(codec)):
        return "it keeps no residual"
    for shape in SHAPES:
        for scale in SCALES:
            value = make_value(shape, 0, 0, scale)
            total = exchange_all(codec, [value])[0].total
            error, norm = (value.double() - total.double()).norm(), value.double().norm()
            assert error <= norm * (1 + 1e-5), f"{shape} at scale {scale:g}: error {error:g} of a value of {norm:g}"
    return None


def an_exchange_can_be_repeated(codec: Codec) -> None:
    """Dropping the new state undoes an exchange: repeated, it gives the same bits; its arguments are unchanged."""
    for shape in SHAPES:
        first = list(run_steps(codec, shape, 3))[-1]
        states = [result.state for result in first]
        values = [make_value(shape, NUM_STEPS, rank) for rank in range(3)]
        given = [{**state, "value": value} for state, value in zip(states, values, strict=True)]
        copies = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in given]
        once = exchange_all(codec, values, states, step=NUM_STEPS)
        for tensors, copy in zip(given, copies, strict=True):
            _expect_same_state(tensors, copy, f"what was given to an exchange of {shape}")
        again = exchange_all(codec, values, states, step=NUM_STEPS)
        for one, other in zip(once, again, strict=True):
            _expect_same_bits(one.total, other.total, f"totals of a repeated exchange of {shape}")
            _expect_same_state(one.state, other.state, f"states of a repeated exchange of {shape}")


def results_share_no_memory(codec: Codec) -> None:
    """Gradients are overwritten while the state is kept, so totals, states and values share no memory."""
    for shape in SHAPES:
        if Size(shape).numel() == 0:
            continue
        values = [make_value(shape, 0, rank) for rank in range(2)]
        for result in exchange_all(codec, values):
            for tensor in (result.total, *result.state.values()):
                others = [*values, *(other for other in (result.total, *result.state.values()) if other is not tensor)]
                shared = [other for other in others if _memory(tensor) == _memory(other) and tensor.numel()]
                assert not shared, f"total, state and value of {shape} must not share memory, but two do"


def the_global_random_generator_is_left_alone(codec: Codec) -> None:
    """Random numbers depend on seed, block and step, and on nothing else."""
    before = torch.get_rng_state()
    try:
        totals = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            state = torch.get_rng_state()
            totals.append(exchange_all(codec, [make_value((13, 3), 0, rank) for rank in range(2)])[0].total)
            values_drawn = not torch.equal(state, torch.get_rng_state())
            assert not values_drawn, "the global random generator was drawn from"
        _expect_same_bits(totals[0], totals[1], "totals under two global seeds")
    finally:
        torch.set_rng_state(before)


def payloads_are_what_they_were_said_to_be(codec: Codec) -> None:
    """`payloads` predicts every round and its bytes, also at later steps, for any values."""
    for shape in SHAPES:
        for size in WORKERS:
            said = codec.payloads(Size(shape), size)
            states: Sequence[State] | None = None
            for step in range(NUM_STEPS):
                requests: list[Request] = []
                values = [make_value(shape, step, rank) * (step != 2) for rank in range(size)]
                results = exchange_all(codec, values, states, step=step, requests=requests)
                states = [result.state for result in results]
                sent = [(type(request), request.payload.nbytes) for request in requests]
                assert sent == said, f"{shape}, {size} workers, step {step}: predicted {said}, but sent {sent}"


def values_that_are_not_finite_are_reported(codec: Codec) -> None:
    """Only the worker that has them reports them: signs, largest elements and clipping would hide them."""
    for shape in SHAPES:
        num_elements = Size(shape).numel()
        for bad in (float("nan"), float("inf"), float("-inf")):
            for index in {0, num_elements // 2, num_elements - 1} if num_elements else ():
                values = [make_value(shape, 0, rank) for rank in range(3)]
                values[1].view(-1)[index] = bad
                results = exchange_all(codec, values)
                flags = [result.is_finite for result in results]
                assert flags == [True, False, True], f"{bad} at {index} of {shape} on worker 1: is_finite {flags}"
                requests: list[Request] = []
                exchange_all(codec, [values[1], values[0], values[2]], requests=requests)
                told = getattr(requests[-1], "is_finite", None)
                assert told is not True, f"{bad} at {index} of {shape}: the last request says that it is finite"


def zeros_stay_zeros(codec: Codec) -> None:
    """A block without a gradient on any worker stays without one."""
    for shape in SHAPES:
        for result in exchange_all(codec, [torch.zeros(shape)] * 3):
            assert bool((result.total == 0).all()), f"the sum of zeros of {shape} is {result.total}"
            assert result.is_finite
            for site, kept in result.state.items():
                assert bool(kept.isfinite().all()), f"after zeros of {shape}, {site} is not finite"


def another_number_of_workers_takes_over_what_was_held_back(codec: Codec) -> None:
    """`resize` keeps the sum of the residuals, and training continues from there."""
    for shape in SHAPES:
        states = [result.state for result in list(run_steps(codec, shape, 3))[-1]]
        kept = codec.held_back(states, Size(shape))
        for size in (1, 2, 5):
            resized = [codec.resize(states, Size(shape), rank, size) for rank in range(size)]
            after = codec.held_back(resized, Size(shape))
            assert (kept is None) == (after is None), f"{shape}: residuals appear or vanish"
            if kept is not None and after is not None:
                bound = 8 * torch.finfo(torch.float32).eps * sum(_largest(state.values()) for state in states)
                assert _largest([kept - after]) <= bound, f"{shape}: residuals {kept} of 3 workers, {after} of {size}"
            exchange_all(codec, [make_value(shape, 9, rank) for rank in range(size)], resized, step=9)
        _expect_same_state(codec.resize(states, Size(shape), 1, 3), states[1], "state for as many workers")


CODEC_CHECKS: tuple[Check, ...] = (
    totals_have_the_same_bits_on_every_worker,
    what_was_sent_and_what_is_kept_is_what_came_in,
    what_is_not_kept_comes_close_to_the_sum,
    the_setting_error_feedback_is_obeyed,
    the_error_of_one_exchange_is_no_larger_than_the_value,
    an_exchange_can_be_repeated,
    results_share_no_memory,
    the_global_random_generator_is_left_alone,
    payloads_are_what_they_were_said_to_be,
    values_that_are_not_finite_are_reported,
    zeros_stay_zeros,
    another_number_of_workers_takes_over_what_was_held_back,
)


def make_value(shape: Sequence[int], step: int, rank: int, scale: float = 1.0) -> Tensor:
    """Return a random value whose magnitude differs from worker to worker too."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(tuple(shape), generator=generator) * scale * (rank + 0.5)


def run_steps(codec: Codec, shape: Sequence[int], size: int, num_steps: int = NUM_STEPS) -> Iterator[list[Exchanged]]:
    """Exchange a block at `num_steps` steps, each with the state from the step before."""
    states: Sequence[State] = [{}] * size
    for step in range(num_steps):
        values = [make_value(shape, step, rank) for rank in range(size)]
        results = exchange_all(codec, values, states, step=step)
        states = [result.state for result in results]
        yield results


def _check_conservation(codec: Codec, shape: Size, size: int, scale: float) -> None:
    states: Sequence[State] = [{}] * size
    balance = torch.zeros(shape, dtype=torch.float64)
    magnitude = 0.0
    requests: list[Request] = []
    for step in range(NUM_STEPS):
        values = [make_value(shape, step, rank, scale) for rank in range(size)]
        results = exchange_all(codec, values, states, step=step, requests=requests)
        states = [result.state for result in results]
        balance += sum(value.double() for value in values) - results[0].total.double()
        magnitude += _largest([*values, results[0].total, *(kept for state in states for kept in state.values())])
    kept = codec.held_back([{site: kept.double() for site, kept in state.items()} for state in states], shape)
    balance -= 0 if kept is None else kept
    # fp32 rounds at each site and at each addition; payloads that are added in transit round in their own dtype.
    wire_eps = max((torch.finfo(r.payload.dtype).eps for r in requests if isinstance(r, AllReduce)), default=0.0)
    bound = size * magnitude * ((size + 4) * torch.finfo(torch.float32).eps + (size - 1) * wire_eps)
    assert _largest([balance]) <= bound, (
        f"{tuple(shape)}, {size} workers, scale {scale:g}: inputs - sent - kept must be at most {bound:g}, "
        f"but is {_largest([balance]):g}"
    )


def _find_shares(codec: Codec, shape: Sequence[int]) -> tuple[float, float]:
    """Return the share of the sum that arrives, and that of the sum of what each worker's exchange alone leaves out."""
    arrived, wanted = [0.0, 0.0], [0.0, 0.0]
    for seed in range(NUM_DRAWS):
        values = [make_value(shape, seed, rank) for rank in range(3)]
        rest = [value - exchange_all(codec, [value], seed=seed)[0].total for value in values]
        for index, parts in enumerate((values, rest)):
            total = exchange_all(codec, parts, seed=NUM_DRAWS + seed)[0].total.double()
            whole = torch.stack(parts).double().sum(0)
            arrived[index] += float((total * whole).sum())
            wanted[index] += float((whole * whole).sum())
    # What is left out may be nothing, or rounding errors too small for the codec.
    has_rest = wanted[1] > 1e-9 * wanted[0]
    return arrived[0] / wanted[0], arrived[1] / wanted[1] if has_rest else 1.0


def _why_not_conserved(codec: Codec) -> str:
    """Return why sent values and residuals need not add up to the inputs; empty if they must."""
    if not codec.conserves:
        return "its class says conserves = False"
    return "" if codec.is_exact or _keeps_residuals(codec) else "it keeps no residual"


def _keeps_residuals(codec: Codec) -> bool:
    """Whether any exchange leaves a residual with the workers or the owners."""
    results = (results for shape in SHAPES for results in run_steps(codec, shape, 2))
    return any(codec.held_back([each.state for each in some], some[0].total.shape) is not None for some in results)


def _largest(tensors: Iterable[Tensor]) -> float:
    return max((float(tensor.abs().max()) for tensor in tensors if tensor.numel()), default=0.0)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _expect_same_state(one: State, other: State, what: str) -> None:
    assert sorted(one) == sorted(other), f"{what}: sites {sorted(one)} and {sorted(other)}"
    for site in one:
        _expect_same_bits(one[site], other[site], f"{what}, {site}")


def _expect_same_bits(one: Tensor, other: Tensor, what: str) -> None:
    same = torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())
    assert same, f"{what} must have the same bits, but differ"
