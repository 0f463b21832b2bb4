"""What the process that workers are forked from imports for all of them."""

import importlib

from paceline.launch.imports import without_collections

with without_collections():
    # torch imports its compiler with the first optimizer.
    for _name in ("paceline.launch.worker", "paceline.launch.workforce", "torch._dynamo"):
        importlib.import_module(_name)
