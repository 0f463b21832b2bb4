"""The line of a user's own code that an error came from."""

import os
import re
import sysconfig
import traceback
from pathlib import Path

_PLACE = re.compile(r'^\s*File "(.+)", line (\d+)', re.MULTILINE)
_OTHERS = [
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")),
]
"""Folders of code that the user has not written: Paceline, Python and installed packages."""


def find_user_line(error: BaseException) -> str:
    """Return the innermost line of the user's own code that an error came through, as ``file:line``; empty if none."""
    # The cause is deeper; an error from a loader process has its traceback as text in its message.
    if error.__cause__ is not None and (line := find_user_line(error.__cause__)):
        return line
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        places.append((error.filename, error.lineno))
    places += [(file, int(line)) for file, line in _PLACE.findall(str(error))]
    return next((f"{shorten(file)}:{line}" for file, line in reversed(places) if is_users(file)), "")


def format_user_traceback(error: BaseException) -> str:
    """Return the traceback of an error from the outermost line of the user's own code on."""
    outermost = error.__traceback__
    while outermost is not None and not is_users(outermost.tb_frame.f_code.co_filename):
        outermost = outermost.tb_next
    return "".join(traceback.format_exception(type(error), error, outermost))


def is_users(file: str) -> bool:
    """Return whether a file is the user's own code: not Paceline's, Python's or an installed package's."""
    is_installed = "site-packages" in file or "dist-packages" in file
    return not file.startswith("<") and not is_installed and not any(file.startswith(f"{path}/") for path in _OTHERS)


def shorten(file: str) -> str:
    """Return the path relative to the working directory if it is below that, else the absolute path."""
    path = os.path.relpath(file)
    return os.path.abspath(file) if path.startswith("..") else path
