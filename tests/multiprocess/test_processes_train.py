"""Real processes over gloo against one process, and restarts by torchrun."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import paceline
from paceline.monitor.events import Preempted, RunFinished, RunStarted, StepFinished
from paceline.monitor.reader import read_log, select
from paceline.testing import check_exits, run_processes


def train_points(weights):
    """Train a small network on this rank's part of each batch, in float64; return losses and all parameters."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    dataset = torch.utils.data.TensorDataset(points, (points[:, 0] > 0).long() + (points[:, 1] > 0).long())
    with paceline.join(timeout_s=58) as group:
        replica = paceline.Replica(module, optimizer, group=group, clip_norm=1.0, bucket_bytes=200, hash_interval=3)
        loader = paceline.Loader(dataset, 12, group=group, shares=weights, num_micro_batches=2)
        losses = []
        for batch in loader:
            loss = F.cross_entropy(replica(batch.inputs), batch.targets)
            replica.backward(loss, weight=batch.num_samples, last=batch.last)
            if batch.last:
                losses.append(replica.update().loss)
            if len(losses) == 9:
                break
        return [losses, torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()]


@pytest.mark.parametrize(("num_ranks", "weights"), [(2, None), (3, [1.0, 2.0, 3.0])])
def test_processes_equal_one_process(num_ranks, weights):
    losses, parameters = train_points(None)
    results = run_processes(num_ranks, train_points, {"weights": weights})
    check_exits(results)
    for result in results:
        assert result.value[0] == pytest.approx(losses, abs=1e-12)
        assert result.value[1] == pytest.approx(parameters, abs=1e-12)
        assert result.value[1] == results[0].value[1]


SETTINGS = {
    "checkpoint_interval": 3,
    "evaluate_interval": 0,
    "evaluate_samples": 4,
    "schedule.warmup_steps": 1,
    "loss.sample_tokens": 0,
    "model.width": 16,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "data.sequence_length": 16,
    "data.max_bytes": 100_000,
    "global_batch": 4,
    "num_threads": 1,
}


def start_torchrun(directory, num_steps):
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "2",
    ]
    command = ["-m", "paceline", "train", "transformer_lm", "--out", str(directory)]
    for name, value in (SETTINGS | {"num_steps": num_steps}).items():
        command += [f"--{name}", str(value)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        launcher + command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def find_worker(launcher):
    """Return one of the processes that torchrun started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == launcher and b"paceline" in (folder / "cmdline").read_bytes():
                return int(folder.name)
        except OSError:
            continue
    raise AssertionError("torchrun has no worker")


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_torchrun_restarts_go_on_with_the_run_they_had_begun(tmp_path, wait_for_step):
    run = tmp_path / "run"
    process = start_torchrun(run, 120)
    wait_for_step(run, 20, process)
    os.kill(find_worker(process.pid), signal.SIGKILL)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    records = read_log(run / "events.jsonl")
    starts = select(records, RunStarted)
    assert len(starts) == 2
    assert starts[1].event.start_step in range(3, 120, 3)  # the newest that was whole; the saver may be some behind
    assert len(select(records, RunFinished)) == 1
    positions = {record.step: record.event.position for record in select(records, StepFinished)}
    assert positions == {step: 4 * step for step in range(1, 121)}


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_preempted_torchrun_says_so_in_the_log(tmp_path, wait_for_step):
    run = tmp_path / "run"
    process = start_torchrun(run, 100_000)
    wait_for_step(run, 20, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 1  # torchrun's, whatever its workers return
    (preempted,) = select(read_log(run / "events.jsonl"), Preempted)
    assert (Path(preempted.event.checkpoint) / "COMMITTED").exists()
