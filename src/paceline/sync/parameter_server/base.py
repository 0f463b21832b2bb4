"""What all rules with servers are: their settings, a worker's side, and a server's."""

from paceline.sync.parameter_server.placement import serve
from paceline.sync.parameter_server.settings import ServerSettings
from paceline.sync.parameter_server.worker import ServedWorker
from paceline.sync.synchroniser import Synchroniser, WorkerContext


class ServedRule(ServerSettings):
    """A method whose parameters are kept by servers."""

    def serve(self, context: WorkerContext, num_workers: int) -> None:
        """Be a server with a process of its own."""
        serve(self, context, num_workers)

    def start_synchroniser(self, context: WorkerContext) -> Synchroniser:
        """Return the worker's side; the servers beside workers are started with it."""
        return ServedWorker(self, context)
