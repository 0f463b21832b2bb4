"""Events that a training writes to its log."""

import dataclasses
import time
import traceback
from collections.abc import Iterator, Sequence

from paceline.checkpoint import SavedCheckpoint
from paceline.data import Source
from paceline.data.storage import read_counters
from paceline.monitor.data_events import DataGrown, StoreRead
from paceline.monitor.events import (
    BadSampleFound,
    BucketExchanged,
    BucketSizeChosen,
    CheckpointSaved,
    CodecChanged,
    ConsensusMeasured,
    DataRead,
    Event,
    ExpertsUsed,
    Failed,
    ReadersChosen,
    StalenessMeasured,
    StepFinished,
    StepTimed,
    UnusedParameters,
    Warned,
)
from paceline.monitor.log import EventLog
from paceline.monitor.user_code import find_user_line
from paceline.parallel.mixture_of_experts import Routing, take_routing
from paceline.replica.step_result import StepResult
from paceline.training.session import Session, find_delays

_NUM_DELAYS = 100
"""Measurements of staleness in a training, between those at boundaries."""
_MOST_DISTANCE = 0.2
"""Distance from the consensus, to its norm, that needs no warning."""
_DRIFT = 3.0
"""Growth of the distance since its least that needs none."""


def log_failure(log: EventLog, error: BaseException, step: int = -1) -> None:
    """Log the failure of this worker; step -1 is before the first."""
    trace = "".join(traceback.format_exception(error))
    place = find_user_line(error)
    log.write(Failed(error=type(error).__name__, message=str(error), traceback=trace, place=place), step=step)


def log_bad_samples(session: Session) -> None:
    """Log the samples that this worker could not read, whichever it is; callbacks are not called."""
    training = session.training
    events = [
        BadSampleFound(**found._asdict(), action=training.run.bad_samples.action)
        for found in session.loader.take_bad_samples()
    ]
    events += [BadSampleFound(**found._asdict(), action="skip") for found in training.held_out_bad.take()]
    for event in events:
        training.log.write(event, step=training.step)


def take_new_shards(session: Session, *, is_due: bool = False) -> None:
    """Take shards that have appeared into epochs to come, if data grows and it is time; all ranks call it.

    Args:
        session: Session of the workers.
        is_due: Whether to look for them anyway; else it is done once in each epoch.
    """
    loader = session.loader
    if loader.grows and (is_due or loader.is_growth_due) and loader.grow(session.replica.shard.world) is not None:
        log_growth(session)


def log_growth(session: Session) -> None:
    """Log that epochs to come have more samples, if they have."""
    order, train = session.loader.order, session.training.splits.train
    if order.newest_start <= session.loader.position:
        return
    assert isinstance(train, Source)
    session.log_event(
        DataGrown(num_samples=order.num_samples, num_shards=len(train.shard_sizes), start=order.newest_start)
    )


def log_step(session: Session, result: StepResult, num_samples: int) -> None:
    """Log the result of a step of `num_samples`."""
    step = note_step(session, result, num_samples)
    session.log_event(step)
    compare_with_plan(session, step.duration_s)
    log_reading(session)
    session.usage.write_if_due()
    if session.resources is not None:
        for low in session.resources.look(session.checkpoint_bytes):
            session.training.log.write(low, step=session.training.step)
    interval = session.training.run.timeline_interval
    if interval and session.training.step % interval == 0:
        for event in timeline_events(result):
            session.training.log.write(event, step=session.training.step)
        pipeline = session.replica.shard.pipeline
        if pipeline is not None and pipeline.times is not None:
            session.training.log.write(pipeline.times.to_event(), step=session.training.step)
    if (choice := result.times.bucket_choice) is not None:
        session.log_event(BucketSizeChosen(bucket_bytes=choice.bucket_bytes, reason=choice.reason))
    for change in session.replica.state.take_codec_changes():
        session.log_event(
            CodecChanged(codec=change.codec, before=change.before, codec_of=change.codec_of, reason=change.reason)
        )
    if result.newly_unused:
        session.log_event(UnusedParameters(names=result.newly_unused))
    training = session.training
    is_due = training.step - training.delays_step >= max(1, training.num_steps // _NUM_DELAYS)
    if is_due and session.replica.sync.is_asynchronous:
        log_delays(session)


def note_step(session: Session, result: StepResult, num_samples: int) -> StepFinished:
    """Return the event of a step, which this worker remembers: the first one may be lost before it writes it."""
    event = StepFinished(
        loss=result.loss,
        weight=result.weight,
        num_samples=num_samples,
        learning_rate=session.replica.optimizer.param_groups[0]["lr"],
        gradient_norm=result.gradient_norm,
        duration_s=time.perf_counter() - session.step_began_s,
        communication_s=result.communication_s,
        position=session.loader.position,
        loss_scale=session.replica.loss_scale,
        wire_bytes=result.wire_bytes,
        data_s=session.take_data_wait(),
    )
    if session.replica.dispatcher is None:  # else each worker has steps of its own
        session.training.newest_steps.append((session.training.step, event))
    return event


def compare_with_plan(session: Session, duration_s: float) -> None:
    """Log on the first rank how a run's steps compare with its plan, if it has one and that is due."""
    training = session.training
    if training.plan_watch is not None and session.replica.shard.world.rank == 0:
        for event in training.plan_watch.look(duration_s, is_last=training.step == training.num_steps):
            session.log_event(event)


def log_reading(session: Session) -> None:
    """Log the times of reading data, on each worker, if they are due; and what was chosen to read it."""
    training, loader = session.training, session.loader
    interval = training.run.timeline_interval
    is_due = interval > 0 and (training.step % interval == 0 or training.step == training.num_steps)
    if not is_due:
        return
    times = loader.take_read_times()
    reader = "process" if times.is_processes else "thread"
    if times.choice:
        chosen = ReadersChosen(num_readers=times.num_readers, reader=reader, reason=times.choice)
        training.log.write(chosen, step=training.step)
    read = DataRead(
        fetch_s=times.busy_s["fetch"],
        decode_s=times.busy_s["decode"],
        augment_s=times.busy_s["augment"],
        collate_s=times.busy_s["collate"],
        waited_s=times.waited_s,
        used_s=times.used_s,
        slowest=times.slowest,
        num_steps=times.num_steps,
        num_samples=times.num_samples,
        num_bytes=times.num_bytes,
        num_readers=times.num_readers,
        reader=reader,
    )
    training.log.write(read, step=training.step)


def log_delays(session: Session) -> None:
    """Log the staleness of gradients, where there is any, on rank 0."""
    training, delays = session.training, find_delays(session)
    if delays is None:
        return
    new = delays.since(training.delays)
    training.delays, training.delays_step = delays, training.step
    ages, counts = zip(*sorted(delays.counts.items()), strict=True) if delays.counts else ((), ())
    session.log_event(
        StalenessMeasured(
            delays=list(ages),
            counts=list(counts),
            num_dropped=delays.num_dropped,
            mean=sum(delay * count for delay, count in new.items()) / sum(new.values()) if new else None,
            largest=max(new, default=None),
        )
    )


def log_routing(session: Session) -> None:
    """Log how experts of all ranks were used since the last time, if the model has any; all ranks call it."""
    training, shard = session.training, session.replica.shard
    if not training.has_experts:
        return
    mine = [list(routing) for routing in take_routing(session.replica.module)]
    by_layer: dict[str, list[Routing]] = {}
    for theirs in shard.world.gather_documents(mine, name="use of experts"):
        for routing in theirs:
            by_layer.setdefault(routing[0], []).append(Routing(*routing))
    layers = list(by_layer)
    counts = [[sum(each) for each in zip(*(one.counts for one in by_layer[name]), strict=True)] for name in layers]
    dropped = [sum(one.num_dropped for one in by_layer[name]) for name in layers]
    session.log_event(ExpertsUsed(layers=layers, counts=counts, num_dropped=dropped))


def log_stores(session: Session) -> None:
    """Log what this worker has read from stores so far, if its data lies in any."""
    training = session.training
    for counters in read_counters():
        training.log.write(StoreRead(**dataclasses.asdict(counters)), step=training.step)


def log_distance(session: Session) -> None:
    """Log how far workers are from their consensus, if it was measured since, and warn if they drift apart."""
    training, distance = session.training, session.replica.state.distance.take()
    if distance is None:
        return
    session.log_event(ConsensusMeasured(distance=distance))
    least = training.least_distance
    if training.least_distance is None or distance < training.least_distance:
        training.least_distance = distance
    if (
        not training.has_drifted
        and not distance <= _MOST_DISTANCE
        and (least is None or not distance <= _DRIFT * least)
    ):
        training.has_drifted = True
        session.log_event(
            Warned(
                message=f"workers drift apart: they are {distance:.0%} of the parameters' norm from their consensus, "
                "which is what is evaluated and saved; lower the learning rate, exchange more often (--sync.period, "
                "another --sync.graph), or send more (--sync.codec)"
            )
        )


def log_saved(session: Session, saved: list[SavedCheckpoint], lost_ranks: Sequence[int] = ()) -> None:
    """Log the checkpoints that are complete now."""
    for one in saved:
        session.checkpoint_bytes = one.num_bytes
        session.log_event(
            CheckpointSaved(
                path=str(one.path),
                num_bytes=one.num_bytes,
                duration_s=one.duration_s,
                shared_bytes=one.shared_bytes,
                lost_ranks=list(lost_ranks),
            )
        )


def timeline_events(result: StepResult) -> Iterator[Event]:
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
