"""Entry of a worker process that `launch` starts: ``python -m paceline.launch RUN_DIRECTORY ATTEMPT``."""

from paceline.launch.exit_codes import leave
from paceline.launch.worker import main

leave(main())
