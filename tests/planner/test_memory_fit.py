"""Runs that do not fit are refused, with what would fit."""

import re

import pytest
import torch
from test_memory_estimate import CPU, TEXT, make_run

from paceline.errors import SettingsError
from paceline.memory import Memory
from paceline.planner import Estimate, available, check_fit, divide, estimate
from paceline.recipes import find_recipe
from paceline.topology.layout import Layout
from paceline.training.model import FunctionModel


def test_what_is_advised_fits():
    run = make_run(global_batch=32)
    needed = estimate(run, TEXT, 2, CPU).peak_bytes
    room = int(0.6 * needed)
    with pytest.raises(SettingsError, match=r"must hold a step, but it needs .* parameters") as refusal:
        check_fit(run, TEXT, 2, CPU, room)
    advice = re.findall(r"--([\w.]+) (\w+)", str(refusal.value).partition("it would with")[2])
    assert ("memory.recompute", "full") in advice
    assert any(setting == "num_micro_batches" for setting, _ in advice)
    for setting, value in advice:
        if setting == "num_micro_batches":
            changed = run.model_copy(update={setting: int(value)})
            assert check_fit(changed, TEXT, 2, CPU, room).peak_bytes <= room
            assert estimate(run.model_copy(update={setting: int(value) // 2}), TEXT, 2, CPU).peak_bytes > room
            break


def test_what_nothing_helps_says_so():
    with pytest.raises(SettingsError, match="take more ranks, or a smaller model"):
        check_fit(make_run(), TEXT, 1, CPU, 1000)


def test_it_is_left_out_on_demand_and_where_it_fits_by_far():
    run = make_run()
    assert check_fit(run.model_copy(update={"memory": Memory(check=False)}), TEXT, 2, CPU, 1) is None
    assert check_fit(run, TEXT, 2, CPU, 10**9) is None
    needed = estimate(run, TEXT, 2, CPU)
    assert check_fit(run, TEXT, 2, CPU, 2 * needed.peak_bytes) == needed


def test_a_model_that_cannot_be_rehearsed_is_trained_with_a_warning():
    run = make_run(model=FunctionModel(path=f"{__file__}:make_stubborn"))
    with pytest.warns(UserWarning, match=r"memory was not checked: .*nobody can run"):
        assert check_fit(run, TEXT, 2, CPU, 1000) is None
    with pytest.raises(SettingsError, match="without contents"):
        estimate(run, TEXT, 2, CPU)


def make_stubborn():
    class Stubborn(torch.nn.Linear):
        def forward(self, x):
            raise ValueError("nobody can run it")

    return Stubborn(4, 4)


def test_layouts_divide():
    whole = Estimate(
        {
            "parameters": 800,
            "gradients": 800,
            "optimizer": 1600,
            "activations": 8000,
            "communication": 0,
            "temporary": 80,
        }
    )
    tensor = divide(whole, Layout(tensor=2, pipeline=2), num_micro_batches=4).bytes_of
    assert tensor["parameters"] == tensor["gradients"] == 200
    assert tensor["optimizer"] == 400
    assert tensor["activations"] == 4000  # half of the layers, of two micro-batches, halved over the tensor axis
    by_stage = [divide(whole, Layout(sharded=4, zero_stage=stage)).bytes_of for stage in (1, 2, 3)]
    assert [part["optimizer"] for part in by_stage] == [400, 400, 400]
    assert [part["gradients"] for part in by_stage] == [800, 200, 200]
    assert [part["parameters"] for part in by_stage] == [800, 800, 200]
    added_up = [
        divide(whole, Layout(sharded=4), num_micro_batches=2).bytes_of,
        divide(whole, Layout(sharded=4, pipeline=2)).bytes_of,
    ]
    assert [part["gradients"] for part in added_up] == [800, 400]
    assert [part["parameters"] for part in added_up] == [200, 100]
    assert divide(whole, Layout(context=4)).bytes_of["activations"] == 2000


def test_memory_of_this_machine(tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert available._limit_bytes(tmp_path) == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available._limit_bytes(tmp_path) > 10**15
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   50 kB\n")
    assert available._free_bytes(tmp_path / "meminfo") == 50 * 1024
    one, two = (available.available_bytes(CPU, num) + available.PROCESS_BYTES for num in (1, 2))
    assert two == pytest.approx(one / 2, rel=0.2)


def test_offloading_is_refused_on_cpus_and_budgets_are_sizes():
    run = make_run(memory=Memory(offload="optimizer"))
    with pytest.raises(SettingsError, match=r"memory.offload must be none on CPUs"):
        estimate(run, TEXT, 2, CPU)
    assert Memory(recompute="500MB").recompute == 500_000_000
    with pytest.raises(ValueError, match="none, full, selective or a budget such as 500MB"):
        Memory(recompute="some")
    assert find_recipe("transformer_lm")().memory == Memory()


def test_a_model_without_blocks_cannot_be_recomputed():
    run = make_run(model=FunctionModel(path=f"{__file__}:make_stubborn"), memory=Memory(recompute="full"))
    with pytest.raises(SettingsError, match="model without blocks"):
        estimate(run, TEXT, 2, CPU)
