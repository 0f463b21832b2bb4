"""Traces that are kept on disk, under a digest of all that they depend on."""

import contextlib
import hashlib
import os
import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn

from paceline.data.base import Splits
from paceline.data.batch import list_tensors
from paceline.errors import SettingsError
from paceline.simulator.training import TracedShape
from paceline.training.run import Run

_VERSION = 1
_FIELDS = ("model", "loss", "growth", "tensor_plan", "seed", "batch_norm")
"""Fields of a run that a trace depends on."""
_FIELDS_OF_GROWTH = ("num_steps", "num_epochs")
"""Fields that say how large a model is in the end that grows."""


def digest_workload(run: Run, splits: Splits, module: nn.Module, *, on_cpu: bool) -> str:
    """Return a digest of a run's model and loss, the code of both, the shapes of a sample and the library's version.

    Args:
        run: The run.
        splits: Training and held-out data.
        module: Model of the run.
        on_cpu: Whether attention is traced as on a processor.
    """
    digest = hashlib.sha256()
    spec = splits.train.spec
    sample = [(tuple(leaf.shape[1:]), str(leaf.dtype)) for leaf in list_tensors(splits.train.read_first())]
    settings = run.model_dump(mode="json", include={*_FIELDS, *(_FIELDS_OF_GROWTH if run.growth.steps else ())})
    digest.update(repr((_VERSION, torch.__version__, on_cpu, settings, spec, sample)).encode())
    kinds = {type(part) for part in module.modules()}
    names = {kind.__module__ for kind in kinds}
    versions = {
        top: str(getattr(sys.modules.get(top), "__version__", "")) for top in {n.partition(".")[0] for n in names}
    }
    digest.update(repr(sorted(versions.items())).encode())
    for path in sorted({*_list_own_files(), *map(_find_source, names - {"torch"})} - {None}, key=str):
        with contextlib.suppress(OSError):
            digest.update(Path(str(path)).read_bytes())
    return digest.hexdigest()[:32]


def _find_source(name: str) -> str | None:
    return None if name.startswith("torch.") else getattr(sys.modules.get(name), "__file__", None)


def _list_own_files() -> set[str]:
    """Return the files of the modules of this package, and of all that are of neither a library nor Paceline.

    What a model calls is not known, but whatever it is of the user's own, its module has been imported by now.
    """
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    found = {str(path) for path in Path(__file__).parent.glob("*.py")}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and name.partition(".")[0] != "paceline" and not file.startswith(libraries):
            found.add(file)
    return found


def load_trace(digest: str) -> TracedShape | None:
    """Return the trace with a digest, if there is one."""
    try:
        return TracedShape.model_validate_json(_find_file(digest).read_text())
    except (OSError, ValueError, SettingsError):  # none, or of an older version
        return None


def save_trace(shape: TracedShape) -> None:
    """Keep a trace; where nothing can be written, it is made anew each time."""
    file = _find_file(shape.digest)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(shape.model_dump_json())
        partial.replace(file)


def _find_file(digest: str) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return folder / "paceline" / "traces" / f"{digest}.json"
