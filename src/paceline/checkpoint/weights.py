"""Weights of a model without its training state: read from checkpoints and other tools' files, and written.

A file of safetensors has each tensor once, under its first name, with its other names in the header
(``"lm_head.weight": "transformer.wte.weight"``), as from `safetensors.torch.save_model`. A ``.pt`` file is a
`state_dict` written by `torch.save`.
"""

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.checkpoint import Checkpoint, TensorSpec
from paceline.checkpoint.durable import sync_directory
from paceline.checkpoint.find import find_checkpoint, holds_checkpoint
from paceline.checkpoint.remote import fetch_weights, to_path
from paceline.checkpoint.tensor_file import Entry, read_block, read_header, write_tensor_file
from paceline.errors import CheckpointError, SettingsError, storing

SAFETENSORS, TORCH = (".safetensors",), (".pt", ".pth")
_INDEX = "model.safetensors.index.json"
_MOST_NAMED = 5
_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that torch's DistributedDataParallel and compiler give to names."""


@dataclass(frozen=True)
class Weights:
    """Tensors of a model by name: shapes and dtypes, and a function that reads one."""

    place: str
    """Place of the weights, for messages."""
    specs: Mapping[str, TensorSpec]
    read: Callable[[str], Tensor]
    ties: Mapping[str, str] = field(default_factory=dict)
    """First names of tied tensors, by their other names."""
    averaged: bool = False
    """Whether parameters are moving averages."""
    prefix: str = ""
    """Prefix that names have on disk, and not here."""

    def without_wrapper(self, names: Collection[str]) -> "Weights":
        """Return the weights without a wrapper's prefix that all of them have, for a model with tensors `names`."""
        for prefix in _WRAPPERS:
            is_wrapped = bool(self.specs) and all(name.startswith(prefix) for name in self.specs)
            if is_wrapped and not any(name.startswith(prefix) for name in names):
                return replace(
                    self,
                    specs={name.removeprefix(prefix): spec for name, spec in self.specs.items()},
                    ties={name.removeprefix(prefix): first.removeprefix(prefix) for name, first in self.ties.items()},
                    read=lambda name, prefix=prefix: self.read(prefix + name),  # type: ignore[misc]
                    prefix=self.prefix + prefix,
                ).without_wrapper(names)
        return self

    @classmethod
    def of_tensors(cls, place: str, tensors: Mapping[str, Tensor]) -> "Weights":
        """Return weights in memory; a tensor under several names is tied."""
        names: dict[int, str] = {}
        ties = {n: first for n, tensor in tensors.items() if (first := names.setdefault(id(tensor), n)) != n}
        specs = {name: TensorSpec(tensors[name].shape, tensors[name].dtype) for name in names.values()}
        return cls(place, specs, tensors.__getitem__, ties)

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, *, averaged: bool | None = None) -> "Weights":
        """Return the weights of the model in a checkpoint: the consensus of its workers.

        Args:
            checkpoint: Checkpoint of a run, or of a loop with one replica.
            averaged: Whether to take the moving averages of parameters, which a run with `ema` evaluates; by default if
                there are any.

        Raises:
            SettingsError: The checkpoint holds several models, or no averages.
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


def open_weights(place: str | Path, which: str = "newest", *, averaged: bool | None = None) -> Weights:
    """Return weights on disk or in a store.

    Args:
        place: Path or URL: file of safetensors; ``.pt`` file with a `state_dict`; directory of a run, folder of
            checkpoints or one of them; or folder that `save_pretrained` of the transformers library wrote.
        which: Choice of a run's checkpoint; see `find_checkpoint`.
        averaged: See `Weights.of_checkpoint`.

    Raises:
        CheckpointError: There are no such weights.
        SettingsError: There are several models, or none of the requested averages.
    """
    path = to_path(place) or fetch_weights(str(place), _is_of_weights)
    if path is None:
        return Weights.of_checkpoint(find_checkpoint(place, which), averaged=averaged)
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


def _is_of_weights(name: str) -> bool:
    return name.endswith((*SAFETENSORS, *TORCH)) or name == _INDEX


def load_weights(module: nn.Module, weights: Weights, *, strict: bool = True) -> str:
    """Copy weights into a module, in place, and return a text that lists misfits; empty if there are none.

    Tied tensors need only one of their names.

    Args:
        module: Module, not on the meta device.
        weights: Weights to copy.
        strict: Whether all weights must fit; if one does not, nothing is copied.

    Raises:
        CheckpointError: A weight does not fit and must, or none does, tensors that are tied here differ there, or a
            parameter is not a number.
    """
    sources, misfits = match_weights(module, weights, strict=strict)
    for names in _list_tensors(module).values():
        name, target = names[0]
        if name in sources:
            target.detach().copy_(sources[name]())
    return misfits


def match_weights(
    module: nn.Module, weights: Weights, *, strict: bool = True
) -> tuple[dict[str, Callable[[], Tensor]], str]:
    """Return functions that read the values of tensors of a module, and what `load_weights` returns.

    Args:
        module: Whole module, perhaps on the meta device.
        weights: Weights to read.
        strict: Whether all weights must fit.

    Returns:
        Functions by all names of each tensor that gets values, and a text that lists misfits.
    """
    misfits = find_misfits(module, weights, strict=strict)
    sources: dict[str, Callable[[], Tensor]] = {}
    for names in _list_tensors(module).values():
        target = names[0][1]
        fitting = [name for name, _ in names if name in weights.specs and _fits(weights.specs[name], target)]
        if fitting:
            read = partial(_read_tied, weights, fitting, target.dtype, is_number=isinstance(target, nn.Parameter))
            sources |= {name: read for name, _ in names}
    return sources, misfits


def _read_tied(weights: Weights, names: Sequence[str], dtype: torch.dtype, *, is_number: bool) -> Tensor:
    """Return the values that weights have under one name or several."""
    values = weights.read(names[0]).to(dtype)
    if is_number and values.isnan().any():
        raise CheckpointError(
            f"weights must be numbers, but {' and '.join(names)} in {weights.place} have NaN; give weights of a "
            "training that did not diverge"
        )
    if any(not torch.equal(values, weights.read(other).to(dtype)) for other in names[1:]):
        raise CheckpointError(
            f"weights that are tied in the model must be the same, but {' and '.join(names)} differ in "
            f"{weights.place}; build the model without tying them"
        )
    return values


def find_misfits(module: nn.Module, weights: Weights, *, strict: bool = True) -> str:
    """Return a text that lists weights that do not fit a module, perhaps on the meta device; see `load_weights`."""
    tensors = _list_tensors(module)
    known = {name: tensor for names in tensors.values() for name, tensor in names}
    missing = [names[0][0] for names in tensors.values() if not any(name in weights.specs for name, _ in names)]
    unexpected = [name for name in weights.specs if name not in known]
    misshapen = [
        f"{name} {tuple(weights.specs[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in known.items()
        if name in weights.specs and weights.specs[name].shape != tensor.shape
    ]
    mistyped = [
        f"{name} {weights.specs[name].dtype} instead of {tensor.dtype}"
        for name, tensor in known.items()
        if name in weights.specs and _kind_of(weights.specs[name].dtype) != _kind_of(tensor.dtype)
    ]
    kinds = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape": misshapen,
        "of another type": mistyped,
    }
    misfits = "; ".join(f"{kind}: {_shorten(found)}" for kind, found in kinds.items() if found)
    is_nothing_left = len(missing) + len({text.partition(" ")[0] for text in misshapen + mistyped}) >= len(tensors) > 0
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


def _fits(spec: TensorSpec, tensor: Tensor) -> bool:
    return spec.shape == tensor.shape and _kind_of(spec.dtype) == _kind_of(tensor.dtype)


def _kind_of(dtype: torch.dtype) -> str:
    return "complex" if dtype.is_complex else "floating" if dtype.is_floating_point else "integer"


def write_safetensors(path: Path, weights: Weights, about: Mapping[str, str]) -> None:
    """Write weights into a new file, one after another, in the memory of the largest.

    Args:
        path: Path of the new file.
        weights: Weights to write.
        about: Metadata in the header.
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
    with writing_anew(path) as part, open(part, "wb") as file:  # torch's own file would hide the reason of a failure
        torch.save(state, file)


@contextmanager
def writing_anew(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder that then appears at `path` atomically.

    Raises:
        SettingsError: The path exists.
        StorageError: The file or folder cannot be written.
    """
    if path.exists():
        raise SettingsError(f"what is exported must be new, but {path} exists; remove it, or choose another name")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with storing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield part
            part.rename(path)
            sync_directory(path.parent)
        finally:
            if part.is_dir():
                shutil.rmtree(part)
            elif part.exists():
                part.unlink()


def _list_tensors(module: nn.Module) -> dict[int, list[tuple[str, Tensor]]]:
    """Return the tensors of a module's `state_dict`, each once, with all its names."""
    tensors: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            tensors.setdefault(id(tensor), []).append((name, tensor))
    return tensors


def _list_files(first: Path) -> list[Path]:
    """Return the files of a folder's model, which an index lists if there are several."""
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
