"""Paths of this machine in settings of data that no URL may name."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator


def _check(path: Path) -> Path:
    """Return the path, also of a ``file://`` URL, of whose slashes a `Path` has kept one."""
    scheme = re.match(r"([a-z][a-z0-9+.-]+):/", str(path))
    if scheme is None:
        return path
    if scheme[1] == "file":
        return Path(str(path)[len("file:") :])
    raise ValueError(
        f"path must be one of this machine, but got an URL of {scheme[1]}; copy it here, or take --data files"
    )


LocalPath = Annotated[Path, AfterValidator(_check)]
