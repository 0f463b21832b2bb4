"""``python -m paceline`` is the `paceline` command, as ``torchrun -m paceline`` needs it."""

from paceline.cli import main
from paceline.launch.exit_codes import leave

if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        leave(end.code or 0)
