"""Counted flops, parameters and bytes against formulas that others have printed."""

import csv
from importlib.resources import files
from math import exp

import pytest
from steps import ROW, answer, change, describe_row

from paceline.simulator.training import estimate_memory, make_case
from paceline.simulator.training.answers import QUANTILE
from paceline.simulator.training.contract import read_row
from paceline.simulator.training.energy import widen_by_power
from paceline.simulator.training.exchanges import Axis


def flops(description):
    workload = description.workload
    parts = (workload.blocks, workload.head)
    return sum(f * c for part in parts for f, c in zip(part.flops, part.counts, strict=True))


def exchanges(description, axis):
    return [exchange for exchange in description.exchanges if exchange.axis == axis]


GPT3 = {
    **ROW["model"], "num_layers": 96, "width": 12288, "num_heads": 96, "num_kv_heads": 96, "feedforward": 49152,
    "vocabulary": 51200,
}  # fmt: skip


@pytest.mark.parametrize(("recompute", "times"), [("none", 72), ("full", 96)])
def test_flops_of_a_transformer_are_those_of_the_published_formula(recompute, times):
    """72 B s L h^2 (1 + s/6h + V/12Lh); with full recomputation 96 B s L h^2 (1 + s/6h + V/16Lh)."""
    layers, width, words, sequence = 96, 12288, 51200, 2048
    found = flops(describe_row(change(model=GPT3, sample={"tokens": sequence}, micro_batch=1, recompute=recompute)))
    of_head = words / ((12 if recompute == "none" else 16) * layers * width)
    wanted = times * sequence * layers * width**2 * (1 + sequence / (6 * width) + of_head)
    assert found == pytest.approx(wanted, rel=1e-3)


def test_parameters_are_those_of_known_models():
    assert describe_row(change(model=GPT3)).stage_parameters == pytest.approx(175e9, rel=0.01)
    llama = {
        **ROW["model"], "num_layers": 32, "width": 4096, "num_heads": 32, "num_kv_heads": 8, "feedforward": 14336,
        "is_gated": True, "vocabulary": 128256, "is_tied": False, "positions": "rotary",
    }  # fmt: skip
    assert describe_row(change(model=llama)).stage_parameters == pytest.approx(8.03e9, rel=0.005)
    resnet = change(model={"name": "resnet", "depth": 50, "num_classes": 1000}, sample={"image": [3, 224, 224]})
    assert describe_row(resnet).stage_parameters == pytest.approx(25.6e6, rel=0.005)


@pytest.mark.parametrize(("depth", "gigaflops"), [(18, 1.82), (34, 3.67), (50, 4.09), (101, 7.80), (152, 11.5)])
def test_flops_of_resnets_are_the_published_ones(depth, gigaflops):
    row = change(model={"name": "resnet", "depth": depth}, sample={"image": [3, 224, 224]}, micro_batch=1)
    assert flops(describe_row(row)) / (3 * 2e9) == pytest.approx(gigaflops, rel=0.02)


def test_causal_attention_in_one_kernel_counts_half_and_computes_its_scores_again():
    eager, fused = (describe_row(change(attention=name)) for name in ("eager", "fused"))
    core = 4 * 4 * 1024 * 1024 * 1024 * 8  # two products, samples x tokens x tokens x width x layers
    assert flops(eager) - flops(fused) == pytest.approx(3 * core - 0.5 * 3.5 * core)


def test_grouped_heads_and_gates_change_the_matrices():
    plain = describe_row(ROW).workload.block_parameters
    grouped = describe_row(change(model={**ROW["model"], "num_kv_heads": 2})).workload.block_parameters
    gated = describe_row(change(model={**ROW["model"], "is_gated": True})).workload.block_parameters
    assert plain - grouped == 8 * 2 * 1024 * 768
    assert gated - plain == 8 * 1024 * 4096


def test_tensor_ranks_divide_flops_and_reduce_activations():
    one, four = describe_row(ROW), describe_row(change({"tensor": 4}))
    assert flops(four) == pytest.approx(flops(one) / 4)
    (reduction,) = exchanges(four, Axis.TENSOR)
    assert reduction.count == 4 * 8  # two forward, two backward, for each layer
    assert reduction.local_bytes == pytest.approx(2 * 3 / 4 * 4 * 1024 * 1024 * 2)
    assert reduction.network_bytes == 0


def test_bytes_of_gradients_are_those_of_each_way_of_sharding():
    """DDP moves 2(d-1)/d times the gradients; ZeRO-3 3(d-1)/d times the parameters, each micro-batch; ZeRO-2 two."""
    parameters = describe_row(ROW).stage_parameters
    (ddp,) = exchanges(describe_row(change({"data": 8})), Axis.DATA)
    assert ddp.local_bytes * ddp.count == pytest.approx(2 * 7 / 8 * 2 * parameters)
    for stage, times in ((3, 3), (2, 2)):
        (shard,) = exchanges(describe_row(change({"sharded": 8, "zero_stage": stage})), Axis.SHARD)
        assert shard.local_bytes * shard.count == pytest.approx(times * 7 / 8 * 2 * parameters)
    (first,) = exchanges(describe_row(change({"sharded": 8, "zero_stage": 1})), Axis.DATA)
    assert first.local_bytes == pytest.approx(ddp.local_bytes)


def test_ranks_on_other_hosts_use_the_network_for_their_part_alone():
    (inside,) = exchanges(describe_row(change({"data": 8})), Axis.DATA)
    (across,) = exchanges(describe_row(change({"data": 16})), Axis.DATA)
    assert inside.network_bytes == 0
    assert across.local_bytes == pytest.approx(inside.local_bytes)
    assert across.network_bytes == pytest.approx(2 * 1 / 2 * describe_row(ROW).stage_parameters * 2 / 8)


def test_a_rank_holds_sixteen_bytes_a_parameter_and_sharding_divides_them():
    parameters = describe_row(ROW).stage_parameters
    assert estimate_memory(describe_row(ROW)).state_bytes == pytest.approx(16 * parameters)
    for stage, wanted in ((1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)):
        held = estimate_memory(describe_row(change({"sharded": 8, "zero_stage": stage}))).state_bytes
        assert held == pytest.approx(wanted * parameters)


def test_energy_is_idle_power_of_all_hosts_and_the_rest_while_they_compute():
    found = answer(change({"data": 16}))
    from paceline.topology import DGXA100, find_device

    device, host = find_device("a100_80gb"), DGXA100().host
    idle = found["step_s"] * (16 * device.idle_w + 2 * host.idle_w)
    load = found["step_s"] * (16 * device.load_w + 2 * host.load_w)
    assert idle < found["energy_j"] < load


POWER = [
    ("P239", {"name": "bert", "num_layers": 24, "width": 1024, "num_heads": 16, "vocabulary": 30522}, 8, 768),
    ("P240", {"name": "resnet", "depth": 50, "num_classes": 1000}, 8, 3200),
    ("P242", {"name": "resnet", "depth": 50, "num_classes": 1000}, 64, 3200),
]


@pytest.mark.parametrize(("number", "model", "num_ranks", "batch"), POWER)
def test_published_power_of_hosts_which_nothing_is_fitted_to_is_in_the_interval(number, model, num_ranks, batch):
    """Mean power is energy over time: what is uncertain of the time is not of it, so that the interval is narrower."""
    text = (files("paceline.simulator.training") / "published" / "measurements.csv").read_text().splitlines()
    published = next(row for row in csv.DictReader(text) if row["row"] == number)
    assert (published["family"], published["gpus"], published["unit"]) == ("power", str(num_ranks), "W/node")
    row = {
        "id": number, "model": model, "num_ranks": num_ranks, "global_batch": batch, "micro_batch": batch / num_ranks,
        "device": "h100_80gb", "cluster": {"name": "dgx_h100"}, "precision": "fp16", "attention": "fused",
        "is_compiled": True,
    }  # fmt: skip
    case = make_case(read_row(row, "row"))
    found = answer(row)
    watts = found["energy_j"] / found["step_s"] / case.num_hosts
    width = exp(QUANTILE * widen_by_power(case, 0.0))
    assert watts / width < float(published["measured_value"]) < watts * width
