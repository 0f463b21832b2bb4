"""Where servers run, what each of them holds, and the program of one that has a process of its own."""

from paceline.comm.exchange import Exchange
from paceline.errors import CommunicationError, SettingsError
from paceline.optim.torch_rules import updates_by_element
from paceline.sync.parameter_server.pieces import share_out
from paceline.sync.parameter_server.server import Server
from paceline.sync.parameter_server.settings import ServerSettings
from paceline.sync.parameter_server.shard import Shard
from paceline.sync.parameter_server.verdicts import Verdicts
from paceline.sync.parameter_server.wire import make_wires
from paceline.sync.synchroniser import Site


class Stage:
    """Who talks to whom.

    Args:
        rule: Settings.
        site: A worker, or a server with a process of its own; then its group is all there is of workers.

    Raises:
        SettingsError: There are not enough processes for the servers.
    """

    def __init__(self, rule: ServerSettings, site: Site, num_workers: int | None = None) -> None:
        self._rule, self._site = rule, site
        self.num_workers = num_workers or site.group.size
        self.everybody = site.group
        """Workers, and servers if they have processes of their own: then these come last."""
        first = 0
        if rule.placement == "own":
            if site.world is None:
                raise SettingsError(
                    f"servers with processes of their own must be started with the workers, but there are none for "
                    f"sync {rule.name}; start them, or take placement beside"
                )
            self.everybody, first = site.world, self.num_workers
        self.servers = list(range(first, first + rule.num_servers))
        """Their ranks."""
        if self.servers[-1] >= self.everybody.size:
            raise SettingsError(
                f"num_servers must be at most the number of processes for them, but got {rule.num_servers} for "
                f"{self.everybody.size - first}; lower it, or start more"
            )
        self.routes = [(worker, server) for worker in range(self.num_workers) for server in self.servers]
        may_cut = updates_by_element(site.optimizer)
        self.shares = share_out(dict(site.parameters), rule.num_servers, may_cut=may_cut)
        """What each server holds."""

    @property
    def body_bytes(self) -> dict[int, tuple[int, int]]:
        """Size of pushes and pulls, by server's rank."""
        rule, num_groups = self._rule, len(self._site.optimizer.param_groups)
        wires = (make_wires(rule.codec, rule.pull_codec, pieces, num_groups, self._site.seed) for pieces in self.shares)
        return {
            server: (push.num_bytes, pull.num_bytes) for server, (push, pull) in zip(self.servers, wires, strict=True)
        }

    def number_of(self, rank: int) -> int | None:
        """Return which server a rank runs, if any."""
        return self.servers.index(rank) if rank in self.servers else None

    def make_server(self, number: int) -> Server:
        """Return the server of that number; its parameters are the site's."""
        rule, site = self._rule, self._site
        shard = Shard(self.shares[number], site.parameters, site.optimizer)
        landing = rule.start_landing(self.num_workers, site.optimizer, number=number)
        return Server(shard, landing, range(self.num_workers), rule.codec, rule.pull_codec, site.seed)

    def open_verdicts(self, server: Server | None) -> Verdicts | None:
        """Let the first server speak to the others, if the rule wants it; `server` is this process's own, if any."""
        return Verdicts(self.everybody, self.servers, server) if self._rule.follows_first else None


def serve(rule: ServerSettings, site: Site, num_workers: int) -> None:
    """Be a server with a process of its own, until all workers have left.

    Args:
        rule: Settings, the workers' own.
        site: A model and an optimizer as the workers build them; `world` is all processes, workers first, as theirs is.
        num_workers: How many of them are workers.

    Raises:
        CommunicationError: Workers were lost.
    """
    stage = Stage(rule, site, num_workers)
    number = stage.number_of(stage.everybody.rank)
    if number is None:
        return
    server = stage.make_server(number)
    verdicts = stage.open_verdicts(server)  # before pushes can come
    exchange = Exchange(stage.everybody, stage.routes, server, rule.name, stage.body_bytes)
    exchange.close()
    if verdicts is not None:
        verdicts.close()
    if server.lost:
        lost = "; ".join(f"rank {rank}: {error}" for rank, error in sorted(server.lost.items()))
        raise CommunicationError(f"server {number} lost workers: {lost}")
