"""Layer 5: save and load training state: complete, verified, in a new directory each time."""

from paceline.checkpoint.checkpoint import Checkpoint, SavedState, TensorSpec
from paceline.checkpoint.manifest import DamagedError
from paceline.checkpoint.saver import AsyncSaver
from paceline.checkpoint.storage import SafetensorsReader, SafetensorsWriter, TensorBlock
from paceline.checkpoint.store import CheckpointStore, SavedCheckpoint

__all__ = [
    "AsyncSaver",
    "Checkpoint",
    "CheckpointStore",
    "DamagedError",
    "SafetensorsReader",
    "SafetensorsWriter",
    "SavedCheckpoint",
    "SavedState",
    "TensorBlock",
    "TensorSpec",
]
