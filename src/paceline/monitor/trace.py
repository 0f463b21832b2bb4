"""Export of sampled steps as a Chrome trace, which opens in Perfetto (https://ui.perfetto.dev)."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import SettingsError, storing
from paceline.monitor.events import BucketExchanged, EventError
from paceline.monitor.formatting import printable
from paceline.monitor.reader import read_log
from paceline.monitor.timeline import TimedStep, find_timed_steps

_TIDS_PER_RANK = 1000  # Perfetto tells threads by number alone: ranks may not share any, and 0 is invalid
_COMPUTING, _WAITING, _EXCHANGE = 1, 2, 3


class _Slice(NamedTuple):
    """An interval of work, in microseconds since the beginning of the trace."""

    began: int
    ended: int
    name: str
    arguments: dict[str, Any]


def export_trace(run_dir: str | os.PathLike[str], out: str | os.PathLike[str]) -> int:
    """Write the sampled steps of the run in `run_dir` to `out` as a Chrome trace; return their number.

    Each rank is a process with threads for computing, for waiting and for the exchange; if exchanges overlap
    there are several of the last kind, since slices of one thread may only nest. Ranks are aligned by their
    hosts' clocks, and steps that were undone by a restart are included.

    Raises:
        SettingsError: `out` exists, or its directory does not.
        StorageError: `out` cannot be written.
        EventError: `run_dir` holds no log, or no step was sampled.
    """
    steps = list(find_timed_steps(read_log(Path(run_dir) / "events.jsonl")))
    if not steps:
        raise EventError(
            f"a run must have sampled steps to be traced, but {os.fspath(run_dir)} has none; "
            "with several workers every timeline_interval-th is"
        )
    content = json.dumps(make_trace(steps), allow_nan=False, separators=(",", ":"))
    _write_new(Path(out), content.encode("ascii"))
    return len(steps)


def make_trace(steps: Iterable[TimedStep]) -> dict[str, Any]:
    """Return `steps` in the Trace Event Format: an object with metadata and complete events."""
    steps = sorted(steps, key=lambda step: step.times.began_unix_s)
    origin_s = min(step.times.began_unix_s + min([0.0, *(one.began_s for one in step.buckets)]) for step in steps)
    events: list[dict[str, Any]] = []
    for rank in sorted({step.rank for step in steps}):
        mine = [step for step in steps if step.rank == rank]
        waits = [one for step in mine for one in _waits(step, origin_s)]
        exchanges = [one for step in mine for one in _exchanges(step, origin_s)]
        threads = [
            (_COMPUTING, "computing", list(_computing(mine, origin_s))),
            (_WAITING, "waiting", list(_in_turn(sorted(waits, key=_when)))),
            *((_EXCHANGE + n, "exchange", row) for n, row in enumerate(_side_by_side(exchanges))),
        ]
        events.append(_metadata(rank, _COMPUTING, "process_name", f"rank {rank}"))
        for thread, name, slices in threads:
            events.append(_metadata(rank, thread, "thread_name", name))
            events += [_complete(rank, thread, name, one) for one in slices]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"began_unix_s": origin_s}}


def _computing(steps: list[TimedStep], origin_s: float) -> Iterator[_Slice]:
    """Yield each step, and its parts inside it."""
    wholes = [
        _Slice(*_place(step, 0.0, step.times.duration_s, origin_s), f"step {step.step}", _facts(step)) for step in steps
    ]
    for step, whole in zip(steps, _in_turn(wholes), strict=True):
        yield whole
        times = step.times
        parts = (
            ("forward", 0.0, times.forward_ended_s),
            ("backward", times.backward_began_s, times.backward_ended_s),
            *(("optimizer", began_s, ended_s) for began_s, ended_s in step.optimizer_spans),
        )
        slices = [_Slice(*_place(step, began_s, ended_s, origin_s), name, {}) for name, began_s, ended_s in parts]
        yield from _in_turn(slices, whole.began, whole.ended)


def _waits(step: TimedStep, origin_s: float) -> Iterator[_Slice]:
    for one in step.buckets:
        if one.waited_s > 0:
            yield _Slice(
                *_place(step, one.landed_s - one.waited_s, one.landed_s, origin_s),
                f"for bucket {one.bucket}",
                {"step": step.step},
            )


def _exchanges(step: TimedStep, origin_s: float) -> Iterator[_Slice]:
    for one in step.buckets:
        yield _Slice(
            *_place(step, one.began_s, one.ended_s, origin_s), f"bucket {one.bucket}", _bucket_facts(step, one)
        )


def _place(step: TimedStep, began_s: float, ended_s: float, origin_s: float) -> tuple[int, int]:
    """Return two times of a step as microseconds of the trace."""
    start_s = step.times.began_unix_s - origin_s
    return round(1e6 * (start_s + began_s)), round(1e6 * (start_s + ended_s))


def _in_turn(slices: Iterable[_Slice], first: int = 0, last: int = 2**63) -> Iterator[_Slice]:
    """Yield slices of one thread, cut so that they lie between `first` and `last` and do not overlap.

    One thread does one thing at a time: any overlap is rounding, or a clock that was set back.
    """
    for one in slices:
        began = min(max(one.began, first), last)
        first = min(max(one.ended, began), last)
        yield one._replace(began=began, ended=first)


def _when(one: _Slice) -> tuple[int, int]:
    return one.began, one.ended


def _side_by_side(slices: Iterable[_Slice]) -> list[list[_Slice]]:
    """Return slices in the fewest rows such that none overlap within a row."""
    rows: list[list[_Slice]] = []
    for one in sorted(slices, key=_when):
        one = one._replace(ended=max(one.began, one.ended))
        free = next((row for row in rows if row[-1].ended <= one.began), None)
        if free is None:
            rows.append([one])
        else:
            free.append(one)
    return rows


def _facts(step: TimedStep) -> dict[str, Any]:
    return {
        "epoch": step.epoch,
        "computing_s": step.computing_s,
        "exchange_s": step.exchange_s,
        "hidden_s": step.hidden_s,
        "exposed_s": step.times.waited_s,
        "wire_bytes": step.wire_bytes,
    }


def _bucket_facts(step: TimedStep, bucket: BucketExchanged) -> dict[str, Any]:
    return {
        "step": step.step,
        "first_parameter": printable(bucket.first_parameter),
        "num_parameters": bucket.num_parameters,
        "num_bytes": bucket.num_bytes,
        "wire_bytes": bucket.wire_bytes,
        "queued_s": bucket.began_s - bucket.ready_s,
        "waited_s": bucket.waited_s,
    }


def _complete(rank: int, thread: int, category: str, one: _Slice) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": rank,
        "tid": _tid(rank, thread),
        "ts": one.began,
        "dur": one.ended - one.began,
        "name": one.name,
        "cat": category,
        "args": one.arguments,
    }


def _metadata(rank: int, thread: int, name: str, value: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": _tid(rank, thread), "ts": 0, "name": name, "args": {"name": value}}


def _tid(rank: int, thread: int) -> int:
    return _TIDS_PER_RANK * (rank + 1) + thread


def _write_new(path: Path, content: bytes) -> None:
    with storing(path):
        try:
            path.touch(exist_ok=False)
        except FileExistsError as error:
            raise SettingsError(
                f"a trace must go to a new file, but {path} exists; choose another, or remove it"
            ) from error
        except (FileNotFoundError, NotADirectoryError) as error:
            raise SettingsError(
                f"a trace must go to a file in a directory that exists, but got {path}: {error.strerror}; make it"
            ) from error
        try:
            path.write_bytes(content)
        except BaseException:
            path.unlink()
            raise
