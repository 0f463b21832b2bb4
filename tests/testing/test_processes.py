import os
import threading
import time

import pytest
from pydantic import ValidationError

from paceline.testing import Fault, faults, run_processes

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "EXTRA")


def end_in_all_ways(script, greeting):
    rank = int(os.environ["RANK"])
    print(f"{greeting} from rank {rank}")
    faults.strike(script, rank=rank, step=0)
    return {"environment": {name: os.environ.get(name) for name in NAMES}, "num_threads": threading.active_count()}


def test_each_rank_is_told_how_it_ended():
    script = [
        faults.fail(rank=1, step=0, message="mine"),
        faults.kill(rank=2, step=0),
        faults.freeze(rank=3, step=0),
        faults.delay(rank=4, step=0, duration_s=1000),
        faults.kill(rank=0, step=1),
    ]
    results = run_processes(
        5,
        end_in_all_ways,
        {"script": [fault.model_dump() for fault in script], "greeting": "hello, Zoë"},
        wait_for=[0, 1, 2],
        environment={"EXTRA": "more"},
    )
    assert [result.rank for result in results] == [0, 1, 2, 3, 4]
    assert [result.exit_code for result in results] == [0, 1, -9, None, None]
    assert [result.value is None for result in results] == [False, True, True, True, True]
    assert results[0].value == {
        "environment": dict(zip(NAMES, ("0", "0", "5", "5", "127.0.0.1", "1", "more"), strict=True)),
        "num_threads": 1,
    }
    assert results[0].output == "hello, Zoë from rank 0\n"
    assert "ScriptedError: mine" in results[1].output


def test_a_starter_that_cannot_find_the_function_says_so():
    with pytest.raises(RuntimeError, match="no_such_function"):
        run_processes(1, "json:no_such_function")


def test_faults_strike_one_rank_at_one_step():
    script = [faults.fail(rank=1, step=3, message="now"), faults.delay(rank=0, step=2, duration_s=0.05)]
    for rank, step in [(0, 3), (1, 2), (2, 3)]:
        faults.strike(script, rank=rank, step=step)
    began_s = time.monotonic()
    faults.strike(script, rank=0, step=2)
    assert time.monotonic() - began_s >= 0.05
    with pytest.raises(faults.ScriptedError, match="now"):
        faults.strike([fault.model_dump() for fault in script], rank=1, step=3)


def test_a_fault_that_there_is_none_of_is_refused():
    with pytest.raises(ValidationError, match="'kill', 'freeze', 'delay' or 'fail'"):
        Fault(kind="explode", rank=0, step=0)
