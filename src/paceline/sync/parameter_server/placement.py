"""The ranks and blocks of servers, and the program of a server with its own process."""

from paceline.comm.hosts import find_hosts
from paceline.comm.rpc import RpcEndpoint
from paceline.errors import CommunicationError, SettingsError
from paceline.optim.torch_rules import updates_by_element
from paceline.sync.parameter_server.announcements import StepAnnouncements
from paceline.sync.parameter_server.blocks import ParameterBlock, partition_parameters
from paceline.sync.parameter_server.server import Server
from paceline.sync.parameter_server.settings import ServerSettings
from paceline.sync.parameter_server.shard import Shard
from paceline.sync.parameter_server.standby import Standbys, choose_standby
from paceline.sync.parameter_server.wire_format import make_wire_formats
from paceline.sync.synchroniser import WorkerContext


class ServerPlacement:
    """The ranks and blocks of each server, and the routes between workers and servers.

    Args:
        rule: Settings of the rule.
        context: Context of a worker, or of a server with its own process; then its group is that of all workers.

    Raises:
        SettingsError: There are too few processes for the servers.
    """

    def __init__(self, rule: ServerSettings, context: WorkerContext, num_workers: int | None = None) -> None:
        self._rule, self._context = rule, context
        self.num_workers = num_workers or context.group.size
        self.everybody = context.group
        """Group of all workers, and of servers with their own processes, which come last."""
        first = 0
        if rule.placement == "own":
            if context.world is None:
                raise SettingsError(
                    f"servers with their own processes must be started with the workers, but there are none for "
                    f"sync {rule.name}; start them, or take placement beside"
                )
            self.everybody, first = context.world, self.num_workers
        self.servers = list(range(first, first + rule.num_servers))
        """Ranks of the servers."""
        if self.servers[-1] >= self.everybody.size:
            raise SettingsError(
                f"num_servers must be at most the number of processes for them, but got {rule.num_servers} for "
                f"{self.everybody.size - first}; lower it, or start more"
            )
        self.routes = [(worker, server) for worker in range(self.num_workers) for server in self.servers]
        self.blocks_by_server = self.partition(rule.num_servers)
        """Blocks of each server."""

    @property
    def body_bytes(self) -> dict[int, tuple[int, int]]:
        """Sizes of pushes and pulls, by server's rank."""
        rule, num_groups = self._rule, len(self._context.optimizer.param_groups)
        formats = (
            make_wire_formats(rule.codec, rule.pull_codec, blocks, num_groups, self._context.seed)
            for blocks in self.blocks_by_server
        )
        return {
            server: (push.num_bytes, pull.num_bytes) for server, (push, pull) in zip(self.servers, formats, strict=True)
        }

    def partition(self, num_servers: int) -> list[list[ParameterBlock]]:
        """Return the blocks of each of so many servers."""
        may_cut = updates_by_element(self._context.optimizer)
        return partition_parameters(dict(self._context.parameters), num_servers, may_cut=may_cut)

    def number_of(self, rank: int) -> int | None:
        """Return the number of a rank's server, if it runs one."""
        return self.servers.index(rank) if rank in self.servers else None

    def make_server(self, number: int) -> Server:
        """Return the server of that number; its parameters are the context's."""
        rule, context = self._rule, self._context
        shard = Shard(self.blocks_by_server[number], context.parameters, context.optimizer)
        server_update = rule.start_server_update(self.num_workers, context.optimizer, number=number)
        return Server(
            shard,
            server_update,
            range(self.num_workers),
            rule.codec,
            rule.pull_codec,
            context.seed,
            stops_at_loss=context.group.is_supervised,
        )

    def open_standbys(self, server: Server | None) -> Standbys | None:
        """Connect servers to their standbys, if there are any; `server` is this process's own, if any."""
        if not self._rule.num_standbys or self.everybody.size == 1:
            return None
        hosts = find_hosts(self.everybody)
        chosen = {number: (rank, choose_standby(rank, hosts)) for number, rank in enumerate(self.servers)}
        places = {number: (rank, standby) for number, (rank, standby) in chosen.items() if standby is not None}
        return Standbys(self.everybody, places, server, self.make_server)

    def open_announcements(self, server: Server | None) -> StepAnnouncements | None:
        """Connect the first server to the others, if the rule needs it; `server` is this process's own, if any."""
        return StepAnnouncements(self.everybody, self.servers, server) if self._rule.follows_first else None


def serve(rule: ServerSettings, context: WorkerContext, num_workers: int) -> None:
    """Run a server in its own process, until all workers have left.

    Args:
        rule: Settings of the rule, the same as the workers'.
        context: Model and optimizer, built like the workers'; `world` is the group of all processes, workers first.
        num_workers: Number of workers among them.

    Raises:
        CommunicationError: Workers were lost.
    """
    placement = ServerPlacement(rule, context, num_workers)
    number = placement.number_of(placement.everybody.rank)
    if number is None:
        return
    server = placement.make_server(number)
    announcements = placement.open_announcements(server)  # before pushes can come
    endpoint = RpcEndpoint(placement.everybody, placement.routes, server, rule.name, placement.body_bytes)
    endpoint.close()
    if announcements is not None:
        announcements.close()
    if server.lost:
        lost = "; ".join(f"rank {rank}: {error}" for rank, error in sorted(server.lost.items()))
        raise CommunicationError(f"server {number} lost workers: {lost}")
