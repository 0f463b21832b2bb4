"""What layouts divide of an estimate, and what memory this machine has."""

import pytest
import torch

from paceline.memory import Estimate, available, divide
from paceline.memory.estimate import count_codec
from paceline.sync import EveryStep
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
    experts = divide(whole, Layout(expert=4), expert_share=0.5)  # half of the parameters stays whole
    assert [experts.bytes_of[category] for category in ("parameters", "gradients", "optimizer")] == [500, 500, 1000]


def test_state_of_codecs_is_in_proportion_beyond_what_is_tried():
    rule = EveryStep(codec="top_k")
    small, large = (count_codec(rule, {"weight": (rows, 512)}, 2) for rows in (128, 4096))
    assert large == 32 * small > 0


def limit_group(folder, most, used, cached, *, first=False):
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if first else ("memory.max", "memory.current")
    for name, value in zip(names, (most, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    prefix = "total_" if first else ""
    (folder / "memory.stat").write_text(f"anon 7\n{prefix}inactive_file {cached}\n{prefix}active_file 1000\n")


@pytest.mark.parametrize("is_first", [False, True])
def test_limits_of_control_groups(tmp_path, is_first):
    """Also of the groups around a process's own; what files are read into can be had."""
    root, own = tmp_path / "root", tmp_path / "own"
    top = root / "memory" if is_first else root
    own.write_text("3:cpu,cpuacct:/elsewhere\n" + ("4:memory:" if is_first else "0::") + "/slurm/job_7/step\n")
    assert available.find_limit(root, own).left > 10**15
    limit_group(top, 2**63 - 4096 if is_first else "max", 0, 0, first=is_first)
    assert available.find_limit(root, own).left > 10**15
    limit_group(top / "slurm/job_7", 1_000_000, 400_000, 99_000, first=is_first)
    assert available.find_limit(root, own) == (700_000, 1_000_000)
    limit_group(top / "slurm/job_7/step", 900_000, 900_000, 0, first=is_first)
    assert available.find_limit(root, own) == (1_000, 900_000)
    limit_group(top / "slurm/job_8", 1, 1, 0, first=is_first)
    assert available.find_limit(root, own) == (1_000, 900_000)
    own.write_text("0::/docker/of_the_host\n4:memory:/docker/of_the_host\n")  # a container whose own is the root
    limit_group(top, 500_000, 450_000, 49_000, first=is_first)
    assert available.find_limit(root, own) == (100_000, 500_000)
    own.unlink()
    assert available.find_limit(root, own).left > 10**15


def test_memory_of_this_machine(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   50 kB\n")
    assert available._free_bytes(tmp_path / "meminfo") == 50 * 1024
    one, two = (available.available_bytes(CPU, num) + available.PROCESS_BYTES for num in (1, 2))
    assert two == pytest.approx(one / 2, rel=0.2)
