"""Export of a trained model for other tools."""

import importlib.metadata
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import nn

from paceline.checkpoint import Checkpoint
from paceline.checkpoint.find import find_checkpoint
from paceline.checkpoint.remote import to_path, write_there
from paceline.checkpoint.weights import SAFETENSORS, TORCH, Weights, write_safetensors, write_torch, writing_anew
from paceline.errors import CheckpointError, PacelineError, SettingsError
from paceline.exporting.load import load_checkpoint_model
from paceline.replica import Replica
from paceline.replica.state import full_state_dict
from paceline.sync.batch_statistics import pooled_over_workers

Format = Literal["safetensors", "torch", "folder"]


@runtime_checkable
class HasSavePretrained(Protocol):
    """A model that writes itself into a folder, as in the transformers library."""

    def save_pretrained(self, save_directory: Path) -> Any:
        """Write weights and configuration."""


def export(
    source: Replica | str | Path, to: str | Path, checkpoint: str = "newest", *, averaged: bool | None = None
) -> None:
    """Write a whole trained model, of any rule and layout, to a new path or URL.

    A file that ends in ``.safetensors`` has each tensor once; load it with ``safetensors.torch.load_model``, which
    restores tied ones. A file that ends in ``.pt`` holds the `state_dict`, for ``torch.load``. A name without an ending
    becomes a folder for ``from_pretrained`` of the transformers library, if the model has `save_pretrained`.

    Args:
        source: Directory of a run, folder of your own loop's checkpoints, one checkpoint, or a run's `checkpoint_url`.
            Or the replica of your own loop, between its update and the next backward: every rank calls it, and rank 0
            writes.
        to: Path or URL of the new file or folder.
        checkpoint: ``newest`` for the newest valid one, ``best`` for the one that `keep_best` kept, or the step after
            which it was saved.
        averaged: Whether to export the moving averages of parameters; by default if there are any (`ema`).

    Raises:
        SettingsError: The path exists, or has another ending, or is a folder and the model has no `save_pretrained`; or
            there are no averages.
        CheckpointError: There is no such checkpoint, or the file could not be written.
    """
    if isinstance(source, Replica):
        _export_replica(source, to, averaged=averaged)
    else:
        export_checkpoint(find_checkpoint(source, checkpoint), to, averaged=averaged)


def export_checkpoint(checkpoint: Checkpoint, to: str | Path, *, averaged: bool | None = None) -> Weights:
    """Write the model in a checkpoint, and return its weights; see `export`."""
    weights = Weights.of_checkpoint(checkpoint, averaged=averaged)
    if find_format(to) == "folder":
        module = load_checkpoint_model(checkpoint, weights)
        _write_to(to, lambda path: _write_folder(path, module))
    else:
        recipe = checkpoint.read_document().get("recipe", "")
        _write_to(to, lambda path: _write_file(path, weights, step=checkpoint.step, recipe=recipe))
    return weights


def _write_to(to: str | Path, write: Callable[[Path], None]) -> None:
    """Let a function write to a path of this machine, and bring what it wrote to an URL."""
    path = to_path(to)
    if path is None:
        write_there(str(to), write)
    else:
        write(path)


def find_format(to: str | Path) -> Format:
    """Return the format of an export, by the ending of its name.

    Raises:
        SettingsError: The ending is unknown.
    """
    path = Path(to)
    if path.name in ("", ".."):
        raise SettingsError(f"what is exported must have a name, but got {str(path)!r}; write model.safetensors")
    if path.suffix in SAFETENSORS:
        return "safetensors"
    if path.suffix in TORCH:
        return "torch"
    if not path.suffix or path.suffix[1:].isdecimal():  # gpt2-v1.5 is a folder's name
        return "folder"
    raise SettingsError(
        f"what is exported must end in {', '.join(SAFETENSORS + TORCH)} or have no ending, for a folder, but got {path}"
    )


def _export_replica(replica: Replica, to: str | Path, *, averaged: bool | None) -> None:
    shard, module = replica.shard, replica.module
    if averaged is None:
        averaged = replica.state.average is not None
    weights: Weights | None = None
    refused: PacelineError | None = None
    with ExitStack() as as_all_stand_for:
        if find_format(to) != "folder":
            weights = Weights.of_tensors("the model", full_state_dict(replica, averaged=averaged))
        elif not shard.is_whole:
            raise SettingsError(
                f"a folder must be written by a rank with a whole model, but got {shard.layout}; export a file of "
                "safetensors, and load it into a model outside of the layout"
            )
        else:
            as_all_stand_for.enter_context(replica.averaged() if averaged else replica.consensus())
            as_all_stand_for.enter_context(pooled_over_workers(module, shard.statistics_group))
        if shard.world.rank == 0:
            try:
                _write_to(
                    to,
                    lambda path: (
                        _write_file(path, weights, step=replica.num_updates) if weights else _write_folder(path, module)
                    ),
                )
            except PacelineError as error:
                refused = error
    reason = shard.world.gather_documents(str(refused or ""), name="export")[0]
    if refused is not None:
        raise refused
    if reason:
        raise CheckpointError(reason)


def _write_file(path: Path, weights: Weights, *, step: int, recipe: str = "") -> None:
    if find_format(path) == "torch":
        write_torch(path, weights)
    else:
        version = importlib.metadata.version("paceline")
        write_safetensors(path, weights, {"step": str(step), "recipe": recipe, "paceline": version})


def _write_folder(path: Path, module: nn.Module) -> None:
    if not isinstance(module, HasSavePretrained):
        raise SettingsError(
            "a model must have save_pretrained, as those of the transformers library have, to be exported to a folder, "
            f"but got {type(module).__name__}; give a file's name, such as {path}.safetensors"
        )
    with writing_anew(path) as part:
        module.save_pretrained(part)
