"""A worker's membership as a script, over a store: who is lost, and who joins, is known beforehand."""

import json
import os
import signal
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from paceline.comm.join import _open_cpu_group
from paceline.comm.local_group import LocalGroup
from paceline.elastic.facts import View
from paceline.elastic.member import Evicted, Member
from paceline.errors import CommunicationError


@dataclass
class Epoch:
    """One change of the workers.

    Args:
        names: Workers from then on.
        at_step: Step after which the change is pending; None if it follows a loss.
    """

    names: list[str]
    at_step: int | None = None


class ScriptedMember(Member):
    """The membership of one worker, whose every change is known.

    Args:
        store: Store that outlives every worker.
        name: Name of this worker.
        epochs: Workers of each epoch, beginning with the first.
        transport: See `paceline.join`.
    """

    def __init__(self, store, name, epochs, transport="auto"):
        self._store, self._name, self._epochs, self._transport = store, name, epochs, transport
        self._epoch = -1
        self._names: list[str] = []
        self.step = 0
        self.views: list[View] = []
        self.reports: list[tuple[int, bool]] = []
        joins = next(number for number, epoch in enumerate(epochs) if name in epoch.names)
        if joins:
            self._epoch = joins - 1
            self._names = epochs[joins - 1].names

    def report_loss(self, step, *, is_whole, reason, accused=()):
        self.reports.append((step, is_whole))
        self._vote(step if is_whole else -1)

    def change_is_pending(self):
        self.step += 1
        next_epoch = self._epochs[self._epoch + 1] if self._epoch + 1 < len(self._epochs) else None
        return next_epoch is not None and next_epoch.at_step is not None and self.step >= next_epoch.at_step

    def at_boundary(self, step):
        self._vote(step)

    def _vote(self, step):
        self._store.set(f"vote/{self._epoch + 1}/{self._name}", json.dumps(step))

    def next_view(self, timeout_s):
        before, self._epoch = self._names, self._epoch + 1
        if self._epoch >= len(self._epochs):
            raise CommunicationError("there is no other epoch")
        names = self._epochs[self._epoch].names
        if self._name not in names:
            raise Evicted("the script ends here for this worker")
        step, ranked = -1, [(0, name) for name in names]
        if before:
            stayed = [name for name in before if name in names]
            keys = [f"vote/{self._epoch}/{name}" for name in stayed]
            self._store.wait(keys, timedelta(seconds=20))
            votes = {name: json.loads(self._store.get(key)) for name, key in zip(stayed, keys, strict=True)}
            step = max(votes.values())
            if step < 0:
                raise CommunicationError("no state is whole")
            ranked = sorted((-votes.get(name, -2), name) for name in names)
        self._names = [name for _, name in ranked]
        self.views.append(
            View(
                epoch=self._epoch,
                rank=self._names.index(self._name),
                size=len(names),
                names=tuple(self._names),
                previous=tuple(before.index(name) if name in before else None for name in self._names),
                step=step,
                reason="as in the script",
            )
        )
        return self.views[-1]

    def open_group(self, view, device, timeout_s, transport):
        if view.size == 1:
            return LocalGroup(epoch=view.epoch)
        prefix = dist.PrefixStore(f"epoch{view.epoch}", self._store)
        try:
            return _open_cpu_group(
                prefix, view.rank, view.size, timeout_s=timeout_s, epoch=view.epoch, transport=self._transport
            )
        except RuntimeError as error:
            raise CommunicationError(str(error)) from error


def die():
    """End this process as a power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)
