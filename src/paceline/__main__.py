"""``python -m paceline`` is the `paceline` command, as ``torchrun -m paceline`` needs it."""

from paceline.cli import main

if __name__ == "__main__":
    main()
