"""Real processes for tests: N ranks that find each other like torchrun's workers.

One starter process imports the function under test and then forks the ranks. The starter itself is forked from Python's
fork server, which has imported torch and Paceline, so that the starts of one process share that import. The caller
owns the ranks' rendezvous store, like torchrun's agent: it outlives every rank. When the caller dies, even by
SIGKILL, starter and ranks die with it.
"""

import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from pydantic import JsonValue

from paceline.launch.forking import unblock_signals
from paceline.testing.netlab_namespaces import enter_namespace

_PR_SET_PDEATHSIG = 1
_GRACE_S = 15.0
"""Additional time of the starter beyond the ranks', to import torch and to clean up."""
_PRELOADED = ["paceline.launch.preloaded", "paceline.testing", "paceline.recipes.transformer_lm", "pytest"]
_PRELOADED += ["torch.distributed.optim"]  # each rank with zero_stage 1 would take a third of a second for it
"""Modules that the fork server imports, where they are installed."""


@dataclass(frozen=True)
class RankResult:
    """Result of one process."""

    rank: int
    value: Any
    """Return value of the function, through JSON; None if it did not return."""
    exit_code: int | None
    """Exit code: 0 if the function returned, 1 if it raised, minus the signal that ended it; None if it was still
    running at the end."""
    output: str
    """Output to stdout and stderr, with the traceback of an error."""


def check_exits(results: Sequence[RankResult]) -> None:
    """Check that the function returned on every rank.

    Raises:
        AssertionError: A rank ended otherwise; the message has all exit codes, and the end of that rank's output.
    """
    said = "".join(f"\n--- rank {each.rank}:\n{each.output[-4000:]}" for each in results if each.exit_code != 0)
    assert not said, f"exit codes are {[each.exit_code for each in results]}{said}"


def open_store() -> dist.TCPStore:
    """Return a store for `run_processes` that several starts can share, as those of a restarting launcher do.

    The kernel chooses its port while it is bound, so that no other process can take it.
    """
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def run_processes(
    num_ranks: int,
    function: str | Callable[..., JsonValue],
    arguments: Mapping[str, JsonValue] | None = None,
    *,
    timeout_s: float = 40.0,
    wait_for: Collection[int] | None = None,
    store: dist.TCPStore | None = None,
    environment: Mapping[str, str] | None = None,
    namespaces: Sequence[str] | None = None,
) -> list[RankResult]:
    """Run ``function(**arguments)`` in `num_ranks` processes with torchrun's environment, and return their results.

    A script that calls it must do so below ``if __name__ == "__main__":``, as with all of `multiprocessing`.

    Args:
        num_ranks: Number of processes; each has one thread.
        function: Function at the top of a module; or its path, ``package.module:function`` or ``file.py:function``.
        arguments: Keyword arguments of the function, as JSON.
        timeout_s: Time after which all remaining processes are killed.
        wait_for: Ranks to wait for, after which the others are killed; all by default.
        store: Rendezvous store; a new one by default.
        environment: Additional environment variables.
        namespaces: Path of each rank's network namespace, all with the same number of ranks; the ranks of one
            namespace are consecutive and form one host.
    """
    paths = list(namespaces or [""] * num_ranks)
    held = store or open_store()
    with tempfile.TemporaryDirectory(prefix="paceline-ranks-") as folder:
        plan = {
            "owner": os.getpid(),
            "function": function if isinstance(function, str) else _locate(function),
            "arguments": dict(arguments or {}),
            "timeout_s": timeout_s,
            "wait_for": sorted(range(num_ranks) if wait_for is None else wait_for),
            "folder": folder,
            "namespaces": paths,
        }
        launcher = _launcher_environment(num_ranks, num_ranks // len(set(paths)), held.port)
        variables = {**os.environ, **launcher, **(environment or {})}
        # Variables may affect imports, which the fork server has done already.
        _check(*(_run_starter if environment else _fork_starter)(plan, variables))
        return [_collect(Path(folder), rank) for rank in range(num_ranks)]


def _locate(function: Callable[..., JsonValue]) -> str:
    """Return the path of `function` for the starter: a package's module by name, to import it once, else a file."""
    module = function.__module__
    return f"{module if '.' in module else inspect.getsourcefile(function)}:{function.__qualname__}"


def _launcher_environment(num_ranks: int, ranks_per_host: int, port: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store exists already: rank 0 must not open one
        "OMP_NUM_THREADS": "1",
    }


def _run_starter(plan: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a separate starter, which never outlives this call; return exit code and output."""
    program = "import json, sys; from paceline.testing.processes import start_ranks; start_ranks(json.load(sys.stdin))"
    command = [sys.executable, "-c", program]
    starter = subprocess.Popen(
        command,
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = starter.communicate(json.dumps(plan), timeout=plan["timeout_s"] + _GRACE_S)
    finally:
        if starter.returncode is None:
            os.killpg(starter.pid, signal.SIGKILL)
            starter.communicate()
    return starter.returncode, output


def _fork_starter(plan: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a starter that the fork server forks; return exit code and output."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    starter = context.Process(target=_be_forked, args=(plan, dict(environment), os.getcwd()))
    starter.start()
    try:
        starter.join(plan["timeout_s"] + _GRACE_S)
        if starter.exitcode is None:
            raise TimeoutError("the process that starts ranks must end in time, but it did not")
    finally:
        starter.kill()
        starter.join()
    output = Path(plan["folder"], "starter.output")
    return starter.exitcode, output.read_text(errors="replace") if output.exists() else ""


def _be_forked(plan: Mapping[str, Any], environment: Mapping[str, str], directory: str) -> None:
    """Run as a starter, as if this process had been started for it alone."""
    unblock_signals()  # they are blocked if a launcher started the fork server
    os.setsid()  # Ctrl-C is for the caller
    output = os.open(Path(plan["folder"], "starter.output"), os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    torch.set_num_threads(1)  # OMP_NUM_THREADS comes too late
    start_ranks({**plan, "owner": os.getppid()})


def _check(exit_code: int, output: str) -> None:
    if exit_code != 0:
        raise RuntimeError(f"the process that starts ranks must end well, but it did not:\n{output}")


def _collect(folder: Path, rank: int) -> RankResult:
    value, output = folder / f"{rank}.value", folder / f"{rank}.output"
    exits: dict[str, int | None] = json.loads((folder / "exits").read_text())
    return RankResult(
        rank,
        json.loads(value.read_text()) if value.exists() else None,
        exits[str(rank)],
        output.read_text(errors="replace") if output.exists() else "",  # none if it was killed at once
    )


def start_ranks(plan: Mapping[str, Any]) -> None:
    """Run as the starter: fork the ranks of a plan, and write the result of each."""
    folder = Path(plan["folder"])
    signal.signal(signal.SIGTERM, lambda *_: _vanish(folder))
    _die_with_parent(plan["owner"], signal.SIGTERM)
    place, _, name = plan["function"].rpartition(":")
    function = getattr(_load(place), name)
    gc.freeze()  # a collection on a rank need not look through all that was imported, which takes 0.3 s
    namespaces = plan["namespaces"]
    ranks = {_fork(rank, function, plan["arguments"], folder, namespaces): rank for rank in range(len(namespaces))}
    exits = dict.fromkeys(range(len(namespaces)), None) | _wait(ranks, set(plan["wait_for"]), plan["timeout_s"])
    (folder / "exits").write_text(json.dumps(exits))


def _vanish(folder: Path) -> None:
    """End like the owner: the ranks follow."""
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _die_with_parent(parent: int, by: signal.Signals) -> None:
    """Make the kernel send this process a signal when its parent dies, or send it now if it has died already."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
        if os.getppid() != parent:
            os.kill(os.getpid(), by)


def _load(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(Path(place).parent))  # so that the file may import its neighbours, as under pytest
    spec.loader.exec_module(module)
    return module


def _fork(
    rank: int,
    function: Callable[..., JsonValue],
    arguments: Mapping[str, JsonValue],
    folder: Path,
    namespaces: Sequence[str],
) -> int:
    """Return the process id of a new rank; in the rank itself, never return."""
    starter = os.getpid()
    pid = os.fork()
    if pid != 0:
        return pid
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with_parent(starter, signal.SIGKILL)
    output = os.open(folder / f"{rank}.output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()  # a rank that native code ends says where
    namespace = namespaces[rank]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(namespaces[:rank].count(namespace))}
    code = 1
    try:
        if namespace:
            enter_namespace(namespace)
        value = json.dumps(function(**arguments))
        (folder / f"{rank}.value").write_text(value)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # not the starter's exit handlers, which a fork has inherited


def _wait(ranks: dict[int, int], needed: set[int], timeout_s: float) -> dict[int, int | None]:
    """Wait until the `needed` ranks have ended, kill the others, and return the exit codes of those that ended."""
    deadline_s = time.monotonic() + timeout_s
    exits: dict[int, int | None] = {}
    while not needed <= exits.keys() and time.monotonic() < deadline_s:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            exits[ranks[pid]] = os.waitstatus_to_exitcode(status)
        else:
            owner = multiprocessing.parent_process()  # where the fork server has forked this process
            if owner is not None and not owner.is_alive():
                signal.raise_signal(signal.SIGTERM)
            time.sleep(0.01)
    for pid, rank in ranks.items():
        if rank not in exits:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return exits
