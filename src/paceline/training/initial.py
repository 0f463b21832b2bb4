"""Initial weights of a run, instead of random ones."""

from pathlib import Path
from typing import Any

from pydantic import field_validator, model_validator
from torch import nn

from paceline.checkpoint.weights import Weights, find_misfits, load_weights, open_weights
from paceline.registry import Settings


class InitialWeights(Settings):
    """Trained weights of a model. In a `Run`, their path alone suffices.

    They are read at the first step; a run that resumes from its own checkpoint does not need them.
    """

    path: str
    """Path of a .safetensors file, a .pt file with a state_dict, a folder of save_pretrained, or a run's directory."""
    checkpoint: str = "newest"
    """Checkpoint of a run: newest, best, or the step after which it was saved."""
    averaged: bool | None = None
    """Whether to take the moving averages of a run's parameters; by default if it has them (ema)."""
    strict: bool = True
    """Whether all weights must fit; if not, those that fit are taken, and a warning lists the others."""

    @model_validator(mode="before")
    @classmethod
    def _accept_path(cls, value: Any) -> Any:
        return {"path": str(value)} if isinstance(value, str | Path) else value

    @field_validator("path")
    @classmethod
    def _be_found_from_anywhere(cls, path: str) -> str:
        return str(Path(path).expanduser().absolute())

    def check(self, module: nn.Module) -> None:
        """Refuse weights that are missing or do not fit; the module may be on the meta device.

        Raises:
            CheckpointError: Weights do not fit; the message lists them.
            SettingsError: There are several models, or none of the requested averages.
        """
        find_misfits(module, self._open(), strict=self.strict)

    def load_into(self, module: nn.Module) -> str:
        """Copy the weights into a module, and return a text that lists misfits; see `check`."""
        return load_weights(module, self._open(), strict=self.strict)

    def _open(self) -> Weights:
        return open_weights(Path(self.path), self.checkpoint, averaged=self.averaged)
