"""A step's times as events, from which reports draw what computing hid of communication."""

import time
from collections.abc import Iterator

from paceline.monitor.events import BucketExchanged, Event, StepTimed
from paceline.replica.step_result import StepResult


def tell_timeline(result: StepResult) -> Iterator[Event]:
    """Return the events of one step on this worker: its buckets, then the step."""
    times = result.times
    began_s = times.began_s
    began_unix_s = time.time() - (time.perf_counter() - began_s)
    for bucket in times.buckets:
        yield BucketExchanged(
            bucket=bucket.index,
            first_parameter=bucket.parameters[0],
            num_parameters=len(bucket.parameters),
            num_bytes=bucket.num_bytes,
            wire_bytes=bucket.wire_bytes,
            ready_s=bucket.ready_s - began_s,
            began_s=bucket.began_s - began_s,
            ended_s=bucket.ended_s - began_s,
            landed_s=bucket.landed_s - began_s,
            waited_s=bucket.waited_s,
        )
    yield StepTimed(
        began_unix_s=began_unix_s,
        forward_ended_s=times.backward_began_s - began_s,
        backward_began_s=times.backward_began_s - began_s,
        backward_ended_s=times.backward_ended_s - began_s,
        optimizer_began_s=times.optimizer_began_s - began_s if times.optimizer_began_s else None,
        optimizer_ended_s=times.optimizer_ended_s - began_s if times.optimizer_ended_s else None,
        duration_s=times.ended_s - began_s,
        waited_s=result.communication_s,
    )
