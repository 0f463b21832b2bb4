"""Entry of a worker process that `launch` starts: ``python -m paceline.launch RUN_DIRECTORY ATTEMPT``."""

import sys

from paceline.launch.worker import main

sys.exit(main())
