"""Workers are killed at each phase of a step; the others go on as a resume with fewer workers would, from memory."""

import contextlib
import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from scripted_member import Epoch, ScriptedMember, die
from torch import nn

from paceline.checkpoint import Checkpoint, CheckpointStore
from paceline.comm import LocalGroup
from paceline.data import Data, Source, Spec, Splits
from paceline.elastic.member import Evicted
from paceline.errors import CommunicationError
from paceline.monitor.events import ConsensusMeasured, RunFinished, StateCopied, StepFinished, WorkersChanged
from paceline.monitor.log import EventLog
from paceline.monitor.reader import read_log, select
from paceline.optim import SGD, AdamW
from paceline.registry import register
from paceline.replica import reduction
from paceline.replica.gradients import Gradients
from paceline.replica.optimizer_step import OptimizerStep
from paceline.schedules import Linear
from paceline.sync.outer_parameters import OuterParameters
from paceline.testing import run_processes
from paceline.training import Classification, Model, Run, held_out, loop, saving, train

NUM_STEPS, NUM_SAMPLES, GLOBAL_BATCH = 9, 50, 12
LOST_STEP = 5


@register("reformed_points")
class Points(Data):
    def open(self):
        return Splits(PointSource(NUM_SAMPLES), PointSource(15))


class PointSource(Source):
    """Samples whose first value is their number."""

    def __init__(self, num_samples):
        self.spec = Spec(num_classes=3, input_shape=(9,))
        generator = torch.Generator().manual_seed(num_samples)
        self.targets = torch.randint(3, (num_samples,), generator=generator)
        numbers = torch.arange(num_samples).float()[:, None]
        self.inputs = torch.cat([numbers, torch.randn(num_samples, 8, generator=generator)], dim=1)

    def __len__(self):
        return len(self.targets)

    def read(self, indices):
        return self.inputs[indices], self.targets[indices]


class Recording(nn.Module):
    """A network that notes which samples it was trained on."""

    def __init__(self, normalises):
        super().__init__()
        middle = [nn.BatchNorm1d(16, momentum=0.3)] if normalises else []
        self.layers = nn.Sequential(nn.Linear(8, 16), *middle, nn.ReLU(), nn.Linear(16, 3))
        self.seen = []

    def forward(self, inputs):
        if self.training:
            self.seen.append(inputs[:, 0].int().tolist())
            BEFORE_FORWARD(len(self.seen))
        return self.layers(inputs[:, 1:])


def do_nothing(_):
    pass


BEFORE_FORWARD = do_nothing


@register("reformed_network")
class Network(Model):
    normalises: bool = False

    def build(self, spec):
        return Recording(self.normalises)


def make_run(**changes):
    settings = {
        "model": Network(),
        "data": Points(),
        "loss": Classification(),
        "optimizer": AdamW(learning_rate=0.01),
        "schedule": Linear(warmup_steps=2),
        "global_batch": GLOBAL_BATCH,
        "num_steps": NUM_STEPS,
        "evaluate_interval": 3,
        "checkpoint_interval": 1,
        "keep_checkpoints": None,
        "hash_interval": 2,
        "bucket_bytes": 300,
        "ema": 0.9,
    }
    return Run(**(settings | changes))


def die_in(phase, step):
    """Let this process die in a phase of the update after `step`."""

    def patch(owner, name, is_there):
        real = getattr(owner, name)

        def run(*arguments, **options):
            if is_there(*arguments):
                die()
            return real(*arguments, **options)

        setattr(owner, name, run)

    if phase == "forward":
        global BEFORE_FORWARD
        BEFORE_FORWARD = lambda number: die() if number == step + 1 else None  # noqa: E731
    elif phase == "backward":
        patch(reduction.GradientReduction, "end_backward", lambda own: own._step_now == step)
        real = reduction.GradientReduction.arm

        def arm(self, divisor, share, number, scale):
            self._step_now = number
            real(self, divisor, share, number, scale)

        reduction.GradientReduction.arm = arm
    elif phase == "reduce":
        patch(reduction.GradientReduction, "check_totals", lambda own, scalars, loss, number: number == step)
    elif phase == "update":
        patch(OptimizerStep, "run", lambda own, optimizer, number, *_: number == step)
    elif phase == "second bucket":
        patch(Gradients, "_launch", lambda own, bucket: own._step == step and bucket.index == 1)
    elif phase == "exchange":
        patch(OuterParameters, "send", lambda own, weight, total, number: number == step)
    elif phase == "save":
        patch(saving, "describe", lambda replica: replica.num_updates == step + 1)
    elif phase == "evaluate":
        patch(held_out, "_evaluate", lambda session, _: session.training.step == step + 1)


def note_samples(folder, name):
    """Write down, for each step, the samples that this worker computes gradients of."""
    real = loop.train_step

    def run(session, batch, step):
        with open(folder / f"samples {name} {step}.json", "a") as file:
            file.write(json.dumps(batch.inputs[: batch.num_samples, 0].int().tolist()) + "\n")
        return real(session, batch, step)

    loop.train_step = run


def fail_before_the_optimizer(step):
    """Let the update after `step` fail here, where all gradients have come, as if a connection broke."""
    real = OptimizerStep.run

    def run(self, optimizer, number, *arguments, **options):
        if number == step:
            raise CommunicationError("a cable was pulled")
        return real(self, optimizer, number, *arguments, **options)

    OptimizerStep.run = run


def work(folder, epochs, changes, phase, dying, transport="auto", behind=""):
    """Be one of the workers; worker 0 of a rank is named w0."""
    rank = int(os.environ["RANK"])
    name = f"w{rank}"
    run = make_run(**read(changes))
    note_samples(Path(folder), name)
    if name == behind:
        fail_before_the_optimizer(LOST_STEP - 1)
    if name == dying:
        die_in(phase, LOST_STEP)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    member = ScriptedMember(dist.PrefixStore("script", store), name, [Epoch(*e) for e in epochs], transport)
    with EventLog(Path(folder) / "events.jsonl", run="r", rank=rank) as log, contextlib.suppress(Evicted):
        train(run, Path(folder), LocalGroup(), log, recipe="test", member=member)
    return {
        "views": [[view.epoch, view.rank, view.size, view.step] for view in member.views],
        "reports": member.reports,
    }


def read(changes):
    """Return settings that came as JSON."""
    if "optimizer" in changes:
        changes = changes | {"optimizer": SGD(learning_rate=0.05, momentum=changes["optimizer"])}
    return changes


def weights_of(folder):
    checkpoint = Checkpoint.open(CheckpointStore(Path(folder) / "checkpoints").list_checkpoints()[0])
    assert checkpoint.step == NUM_STEPS
    kinds = ("model/", "optimizer/", "ema/")
    return {name: checkpoint.read(name) for name in checkpoint.list_tensors() if name.startswith(kinds)}


def train_with_resume(step, sizes, changes):
    """Return weights after a training with as many workers that stopped after `step` and went on with others."""
    return _train_with_resume(step, sizes, json.dumps(changes))


@cache
def _train_with_resume(step, sizes, changes):
    with tempfile.TemporaryDirectory() as folder:
        return _train_twice(Path(folder), step, sizes, json.loads(changes))


def _train_twice(folder, step, sizes, changes):
    first, second = folder / "first", folder / "second"
    for directory, size in ((first, sizes[0]), (second, sizes[1])):
        directory.mkdir(exist_ok=True)

        def run_one(group, directory=directory):
            with EventLog(directory / "events.jsonl", run="r", rank=group.rank) as log:
                train(make_run(**read(changes)), directory, group, log, recipe="test")

        LocalGroup.run(size, run_one)
        if directory is first:
            (second / "checkpoints").mkdir(parents=True)
            saved = f"checkpoints/step-{step:08d}"
            shutil.copytree(first / saved, second / saved)
    return weights_of(second)


def run_killed(folder, phase, dying, transport="auto", behind="", **changes):
    epochs = [[["w0", "w1", "w2"]], [[name for name in ("w0", "w1", "w2") if name != dying]]]
    return run_script(folder, epochs, changes, phase=phase, dying=dying, transport=transport, behind=behind)


def run_script(folder, epochs, changes, phase="", dying="", **options):
    folder.mkdir()
    arguments = {"folder": str(folder), "epochs": epochs, "changes": changes, "phase": phase, "dying": dying}
    results = run_processes(3, work, arguments | options)
    for result in results:
        expected = -9 if f"w{result.rank}" == dying else 0
        assert result.exit_code == expected, result.output
    return [result.value for result in results if result.value is not None]


def campaign(*values, **options):
    """Return one more kind of what others are an example of."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.campaign], **options)


# Rank 0, which writes and tells, matters where it alone acts, and once elsewhere.
@pytest.mark.parametrize(
    ("phase", "dying"),
    [
        *(
            ("forward", "w2"),
            ("backward", "w0"),
            ("reduce", "w2"),
            ("update", "w2"),
            ("save", "w0"),
            ("evaluate", "w0"),
        ),
        *(campaign(phase, "w0") for phase in ("forward", "reduce", "update")),
        *(campaign(phase, "w2") for phase in ("backward", "save", "evaluate")),
    ],
)
def test_survivors_of_a_step_go_on_as_a_resume_would(tmp_path, phase, dying):
    found = run_killed(tmp_path / "killed", phase, dying)
    changed = select(read_log(tmp_path / "killed" / "events.jsonl"), WorkersChanged)
    assert [record.event.num_workers for record in changed] == [2]
    step = changed[0].step
    assert step in (LOST_STEP, LOST_STEP + 1), "at most the step in flight is done again"
    assert all(whole for one in found for _, whole in one["reports"])
    expected = train_with_resume(step, (3, 2), {})
    for name, tensor in weights_of(tmp_path / "killed").items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    "changes",
    [
        {"num_micro_batches": 2, "optimizer": 0.9, "clip_norm": 0.5},
        {"precision": "fp16"},
        {"bucket_bytes": None},
        {"batch_policy": {"name": "per_worker", "samples": 4}, "optimizer": 0.9},
    ],
    ids=["accumulation", "fp16", "chosen buckets", "per worker"],
)
def test_other_settings_too(tmp_path, changes):
    run_killed(tmp_path / "killed", "reduce", "w1", **changes)
    (changed,) = select(read_log(tmp_path / "killed" / "events.jsonl"), WorkersChanged)
    expected = train_with_resume(changed.step, (3, 2), changes)
    for name, tensor in weights_of(tmp_path / "killed").items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("num_data", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_copies_in_the_memory_of_peers_go_on(tmp_path, num_data):
    memory = tmp_path / "memory"
    memory.mkdir()
    copies = {"interval": 2, "num_data": num_data, "folder": str(memory)}
    run_killed(tmp_path / "killed", "backward", "w1", peer_memory=copies, checkpoint_interval=0)
    records = read_log(tmp_path / "killed" / "events.jsonl")
    (changed,) = select(records, WorkersChanged)
    steps = [record.step for record in select(records, StateCopied)]
    if num_data == 1:
        assert steps == [2, 4, 6, 8]
    else:  # two that are left cannot protect two with a third
        assert steps == [2, 4]
        assert "no copies in peers' memory" in changed.event.repaired
    assert list(memory.iterdir()) == [], "the end frees it"
    expected = train_with_resume(changed.step, (3, 2), {})
    for name, tensor in weights_of(tmp_path / "killed").items():
        assert torch.equal(tensor, expected[name]), name


def test_over_the_network_too(tmp_path):
    run_killed(tmp_path / "killed", "backward", "w1", transport="network")
    (changed,) = select(read_log(tmp_path / "killed" / "events.jsonl"), WorkersChanged)
    expected = train_with_resume(changed.step, (3, 2), {})
    for name, tensor in weights_of(tmp_path / "killed").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)  # other sums, and Adam


@pytest.mark.parametrize(
    "sync",
    [
        campaign({"name": "local_sgd", "period": 3}),
        {"name": "diloco", "period": 3},
        {"name": "local_sgd", "period": 3, "codec": {"name": "one_bit", "dense_below": 0}},
        campaign({"name": "every_step", "codec": {"name": "one_bit", "dense_below": 0}, "codec_of": "gradient"}),
        {"name": "every_step", "codec": {"name": "power_sgd", "dense_below": 0}, "codec_of": "gradient"},
        {"name": "streaming_diloco", "period": 4, "num_fragments": 2},
        campaign({"name": "hierarchical_local_sgd", "period": 4, "host_size": 1}),
        campaign({"name": "adaptive_local_sgd", "period": 3}),
        campaign({"name": "scaffold", "period": 3}),
        {"name": "easgd", "period": 3},
        campaign({"name": "dpsgd"}),
        {"name": "choco_sgd"},
        campaign({"name": "push_sum"}),
    ],
    ids=lambda sync: sync["name"] + (" with " + sync["codec"]["name"] if "codec" in sync else ""),
)
def test_rules_with_a_state_go_on(tmp_path, sync):
    found = run_killed(tmp_path / "killed", "reduce", "w1", sync=sync, optimizer=0.9, hash_interval=0)
    records = read_log(tmp_path / "killed" / "events.jsonl")
    (changed,) = select(records, WorkersChanged)
    assert changed.event.num_sent == 0
    assert all(whole for one in found for _, whole in one["reports"])
    (ended,) = select(records, RunFinished)
    assert ended.step == NUM_STEPS
    assert ended.event.held_out_loss < 1.2
    assert ("residuals" in changed.event.lost) == ("codec" in sync)
    assert ("w1" in changed.event.lost) == (sync["name"] != "every_step")


def samples_of(folder, step, names):
    """Return the samples of a step of which these workers computed gradients, each worker's last time."""
    found = []
    for name in names:
        path = folder / f"samples {name} {step}.json"
        found += json.loads(path.read_text().splitlines()[-1]) if path.exists() else []
    return sorted(found)


def test_each_sample_counts_once(tmp_path):
    folder = tmp_path / "killed"
    run_killed(folder, "backward", "w1")
    (changed,) = select(read_log(folder / "events.jsonl"), WorkersChanged)
    both = [samples_of(folder, step, ["w0", "w2"] + ["w1"] * (step < changed.step)) for step in range(NUM_STEPS)]
    epoch = [sample for step in both[:5] for sample in step]  # of 50 samples: four steps of 12 and one of 2
    assert sorted(epoch) == list(range(NUM_SAMPLES))
    assert [len(step) for step in both[5:]] == [12] * 4
    rest = [sample for step in both[5:] for sample in step]
    assert len(set(rest)) == len(rest)
    steps = [record.step for record in select(read_log(folder / "events.jsonl"), StepFinished)]
    # The line of a step is missing if workers were lost between its update and its line.
    assert steps == [step for step in range(1, NUM_STEPS + 1) if step in steps]
    assert set(range(1, NUM_STEPS + 1)) - set(steps) <= {changed.step}


@pytest.mark.parametrize("sync", ["local_sgd", "diloco"])
def test_a_broken_exchange_is_made_again(tmp_path, sync):
    sync = {"name": sync, "period": 3}
    found = run_killed(tmp_path / "killed", "exchange", "w1", sync=sync, optimizer=0.9, hash_interval=0)
    records = read_log(tmp_path / "killed" / "events.jsonl")
    (changed,) = select(records, WorkersChanged)
    assert changed.step == LOST_STEP + 1, "the exchange is that of the update after it"
    assert changed.event.num_sent == 0
    assert [one["reports"] for one in found] == [[[LOST_STEP, True]]] * 2
    distances = {record.step: record.event.distance for record in select(records, ConsensusMeasured)}
    assert distances[LOST_STEP + 1] < 1e-6, "workers are together after it"
    assert distances[4] > 1e-4, "and apart before"


def test_who_is_behind_is_sent_the_state_of_the_most_advanced(tmp_path):
    quiet = {"checkpoint_interval": 0, "evaluate_interval": 0, "hash_interval": 0, "optimizer": 0.9}
    found = run_killed(tmp_path / "killed", "forward", "w1", behind="w0", **quiet)
    assert [one["reports"] for one in found] == [[[LOST_STEP - 1, True]], [[LOST_STEP, True]]]
    (changed,) = select(read_log(tmp_path / "killed" / "events.jsonl"), WorkersChanged)
    assert changed.event.names == ["w2", "w0"]
    assert changed.event.num_sent == 1
    expected = train_with_resume(LOST_STEP, (3, 2), {"optimizer": 0.9})
    for name, tensor in weights_of(tmp_path / "killed").items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
@pytest.mark.parametrize("settings", [{}, {"sync": {"name": "local_sgd", "period": 2}, "hash_interval": 0}])
def test_workers_join_and_leave_at_a_step_as_at_a_resume(tmp_path, sizes, settings):
    names = ["w0", "w1", "w2"]
    epochs = [[names[: sizes[0]]], [names[: sizes[1]], 3]]
    settings = settings | {"optimizer": 0.9}
    run_script(tmp_path / "changed", epochs, settings)
    (changed,) = select(read_log(tmp_path / "changed" / "events.jsonl"), WorkersChanged)
    assert changed.event.num_workers == sizes[1]
    assert changed.event.num_sent == max(0, sizes[1] - sizes[0])
    assert changed.step in (4, 5), "the step after that in which it was asked for"
    expected = train_with_resume(changed.step, sizes, settings)
    for name, tensor in weights_of(tmp_path / "changed").items():
        if "sync" not in settings:
            assert torch.equal(tensor, expected[name]), name
        elif name.startswith("model/"):
            torch.testing.assert_close(tensor, expected[name], rtol=0.2, atol=0.05)  # momentum is each worker's own


@pytest.mark.parametrize(
    "changes",
    [
        {"landing": "arrival", "clip_norm": None},
        {"landing": "next_forward", "ema": None, "clip_norm": None},
        {"sync": {"name": "every_step", "codec": {"name": "top_k", "dense_below": 0}}},
    ],
    ids=["arrival", "next_forward", "coded steps"],
)
def test_a_half_applied_step_is_never_taken_for_a_whole_one(tmp_path, changes):
    epochs = [[["w0", "w1", "w2"]], [["w0", "w2"]]]
    folder = tmp_path / "killed"
    folder.mkdir()
    arguments = {"folder": str(folder), "epochs": epochs, "changes": changes, "dying": "w1"}
    results = run_processes(3, work, arguments | {"phase": "second bucket"})
    assert [result.exit_code for result in results] == [1, -9, 1], results[1].output
    assert all("no state is whole" in results[rank].output for rank in (0, 2))


def test_statistics_of_a_dropped_step_do_not_count(tmp_path):
    changes = {"model": {"name": "reformed_network", "normalises": True}, "hash_interval": 0, "drop_last": True}
    run_killed(tmp_path / "killed", "second bucket", "w1", **changes)
    (changed,) = select(read_log(tmp_path / "killed" / "events.jsonl"), WorkersChanged)
    assert changed.step == LOST_STEP
    expected, found = train_with_resume(changed.step, (3, 2), changes), weights_of(tmp_path / "killed")
    for name, tensor in found.items():
        if "running" not in name:  # those of the lost worker are lost
            assert torch.equal(tensor, expected[name]), name
    assert int(found["model/layers.1.num_batches_tracked"]) == NUM_STEPS
