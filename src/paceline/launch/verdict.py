"""How workers ended, by their exit codes and what they said in the log and in their output."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import paceline.errors
from paceline.launch.exit_codes import ExitCode, find_exit_code
from paceline.launch.processes import Ended, describe_exit
from paceline.monitor.events import BudgetSpent, Failed, Preempted, Record, RunFinished, StepFinished
from paceline.monitor.reader import select

_LOST_PEERS = ("CommunicationError", "PeerTimeoutError")
_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
"""Words of gloo before it aborts a process."""
_OPERATION = re.compile(r'distributed_c10d\.py", line \d+ in (\w+)')
"""Operation of torch on the stack of a process that is aborted."""


@dataclass(frozen=True)
class Outcome:
    """How one start of all workers ended."""

    code: ExitCode
    reason: str = ""
    last_step: int = -1
    mismatch: str = ""
    """Sentence on the operations of ranks, if torch ended one because another ran something else; empty if not."""


def judge(records: list[Record], ended: Ended, signalled: bool, output: Path, killed: Sequence[str] = ()) -> Outcome:
    """Return how a start of all workers ended.

    Args:
        records: Records of the log from that start on.
        ended: Ends of the processes.
        signalled: Whether the launcher was asked to stop.
        output: Folder of what workers printed.
        killed: Ways in which workers were killed, as the supervisor knows them.
    """
    last_step = max((record.step for record in select(records, StepFinished)), default=-1)
    failures = select(records, Failed)
    if select(records, Preempted):
        return Outcome(ExitCode.PREEMPTED)
    if select(records, BudgetSpent):
        return Outcome(ExitCode.BUDGET_SPENT)
    if select(records, RunFinished):  # whatever became of a worker that was to join
        return Outcome(ExitCode.FINISHED)
    final = [failure.event for failure in failures if failure.event.error not in _LOST_PEERS]
    if final:
        return Outcome(find_exit_code(getattr(paceline.errors, final[0].error, Exception)))
    if signalled:  # before the first step there was nothing to save
        return Outcome(ExitCode.FAILED if last_step >= 0 else ExitCode.PREEMPTED)
    reason = "; ".join(dict.fromkeys(killed)) or _find_cause(failures, ended, output)
    return Outcome(ExitCode.PEERS_LOST, reason, last_step, _find_mismatch(failures, ended, output))


def _find_cause(failures: list[Record[Failed]], ended: Ended, output: Path) -> str:
    """Return who ended without an error message or, if nobody did, what the first rank to notice says of the others."""
    told = (ExitCode.PEERS_LOST, ExitCode.PREEMPTED, ExitCode.BUDGET_SPENT)
    odd = {rank: code for rank, code in ended.failures.items() if code not in told}
    if odd:
        return "; ".join(describe_exit(f"rank {rank}", code, output) for rank, code in odd.items())
    # Who ran out of time has looked where everybody is; to others, it is then the one that is gone.
    reports = sorted(failures, key=lambda failure: failure.event.error != paceline.errors.PeerTimeoutError.__name__)
    if not reports:
        return "the workers ended without an error message"
    return f"rank {reports[0].rank}: {reports[0].event.message}"


def _find_mismatch(failures: list[Record[Failed]], ended: Ended, output: Path) -> str:
    """Return what ranks ran, if gloo aborted one that got a message of another size; empty if it did not."""
    for rank in (rank for rank, code in ended.failures.items() if code == -signal.SIGABRT):
        said = (output / f"rank{rank}.err").read_text(errors="replace").rpartition("---- started again")[2]
        if sizes := _SIZES.search(said):
            operation = _OPERATION.search(said)
            others = "".join(f"; rank {each.rank}: {each.event.message}" for each in failures)
            return (
                f"ranks must run the same operations, but rank {rank}, in {operation[1] if operation else 'one'}, got "
                f"{sizes[1]} bytes where it expected {sizes[2]}{others}; let every rank run the same modules; the "
                f"stack is in {output / f'rank{rank}.err'}"
            )
    return ""


def describe_killed(killed: dict[str, str], records: list[Record], first_epoch: int) -> str:
    """Return who was killed after all were asked to stop, and whether the others saved a checkpoint, in words."""
    saved = select([record for record in records if record.epoch >= first_epoch], Preempted)
    end = f"the others saved {saved[-1].event.checkpoint}" if saved else "no checkpoint was written for the stop"
    return f"{', '.join(killed)} did not stop as asked, and had to be killed; {end}; {'; '.join(killed.values())}"
