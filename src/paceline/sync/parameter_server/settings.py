"""The common settings of rules with servers, for servers and workers."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Size

from paceline.comm.group import Group
from paceline.compression import Codec, NoCodec, RandomK
from paceline.compression.message import message_bytes
from paceline.errors import SettingsError
from paceline.sync.parameter_server.meeting import find_missing
from paceline.sync.parameter_server.shard import ServerUpdate
from paceline.sync.rule import Rule, Traffic


class ServerSettings(Rule):
    """Settings of servers that keep the parameters, in host memory."""

    num_servers: int = Field(default=1, ge=1)
    """Number of servers that share the parameters, divided by bytes."""
    placement: Literal["beside", "own"] = "beside"
    """Place of servers: in the processes of the first workers (beside), or in their own processes (own)."""
    num_standbys: int = Field(default=0, ge=0, le=1)
    """Number of standbys of each server: another worker, on another host if there is one, makes the same updates, and
    the others go on from its state if the server is lost."""
    codec: Codec = NoCodec()
    """Codec of pushes."""
    pull_codec: Codec = NoCodec()
    """Codec of pulls, which then send differences from the worker's parameters."""

    @model_validator(mode="after")
    def _check_standbys(self) -> Self:
        if self.num_standbys and (self.placement == "own" or self.follows_first):
            raise SettingsError(
                "num_standbys must be 0 where workers cannot go on without a lost one, as with placement own, and with "
                f"several servers and backups, but got {self.num_standbys}; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_pull_codec(self) -> Self:
        if self.pull_codec.carries_momentum:
            raise SettingsError(f"pull_codec must have no momentum, but got {self.pull_codec.name!r}; take int8")
        if isinstance(self.pull_codec, RandomK) and self.pull_codec.scaled:
            raise SettingsError(
                "pull_codec must not be scaled, or the error of the parameters grows from pull to pull, but got "
                "random_k with scaled; leave it out"
            )
        return self

    @property
    def sums_samples(self) -> bool:
        """Whether pushes count by their weight; else each is a mean, and counts as one."""
        return True

    @property
    def applies_at_once(self) -> bool:
        """Whether servers apply a push on arrival; else with those of other workers."""
        return False

    @property
    def survives_loss(self) -> bool:
        """Whether servers run beside workers, who then go on from what the servers of those that are left have."""
        return self.placement == "beside" and not self.follows_first

    def fit_workers(self, num_workers: int) -> Self:
        """Return the rule with no more servers than workers."""
        return self.model_copy(update={"num_servers": min(self.num_servers, num_workers)})

    def find_missing(self, held: Sequence[Mapping[str, Any]]) -> str:
        """Return which servers are lost, or why they do not fit each other; empty if they can go on."""
        return find_missing(held, steps_together=not self.is_asynchronous)

    @property
    def follows_first(self) -> bool:
        """Whether the first server decides for the others which workers' gradients a step uses."""
        return False

    @property
    def keeps_replicas_equal(self) -> bool:
        """Always false: the servers' parameters are saved."""
        return False

    def reduce_ranks(self, group: Group, step: int) -> Sequence[int]:
        """Return this worker alone."""
        return [group.rank]

    @property
    def num_server_processes(self) -> int:
        """Number of server processes that `placement` needs."""
        return self.num_servers if self.placement == "own" else 0

    @abstractmethod
    def start_server_update(
        self, num_workers: int, optimizer: torch.optim.Optimizer, *, number: int = 0
    ) -> ServerUpdate:
        """Return the update that the server of that number applies pushes with."""

    def traffic(self, shapes: Sequence[Size], num_workers: int) -> tuple[Traffic, ...]:
        """A push and a pull a step; servers send pushes on to standbys."""
        num_bytes = 4 * sum(shape.numel() for shape in shapes)
        blocks = {str(number): shape for number, shape in enumerate(shapes)}
        push, pull = (message_bytes(codec, blocks) for codec in (self.codec, self.pull_codec))
        served = (
            Traffic("push", num_bytes, push, peers="servers"),
            Traffic("pull", num_bytes, pull, peers="servers"),
        )
        return (*served, Traffic("standby", num_bytes, push, peers="servers")) if self.num_standbys else served
