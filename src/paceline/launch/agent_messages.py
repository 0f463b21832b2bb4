"""What a launcher and the agents of other machines write for each other into the launcher's store.

Each side has one document, which it writes again whenever it changes: what is lost or doubled on the way does no harm.
"""

import functools
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch.distributed import Store

import paceline
from paceline.elastic.facts import End
from paceline.errors import SettingsError
from paceline.registry import explain

INVITATION, NUM_AGENTS, MAIL = "agents/run", "agents/number", "agents/mail"
T = TypeVar("T")


class DocumentError(SettingsError):
    """What the other side has written is no document of this version."""


@dataclass(frozen=True)
class _Document:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Invitation(_Document):
    """Run that agents may offer workers to."""

    name: str
    """Name of the run's directory."""
    file: dict[str, Any]
    """Content of its ``run.json``."""
    num_samples: int
    """Number of training samples; -1 if unknown."""
    code: str
    """Digest of the file that the recipe is in; empty if it is in a package."""
    versions: dict[str, str]
    leaves_on_sigterm: bool
    """Whether SIGTERM to one worker lets it leave, and does not stop all."""
    launcher_timeout_s: float = 0.0
    """Time for which workers train on without a launcher, until another one takes its place."""


@dataclass(frozen=True)
class Offer(_Document):
    """State of an agent, as the launcher sees it."""

    host: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    num_workers: Annotated[int, Field(ge=1)]
    beat: int = 0
    """Number of times that it was written."""
    is_leaving: bool = False
    is_closed: bool = False
    """Whether the agent has ended all of its workers, and ends."""
    ended: dict[str, tuple[End, str]] = field(default_factory=dict)
    """Ends of its workers by name, also in words."""
    num_chunks: int = 0
    """Number of pieces of its workers' log that it has sent."""
    asked: int = 0
    """Signal that asked one of its workers, and so all, to stop, and ended that one; 0 if there was none."""


@dataclass(frozen=True)
class Demand(_Document):
    """What the launcher wants of an agent."""

    host: str = ""
    """Name of its machine among the workers' names; empty until its workers are taken."""
    start: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Slot and epoch of each worker that was ever wanted, by name."""
    kill: tuple[str, ...] = ()
    """Names of workers that must end at once."""
    signals: tuple[int, ...] = ()
    """Signals to all its workers, the first one first."""
    over: str = ""
    """Reason why nothing more is wanted of it; empty while something is."""
    is_refused: bool = False
    """Whether the launcher does not take what it offers, for that reason."""


def offer_key(number: int) -> str:
    """Return the key of the offer of an agent."""
    return f"agents/{number}/offer"


def demand_key(number: int) -> str:
    """Return the key of the demand to an agent."""
    return f"agents/{number}/demand"


def chunk_key(number: int, chunk: int) -> str:
    """Return the key of a piece of the log of an agent's workers."""
    return f"agents/{number}/log/{chunk}"


def write(store: Store, key: str, document: Any) -> None:
    """Write a document, one of the classes above."""
    store.set(key, json.dumps(asdict(document)))


def read(store: Store, key: str, kind: type[T]) -> T | None:
    """Return the document under a key; None if there is none.

    Raises:
        DocumentError: Something else lies there.
    """
    if not store.check([key]):
        return None
    try:
        document: T = _READERS[kind].validate_json(store.get(key))
    except ValidationError as error:
        faults = ", ".join(explain(error).splitlines())
        raise DocumentError(
            f"{key} of the control store must be what Paceline {paceline.__version__} writes, but: {faults}; "
            "install the same version on all machines"
        ) from error
    return document


def read_versions(store: Store) -> dict[str, object]:
    """Return the versions where the launcher runs, whatever else these versions write; empty if there are none."""
    try:
        versions = json.loads(store.get(INVITATION))["versions"] if store.check([INVITATION]) else {}
    except (ValueError, KeyError, TypeError):  # `read` says what is wrong
        return {}
    return versions if isinstance(versions, dict) else {}


_READERS: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (Invitation, Offer, Demand)}


@functools.cache
def find_versions() -> dict[str, str]:
    """Return the versions that must be the same on all machines."""
    return {"paceline": paceline.__version__, "torch": str(torch.__version__)}


def digest_code(recipe: str) -> str:
    """Return a digest of the file that a recipe is in; empty if it is in a package."""
    file = Path(recipe.partition(".py:")[0] + ".py") if ".py" in recipe else None
    return hashlib.sha256(file.read_bytes()).hexdigest() if file is not None and file.is_file() else ""
