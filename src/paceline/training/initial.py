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
        find_misfits(module, self._open(module), strict=self.strict)

    def load_into(self, module: nn.Module) -> str:
        """Copy the weights into a module, and return what to tell about them; empty if nothing. See `check`."""
        weights = self._open(module)
        misfits = load_weights(module, weights, strict=self.strict)
        told = (
            [f"initial weights are taken without the prefix {weights.prefix} of their names"] if weights.prefix else []
        )
        told += [f"initial weights do not fit the model in all, the rest is new; {misfits}"] if misfits else []
        return ". ".join(told)

    def _open(self, module: nn.Module) -> Weights:
        weights = open_weights(Path(self.path), self.checkpoint, averaged=self.averaged)
        return weights.without_wrapper(module.state_dict().keys())
