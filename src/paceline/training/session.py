"""State of the workers that train together now: opened when they start, closed when they part."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.checkpoint import AsyncSaver, SavedState
from paceline.checkpoint.peer_memory import PeerMemory
from paceline.checkpoint.stripes import make_teams
from paceline.comm.group import Group
from paceline.comm.membership import Membership
from paceline.data import Batch, IterableSource, Loader, Source
from paceline.data.content import agree_on_content
from paceline.data.growth import agree_on_shards
from paceline.elastic.member import Member
from paceline.errors import CommunicationError, SettingsError
from paceline.monitor.events import BatchChanged, Event, ReplicasHealed, RunStarted, Warned
from paceline.parallel.model_shard import ModelShard
from paceline.replica.healing import GradientComparison, Healed, heal
from paceline.replica.living import LivingState
from paceline.replica.memory import KeptReplica
from paceline.replica.named_tensors import restore_objects
from paceline.replica.replica import Replica
from paceline.replica.shared_saving import open_saver
from paceline.replica.state import restore
from paceline.sync.batch_statistics import pool_over_workers
from paceline.sync.rule import Rule
from paceline.sync.synchroniser import Delays
from paceline.training.anomalies import AnomalyGuard
from paceline.training.budget import BudgetGuard, Spent
from paceline.training.idle import list_idle
from paceline.training.load_balancing import LoadBalancer
from paceline.training.loading import make_loader
from paceline.training.memory_probe import MemoryProbe
from paceline.training.noise_scale import NO_CLIPPING, NoiseMeter
from paceline.training.rates import Rates
from paceline.training.rehearsal import check_batch_norm_sizes
from paceline.training.resources import ResourceWatch
from paceline.training.run import Run
from paceline.training.save_interval import SaveInterval, estimate_failures_per_day
from paceline.training.training import Training
from paceline.training.usage import UsageMeter


@dataclass
class Session:
    """State of a training that lasts as long as its workers stay the same."""

    training: Training
    replica: Replica
    rates: Rates
    """Learning rates of the replica's optimizer."""
    loader: Loader
    saver: AsyncSaver | None
    """Saver of this rank; None where rank 0 writes for it."""
    load_balancer: LoadBalancer
    save_interval: SaveInterval
    peer_memory: PeerMemory | None
    """This rank's copies in the memory of peers; None if the run keeps none, or workers are too few."""
    noise: NoiseMeter | None
    """Meter of the gradient noise scale; None if it is not measured."""
    probe: MemoryProbe
    guard: AnomalyGuard
    resources: ResourceWatch | None
    """Watch of this host's memory and disk, on its first rank."""
    usage: UsageMeter
    """Meter of what this worker uses."""
    budget: BudgetGuard
    """Guard of the run's budget."""
    checkpoint_bytes: int = 0
    """Size of the newest checkpoint; 0 before the first."""
    step_began_s: float = 0.0
    data_waited_s: float = 0.0
    """Time that the loader had waited for data when the last step was logged."""
    num_micro_batches: int = 0
    """Number of micro-batches done in the current step."""
    global_batch: int = 0
    """Samples of the next step, as logged last."""
    member: Member | None = None
    """Connection to the supervisor of workers that may change; None if they stay the same."""
    is_changing: bool = False
    """Whether the session ends because all workers have agreed that others join or leave."""
    unfinished: Batch | None = None
    """Batch of the step in which workers were lost."""
    first_step: int = 0
    """Number of steps before the session."""
    first_update: int = 0
    """Number of the replica's updates before the session."""
    repaired: str = ""
    """Words on what was changed so that it fits these workers."""

    @property
    def membership(self) -> Membership:
        """State of the workers that your own loop has too, such as their agreement to stop."""
        return self.replica.membership

    def take_data_wait(self) -> float:
        """Return the time of waiting for data since this was called last."""
        before, self.data_waited_s = self.data_waited_s, self.loader.waited_s
        return max(0.0, self.data_waited_s - before)

    def log_event(self, event: Event) -> None:
        """Log an event that all workers know, once, and call the callbacks."""
        training, rank = self.training, self.replica.shard.world.rank
        if rank == 0:
            training.log.write(event, step=training.step)
        for callback in training.run.callbacks:
            if rank == 0 or callback.all_workers:
                callback.call(event, TrainingView(self))


class TrainingView:
    """A callback's view of a training, and its requests to it."""

    def __init__(self, session: Session) -> None:
        self._session, self._training = session, session.training

    @property
    def run(self) -> Run:
        """Settings of the run."""
        return self._training.run

    @property
    def directory(self) -> Path:
        """Directory of the run."""
        return self._training.directory

    @property
    def step(self) -> int:
        """Number of updates so far."""
        return self._training.step

    @property
    def num_steps(self) -> int:
        """Number of updates of the whole training."""
        return self._training.num_steps

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self._session.replica.shard.world.rank

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self._session.replica.shard.data_parallel_group.size

    @property
    def module(self) -> nn.Module:
        """Module that is trained, or this rank's part of it; read it, but do not change it."""
        return self._training.module

    def request_stop(self, reason: str = "a callback asked for it") -> None:
        """Ask all workers to end the training after a step; it is then evaluated and finished as after its last one."""
        self._training.end_reason = self._training.end_reason or reason
        self._session.membership.request_stop(reason)


def watch_replica(session: Session) -> None:
    """Let the data and the run's health settings know the session's replica, which may be a new one."""
    run, replica, group = session.training.run, session.replica, session.replica.shard.group
    if isinstance(train := session.training.splits.train, Source):
        train.watch(replica.module)
    replica.state.judge_with(session.guard.judge)
    replica.state.keeps_refused &= run.anomalies.may_go_on

    repeated = session.training.repeated_healing

    def log_healed(healed: Healed) -> None:
        session.log_event(
            ReplicasHealed(ranks=healed.ranks, source_rank=healed.source_rank, difference=healed.difference)
        )
        if words := repeated.react(healed.ranks, replica.num_updates, group, run.hash_interval, session.member):
            session.log_event(Warned(message=words))

    def heal_replica(everybody: list[dict[str, str]], targets: dict[str, Any]) -> bool:
        healed = heal(everybody, group, targets)
        if healed is not None:
            log_healed(healed)
        return healed is not None

    heals = run.on_divergence == "heal"
    if heals:
        replica.comparison.heal = heal_replica
    if run.gradient_hash_interval and group.size > 1:
        parameters = {name: p for name, p in replica.module.named_parameters() if p.requires_grad}
        comparison = GradientComparison(
            parameters, replica.shard, run.gradient_hash_interval, log_healed if heals else None
        )
        replica.state.compare_gradients_with(comparison.check)


@contextmanager
def open_session(
    training: Training,
    group: Group,
    world: Group | None,
    state: SavedState | Callable[[Replica], SavedState] | None,
    *,
    member: Member | None = None,
    is_live: bool = False,
    kept: KeptReplica | None = None,
) -> Iterator[Session]:
    """Open the session of the workers of `group`; signals inside are requests to stop, and at the end saves finish.

    Args:
        training: Training of the workers.
        group: The workers, or all ranks of the layout.
        world: See `Replica`.
        state: Checkpoint to resume from, or the state in memory, on rank 0; or a function that finds it on all ranks.
        member: Connection to the supervisor, if workers may change.
        is_live: Whether the state is that of rank 0 at its end of the session before, in memory.
        kept: State that this worker has kept from the session before, if it is at the same step as rank 0.
    """
    session = _make_session(training, group, world, kept, is_live=is_live)
    session.member = member
    watch_replica(session)
    try:
        resume(session, state(session.replica) if callable(state) else state, is_live=is_live, kept=kept)
        check_batch_norm_sizes(training.run, training.splits, session.loader)
        before, session.global_batch = session.global_batch, session.loader.global_batch
        if is_live:
            words = session.replica.state.settle(session.replica.optimizer, is_new=kept is None)
            session.repaired = "; ".join(filter(None, (session.repaired, words, follow_servers(session))))
        else:
            _log_start(session)
        session.budget.begin(training.step, session.replica.shard.world)
        if before not in (0, session.global_batch):  # other workers, or other settings, than before
            session.log_event(describe_batch(session))
    except CommunicationError:  # another session may follow
        session.usage.close()
        session.replica.state.abandon_step()
        session.replica.close()
        raise
    session.first_step, session.first_update = training.step, session.replica.num_updates
    saver = session.saver if not training.keeps_saver else None
    # A second signal must not end the process while the saver still writes.
    usage = session.usage.logging_to(training.log, lambda: training.step)
    with session.membership.stopping_on_signals(may_interrupt=False), saver or nullcontext(), usage:
        yield session
    session.replica.close()
    if session.peer_memory is not None and not session.is_changing:  # what is on disk now is as new
        session.peer_memory.forget()


def _make_session(
    training: Training, group: Group, world: Group | None, kept: KeptReplica | None, *, is_live: bool
) -> Session:
    run = training.run
    sync = run.sync.fit_workers(group.size) if is_live else run.sync
    replica = build_replica(training, group, world, sync)
    if kept is not None:
        kept.put_back(training.module)
    agree_on_shards(training.splits.train, replica.shard.world, looks=False)
    loader = make_loader(
        run,
        training.splits,
        replica.shard.data_parallel_group,
        split=replica.shard.split_context,
        dispatcher=replica.dispatcher,
    )
    if is_live:
        agree_on_content(training.splits.train, replica.shard.world)
    if replica.dispatcher is not None:
        replica.dispatcher.set_source(loader.claim_next, loader.mark_used)
    load_balancer = LoadBalancer(
        loader,
        None if run.sync.is_asynchronous or not run.layout.is_plain else group,
        interval=run.speed_interval,
        is_following=run.shares == "measured",
    )
    noise = None
    if run.noise_interval:
        noise = NoiseMeter(training.module, group, interval=run.noise_interval, num_parts=run.num_micro_batches)
    saver = _find_saver(training, replica.shard)
    guard = AnomalyGuard(run.anomalies)
    world_rank, host_ranks = replica.shard.world.rank, replica.shard.world.host_ranks
    resources = (
        ResourceWatch(training.directory if saver is not None else None) if world_rank in host_ranks[:1] else None
    )
    probe = MemoryProbe(replica.shard, is_together=not run.sync.is_asynchronous)
    peer_memory = run.peer_memory.open(training.directory, replica.shard.world)
    repaired = "" if sync == run.sync else f"sync {sync.name} goes on as {sync}, which {group.size} workers can run"
    if peer_memory is not None:  # before a step
        try:
            make_teams(replica.shard.world.size, run.peer_memory.num_data, run.peer_memory.num_parity)
        except SettingsError as error:
            if not is_live:
                raise
            peer_memory.forget()
            peer_memory, repaired = None, "; ".join(filter(None, (repaired, f"no copies in peers' memory: {error}")))
    failures_per_day = run.failures_per_day or 1.0
    if run.checkpoint_interval == "auto" and run.failures_per_day is None and group.rank == 0:
        failures_per_day = estimate_failures_per_day(training.log.path)  # rank 0 chooses
    usage = UsageMeter.open(run.site, replica.shard.world)
    before = Spent.of_log(training.log.path) if run.budget.limits and replica.shard.world.rank == 0 else Spent()
    return Session(
        training,
        replica,
        make_rates(training, replica),
        loader,
        saver,
        load_balancer,
        SaveInterval(run.checkpoint_interval, failures_per_day),
        peer_memory,
        noise,
        probe,
        guard,
        resources,
        usage,
        BudgetGuard(run.budget, run.site, before, usage.read_total),
        repaired=repaired,
    )


def _find_saver(training: Training, shard: ModelShard) -> AsyncSaver | None:
    """Return this rank's saver; one that outlives the session goes on writing what it has begun."""
    if not training.keeps_saver:
        return open_saver(training.store, shard)
    if shard.world.rank == 0:
        training.saver = training.saver or AsyncSaver(training.store)
    elif training.saver is not None:  # another worker saves from now on
        training.saver.close()
        training.saver = None
        training.store.close()
    return training.saver


def build_replica(training: Training, group: Group, world: Group | None = None, sync: Rule | None = None) -> Replica:
    """Return a new replica of the training's model, among the workers of `group`, with the run's rule or `sync`."""
    run = training.run
    # A norm is reported only if it is bounded.
    if run.num_virtual_workers is not None and group.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch demands it of what comes next
        torch.use_deterministic_algorithms(True)
    clip_norm = NO_CLIPPING if run.clip_norm is None and run.noise_interval else run.clip_norm
    replica = Replica(
        training.module,
        training.optimizer,
        group=group,
        sync=(sync or run.sync).fit_length(training.num_steps),
        precision=run.precision,
        clip_norm=clip_norm,
        bucket_bytes=run.bucket_bytes,
        landing=run.landing,
        ema=run.ema,
        batch_norm=run.batch_norm,
        hash_interval=run.hash_interval,
        seed=run.seed,
        num_virtual_workers=run.num_virtual_workers,
        world=world,
    )
    replica.state.warns_of_idleness = False  # the run has said so before its first step
    return replica


def make_rates(training: Training, replica: Replica, before: Rates | None = None) -> Rates:
    """Return the learning rates of a new replica, which continue from those `before`."""
    rates = Rates(replica.optimizer, training.run.optimizer, training.run.schedule, training.num_steps)
    if before is not None:
        rates.load_state_dict(before.state_dict())
    return rates


def resume(
    session: Session, state: SavedState | None, *, is_live: bool = False, kept: KeptReplica | None = None
) -> bool:
    """Load rank 0's `state` into the session of every rank; return whether there was one. See `open_session`."""
    training, run, loader = session.training, session.training.run, session.loader
    is_shared = isinstance(state, LivingState)
    document = restore(state, session.replica, has_model=is_live and not is_shared, kept=kept)
    if document is None:
        return False
    loader.load_state_dict(document["loader"])
    session.global_batch = document["loader"]["batches"][0][2] if "batches" in document["loader"] else 0
    if run.shares == "measured":
        loader.load_shares(document["loader"])
    if run.batch_schedule.noise_interval and document["run"]["batch_schedule"]["name"] == run.batch_schedule.name:
        loader.load_batches(document["loader"])
    restore_objects(state, {"rates": session.rates}, session.replica.shard.world)
    training.best.load(document.get("best", {}))
    session.guard.load(document.get("anomalies"))
    if session.noise is not None and document.get("noise"):
        session.noise.load(document["noise"])
    training.step = training.delays_step = document["step"]
    training.delays = find_delays(session) or training.delays
    training.evaluated_step = 0 if document.get("is_evaluation_due") else training.step
    training.evaluation = None  # workers that join have none, and all must decide alike whether to evaluate at the end
    if is_live:
        session.replica.state.is_exchange_due = document["is_exchange_due"]
        training.saved_step = document["saved_step"]
        if not is_shared:
            pool_over_workers(training.module, session.replica.shard.statistics_group, weight=float(kept is not None))
    else:
        training.resumed_from = document["path"] = str(state.path) if state else ""
    return True


def follow_servers(session: Session) -> str:
    """Go on after what servers had applied when workers changed, if there are servers; return words on it.

    Samples that a lost worker had claimed, and servers had not applied, are handed out again.
    """
    training, replica, loader = session.training, session.replica, session.loader
    progress = replica.state.progress
    if progress is None:
        return ""
    if replica.dispatcher is None:  # the last step may have been applied, and no worker told so
        for _ in range(replica.num_updates, max((stop for _, stop in progress.used), default=0)):
            loader.mark_used(*loader.claim_next(loader.global_batch))
            replica.state.end_exchange()
        training.step = loader.step
        return ""
    gaps = loader.set_used(progress.used)
    training.step = loader.order.step_of(loader.position, training.run.global_batch)
    return f"samples {', '.join(f'{a} to {b}' for a, b in gaps)} are handed out again" if gaps else ""


def find_delays(session: Session) -> Delays | None:
    """Return the delays of gradients, on rank 0; None elsewhere, or if workers step together."""
    return session.replica.state.count_delays() if session.replica.group.rank == 0 else None


def describe_batch(session: Session) -> BatchChanged:
    """Return the event that says how many samples steps take from here on, and at which learning rates."""
    factor = session.training.run.optimizer.scale_rate(session.global_batch)
    return BatchChanged(global_batch=session.global_batch, start=session.loader.position, rate_factor=factor)


def _log_start(session: Session) -> None:
    training, train = session.training, session.training.splits.train
    session.log_event(
        RunStarted(
            recipe=training.recipe,
            settings=training.run.model_dump(mode="json"),
            num_workers=session.replica.shard.data_parallel_group.size,
            device=str(session.replica.shard.world.device),
            num_parameters=training.num_parameters,
            start_step=training.step,
            total_steps=training.num_steps,
            global_batch=session.global_batch,
            samples_per_epoch=0 if isinstance(train, IterableSource) else len(train),
            resumed_from=training.resumed_from,
        )
    )
    shapes = [parameter.shape for parameter in training.module.parameters() if parameter.requires_grad]
    for sentence in list_idle(training.run, training.num_steps, shapes, session.replica.shard.group.size):
        session.log_event(Warned(message=sentence))
    price = training.run.site.find_price()
    if price is not None and (old := price.warn_of_age()):
        session.log_event(Warned(message=f"{old} (--site.prices mine.csv)"))
    batch_size = training.splits.batch_size
    if batch_size not in (None, 1, training.run.global_batch):  # 1 is what a DataLoader has by itself
        session.log_event(
            Warned(
                message=f"the DataLoader's batch_size of {batch_size} is not used: a step takes the run's global_batch "
                f"of {training.run.global_batch}, over all workers; give one of them the other's value"
            )
        )
    if training.about_building:
        session.log_event(Warned(message=training.about_building))
    if training.about_initial:
        session.log_event(Warned(message=training.about_initial))
    if training.splits.held_out is None:
        if training.best.is_used:
            raise SettingsError(
                "keep_best and stop_after must come with held-out data, but there is none; return (train, held_out)"
            )
        message = "the data has no held-out part, so that nothing is evaluated; return (train, held_out)"
        session.log_event(Warned(message=message))
