"""Initial weights of a run, instead of random ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import field_validator, model_validator
from torch import Tensor, nn

from paceline.checkpoint.remote import to_path
from paceline.checkpoint.weights import Weights, find_misfits, match_weights, open_weights
from paceline.comm.group import Group
from paceline.parallel.local import local
from paceline.registry import Settings
from paceline.replica.gathering import Slice, scatter
from paceline.replica.named_tensors import model_tensors


class InitialWeights(Settings):
    """Trained weights of a model. In a `Run`, their path alone suffices.

    They are read at the first step; a run that resumes from its own checkpoint does not need them.
    """

    path: str
    """Path or URL of a .safetensors file, a .pt file with a state_dict, a folder of save_pretrained, or a run's
    directory or `checkpoint_url`."""
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
        here = to_path(path)
        return path if here is None else str(here.absolute())

    def check(self, module: nn.Module) -> None:
        """Refuse weights that are missing or do not fit; the module may be on the meta device.

        Raises:
            CheckpointError: Weights do not fit; the message lists them.
            SettingsError: There are several models, or none of the requested averages.
        """
        find_misfits(module, self._open(module), strict=self.strict)

    def match(self, module: nn.Module) -> "MatchedWeights":
        """Return the weights that fit a whole module, which may be on the meta device. See `check`."""
        weights = self._open(module)
        sources, misfits = match_weights(module, weights, strict=self.strict)
        told = (
            [f"initial weights are taken without the prefix {weights.prefix} of their names"] if weights.prefix else []
        )
        told += [f"initial weights do not fit the model in all, the rest is new; {misfits}"] if misfits else []
        return MatchedWeights(sources, ". ".join(told))

    def _open(self, module: nn.Module) -> Weights:
        weights = open_weights(self.path, self.checkpoint, averaged=self.averaged)
        return weights.without_wrapper(module.state_dict().keys())


@dataclass(frozen=True)
class MatchedWeights:
    """Initial weights that fit a model."""

    sources: Mapping[str, Callable[[], Tensor]]
    """Functions that read the values of each tensor, by all its names in the model."""
    about: str
    """Message about them; empty if there is nothing to tell."""

    def load_into(self, module: nn.Module) -> None:
        """Copy the weights into a whole module."""
        for name, tensor in model_tensors(module).items():
            if name in self.sources:
                tensor.copy_(self.sources[name]())


def load_slices(matched: MatchedWeights | None, module: nn.Module, world: Group) -> None:
    """Load rank 0's weights into what each rank holds of a model, tensor by tensor; every rank calls it.

    Args:
        matched: Weights on rank 0; None there if none are to be loaded, and on other ranks.
        module: This rank's part of the model.
        world: All ranks.
    """
    names = world.gather_documents(list(matched.sources) if matched is not None else None, name="initial weights")[0]
    known = set(names or ())
    targets = {name: tensor for name, tensor in model_tensors(module).items() if name in known}
    wanted = {name: Slice.of(tensor) for name, tensor in targets.items()}

    def read(name: str) -> Tensor:
        assert matched is not None
        return matched.sources[name]()

    for name, values in scatter(wanted, read if matched is not None else None, world):
        local(targets[name]).copy_(values)
