"""The synchronous parameter server, with backup workers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Size

from paceline.comm.group import Group
from paceline.comm.hosts import find_hosts
from paceline.errors import SettingsError
from paceline.registry import register
from paceline.sync.parameter_server.aggregation import StepAggregation
from paceline.sync.parameter_server.base import ServedRule
from paceline.sync.parameter_server.clocks import FollowedQuorum, Quorum
from paceline.sync.parameter_server.host import ServedHost
from paceline.sync.parameter_server.shard import ServerUpdate
from paceline.sync.rule import Traffic
from paceline.sync.synchroniser import Synchroniser, WorkerContext


@register("parameter_server")
class ParameterServer(ServedRule):
    """Synchronous SGD by parameter servers (Li et al. 2014), with backup workers (Chen et al. 2016).

    In each step the servers sum the gradients of all workers, weighted by samples, take one step of their optimizer,
    and send the parameters out. Without codecs and backups it equals `EveryStep`, up to the order of summation. Wire: a
    push and a pull of all parameters a step for each worker, so each of s servers carries 2n/s times their bytes.

    Each worker clips its own gradient before it pushes: that bounds every worker's part, not the norm of the mean, as
    `EveryStep` does. The difference from Chen et al.: gradients that come too late are not dropped with their
    samples, which are handed out again.
    """

    num_backups: int = Field(default=0, ge=0)
    """Number of workers that a step need not wait for: it uses the first n - num_backups gradients, weighted by their
    samples, and drops later ones. If it is not 0, workers take samples at their own pace. The first of several servers
    decides, so that all use those of the same workers."""

    host_size: int | None = Field(default=1, ge=1)
    """Number of workers of a host, in the order of ranks, that sum their gradients first, so that one of them
    talks to the servers for all; None: those on one machine. 1: each worker talks for itself."""

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        if self.host_size != 1 and (self.num_backups or self.num_standbys or self.placement == "own"):
            raise SettingsError(
                f"host_size must be 1 with backup workers, standbys or placement own, but got "
                f"{self.host_size}; leave it out"
            )
        return self

    @property
    def is_asynchronous(self) -> bool:
        """Whether there are backup workers: late ones are left behind."""
        return self.num_backups > 0

    @property
    def follows_first(self) -> bool:
        """Whether there are backup workers and several servers, which would each use the gradients of others."""
        return self.num_backups > 0 and self.num_servers > 1

    @property
    def survives_loss(self) -> bool:
        """Whether servers run beside workers, and each worker talks to them for itself."""
        return super().survives_loss and self.host_size == 1

    def fit_workers(self, num_workers: int) -> Self:
        """Return the rule with no more servers, and fewer backups, than workers."""
        fitted = super().fit_workers(num_workers)
        return fitted.model_copy(update={"num_backups": min(self.num_backups, num_workers - 1)})

    @property
    def carries_momentum(self) -> bool:
        """Whether the codec corrects momentum."""
        return self.codec.carries_momentum

    @property
    def runs_optimizer(self) -> bool:
        """Always false: the servers' optimizer runs."""
        return False

    def reduce_ranks(self, group: Group, step: int) -> Sequence[int]:
        """Return the workers of this worker's host."""
        return next(ranks for ranks in self._hosts(group) if group.rank in ranks)

    def start_synchroniser(self, context: WorkerContext) -> Synchroniser:
        """Return the worker's side; behind the first worker of its host if there are several."""
        hosts = self._hosts(context.group)
        if len(hosts) == context.group.size:
            return super().start_synchroniser(context)
        return ServedHost(self, context, hosts)

    def traffic(self, shapes: Sequence[Size], num_workers: int) -> tuple[Traffic, ...]:
        """A push and a pull a step for each host, an all-reduce and a broadcast inside it: the mean over workers."""
        served = super().traffic(shapes, num_workers)
        size = min(self.host_size or num_workers, num_workers)
        if size == 1:
            return served
        num_bytes = served[0].num_bytes
        inside = Traffic("all_reduce", num_bytes, round(2 * (size - 1) / size * num_bytes), peers="host")
        handed_on = Traffic("broadcast", num_bytes, round((size - 1) / size * num_bytes), peers="host")
        return (inside, handed_on, *(replace(each, wire_bytes=round(each.wire_bytes / size)) for each in served))

    def _hosts(self, group: Group) -> list[list[int]]:
        if self.host_size is None:
            return find_hosts(group)
        ranks = range(group.size)
        return [list(ranks[first : first + self.host_size]) for first in ranks[:: self.host_size]]

    def start_server_update(
        self, num_workers: int, optimizer: torch.optim.Optimizer, *, number: int = 0
    ) -> ServerUpdate:
        """Return the update that sums a step's pushes.

        Raises:
            SettingsError: There are no more workers than backups.
        """
        if num_workers <= self.num_backups:
            raise SettingsError(
                f"num_backups must be less than the number of workers, but got {self.num_backups} of {num_workers}; "
                "lower it, or start more workers"
            )
        clocks = FollowedQuorum() if self.follows_first and number else Quorum(self.num_backups)
        return StepAggregation(clocks, lambda shard, mean: shard.step(mean.values, mean.used, mean.rates))
