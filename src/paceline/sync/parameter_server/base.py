"""What all rules with servers are: their settings, a worker's side, and a server's."""

from paceline.sync.parameter_server.settings import ServerSettings
from paceline.sync.parameter_server.stage import serve
from paceline.sync.parameter_server.worker import ServedWorker
from paceline.sync.synchroniser import Site, Synchroniser


class ServedRule(ServerSettings):
    """A method whose parameters are kept by servers."""

    def serve(self, site: Site, num_workers: int) -> None:
        """Be a server with a process of its own."""
        serve(self, site, num_workers)

    def start_synchroniser(self, site: Site) -> Synchroniser:
        """Return the worker's side; the servers beside workers are started with it."""
        return ServedWorker(self, site)
