"""The loop: what it writes, and that a stopped run goes on as if it had never stopped."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.checkpoint import AsyncSaver, Checkpoint, CheckpointStore
from paceline.comm import LocalGroup
from paceline.data import Data, Source, Spec, Splits, derive_seed
from paceline.errors import (
    CheckpointError,
    CommunicationError,
    DataError,
    DivergenceError,
    NonFiniteError,
    SettingsError,
)
from paceline.monitor.events import (
    CheckpointSaved,
    CheckpointSkipped,
    Evaluated,
    Failed,
    RunFinished,
    RunStarted,
    StalenessMeasured,
    StepFinished,
)
from paceline.monitor.log import EventLog
from paceline.monitor.reader import read_log, select
from paceline.optim import SGD, AdamW
from paceline.registry import register
from paceline.replica import Replica
from paceline.replica.state import restore
from paceline.schedules import Linear
from paceline.sync import ASGD
from paceline.testing import run_processes
from paceline.training import Classification, Model, Run, evaluate, loop, train


@register("test_points")
class Points(Data):
    """Three clouds of points; reading past `fail_at` reads fails."""

    fail_at: int = -1
    num_samples: int = 50

    def open(self):
        return Splits(PointSource(self.num_samples, self.fail_at), PointSource(21, -1))


class PointSource(Source):
    def __init__(self, num_samples, fail_at):
        self.spec = Spec(num_classes=3, input_shape=(2, 4, 4))
        generator = torch.Generator().manual_seed(num_samples)
        self.targets = torch.randint(3, (num_samples,), generator=generator)
        noise = torch.randn(num_samples, 2, 4, 4, generator=generator)
        self.inputs = noise + self.targets[:, None, None, None]
        self.reads_left = fail_at

    def __len__(self):
        return len(self.targets)

    def read(self, indices):
        self.reads_left -= 1
        if self.reads_left == 0:
            raise DataError("the power must be on, but it is off")
        return self.inputs[indices], self.targets[indices]


@register("test_convolution")
class Convolution(Model):
    """With batch statistics, which are each worker's own."""

    dropout: float = 0.0

    def build(self, spec):
        return nn.Sequential(
            nn.Conv2d(2, 6, 3, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(self.dropout),
            nn.Linear(24, 3),
        )


def make_run(**changes):
    settings = {
        "model": Convolution(),
        "data": Points(),
        "loss": Classification(),
        "optimizer": AdamW(learning_rate=0.01),
        "schedule": Linear(warmup_steps=2),
        "global_batch": 12,
        "num_steps": 14,
        "evaluate_interval": 4,
        "checkpoint_interval": 5,
        "keep_checkpoints": None,
        "hash_interval": 3,
        "bucket_bytes": 300,
    }
    return Run(**(settings | changes))


def train_here(run, directory, num_workers=1):
    directory.mkdir(exist_ok=True)

    def worker(group):
        with EventLog(directory / "events.jsonl", run="r", rank=group.rank) as log:
            return train(run, directory, group, log, recipe="test")

    return LocalGroup.run(num_workers, worker)


def read_tensors(directory, step):
    from safetensors.torch import load_file

    (checkpoint,) = directory.glob(f"checkpoints/step-{step:08}*")
    tensors = {}
    for file in checkpoint.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def losses_of(directory):
    return {record.step: record.event.loss for record in select(read_log(directory / "events.jsonl"), StepFinished)}


def test_a_run_writes_what_happened(tmp_path):
    assert train_here(make_run(), tmp_path, num_workers=2) == [True, True]
    records = read_log(tmp_path / "events.jsonl")
    (started,) = select(records, RunStarted)
    assert (started.event.num_workers, started.event.samples_per_epoch, started.event.total_steps) == (
        2,
        50,
        14,
    )
    assert Run.model_validate(started.event.settings) == make_run()
    steps = select(records, StepFinished)
    assert [record.step for record in steps] == list(range(1, 15))
    assert steps[-1].event.loss < steps[0].event.loss
    # 50 samples an epoch in batches of 12: the fifth is short.
    assert [record.event.num_samples for record in steps[:6]] == [12, 12, 12, 12, 2, 12]
    assert [record.event.position for record in steps[:6]] == [12, 24, 36, 48, 50, 62]
    assert [record.event.learning_rate for record in steps[:3]] == pytest.approx([0.005, 0.01, 0.01])
    assert [record.step for record in select(records, Evaluated)] == [4, 8, 12, 14]
    assert [record.step for record in select(records, CheckpointSaved)][-1] == 14
    assert len(select(records, CheckpointSaved)) == 3
    (finished,) = select(records, RunFinished)
    assert 0 <= finished.event.metrics["accuracy"] <= 1


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_run_that_failed_goes_on_bit_for_bit(tmp_path, num_workers):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    run = make_run(model=Convolution(dropout=0.5 if num_workers == 1 else 0.0))  # threads share torch's generator
    train_here(run, straight, num_workers)
    with pytest.raises((DataError, CommunicationError), match="the power must be on"):
        train_here(run.model_copy(update={"data": Points(fail_at=9)}), broken, num_workers)
    failures = select(read_log(broken / "events.jsonl"), Failed)
    assert any("the power must be on" in failure.event.message and failure.step >= 5 for failure in failures)
    train_here(run, broken, num_workers)
    assert losses_of(broken) == losses_of(straight)
    expected, actual = read_tensors(straight, 14), read_tensors(broken, 14)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    has_worker_statistics = any(name.startswith("rank1/buffer/") for name in expected)
    assert has_worker_statistics == (num_workers > 1)


@pytest.mark.parametrize("where", ["parameter", "optimizer"])
def test_nothing_is_saved_of_replicas_that_differ(tmp_path, monkeypatch, where):
    """Between two comparisons a bit of rank 1 flips; a resume goes on from before that, though it saves more often."""

    def flip(training, batch, step):
        if training.replica.group.rank == 1 and step == 7:
            parameter = training.replica.module[0].weight
            tensor = parameter if where == "parameter" else training.replica.optimizer.state[parameter]["exp_avg"]
            tensor.detach().view(-1).view(torch.int32)[5] ^= 1 << 16  # the next sum would round the last bit away
        return learn(training, batch, step)

    learn = loop.train_step
    run, straight, flipped = make_run(hash_interval=100), tmp_path / "straight", tmp_path / "flipped"
    train_here(run, straight, 3)
    monkeypatch.setattr(loop, "train_step", flip)
    with pytest.raises(DivergenceError, match="at step 10 rank 1 differs"):
        train_here(run, flipped, 3)
    monkeypatch.undo()
    assert sorted(path.name for path in flipped.glob("checkpoints/step-*")) == ["step-00000005"]
    train_here(run, flipped, 3)
    expected, actual = read_tensors(straight, 14), read_tensors(flipped, 14)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_at_their_own_pace_use_all_samples_and_come_together(tmp_path, num_workers):
    run = make_run(sync=ASGD(), optimizer=SGD(learning_rate=0.05))
    assert train_here(run, tmp_path, num_workers) == [True] * num_workers
    records = read_log(tmp_path / "events.jsonl")
    num_samples = 2 * 50 + 4 * 12  # two epochs, of five steps each, and four steps
    ledger = json.loads((tmp_path / "checkpoints" / "step-00000014" / "state.json").read_text())["loader"]
    assert (ledger["low_water"], ledger["done_above"]) == (num_samples, [])
    steps = [record.event for record in select(records, StepFinished)]  # of the first worker
    assert (sum(step.num_samples for step in steps) == num_samples) == (num_workers == 1)
    assert steps[-1].loss < steps[0].loss
    assert [record.step for record in select(records, Evaluated)] == [4, 8, 12, 14]
    assert [int(path.name[5:]) for path in sorted(tmp_path.glob("checkpoints/step-*"))] == [5, 10, 14]
    assert select(records, RunFinished)[0].event.samples_per_s > 0
    stale = [record.event for record in select(records, StalenessMeasured)]
    assert len(stale) >= 4, "at each boundary at least"
    measured = [event for event in stale if event.mean is not None]
    assert all(0 <= event.mean <= event.largest for event in measured)
    assert max(event.largest for event in measured) == max(stale[-1].delays)
    assert (stale[-1].delays == [0]) == (num_workers == 1)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 4), (3, 2)])
def test_a_run_goes_on_at_another_number_of_workers(tmp_path, before, after):
    """With the statistics of one process out of the way, every number of workers learns the same."""

    @register("test_linear")
    class LinearModel(Model):
        def build(self, spec):
            return nn.Sequential(nn.Flatten(), nn.Linear(32, 3))

    run = make_run(model=LinearModel(), optimizer=SGD(learning_rate=0.05))
    straight, resized = tmp_path / "straight", tmp_path / "resized"
    train_here(run, straight)
    with pytest.raises((DataError, CommunicationError), match="the power must be on"):
        train_here(run.model_copy(update={"data": Points(fail_at=9)}), resized, before)
    train_here(run, resized, after)
    expected, actual = losses_of(straight), losses_of(resized)
    assert actual.keys() == expected.keys()
    assert list(actual.values()) == pytest.approx(list(expected.values()), abs=1e-6)
    for name, tensor in read_tensors(straight, 14).items():
        torch.testing.assert_close(read_tensors(resized, 14)[name], tensor, atol=1e-6, rtol=0)


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path):
    train_here(make_run(), tmp_path)
    newest = max(tmp_path.glob("checkpoints/step-*"))
    victim = next(newest.glob("*.safetensors"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 4
    victim.write_bytes(content)
    train_here(make_run(), tmp_path)
    records = read_log(tmp_path / "events.jsonl")
    (skipped,) = select(records, CheckpointSkipped)
    assert skipped.event.path == str(newest)
    assert select(records, RunStarted)[-1].event.start_step == 10
    assert newest.exists()  # nothing is lost
    assert (tmp_path / "checkpoints" / "step-00000014-2").exists()


def test_another_optimizer_or_data_is_refused(tmp_path):
    train_here(make_run(num_steps=5), tmp_path)
    with pytest.raises(SettingsError, match="the optimizer must be the checkpoint's AdamW, but got SGD"):
        train_here(make_run(optimizer=SGD()), tmp_path)
    with pytest.raises(DataError, match="num_samples must be that of the checkpoint, but got 51 instead of 50"):
        train_here(make_run(data=Points(num_samples=51)), tmp_path)


def test_a_checkpoint_holds_the_resolved_run(tmp_path):
    train_here(make_run(num_steps=5), tmp_path)
    document = json.loads(next(tmp_path.glob("checkpoints/*/state.json")).read_text())
    assert Run.model_validate(document["run"]) == make_run(num_steps=5)


def test_batch_statistics_are_pooled_on_resize(tmp_path):
    run = make_run(num_steps=5)
    train_here(run, tmp_path, num_workers=3)
    saved = read_tensors(tmp_path, 5)
    means, variances = (
        torch.stack([saved[f"rank{rank}/buffer/1.running_{moment}"] for rank in range(3)]) for moment in ("mean", "var")
    )
    assert not torch.equal(means[0], means[1])
    module = run.model.build(run.data.open().train.spec)
    restore(Checkpoint.open(tmp_path / "checkpoints" / "step-00000005"), Replica(module, run.optimizer.build(module)))
    torch.testing.assert_close(module[1].running_mean, means.mean(0))
    torch.testing.assert_close(module[1].running_var, (variances + means.square()).mean(0) - means.mean(0).square())


def test_a_full_disk_ends_the_run_with_a_clear_error(tmp_path, monkeypatch):
    def full(*_, **__):
        raise CheckpointError("checkpoint could not be written: No space left on device")

    monkeypatch.setattr("paceline.checkpoint.store.CheckpointStore.save", full)
    with pytest.raises(CheckpointError, match="No space left"):
        train_here(make_run(), tmp_path)
    failures = select(read_log(tmp_path / "events.jsonl"), Failed)
    assert failures[0].event.error == "CheckpointError"


def test_resuming_needs_no_shared_file_system(tmp_path):
    """Ranks other than 0 find no checkpoint on their host; they get it from rank 0."""
    shared, alone = tmp_path / "shared", [tmp_path / f"host{rank}" for rank in range(3)]
    train_here(make_run(), shared, 3)
    train_here(make_run(num_steps=14).model_copy(update={"num_steps": 10}), alone[0], 3)

    def worker(group):
        directory: Path = alone[group.rank]
        directory.mkdir(exist_ok=True)
        with EventLog(directory / "events.jsonl", run="r", rank=group.rank) as log:
            return train(make_run(), directory, group, log, recipe="test")

    assert LocalGroup.run(3, worker) == [True] * 3
    steps = losses_of(alone[0])
    assert set(steps) == set(range(1, 15))


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again(tmp_path):
    train_here(make_run(num_steps=5), tmp_path)
    for file in tmp_path.glob("checkpoints/*/*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="one checkpoint must be whole, but all 1 in"):
        train_here(make_run(), tmp_path)


@register("test_breaking")
class Breaking(SGD):
    """Leaves an infinity behind once the rate is low, as a step too large does."""

    def build(self, module):
        optimizer = super().build(module)
        optimizer.register_step_post_hook(
            lambda *_: optimizer.param_groups[0]["lr"] < 0.01 and module[5].bias.data[1].fill_(torch.inf)
        )
        return optimizer


@pytest.mark.parametrize(("landing", "num_workers"), [("update", 1), ("next_forward", 2)])
def test_parameters_that_are_not_finite_are_never_saved(tmp_path, landing, num_workers):
    """Without clipping nothing looks at the gradients, and the last step's loss is from before its update."""
    run = make_run(optimizer=Breaking(learning_rate=0.1), clip_norm=None, landing=landing, checkpoint_interval=0)
    with pytest.raises(NonFiniteError, match=r"must be finite to be saved, but at step 14 5\.bias is not"):
        train_here(run, tmp_path, num_workers)
    assert not list(tmp_path.glob("checkpoints/*/COMMITTED"))


def test_each_worker_step_and_micro_batch_draws_its_own_dropout(tmp_path, monkeypatch):
    def seeds_of_a_run(directory):
        seeds = []

        def derive(*parts):
            seeds.append(derive_seed(*parts))
            return seeds[-1]

        monkeypatch.setattr("paceline.training.loop.derive_seed", derive)
        train_here(make_run(num_steps=3, num_micro_batches=2), directory, 2)
        return sorted(seeds)

    seeds = seeds_of_a_run(tmp_path / "once")
    assert len(set(seeds)) == len(seeds) == 2 * 3 * 2
    assert seeds_of_a_run(tmp_path / "again") == seeds


def test_a_signal_in_an_evaluation_ends_it_on_all_workers():
    run = make_run()
    splits = run.data.open()
    torch.manual_seed(0)
    state = run.model.build(splits.train.spec).state_dict()

    def worker(group, stopped_rank):
        module = run.model.build(splits.train.spec)
        module.load_state_dict(state)
        replica = Replica(module, run.optimizer.build(module), group=group)
        judged = []
        module.register_forward_hook(lambda *_: judged.append(1))
        found = evaluate(
            replica,
            run.loss,
            splits.held_out,
            batch_size=2,
            is_stopped=lambda: group.rank == stopped_rank,
        )
        return found is not None, len(judged) > 0

    assert LocalGroup.run(3, lambda group: worker(group, 1)) == [(False, True), (False, False), (False, True)]
    assert LocalGroup.run(3, lambda group: worker(group, -1)) == [(True, True)] * 3


def fail_while_a_checkpoint_is_written(directory):
    """Raise in step 6 while that of step 5 is written; a launcher then sends SIGTERM."""
    is_failing = threading.Event()
    save, leave = CheckpointStore.save, AsyncSaver.__exit__

    def save_slowly(*arguments, **options):
        assert is_failing.wait(50)
        os.kill(os.getpid(), signal.SIGTERM)
        return save(*arguments, **options)

    def note_and_leave(*arguments):
        is_failing.set()
        leave(*arguments)

    CheckpointStore.save, AsyncSaver.__exit__ = save_slowly, note_and_leave
    run = make_run(data=Points(fail_at=8), num_steps=100, evaluate_interval=0)
    with pytest.raises(DataError), EventLog(f"{directory}/events.jsonl", run="r", rank=0) as log:
        train(run, Path(directory), LocalGroup(), log, recipe="test")
    store = CheckpointStore(Path(directory) / "checkpoints")
    return store.find_newest_valid(on_damaged=print).read_document()["step"]


def test_a_checkpoint_that_is_being_written_outlives_a_signal_after_a_failure(tmp_path):
    (result,) = run_processes(1, fail_while_a_checkpoint_is_written, {"directory": str(tmp_path)})
    assert result.exit_code == 0, result.output
    assert result.value == 5


def test_a_hangup_that_was_ignored_stops_no_training(tmp_path):
    """As under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    read = PointSource.read
    try:
        with pytest.MonkeyPatch.context() as patch, EventLog(tmp_path / "log", run="r", rank=0) as log:
            patch.setattr(PointSource, "read", lambda *_: (os.kill(os.getpid(), signal.SIGHUP), read(*_))[1])
            assert train(make_run(num_steps=3), tmp_path, LocalGroup(), log, recipe="test")
    finally:
        signal.signal(signal.SIGHUP, before)
