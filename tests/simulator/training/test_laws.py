"""Laws of every step, over rows and clusters; and cases whose answer is known."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import ROW, answer, change, describe_row, step_times

from paceline.parallel.pipeline.orders import ORDERS
from paceline.simulator.training import estimate_memory
from paceline.simulator.training.batch import make_batch
from paceline.simulator.training.calibration import load_posterior
from paceline.simulator.training.operators import Kind
from paceline.simulator.training.parameters import INDEX
from paceline.simulator.training.price import TERMS, price, roofline_s
from paceline.topology import find_device

always = settings(deadline=None, derandomize=True, max_examples=20)
A_LITTLE = 1 + 1e-9
CHANGES = ("peak", "memory", "bandwidth", "local_bandwidth")


layouts = st.fixed_dictionaries(
    {
        "data": st.sampled_from([1, 2, 8]),
        "sharded": st.sampled_from([1, 4]),
        "zero_stage": st.sampled_from([1, 2, 3]),
        "tensor": st.sampled_from([1, 2, 8]),
        "pipeline": st.sampled_from([1, 2, 4]),
    }
)
orders = st.sampled_from(
    [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero_bubble", 1), ("interleaved_zero_bubble", 2)]
)


@st.composite
def rows(draw):
    model = {
        **ROW["model"],
        "num_layers": draw(st.sampled_from([4, 8, 12])),
        "width": draw(st.sampled_from([256, 1024, 4096])),
        "is_gated": draw(st.booleans()),
    }
    model["feedforward"] = draw(st.sampled_from([2, 4])) * model["width"]
    axes = draw(layouts)
    return change(
        axes,
        model=model,
        device=draw(st.sampled_from(["v100_32gb", "a100_80gb", "h100_80gb"])),
        cluster={"name": draw(st.sampled_from(["dgx_a100", "dgx_h100", "gcp_a2_highgpu_8g"]))},
        sample={"tokens": draw(st.sampled_from([128, 1024]))},
        precision=draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        attention=draw(st.sampled_from(["eager", "fused"])),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        micro_batch=draw(st.sampled_from([1, 4])),
        global_batch=draw(st.sampled_from([256, 512])),
        stack=draw(st.sampled_from([None, "megatron", "fsdp"])),
    )


def hasten(row, which):
    """Return a row on a device that computes, or moves bytes, twice as fast; and the row."""
    device = find_device(row["device"])
    faster = device.model_dump() | {"peak_flops": dict(device.peak_flops)}
    if which == "memory":
        faster["memory_speed"] = 2 * device.memory_speed
    else:
        faster["peak_flops"] = {name: 2 * flops for name, flops in device.peak_flops.items()}
    return {**row, "device": faster}, {**row, "device": device.model_dump()}


@settings(always, max_examples=60)
@given(rows(), orders, st.sampled_from([1, 2, 3, 16]), st.sampled_from([1, 4]), st.booleans(), st.sampled_from(CHANGES))
def test_faster_devices_memory_and_links_never_slow_a_step_of_any_order_and_number_of_micro_batches(
    row, order, num_micro_batches, context, is_split, which
):
    layout, samples = {**row["layout"], "context": context}, row["micro_batch"] * num_micro_batches
    row = change(
        layout,
        **_fields(row)
        | {
            "pipeline": {"order": order[0], "stages_per_rank": order[1]},
            "model": {**row["model"], "num_layers": 8},
            "global_batch": samples * layout["data"] * layout["sharded"],
            "sequence_parallel": is_split,
        },
    )
    if which in ("peak", "memory"):
        fast, slow = step_times(*hasten(row, which))
    else:
        fast, slow = step_times(*({**row, "cluster": {**row["cluster"], which: n}} for n in ("400gbit", "50gbit")))
    assert fast <= slow * A_LITTLE


@pytest.mark.parametrize("order", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("which", ["peak", "memory"])
def test_a_step_bound_by_starting_kernels_is_not_slower_on_a_faster_device(order, which):
    small = {**ROW["model"], "width": 256, "feedforward": 1024, "vocabulary": 512}
    row = change(
        {"pipeline": 2}, model=small, micro_batch=1, global_batch=1, pipeline={"order": order, "stages_per_rank": 1}
    )
    assert terms(row)["launch"] > terms(row)["matrix"]
    fast, slow = step_times(*hasten(row, which))
    assert fast <= slow * A_LITTLE


def test_exchanges_do_not_hide_behind_the_same_computing():
    """Two kinds of exchanges that each outlast what they hide behind hide together no longer than it takes."""
    row = change(
        {"sharded": 16, "zero_stage": 1, "tensor": 8},
        model={**ROW["model"], "width": 8192, "feedforward": 32768, "num_heads": 64, "num_kv_heads": 64},
        sequence_parallel=True,
        attention="fused",
        micro_batch=4,
        global_batch=64,
        cluster={"name": "dgx_a100", "bandwidth": "1gbit", "local_bandwidth": "20gbit"},
    )
    fast, slow = step_times(*hasten(row, "peak"))
    assert fast <= slow * A_LITTLE


@always
@given(rows())
def test_more_batch_takes_no_less_time_and_no_more_than_proportional(row):
    once, twice = step_times(row, {**row, "global_batch": 2 * row["global_batch"]})
    assert once <= twice * A_LITTLE
    assert twice <= 2 * once * A_LITTLE


@always
@given(rows())
def test_recomputing_is_never_faster_and_never_takes_more_memory(row):
    changed = [{**row, "recompute": name} for name in ("none", "selective", "full")]
    none, selective, full = step_times(*changed)
    assert none <= selective * A_LITTLE
    assert selective <= full * A_LITTLE
    kept = [estimate_memory(describe_row(row)).total_bytes for row in changed]
    assert kept[0] * A_LITTLE >= max(kept[1:])


@always
@given(rows())
def test_each_stage_of_zero_shares_more_state(row):
    layout = {**row["layout"], "sharded": 4, "data": 1}
    states = [
        estimate_memory(describe_row(change({**layout, "zero_stage": stage}, **_fields(row)))).state_bytes
        for stage in (1, 2, 3)
    ]
    assert states[0] >= states[1] >= states[2]


@always
@given(rows())
def test_weak_scaling_on_the_data_axis_never_gains(row):
    fields = _fields(row)
    times = step_times(
        *(change({**row["layout"], "data": n}, **{**fields, "global_batch": 64 * n}) for n in (1, 2, 8, 64))
    )
    assert all(first <= second * A_LITTLE for first, second in pairwise(times))


@always
@given(rows())
def test_no_step_is_below_the_roofline_and_intervals_hold_the_estimate(row):
    found = answer(row)
    least_s = float(roofline_s(make_batch([describe_row(row)]))[0])
    assert found["step_s"] >= least_s / A_LITTLE
    assert found["step_s_low"] < found["step_s"] < found["step_s_high"]
    assert all(seconds > 0 for seconds in found["terms"].values())


def _fields(row):
    return {name: value for name, value in row.items() if name not in ("layout", "num_ranks")}


def terms(row):
    logs = load_posterior().logs
    return dict(zip(TERMS, price(make_batch([describe_row(row)]), logs)[0], strict=True))


def test_one_rank_without_a_network_is_the_sum_of_its_operators():
    found = terms(ROW)
    alone = {"matrix", "attention", "pointwise", "loss", "launch", "optimizer"}
    assert all(seconds == 0 for name, seconds in found.items() if name not in alone)
    assert all(found[name] > 0 for name in alone)


def test_an_operator_takes_its_flops_at_its_share_of_the_peak_or_its_bytes_at_their_speed():
    """With perfect parameters matrix products of full tiles take flops / peak, and the rest bytes / bandwidth."""
    wide = {**ROW["model"], "width": 8192, "feedforward": 32768, "vocabulary": 32768, "num_heads": 64}
    description = describe_row(change(model={**wide, "num_kv_heads": 64}, micro_batch=108, global_batch=108))
    logs = np.zeros(len(INDEX))
    logs[INDEX["depth"]] = logs[INDEX["kernel"]] = logs[INDEX["launch"]] = -60.0
    found = dict(zip(TERMS, price(make_batch([description]), logs)[0], strict=True))
    blocks, head = description.workload.blocks, description.workload.head
    operators = [
        (kind, flops, moved)
        for part in (blocks, head)
        for kind, *sizes, count in zip(part.kinds, part.flops, part.num_bytes, part.counts, strict=True)
        for flops, moved in [(sizes[0] * count, sizes[1] * count)]
    ]
    matrix = sum(flops for kind, flops, _ in operators if kind == Kind.MATRIX)
    moved = sum(moved for kind, _, moved in operators if kind == Kind.POINTWISE)
    device = find_device("a100_80gb")
    assert found["matrix"] == pytest.approx(matrix / device.peak_flops["bf16"], rel=0.02)
    assert found["pointwise"] == pytest.approx(moved / device.memory_speed)


@pytest.mark.parametrize(
    ("order", "chunks", "share"),
    [("1f1b", 1, 1.0), ("gpipe", 1, 1.0), ("interleaved", 2, 1 / 2), ("zero_bubble", 1, 1 / 3)],
)
def test_the_bubble_of_equal_stages_is_that_of_its_order(order, chunks, share):
    """(p - 1) / m of the ideal time, divided by the stages of a rank; a third of it without filling the drain."""
    tiny_head = {**ROW["model"], "vocabulary": 128}
    row = change({"pipeline": 4}, model=tiny_head, pipeline={"order": order, "stages_per_rank": chunks})
    found = terms(row)
    computing = sum(found[name] for name in ("matrix", "attention", "pointwise", "loss"))
    accumulating = describe_row(row).accumulate_bytes
    assert accumulating > 0
    # A split backward fills the drain with products, of which few kernels are.
    filled = share * computing + found["launch"] / chunks
    assert found["bubble"] / filled == pytest.approx(3 / 8, rel=0.15)
    assert terms(change({"data": 4}))["bubble"] == 0


def test_a_stage_with_the_head_holds_up_the_others():
    words = {**ROW["model"], "vocabulary": 1_000_000}
    description = describe_row(change({"pipeline": 4}, model=words))
    assert description.stage_heads == 1.0
    assert description.other_heads == 0.0
    assert describe_row(change({"pipeline": 4})).stage_blocks == 0.25


def test_a_group_of_one_exchanges_nothing():
    assert describe_row(ROW).exchanges == ()


def test_a_cap_slows_only_what_computes():
    device = find_device("h100_80gb").model_dump()
    free, capped = (terms(change({"data": 16}, device={**device, "cap_w": cap})) for cap in (None, 400.0))
    assert capped["matrix"] > 1.1 * free["matrix"]
    assert capped["pointwise"] == pytest.approx(free["pointwise"])
    assert terms(change({"data": 16}, device={**device, "cap_w": 700.0})) == free


def test_workers_that_share_a_processor_share_its_speed():
    cluster = {"name": "loopback", "device": "cpu"}
    one, four = (
        terms(
            change(
                {"data": n}, device="cpu", cluster=cluster, precision="fp32", devices_per_host=None, global_batch=8 * n
            )
        )
        for n in (1, 4)
    )
    assert four["matrix"] > 2 * one["matrix"]
    assert four["data"] > 0


@pytest.mark.parametrize(("order", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)])
def test_bubbles_of_enough_micro_batches_have_the_formula_of_their_order(order, chunks):
    """Idle share of a rank: (p - 1) / (v m + p - 1), or with 3 v m where backward is split."""
    found = describe_row(
        change({"pipeline": 4}, micro_batch=1, global_batch=16, pipeline={"order": order, "stages_per_rank": chunks})
    )
    idle = found.fill * 3  # of one micro-batch's stage
    assert idle / (16 + idle) == pytest.approx(ORDERS[order].bubble(4, chunks, 16))


@pytest.mark.parametrize("order", ["1f1b", "interleaved", "zero_bubble", "interleaved_zero_bubble"])
def test_a_single_micro_batch_passes_all_ranks_one_after_another_in_every_order(order):
    chunks = 2 if "interleaved" in order else 1
    rows = [
        change({"pipeline": 4}, micro_batch=1, global_batch=many, pipeline={"order": order, "stages_per_rank": chunks})
        for many in (1, 2, 3, 4, 5, 8)
    ]
    fills = [describe_row(row).fill for row in rows]
    assert fills[0] == pytest.approx(2 / 3 if "zero" in order else 1.0)
    assert fills[3:] == pytest.approx([(1 / 3 if "zero" in order else 1.0) / chunks] * 3)
    assert step_times(*rows) == sorted(step_times(*rows))
