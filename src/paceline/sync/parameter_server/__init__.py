"""Layer 5: rules whose servers keep the parameters, and the servers."""

from paceline.sync.parameter_server.asgd import ASGD
from paceline.sync.parameter_server.ssp import SSP
from paceline.sync.parameter_server.synchronous import ParameterServer

__all__ = ["ASGD", "SSP", "ParameterServer"]
