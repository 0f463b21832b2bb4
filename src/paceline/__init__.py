"""Paceline trains any PyTorch model across whatever machines you have.

Public names are loaded on first use, so that importing the package is quick and does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Batch": "paceline.data",
    "Data": "paceline.data",
    "Family": "paceline.registry",
    "Group": "paceline.comm",
    "Layout": "paceline.topology",
    "Loader": "paceline.data",
    "Loss": "paceline.replica",
    "Model": "paceline.training",
    "Objective": "paceline.training",
    "PacelineError": "paceline.errors",
    "Replica": "paceline.replica",
    "Run": "paceline.training",
    "Settings": "paceline.registry",
    "export": "paceline.exporting",
    "full_state_dict": "paceline.replica",
    "join": "paceline.comm",
    "load_latest": "paceline.replica",
    "load_model": "paceline.exporting",
    "parallelize": "paceline.parallel",
    "register": "paceline.registry",
    "save": "paceline.replica",
}
_PACKAGES = (
    "checkpoint",
    "comm",
    "compression",
    "data",
    "exporting",
    "monitor",
    "optim",
    "parallel",
    "programs",
    "recipes",
    "replica",
    "schedules",
    "simulator",
    "sync",
    "topology",
    "training",
)

__all__ = ["__version__", *sorted(_HOMES), *_PACKAGES]

if TYPE_CHECKING:
    from paceline import (
        checkpoint,
        comm,
        compression,
        data,
        exporting,
        monitor,
        optim,
        parallel,
        programs,
        recipes,
        replica,
        schedules,
        simulator,
        sync,
        topology,
        training,
    )
    from paceline.comm import Group, join
    from paceline.data import Batch, Data, Loader
    from paceline.errors import PacelineError
    from paceline.exporting import export, load_model
    from paceline.parallel import parallelize
    from paceline.registry import Family, Settings, register
    from paceline.replica import Loss, Replica, full_state_dict, load_latest, save
    from paceline.topology import Layout
    from paceline.training import Model, Objective, Run


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _PACKAGES:
        return import_module(f"paceline.{name}")
    raise AttributeError(f"module 'paceline' has no attribute {name!r}; it has: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
