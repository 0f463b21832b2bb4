"""A whole run, as its log would tell it."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from paceline.monitor import (
    BucketExchanged,
    CheckpointSaved,
    Evaluated,
    Event,
    EventLog,
    Failed,
    Record,
    Restarted,
    RunFinished,
    RunStarted,
    Showcased,
    StepFinished,
    StepTimed,
    Warned,
)

GLOBAL_BATCH = 64


def make_start(**changes: Any) -> RunStarted:
    fields: dict[str, Any] = {
        "recipe": "transformer_lm",
        "settings": {
            "model": {"name": "transformer", "num_layers": 4},
            "sync": {"name": "every_step"},
            "seed": 0,
        },
        "num_workers": 2,
        "device": "cpu",
        "num_parameters": 4_816_128,
        "start_step": 0,
        "total_steps": 100,
        "global_batch": GLOBAL_BATCH,
        "samples_per_epoch": 10_000,
    }
    return RunStarted(**{**fields, **changes})


def make_step(step: int, **changes: Any) -> StepFinished:
    fields: dict[str, Any] = {
        "loss": 2.0,
        "weight": 64.0,
        "num_samples": GLOBAL_BATCH,
        "learning_rate": 1e-3,
        "gradient_norm": 1.0,
        "duration_s": 0.1,
        "communication_s": 0.02,
        "position": step * GLOBAL_BATCH,
    }
    return StepFinished(**{**fields, **changes})


def make_record(event: Event, step: int = 0, **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "run": "first",
        "rank": 0,
        "epoch": 0,
        "time_s": float(step),
        "unix_s": 1e9 + step,
    }
    return Record(event=event, step=step, **{**fields, **changes})


class Clock:
    """A clock that is told what time it is."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def tell_run(path: Path, total_steps: int, *, ends_with: Callable[[EventLog], None] | None = None) -> None:
    """Write the log of a plausible run to `path`: it loses a worker at 5/8 and goes on from 1/2."""
    clock = Clock()
    lost_at, resumed_at = total_steps * 5 // 8, total_steps // 2
    with EventLog(path, run="first", rank=0, clock=clock) as log:
        log.write(make_start(total_steps=total_steps), step=0)
        log.write(Warned(message="2 threads share one core"), step=0)
        _tell_steps(log, clock, range(1, lost_at + 1), total_steps)
        with EventLog(path, run="first", rank=1, clock=clock) as other:
            error = Failed(error="PeerTimeoutError", message="rank 0 is gone", traceback="Traceback ...")
            other.write(error, step=lost_at)
        log.write(Restarted(attempt=1, reason="rank 1 was killed by SIGKILL"), step=lost_at)
        resumed = make_start(total_steps=total_steps, start_step=resumed_at, resumed_from=f"step-{resumed_at}")
        log.write(resumed, step=resumed_at)
        _tell_steps(log, clock, range(resumed_at + 1, total_steps + 1), total_steps)
        (ends_with or _finish)(log)


def _finish(log: EventLog) -> None:
    log.write(Showcased(text="ROMEO:▸ What light\nthrough yonder <script>alert(1)</script>"), step=400)
    finish = RunFinished(held_out_loss=1.56, metrics={"accuracy": 0.541}, duration_s=63.0, samples_per_s=512.3)
    log.write(finish, step=400)


def _tell_steps(log: EventLog, clock: Clock, steps: range, total_steps: int) -> None:
    random = Random(steps.start)
    for step in steps:
        done = step / total_steps
        duration_s = 0.12 * random.lognormvariate(0, 0.12) + (0.5 if step == steps.start else 0)
        clock.now_s += duration_s
        event = make_step(
            step,
            loss=1.4 + 3.1 * math.exp(-9 * done) + random.gauss(0, 0.06),
            learning_rate=1e-3 * min(step / (0.05 * total_steps), 0.5 * (1 + math.cos(math.pi * done))),
            duration_s=duration_s,
            communication_s=duration_s * min(0.9, abs(random.gauss(0.22, 0.04))),
        )
        log.write(event, step=step)
        if step % max(1, total_steps // 10) == 0:
            evaluated = Evaluated(
                loss=1.5 + 3.1 * math.exp(-8.6 * done),
                metrics={"accuracy": 0.55 * (1 - math.exp(-5 * done))},
                num_samples=1000,
                duration_s=1.2,
            )
            log.write(evaluated, step=step)
            saved = CheckpointSaved(path=f"checkpoints/step-{step}", num_bytes=57_800_000, duration_s=0.21)
            log.write(saved, step=step)


def make_bucket(number: int, **changes: Any) -> BucketExchanged:
    """Return the exchange of a bucket that took 10 ms, began at 40 ms and 10 ms a number, and was not waited for."""
    began_s = 0.04 + 0.01 * number
    fields: dict[str, Any] = {
        "bucket": number,
        "first_parameter": f"layers.{9 - number}.weight",
        "num_parameters": 2,
        "num_bytes": 16_000_000,
        "wire_bytes": 4_000_000,
        "ready_s": began_s - 0.002,
        "began_s": began_s,
        "ended_s": began_s + 0.01,
        "landed_s": max(0.08, began_s + 0.01),
        "waited_s": 0.0,
    }
    return BucketExchanged(**{**fields, **changes})


def make_times(**changes: Any) -> StepTimed:
    """Return the times of a step of 100 ms that stood still for 10 ms."""
    fields: dict[str, Any] = {
        "began_unix_s": 1e9,
        "forward_ended_s": 0.03,
        "backward_began_s": 0.031,
        "backward_ended_s": 0.08,
        "optimizer_began_s": 0.09,
        "optimizer_ended_s": 0.1,
        "duration_s": 0.1,
        "waited_s": 0.01,
    }
    return StepTimed(**{**fields, **changes})


def make_timed_step(step: int = 1, num_buckets: int = 5, slower: float = 1.0, **changes: Any) -> list[Record]:
    """Return the records of a sampled step; the last bucket is waited for, and all takes `slower` times as long."""
    last = num_buckets - 1
    buckets = [make_bucket(n, waited_s=0.01 if n == last else 0.0) for n in range(num_buckets)]
    times = make_times(began_unix_s=changes.get("unix_s", 1e9 + step))
    return [make_record(_stretch(event, slower), step, **changes) for event in (*buckets, times)]


def _stretch(event: Any, slower: float) -> Any:
    moments = {name: slower * getattr(event, name) for name in event.__slots__ if name.endswith("_s")}
    return replace(event, **{name: value for name, value in moments.items() if name != "began_unix_s"})
