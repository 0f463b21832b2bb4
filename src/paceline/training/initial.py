"""Weights that a run starts from, instead of random ones."""

from pathlib import Path
from typing import Any

from pydantic import field_validator, model_validator
from torch import nn

from paceline.checkpoint.weights import Weights, find_misfits, load_weights, open_weights
from paceline.registry import Settings


class InitialWeights(Settings):
    """Weights of a model, trained before. In a `Run`, their path alone will do.

    They are read at the first step; a run that goes on from a checkpoint of its own does not need them.
    """

    path: str
    """A file .safetensors; a .pt file with a state_dict; a folder of save_pretrained; or the directory of a run."""
    checkpoint: str = "newest"
    """Which checkpoint of a run: newest, best, or the step after which it was saved."""
    averaged: bool | None = None
    """Whether moving averages of a run's parameters are taken; by default where it has them (ema)."""
    strict: bool = True
    """Whether all weights must fit; else those that do are taken, and a warning lists the others."""

    @model_validator(mode="before")
    @classmethod
    def _accept_path(cls, value: Any) -> Any:
        return {"path": str(value)} if isinstance(value, str | Path) else value

    @field_validator("path")
    @classmethod
    def _be_found_from_anywhere(cls, path: str) -> str:
        return str(Path(path).expanduser().absolute())

    def check(self, module: nn.Module) -> None:
        """Refuse weights that are not there or do not fit; the module may be on the meta device.

        Raises:
            CheckpointError: It says what does not fit.
            SettingsError: There are several models, or no averages that were asked for.
        """
        find_misfits(module, self._open(), strict=self.strict)

    def load_into(self, module: nn.Module) -> str:
        """Copy the weights into a module, and return in words what does not fit; see `check`."""
        return load_weights(module, self._open(), strict=self.strict)

    def _open(self) -> Weights:
        return open_weights(Path(self.path), self.checkpoint, averaged=self.averaged)
