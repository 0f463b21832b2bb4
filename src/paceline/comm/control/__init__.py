"""Layer 3: authenticated control traffic: connections, the launcher's server, and a store of torch's over them."""

from paceline.comm.control.access import ControlAccess
from paceline.comm.control.connection import ControlClient, ControlConnection
from paceline.comm.control.errors import ControlError, ControlTimeoutError, EpochBrokenError, EpochOverError
from paceline.comm.control.key_values import KeyValues
from paceline.comm.control.request_log import RequestLog, read_requests
from paceline.comm.control.server import ControlServer, ServerLimits
from paceline.comm.control.store import ControlStore, store_of_epoch

__all__ = [
    "ControlAccess",
    "ControlClient",
    "ControlConnection",
    "ControlError",
    "ControlServer",
    "ControlStore",
    "ControlTimeoutError",
    "EpochBrokenError",
    "EpochOverError",
    "KeyValues",
    "RequestLog",
    "ServerLimits",
    "read_requests",
    "store_of_epoch",
]
