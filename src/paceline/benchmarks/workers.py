"""Where the workers of a benchmark run: as processes of this machine, or in hosts of a netlab."""

import inspect
from collections.abc import Callable
from typing import Any, Self

from pydantic import Field, model_validator

from paceline.launch.processes import run_in_processes
from paceline.registry import Settings
from paceline.testing.netlab import Netlab
from paceline.topology.units import BytesPerSecond

_TIMEOUT_S = 6 * 3600.0


class Workers(Settings):
    """The workers of a benchmark."""

    num_workers: int = Field(default=2, ge=1)
    """Number of workers, over all hosts."""
    num_hosts: int = Field(default=1, ge=1)
    """Number of hosts that workers are spread over evenly: network namespaces with limited links; 1: this machine."""
    bandwidth: BytesPerSecond | None = None
    """Bandwidth of each host's link, in each direction, such as 100mbit."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_workers % self.num_hosts:
            raise ValueError(
                f"num_workers must be a multiple of num_hosts, but got {self.num_workers} on {self.num_hosts}; "
                "give each host as many"
            )
        if (self.num_hosts > 1) != (self.bandwidth is not None):
            raise ValueError(
                f"bandwidth must be given for several hosts and no others, but got {self.bandwidth} for "
                f"num_hosts={self.num_hosts}; give both, or none"
            )
        return self

    def describe(self) -> str:
        """Return what links the workers, in words."""
        if self.bandwidth is None:
            return f"{self.num_workers} workers on one host"
        return f"{self.num_hosts} hosts at {8 * self.bandwidth / 1e6:g} Mbit/s"

    def start(self, function: Callable[..., Any], *arguments: Any) -> dict[int, Any]:
        """Run `function` in every worker and return what each returned, by rank; on hosts, all goes through JSON.

        Raises:
            RuntimeError: One of them failed; on a host, the message has its output.
        """
        if self.bandwidth is None:
            return run_in_processes(self.num_workers, function, *arguments)
        named = inspect.signature(function).bind(*arguments).arguments
        with Netlab(self.num_hosts, 8 * self.bandwidth) as lab:
            results = lab.run(function, named, ranks_per_host=self.num_workers // self.num_hosts, timeout_s=_TIMEOUT_S)
        failed = [result for result in results if result.exit_code != 0]
        if failed:
            # A worker that was killed or raised takes the others with it, who can only say that it is gone.
            first = min(failed, key=lambda result: "lost its peers" in result.output)
            raise RuntimeError(f"rank {first.rank} must end well, but got {first.exit_code}:\n{first.output}")
        return {result.rank: result.value for result in results}
