"""Weights of a model without the rest of its training: read from checkpoints and other tools' files, and written.

A file of safetensors has each tensor once, under the first of its names, and says in its header under which others it
stands (``"lm_head.weight": "transformer.wte.weight"``), as `safetensors.torch.save_model` does. A ``.pt`` file is what
`torch.save` makes of a `state_dict`.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.checkpoint import Checkpoint, TensorSpec
from paceline.checkpoint.durable import sync_directory
from paceline.checkpoint.find import find_checkpoint, holds_checkpoint
from paceline.checkpoint.tensor_file import Entry, read_block, read_header, write_tensor_file
from paceline.errors import CheckpointError, SettingsError

SAFETENSORS, TORCH = (".safetensors",), (".pt", ".pth")
_INDEX = "model.safetensors.index.json"
_MOST_NAMED = 5


@dataclass(frozen=True)
class Weights:
    """Tensors of a model by name: what they look like, and how one is read."""

    place: str
    """Where they are, for messages."""
    specs: Mapping[str, TensorSpec]
    read: Callable[[str], Tensor]
    ties: Mapping[str, str] = field(default_factory=dict)
    """Other names of tensors."""
    averaged: bool = False
    """Whether parameters are their moving averages."""

    @classmethod
    def of_tensors(cls, place: str, tensors: Mapping[str, Tensor]) -> "Weights":
        """Return weights that are in memory; what is under several names is tied."""
        names: dict[int, str] = {}
        ties = {n: first for n, tensor in tensors.items() if (first := names.setdefault(id(tensor), n)) != n}
        specs = {name: TensorSpec(tensors[name].shape, tensors[name].dtype) for name in names.values()}
        return cls(place, specs, tensors.__getitem__, ties)

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, *, averaged: bool | None = None) -> "Weights":
        """Return the weights of the model in a checkpoint: what its workers together stood for.

        Args:
            checkpoint: Of a run, or of a loop with one replica.
            averaged: Whether the moving averages of parameters are taken, which are what a run with `ema` judges; by
                default where there are any.

        Raises:
            SettingsError: It holds several models, or no averages.
        """
        document = checkpoint.read_document()
        if "replica" not in document:
            raise SettingsError(
                f"a checkpoint must hold one model for its weights to be taken, but {checkpoint.path} holds several; "
                "call paceline.export(replica, ...) for each in the loop that trains them"
            )
        kinds: dict[str, dict[str, TensorSpec]] = {"model": {}, "ema": {}}
        for name, spec in checkpoint.list_tensors().items():
            kind, _, rest = name.partition("/")
            if kind in kinds:
                kinds[kind][rest] = spec
        specs = kinds["model"]
        averages = kinds["ema"] if averaged is not False else {}
        if averaged and not averages:
            raise SettingsError(
                f"moving averages must be in a checkpoint to be taken, but {checkpoint.path} has none; leave averaged "
                "out, or train with ema"
            )

        def read(name: str) -> Tensor:
            return checkpoint.read(f"{'ema' if name in averages else 'model'}/{name}").to(specs[name].dtype)

        ties = document["replica"].get("tied", {})
        return cls(str(checkpoint.path), specs, read, ties, averaged=bool(averages))


def open_weights(path: Path, which: str = "newest", *, averaged: bool | None = None) -> Weights:
    """Return weights that are on disk.

    Args:
        path: A file of safetensors; a ``.pt`` file with a `state_dict`; the directory of a run, folder of checkpoints
            or one of them; or a folder that `save_pretrained` of the transformers library has written.
        which: Which checkpoint of a run; see `find_checkpoint`.
        averaged: See `Weights.of_checkpoint`.

    Raises:
        CheckpointError: There is nothing of the kind.
        SettingsError: There are several models, or no averages that were asked for.
    """
    if path.is_dir():
        files = [path / name for name in (_INDEX, "model.safetensors") if (path / name).is_file()]
        is_ours = holds_checkpoint(path) or not files
        if is_ours:
            return Weights.of_checkpoint(find_checkpoint(path, which), averaged=averaged)
        return _open_files(path, _list_files(files[0]))
    if path.suffix in SAFETENSORS:
        return _open_files(path, [path])
    if path.suffix in TORCH:
        return Weights.of_tensors(str(path), _load_torch(path))
    raise CheckpointError(
        f"weights must be a directory or a file that ends in {' or '.join(SAFETENSORS + TORCH)}, but got {path}; check "
        "the path"
    )


def load_weights(module: nn.Module, weights: Weights, *, strict: bool = True) -> str:
    """Copy weights into a module, in place, and return in words what does not fit; empty where all does.

    What is tied needs one of its names.

    Args:
        module: Not on the meta device.
        weights: What is copied.
        strict: Whether all must fit; nothing is copied where it does not.

    Raises:
        CheckpointError: Something does not fit and must, or nothing does, or what is tied here differs there.
    """
    misfits = find_misfits(module, weights, strict=strict)
    for names in _list_tensors(module).values():
        target = names[0][1]
        sources = [name for name, _ in names if name in weights.specs and weights.specs[name].shape == target.shape]
        read = [weights.read(name) for name in sources]
        if any(not torch.equal(read[0], other) for other in read[1:]):
            raise CheckpointError(
                f"weights that are tied in the model must be the same, but {' and '.join(sources)} differ in "
                f"{weights.place}; build the model without tying them"
            )
        if read:
            target.detach().copy_(read[0])
    return misfits


def find_misfits(module: nn.Module, weights: Weights, *, strict: bool = True) -> str:
    """Return in words which weights do not fit a module; see `load_weights`. It may be on the meta device."""
    tensors = _list_tensors(module)
    known = {name: tensor for names in tensors.values() for name, tensor in names}
    missing = [names[0][0] for names in tensors.values() if not any(name in weights.specs for name, _ in names)]
    unexpected = [name for name in weights.specs if name not in known]
    misshapen = [
        f"{name} {tuple(weights.specs[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in known.items()
        if name in weights.specs and weights.specs[name].shape != tensor.shape
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
    misfits = "; ".join(f"{kind}: {_shorten(found)}" for kind, found in kinds.items() if found)
    is_nothing_left = len(missing) + len(misshapen) >= len(tensors) > 0
    if misfits and (strict or is_nothing_left):
        advice = (
            "give weights of the same model"
            if is_nothing_left
            else ("give weights of the same model, or take what fits with strict=False (--initial.strict false)")
        )
        raise CheckpointError(
            f"weights must fit the model, but of {len(known)} names in it and {len(weights.specs)} in {weights.place} "
            f"some do not; {misfits}; {advice}"
        )
    return misfits


def write_safetensors(path: Path, weights: Weights, about: Mapping[str, str]) -> None:
    """Write weights into a new file, one after the other: the memory that it takes is that of the largest.

    Args:
        path: It must not exist.
        weights: What is written.
        about: What the header says of them.
    """
    entries = [
        Entry(name, spec.dtype, (), tuple(spec.shape), is_whole=True, resolve=partial(weights.read, name))
        for name, spec in weights.specs.items()
    ]
    entries.sort(key=lambda entry: (-entry.dtype.itemsize, entry.name))  # as readers that map files into memory expect
    with writing_anew(path) as part:
        write_tensor_file(part, entries, {**weights.ties, **about, "format": "pt"})


def write_torch(path: Path, weights: Weights) -> None:
    """Write weights into a new file, as `torch.save` does with a `state_dict`."""
    state = {name: weights.read(name) for name in weights.specs}
    state |= {name: state[first] for name, first in weights.ties.items()}
    with writing_anew(path) as part:
        torch.save(state, part)


@contextmanager
def writing_anew(path: Path) -> Iterator[Path]:
    """Yield where to write a file or a folder that appears at `path` whole, in one instant.

    Raises:
        SettingsError: There is something.
        CheckpointError: It cannot be written.
    """
    if path.exists():
        raise SettingsError(f"what is exported must be new, but {path} exists; remove it, or choose another name")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        part.rename(path)
        sync_directory(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error.strerror}; choose another place") from error
    finally:
        if part.is_dir():
            shutil.rmtree(part)
        part.unlink(missing_ok=True)


def _list_tensors(module: nn.Module) -> dict[int, list[tuple[str, Tensor]]]:
    """Return what a module's `state_dict` holds: each tensor once, with all its names."""
    tensors: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            tensors.setdefault(id(tensor), []).append((name, tensor))
    return tensors


def _list_files(first: Path) -> list[Path]:
    """Return the files of a folder's model, which an index lists where they are several."""
    if first.name != _INDEX:
        return [first]
    try:
        names = json.loads(first.read_text())["weight_map"].values()
        return [first.parent / name for name in dict.fromkeys(names)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{first} must be an index of safetensors, but it cannot be read ({error})") from error


def _open_files(place: Path, files: list[Path]) -> Weights:
    blocks = {name: (file, block) for file in files for name, block in read_header(file).items()}
    specs = {name: TensorSpec(block.shape, block.dtype) for name, (_, block) in blocks.items()}
    return Weights(str(place), specs, lambda name: read_block(*blocks[name]))


def _load_torch(path: Path) -> dict[str, Tensor]:
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise CheckpointError(f"{path} must be readable, but: {error.strerror}; check the path") from error
    except (RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{path} must be a state_dict that torch.save wrote, but: {first_line}") from error
    if not isinstance(state, Mapping) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        keys = ", ".join(map(str, list(state)[:_MOST_NAMED])) if isinstance(state, Mapping) else type(state).__name__
        raise CheckpointError(
            f"{path} must hold a state_dict, names and tensors alone, but it holds {keys}; save the state_dict inside "
            "by itself"
        )
    return dict(state)


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
