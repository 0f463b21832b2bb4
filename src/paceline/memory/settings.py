"""Settings of memory."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from paceline.errors import SettingsError
from paceline.registry import Settings
from paceline.topology import parse_size

Recompute = Literal["none", "full", "selective"]
"""Activations of a block that backward computes again: none, all but its input, or all but the results of matrix
products, convolutions and attention."""


def _parse_budget(value: Any) -> Any:
    try:
        return int(parse_size(value))
    except SettingsError as error:
        raise ValueError(
            f"must be none, full, selective or a budget such as 500MB or 2GiB, but got {value!r}; choose one"
        ) from error


Budget = Annotated[int, Field(gt=0), BeforeValidator(_parse_budget)]
"""Number of bytes; as text with a unit."""


class Memory(Settings):
    """How memory is saved, and whether a run is checked to fit before it starts."""

    recompute: Recompute | Budget = "none"
    """Activations that backward computes again: none; full, of every block; selective, all but the results of matrix
    products, convolutions and attention; or a budget in bytes (500MB), which is met with the least recomputation."""
    offload: Literal["none", "activations", "optimizer", "both", "parameters"] = "none"
    """State that waits in CPU memory until it is needed: activations, from forward to backward; optimizer state, which
    the CPU then updates; both; or parameters, with their gradients and the optimizer's state: the GPU gets those of one
    operation at a time, and workers exchange gradients between CPUs. For GPUs."""
    check: bool = True
    """Whether a run that needs more memory than available is refused before it starts."""

    @property
    def offloads_activations(self) -> bool:
        """Whether activations wait in CPU memory."""
        return self.offload in ("activations", "both")

    @property
    def offloads_parameters(self) -> bool:
        """Whether parameters, and all that follows from them, live in CPU memory."""
        return self.offload == "parameters"

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's state lives in CPU memory."""
        return self.offload in ("optimizer", "both")
