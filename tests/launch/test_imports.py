import gc
import multiprocessing
import os
import subprocess
import sys

import pytest

from paceline.launch.forking import prepare_to_fork
from paceline.launch.imports import without_collections
from paceline.testing import run_processes

COMMAND = """
import atexit, gc, runpy, sys
look = lambda: [gc.get_stats()[2]["collections"], gc.get_freeze_count(), "torch" in sys.modules, gc.isenabled()]
atexit.register(lambda: print(*look()))
sys.argv = ["paceline", "train", "nope"]
runpy.run_module("paceline", run_name="__main__")
"""


def is_looked_through():
    return any(each is is_looked_through for each in gc.get_objects())


def test_collections_on_ranks_pass_over_the_module_of_the_test():
    assert is_looked_through() is False, "conftest.py freezes all that was collected"
    (result,) = run_processes(1, is_looked_through)
    assert result.value is False


def test_the_process_that_workers_are_forked_from_has_collected_nothing():
    prepare_to_fork()
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_collector, args=(sender,))
    process.start()
    num_frozen, is_enabled = receiver.recv()
    process.join()
    assert num_frozen > 200_000
    assert is_enabled


def send_collector(sender):
    sender.send([gc.get_freeze_count(), gc.isenabled()])


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({}, id="launcher", marks=pytest.mark.slow),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1"}, id="worker"),
    ],
)
def test_a_command_imports_torch_without_collections(environment):
    variables = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, check=False, env=variables)
    collections, num_frozen, has_torch, is_enabled = done.stdout.split()
    assert (has_torch, is_enabled) == ("True", "True"), done.stderr
    assert int(num_frozen) > 200_000
    assert int(collections) < 3, "of the oldest objects, which take 0.3 s"


def test_collections_go_on_after_an_error_and_stay_off_where_they_were():
    with pytest.raises(ZeroDivisionError), without_collections():
        _ = 1 // gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
