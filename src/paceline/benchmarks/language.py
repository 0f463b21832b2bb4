"""A small language model on real text, and ways to train it on several workers: Paceline's rules, and torch's."""

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from paceline.benchmarks.problems import power_sgd_module
from paceline.comm import Group
from paceline.data import Batch, Loader, Source, Splits
from paceline.data.text import Text
from paceline.recipes.transformer_lm.model import TransformerLM
from paceline.registry import Settings
from paceline.replica.codec_chooser import CodecChange
from paceline.replica.replica import Replica
from paceline.schedules import Cosine, DecaySchedule
from paceline.sync import Rule

_SEEDING = threading.Lock()  # workers that are threads share torch's generator


class LanguageTask(Settings):
    """What is learnt: the Transformer recipe's model, with about 1M parameters, on its text."""

    width: int = 128
    num_layers: int = 5
    num_heads: int = 4
    sequence_length: int = 128
    samples_per_worker: int = Field(default=5, ge=1)
    """In a step."""
    learning_rate: float = Field(default=3e-3, gt=0)
    """Learning rate of AdamW."""
    schedule: DecaySchedule = Cosine(warmup_steps=20)
    """Schedule of the learning rate over `num_steps`."""
    num_steps: int = Field(default=140, ge=1)
    """Number of steps of a whole training."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest gradient norm: of the averaged gradient where gradients are averaged, else of each worker's own."""
    max_bytes: int = 8_000_000
    """Text that is read."""
    held_out_samples: int = Field(default=64, ge=1)
    """That the loss is judged on, from all over the held-out text."""
    seed: int = 0
    """Random seed of initial weights and data order."""

    def open(self) -> Splits:
        """Open the text."""
        return Text(sequence_length=self.sequence_length, max_bytes=self.max_bytes).open()

    def build(self, splits: Splits) -> nn.Module:
        """Return the model as every side begins with it."""
        settings = TransformerLM(width=self.width, num_layers=self.num_layers, num_heads=self.num_heads)
        with _SEEDING:
            torch.manual_seed(self.seed)
            return settings.build(splits.train.spec)

    def load(self, splits: Splits, group: Group) -> Loader:
        """Return this worker's batches, the same for every side."""
        return Loader(splits.train, self.samples_per_worker * group.size, group=group, seed=self.seed)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of every side."""
        return torch.optim.AdamW(module.parameters(), lr=self.learning_rate, fused=True)

    def set_rate(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Set the learning rate of a step."""
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate * self.schedule.factor(step, self.num_steps)

    def loss(self, model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
        """Return the mean loss of a batch."""
        return F.cross_entropy(model(batch.inputs).flatten(0, -2), batch.targets.flatten())

    @torch.no_grad()
    def judge(self, module: nn.Module, splits: Splits, group: Group) -> float:
        """Return the held-out loss of `module`, the same on every worker; each judges a part of the samples."""
        assert isinstance(splits.held_out, Source)
        chosen = np.linspace(0, len(splits.held_out) - 1, self.held_out_samples).astype(np.int64)
        mine = chosen[group.rank :: group.size]
        total = 0.0
        for index in mine:
            inputs, targets = splits.held_out.read(index[None])
            total += float(F.cross_entropy(module(inputs).flatten(0, -2), targets.flatten()))
        losses: list[float] = group.gather_documents(total, name="held-out loss")
        return sum(losses) / len(chosen)


@dataclass
class Side:
    """One way to train.

    Args:
        module: Module of this worker.
        optimizer: Optimizer of the module's parameters.
        step: Takes the step of the number given with a batch, and returns the bytes that this worker sent, by the price
            of the exchange; 0 where nobody says.
        consensus: Inside it parameters of `module` are those that all workers together stand for.
        close: Function that releases connections and threads.
        begin_anew: Function that starts a rule from the loaded weights and optimizer state.
        take_codec_changes: Function that returns the changes of codec auto since its last call.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[int, Batch], int]
    consensus: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    close: Callable[[], None] = lambda: None
    begin_anew: Callable[[], None] = lambda: None
    take_codec_changes: Callable[[], list[CodecChange]] = list

    def save(self, path: str) -> None:
        """Write weights and optimizer state."""
        torch.save([self.module.state_dict(), self.optimizer.state_dict()], path)

    def load(self, path: str) -> None:
        """Go on from what a side has saved."""
        module, optimizer = torch.load(path, weights_only=True)
        self.module.load_state_dict(module)
        self.optimizer.load_state_dict(optimizer)
        self.begin_anew()


def make_rule_side(task: LanguageTask, splits: Splits, group: Group, rule: Rule) -> Side:
    """Return a Replica with a synchronisation rule."""
    module = task.build(splits)
    optimizer = task.make_optimizer(module)
    replica = Replica(
        module, optimizer, group=group, sync=rule.fit_length(task.num_steps), clip_norm=task.clip_norm, hash_interval=0
    )

    def step(number: int, batch: Batch) -> int:
        task.set_rate(optimizer, number)
        replica.backward(task.loss(replica, batch), weight=batch.targets.numel())
        return replica.update().wire_bytes

    changes = replica.state.take_codec_changes
    return Side(module, optimizer, step, replica.consensus, replica.close, replica.begin_anew, changes)


def make_plain_side(task: LanguageTask, splits: Splits) -> Side:
    """Return a loop that exchanges nothing."""
    module = task.build(splits)
    optimizer = task.make_optimizer(module)
    return Side(module, optimizer, _make_step(task, module, module, optimizer))


def make_ddp_side(task: LanguageTask, splits: Splits) -> Side:
    """Return DistributedDataParallel at its best: gradients are views of its buckets."""
    module = task.build(splits)
    optimizer = task.make_optimizer(module)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    return Side(module, optimizer, _make_step(task, module, model, optimizer))


def make_ddp_power_sgd_side(task: LanguageTask, splits: Splits) -> Side:
    """Return DistributedDataParallel with torch's own PowerSGD hook, of rank 4, from the third step on."""
    module = task.build(splits)
    optimizer = task.make_optimizer(module)
    return Side(module, optimizer, _make_step(task, module, power_sgd_module(module), optimizer))


def make_post_local_side(task: LanguageTask, splits: Splits, period: int) -> Side:
    """Return torch's PostLocalSGD, local from the first step on: parameters are averaged every `period` steps."""
    from torch.distributed.optim import PostLocalSGDOptimizer  # importing it warns, which concerns nobody else

    module = task.build(splits)
    optimizer = task.make_optimizer(module)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    state = PostLocalSGDState(None, None, start_localSGD_iter=0, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_localSGD_hook)
    # Its first average is after step `warmup_steps`, counted from 0.
    averager = PeriodicModelAverager(period, warmup_steps=period - 1)
    return Side(module, optimizer, _make_step(task, module, model, PostLocalSGDOptimizer(optimizer, averager)))


def _make_step(
    task: LanguageTask, module: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[int, Batch], int]:
    def step(number: int, batch: Batch) -> int:
        task.set_rate(optimizer, number)
        task.loss(model, batch).backward()
        nn.utils.clip_grad_norm_(module.parameters(), task.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return 0

    return step
