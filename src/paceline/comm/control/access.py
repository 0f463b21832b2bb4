"""Access to a run's control server: its address and the run's token, given to those who may take part."""

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import SettingsError, storing

_ADDRESS, _TOKEN = "PACELINE_CONTROL_ADDRESS", "PACELINE_CONTROL_TOKEN"
_TOKEN_BYTES = 32


@dataclass(frozen=True)
class ControlAccess:
    """Address and token of a control server.

    Args:
        host: Name or IP address of the machine.
        port: Port.
        token: Secret of the run, 32 bytes: who knows it may do everything that a worker may.
    """

    host: str
    port: int
    token: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.token) != _TOKEN_BYTES:
            raise SettingsError(
                f"a token must have {_TOKEN_BYTES} bytes, but got {len(self.token)}; copy the launcher's"
            )

    @property
    def address(self) -> str:
        """Host and port as text."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def environment(self) -> dict[str, str]:
        """Return the environment variables by which a worker finds the server, the same for all workers of a run."""
        return {
            _ADDRESS: self.address,
            _TOKEN: self.token.hex(),
            "GLOO_ENABLE_STORE_V2_API": "1",  # it asks once for the addresses of all peers, not twice for each
        }

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "ControlAccess | None":
        """Return the access that a launcher gave; None if it gave none."""
        if _ADDRESS not in environment:
            return None
        return cls._parse(environment[_ADDRESS], environment.get(_TOKEN, ""), "the environment")

    def save(self, path: Path) -> None:
        """Write a file that only this user can read, in place of any that is there.

        Raises:
            StorageError: The file cannot be written.
        """
        new = path.with_name(f".{path.name}.{os.getpid()}")
        with storing(path):
            new.unlink(missing_ok=True)
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with open(descriptor, "w") as file:
                    json.dump({"address": self.address, "token": self.token.hex()}, file)
                new.replace(path)
            except OSError:
                new.unlink(missing_ok=True)
                raise

    @classmethod
    def load(cls, path: Path) -> "ControlAccess":
        """Return the access that a file holds.

        Raises:
            SettingsError: The file is missing, damaged, or readable by others.
        """
        try:
            with path.open() as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                said = file.read()
            document = json.loads(said)
            is_access = isinstance(document, dict) and {"address", "token"} <= document.keys()
            problem = "" if is_access else "it is no object of JSON with both"
        except OSError as error:
            problem = str(error)
        except (ValueError, RecursionError):
            problem = "it is not JSON"
        if problem:
            raise SettingsError(
                f"{path} must hold the address and token of a run that trains now, but could not be read: {problem}; "
                "copy workers/control.json from the directory of the run"
            )
        if mode & 0o077:
            raise SettingsError(f"{path} must be readable by its owner alone, but has mode {mode:o}; chmod 600 {path}")
        return cls._parse(document["address"], document["token"], str(path))

    @classmethod
    def _parse(cls, address: object, token: object, where: str) -> "ControlAccess":
        try:
            host, _, port = str(address).rpartition(":")
            return cls(host.removeprefix("[").removesuffix("]"), int(port), bytes.fromhex(str(token)))
        except ValueError as error:  # a SettingsError too
            raise SettingsError(f"{where} must give address and token of a control server, but: {error}") from error
