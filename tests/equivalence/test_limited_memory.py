"""A model of four times what one rank may hold trains, is saved and goes on, where the kernel ends who takes more."""

import ctypes
import functools
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.checkpoint import Checkpoint, CheckpointStore
from paceline.comm.join import find_group
from paceline.parallel import defer
from paceline.testing.processes import run_processes
from paceline.topology.layout import Layout

NUM_RANKS, NUM_LAYERS, WIDTH, NUM_SAMPLES = 12, 96, 512, 12
STATE_BYTES = 12 * NUM_LAYERS * WIDTH * (WIDTH + 1)
"""Bytes of the whole model's parameters, gradients and momentum."""
LIMIT_BYTES = STATE_BYTES // 4
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.map = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.map(x)) / NUM_LAYERS  # rounding stays what it is


def build(num_layers: int = NUM_LAYERS, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(Layer(width) for _ in range(num_layers)))


def limit_memory(num_bytes: int) -> Path:
    """Limit what this process takes from now on; what it has already does not count.

    Tensors get pages of their own, which go back when they are freed: glibc would keep those between others.
    """
    libc = ctypes.CDLL(None)
    assert libc.mallopt(_M_MMAP_THRESHOLD, 2**16)
    assert libc.mallopt(_M_ARENA_MAX, 1)
    is_first = (V1 / "memory.limit_in_bytes").exists()
    folder = (V1 if is_first else V2) / f"paceline-test-{os.getpid()}"
    folder.mkdir()
    (folder / ("memory.limit_in_bytes" if is_first else "memory.max")).write_text(str(num_bytes))
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    return folder


@pytest.fixture(autouse=True)
def cgroups() -> Iterator[None]:
    """Skip where processes cannot be limited, and remove what was made for them."""
    holder = V1 if (V1 / "memory.limit_in_bytes").exists() else V2
    probe = holder / f"paceline-test-{os.getpid()}"
    try:
        probe.mkdir()
        has_limit = (probe / "memory.limit_in_bytes").exists() or (probe / "memory.max").exists()
        probe.rmdir()
    except OSError as error:
        pytest.skip(f"memory can be limited by root with cgroups only: {error}")
    if not has_limit:
        pytest.skip("this kernel's cgroups do not limit memory")
    yield
    for folder in holder.glob("paceline-test-*"):
        folder.rmdir()


def make_replica(num_layers: int = NUM_LAYERS, width: int = WIDTH) -> paceline.Replica:
    group = find_group()
    module, construction = defer(functools.partial(build, num_layers, width))
    module = paceline.parallelize(module, Layout(sharded=group.size), construction=construction)
    return paceline.Replica(module, torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9))


def take_steps(replica: paceline.Replica, steps: range, width: int = WIDTH) -> list[float]:
    group, losses = replica.shard.data_parallel_group, []
    for step in steps:
        samples = torch.randn(NUM_SAMPLES, width, generator=torch.Generator().manual_seed(step))[
            group.rank :: group.size
        ]
        replica.backward(replica(samples).square().mean(), weight=len(samples))
        losses.append(replica.update().loss)
    return losses


def train(folder: str, limit: int) -> dict[str, Any]:
    """Return the losses of three steps, the third from a checkpoint, and the most that the process took meanwhile."""
    torch.set_num_threads(1)
    cgroup: Path | None = None
    with paceline.join():
        small = make_replica(2, 16)  # torch imports, and copies what was shared with its parent, at first use
        take_steps(small, range(1), 16)
        paceline.save(f"{folder}/small", small)
        small.close()
        del small
        gc.collect()
        cgroup = limit_memory(limit) if limit else None
        replica = make_replica()
        losses = take_steps(replica, range(2))
        paceline.save(f"{folder}/saved", replica)
        replica.close()
        del replica
        gc.collect()
        again = make_replica()
        assert paceline.load_latest(f"{folder}/saved", again)
        losses += take_steps(again, range(2, 3))
        paceline.save(f"{folder}/saved", again)
        again.close()
    peak = 0
    if cgroup is not None and (cgroup / "memory.max_usage_in_bytes").exists():
        peak = int((cgroup / "memory.max_usage_in_bytes").read_text())
    return {"losses": losses, "peak": peak}


def build_whole(limit: int) -> str:
    """Take a whole model's parameters and momentum within the limit."""
    limit_memory(limit)
    replica = nn.Sequential(build(), build())
    return f"{sum(parameter.nbytes for parameter in replica.parameters())} bytes"


def newest(folder: Path) -> Checkpoint:
    return Checkpoint.open(CheckpointStore(folder / "saved").list_checkpoints()[0])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "names",
    [["alone", "limited"], pytest.param(["alone", "shared", "limited"], marks=pytest.mark.campaign)],
    ids=["as alone", "bit for bit"],
)
def test_a_model_of_four_times_the_limit_trains_as_without(tmp_path: Path, names: list[str]) -> None:
    runs = {}
    for name in names:
        num_ranks, limit = 1 if name == "alone" else NUM_RANKS, LIMIT_BYTES if name == "limited" else 0
        arguments = {"folder": str(tmp_path / name), "limit": limit}
        runs[name] = run_processes(num_ranks, train, arguments, timeout_s=280.0)
        for result in runs[name]:
            assert result.exit_code == 0, f"{name}: {result.exit_code} {result.output}"
    if "shared" in runs:
        assert runs["limited"][0].value["losses"] == runs["shared"][0].value["losses"]
    assert runs["limited"][0].value["losses"] == pytest.approx(runs["alone"][0].value["losses"], rel=1e-6)
    checkpoints = {name: newest(tmp_path / name) for name in runs}
    for name in checkpoints["alone"].list_tensors():
        if name.startswith(("model/", "optimizer/")):
            limited = checkpoints["limited"].read(name)
            if "shared" in runs:
                assert torch.equal(limited, checkpoints["shared"].read(name)), name
            assert torch.allclose(limited, checkpoints["alone"].read(name), rtol=1e-6, atol=1e-6), name
    print("most that a rank took:", max(result.value["peak"] for result in runs["limited"]) / LIMIT_BYTES)


@pytest.mark.slow
def test_the_limit_ends_who_takes_a_whole_model() -> None:
    (result,) = run_processes(1, build_whole, {"limit": LIMIT_BYTES})
    assert result.exit_code == -9, result
