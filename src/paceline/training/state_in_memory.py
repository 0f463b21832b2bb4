"""A run's copies of its state in the memory of peers: settings, and the folder that all its ranks use."""

import json
import math
import os
import secrets
from pathlib import Path

from pydantic import Field

from paceline.checkpoint.checkpoint import SavedState
from paceline.checkpoint.durable import identify
from paceline.checkpoint.peer_memory import PeerMemory
from paceline.checkpoint.recall import recall
from paceline.checkpoint.stripes import make_teams
from paceline.comm.group import Group
from paceline.errors import storing
from paceline.monitor.events import CheckpointSkipped
from paceline.monitor.log import EventLog
from paceline.registry import Settings

_NAME = "peer_memory.json"


class PeerMemorySettings(Settings):
    """Copies of the state in the memory of other ranks' hosts, from which restarted workers go on."""

    interval: int = Field(default=0, ge=0)
    """Steps from one copy to the next; 0 for none."""
    num_data: int = Field(default=1, ge=1)
    """Ranks whose data one parity block protects: with 1 each rank's state is copied whole; with more, memory for
    parity is num_parity/num_data of the state."""
    num_parity: int = Field(default=1, ge=1)
    """Ranks of each num_data + num_parity whose memory may be lost at once."""
    folder: str = "/dev/shm"
    """Folder on each host that is kept in memory."""

    def count_bytes(self, part_bytes: int, num_ranks: int) -> int:
        """Return the memory of two copies, which take turns, of a rank's part and of the parity that it holds.

        Args:
            part_bytes: Size of the part.
            num_ranks: Number of all ranks.

        Raises:
            SettingsError: There are too few ranks.
        """
        smallest = min(map(len, make_teams(num_ranks, self.num_data, self.num_parity)))
        return math.ceil(2 * part_bytes * (1 + self.num_parity / (smallest - self.num_parity)))

    def open(self, directory: Path, group: Group) -> PeerMemory | None:
        """Return this rank's part of the copies; None if there are to be none. Every rank calls it."""
        if not self.interval:
            return None
        return PeerMemory(self._find_folder(directory, group), self.num_data, self.num_parity)

    def recall(self, directory: Path, group: Group, checkpoint: SavedState | None, log: EventLog) -> SavedState | None:
        """Return, on rank 0, the state in memory if it is newer than its checkpoint, else that. Every rank calls it."""
        if not self.interval:
            return checkpoint

        def skip(path: Path, reason: str) -> None:
            log.write(CheckpointSkipped(path=str(path), reason=reason), step=0)

        step = checkpoint.step if checkpoint is not None else -1
        return recall(self._find_folder(directory, group), group, newer_than=step, on_damaged=skip) or checkpoint

    def _find_folder(self, directory: Path, group: Group) -> Path:
        """Return the folder of the run whose directory rank 0 has: a new run in an old directory has another."""
        name = ""
        if group.rank == 0:
            path, mine = directory / _NAME, identify(directory)
            try:
                said = json.loads(path.read_text())
                name = str(said["name"]) if said["directory"] == mine else ""
            except (OSError, ValueError, LookupError, TypeError, RecursionError):
                name = ""
            if not name:  # a new run, a copy of another's directory, or a damaged file
                name = f"paceline-{os.getuid()}-{secrets.token_hex(8)}"
                part = directory / f".{_NAME}.part"
                with storing(path):
                    part.write_text(json.dumps({"name": name, "directory": mine}))
                    part.rename(path)
        return Path(self.folder) / str(group.gather_documents(name, name="folder in memory")[0])
