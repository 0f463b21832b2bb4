"""The common base of rules with servers: their settings, a worker's side, and a server's."""

from paceline.sync.parameter_server.placement import serve
from paceline.sync.parameter_server.settings import ServerSettings
from paceline.sync.parameter_server.worker import ServedWorker
from paceline.sync.synchroniser import Synchroniser, WorkerContext


class ServedRule(ServerSettings):
    """A rule whose servers keep the parameters."""

    @property
    def copies_first_parameters(self) -> bool:
        """Always true: the servers begin with them."""
        return True

    def serve(self, context: WorkerContext, num_workers: int) -> None:
        """Run a server in its own process."""
        serve(self, context, num_workers)

    def start_synchroniser(self, context: WorkerContext) -> Synchroniser:
        """Return the worker's side, and start the servers in workers' processes with it."""
        return ServedWorker(self, context)
