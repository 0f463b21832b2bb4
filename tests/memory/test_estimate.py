"""What layouts divide of an estimate, and what memory this machine has."""

import pytest
import torch

from paceline.memory import Estimate, available, divide
from paceline.topology.layout import Layout

CPU = torch.device("cpu")


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
    assert tensor["activations"] == 2000  # half of the layers, halved over the tensor axis
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
