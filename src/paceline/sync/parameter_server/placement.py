"""Where servers run, what each of them holds, and the program of one that has a process of its own."""

from paceline.comm.rpc import RpcEndpoint
from paceline.errors import CommunicationError, SettingsError
from paceline.optim.torch_rules import updates_by_element
from paceline.sync.parameter_server.announcements import StepAnnouncements
from paceline.sync.parameter_server.blocks import partition_parameters
from paceline.sync.parameter_server.server import Server
from paceline.sync.parameter_server.settings import ServerSettings
from paceline.sync.parameter_server.shard import Shard
from paceline.sync.parameter_server.wire_format import make_wire_formats
from paceline.sync.synchroniser import WorkerContext


class ServerPlacement:
    """Which ranks run servers, which parameters each holds, and who talks to whom.

    Args:
        rule: Settings.
        context: A worker's, or that of a server with a process of its own; then its group is all there is of workers.

    Raises:
        SettingsError: There are not enough processes for the servers.
    """

    def __init__(self, rule: ServerSettings, context: WorkerContext, num_workers: int | None = None) -> None:
        self._rule, self._context = rule, context
        self.num_workers = num_workers or context.group.size
        self.everybody = context.group
        """Workers, and servers if they have processes of their own: then these come last."""
        first = 0
        if rule.placement == "own":
            if context.world is None:
                raise SettingsError(
                    f"servers with processes of their own must be started with the workers, but there are none for "
                    f"sync {rule.name}; start them, or take placement beside"
                )
            self.everybody, first = context.world, self.num_workers
        self.servers = list(range(first, first + rule.num_servers))
        """Their ranks."""
        if self.servers[-1] >= self.everybody.size:
            raise SettingsError(
                f"num_servers must be at most the number of processes for them, but got {rule.num_servers} for "
                f"{self.everybody.size - first}; lower it, or start more"
            )
        self.routes = [(worker, server) for worker in range(self.num_workers) for server in self.servers]
        may_cut = updates_by_element(context.optimizer)
        self.blocks_by_server = partition_parameters(dict(context.parameters), rule.num_servers, may_cut=may_cut)
        """What each server holds."""

    @property
    def body_bytes(self) -> dict[int, tuple[int, int]]:
        """Size of pushes and pulls, by server's rank."""
        rule, num_groups = self._rule, len(self._context.optimizer.param_groups)
        formats = (
            make_wire_formats(rule.codec, rule.pull_codec, blocks, num_groups, self._context.seed)
            for blocks in self.blocks_by_server
        )
        return {
            server: (push.num_bytes, pull.num_bytes) for server, (push, pull) in zip(self.servers, formats, strict=True)
        }

    def number_of(self, rank: int) -> int | None:
        """Return which server a rank runs, if any."""
        return self.servers.index(rank) if rank in self.servers else None

    def make_server(self, number: int) -> Server:
        """Return the server of that number; its parameters are the context's."""
        rule, context = self._rule, self._context
        shard = Shard(self.blocks_by_server[number], context.parameters, context.optimizer)
        server_update = rule.start_server_update(self.num_workers, context.optimizer, number=number)
        return Server(shard, server_update, range(self.num_workers), rule.codec, rule.pull_codec, context.seed)

    def open_announcements(self, server: Server | None) -> StepAnnouncements | None:
        """Let the first server speak to the others, if the rule wants it; `server` is this process's own, if any."""
        return StepAnnouncements(self.everybody, self.servers, server) if self._rule.follows_first else None


def serve(rule: ServerSettings, context: WorkerContext, num_workers: int) -> None:
    """Be a server with a process of its own, until all workers have left.

    Args:
        rule: Settings, the workers' own.
        context: A model and an optimizer as the workers build them; `world` is all processes, workers first, as theirs
            is.
        num_workers: How many of them are workers.

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
