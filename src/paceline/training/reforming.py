"""Training whose workers change: survivors of a lost worker go on from memory, and new workers join them.

What a worker does between two views of the membership: it drops the step under way, keeps its state, opens the group of
the next view, and begins a new session there. Workers at the same step as rank 0 keep what they have; others are sent
rank 0's state, as a resume from a checkpoint with another number of workers sends it, only from memory.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint import SavedState
from paceline.comm.group import Group
from paceline.comm.membership import Membership
from paceline.elastic.facts import View
from paceline.elastic.member import Member
from paceline.errors import CommunicationError, PeerTimeoutError
from paceline.monitor.events import Warned, WorkersChanged
from paceline.monitor.log import EventLog
from paceline.replica.buffer_copies import BufferCopies
from paceline.replica.memory import KeptReplica, MemoryState, capture_alone, digest
from paceline.replica.optimizer_step import release_optimizer
from paceline.sync.every_step import EveryStep
from paceline.sync.gossip import GossipRule
from paceline.training.missing_steps import log_missing_steps, note_unfinished
from paceline.training.run import Run
from paceline.training.saving import capture_progress
from paceline.training.session import Session, open_session
from paceline.training.training import Training, find_start, start_training

RunSteps = Callable[[Session], bool]
"""Function that runs the steps of a session; it returns whether the training has ended, unless workers change."""


def find_fixed(run: Run) -> str:
    """Return why a run needs as many workers as it has, each in its place; empty if there may be others."""
    return "" if run.layout.is_plain else "ranks of the layout share a model"


def can_reform(run: Run, num_workers: int) -> str:
    """Return why the workers of a run cannot go on from memory when others are lost or join; empty if they can.

    Such runs start again from the newest checkpoint.
    """
    if not run.layout.is_plain:
        return _can_replace(run, num_workers)
    if run.sync.num_server_processes:
        return f"servers of sync {run.sync.name} have processes of their own, which cannot be replaced"
    if run.sync.is_asynchronous and not run.sync.survives_loss:
        return f"with sync {run.sync.name} workers go at their own pace"
    if not run.sync.survives_loss:
        return f"sync {run.sync.name} has a state that only all its workers together know"
    if run.growth.steps:
        return "the model grows while it trains"
    if run.fixed_shares is not None:
        return "shares are given for this number of workers"
    return ""


def _can_replace(run: Run, num_workers: int) -> str:
    """Return why a lost worker's part of the model cannot come from another one's memory; empty if it can."""
    if run.layout.resolve(num_workers).size("data") < 2:
        return "each part of the model is on one rank only, as the layout has no data axis"
    if not isinstance(run.sync, EveryStep):
        return f"with sync {run.sync.name} ranks with the same part of the model differ"
    if run.sync.codec.name != "none" or run.sharded_codec is not None:
        return "codecs keep residuals that no other rank has"
    return ""


def start_alone(run: Run, directory: Path, alone: Group, log: EventLog, recipe: str) -> Training:
    """Return a training of a new model, before it is known who trains together: others do not wait for it."""
    training, _ = start_training(run, directory, alone, log, recipe, is_resumed=False)
    training.outlives_workers = True
    return training


@dataclass(frozen=True)
class _Kept:
    """What a worker has left of a session that has ended.

    Args:
        step: Number of updates, the one whose exchange is due included.
        is_whole: Whether the state is whole; without it nothing else is.
        is_exchange_due: Whether the exchange of the last update is still to be made.
        digest: Digest of what is the same on all workers at that step.
        names: Workers of that session.
        steps_alone: Whether its workers make the next step without each other.
        mixed: Step after which each other worker's model was mixed into this one last, by name; empty but for gossip.
        exchanged: Number of updates after which all of this worker's progress was exchanged last.
        replica: State that stays with this worker.
        state: State for workers that have none, if this worker becomes rank 0.
        owes: Whether codecs hold back residuals.
    """

    step: int
    is_whole: bool = False
    is_exchange_due: bool = False
    digest: str = ""
    names: tuple[str, ...] = ()
    steps_alone: bool = False
    mixed: Mapping[str, int] = field(default_factory=dict)
    exchanged: int = 0
    replica: KeptReplica | None = None
    state: MemoryState | None = None
    owes: bool = False

    @property
    def claim(self) -> list[Any]:
        """What tells, as JSON, whether two workers are at the same point, and what is lost with others."""
        point = [self.step, self.is_exchange_due, self.digest, self.steps_alone]
        return [*point, dict(self.mixed), self.held] if self.is_whole else []

    @property
    def held(self) -> Mapping[str, Any]:
        """What this worker holds for all, and others may not; see `Rule.find_missing`."""
        held: Mapping[str, Any] = self.replica.own["sync_document"].get("held", {}) if self.replica is not None else {}
        return held


def _goes_on(claim: list[Any], first: list[Any]) -> bool:
    """Return whether a worker keeps its state, given its claim and rank 0's.

    It does at the same step; and where workers step alone, if they have had no exchange in between: it leaves out the
    steps that it is behind.
    """
    if not claim or claim[1:3] != first[1:3]:
        return False
    step, is_due, _, steps_alone = claim[:4]
    return step == first[0] or (steps_alone and not is_due and step < first[0])


def train_through_views(training: Training, member: Member, run_steps: RunSteps) -> bool:
    """Train from view to view of the membership, and return what `run_steps` returns in the last one.

    Raises:
        CommunicationError: Workers are lost, and all are to start again from the newest checkpoint.
        Evicted: This worker belongs to the training no longer.
    """
    run, device = training.run, next(iter(training.module.parameters())).device
    kept, requests, began_s, has_begun = _Kept(0), Membership(), time.perf_counter(), False
    with requests.stopping_on_signals(may_interrupt=False), _closing(training):
        while True:
            view = member.next_view(run.timeout_s)
            if view.step < 0 and has_begun:  # the module is not what it was at the start
                raise CommunicationError("no worker holds a whole state any more; all must start again")
            training.log.rank, training.log.epoch = view.rank, view.epoch
            has_begun, session = True, None
            group: Group | None = None
            try:
                group = member.open_group(view, device, run.timeout_s, "auto")
                group.leave_losses_to_supervisor()
                training.run = run.fit_workers(view.size)
                with _open(training, group, view, member, kept, requests, began_s) as session:
                    has_ended = run_steps(session)
                    if session.is_changing:
                        began_s, kept = time.perf_counter(), _keep(session, view)
                group.close()
                if not session.is_changing:
                    return has_ended
                member.at_boundary(training.step)
            except CommunicationError as error:
                began_s = time.perf_counter() if session is not None else began_s
                kept = _leave(training, session, group, kept, error, view)
                done = kept.step - kept.is_exchange_due  # who has made the exchange as well is ahead
                hung_ranks = error.hung_ranks if isinstance(error, PeerTimeoutError) else ()
                accused = tuple(view.names[rank] for rank in hung_ranks)
                member.report_loss(done, is_whole=kept.is_whole, reason=str(error), accused=accused)
                forget_frames(error)
            except BaseException as error:
                if group is not None:
                    group.close(error)
                raise
            if session is not None:
                requests.take_request(session.membership)  # which came too late for this session


@contextmanager
def _open(
    training: Training,
    group: Group,
    view: View,
    member: Member,
    kept: _Kept,
    requests: Membership,
    began_s: float,
) -> Iterator[Session]:
    """Open the session of a view, in which this worker goes on from what it has `kept`, or from rank 0's state."""
    is_live = view.step >= 0
    claims = group.gather_documents(kept.claim, name="state in memory") if is_live else []
    is_in_step = is_live and _goes_on(kept.claim, claims[0])
    if is_live and not claims[0]:
        raise CommunicationError("rank 0 of the new group must hold a whole state, but it has lost it; vote again")
    if is_live and (missing := training.run.sync.find_missing([claim[5] for claim in claims if claim])):
        training.is_loading = True  # no state is whole any more
        raise CommunicationError(missing)
    is_equal = training.run.sync.keeps_replicas_equal and kept.is_whole
    group.membership.has_equal_models = bool(claims) and is_equal and all(c == claims[0] for c in claims)
    state: SavedState | None = kept.state if is_live else None
    if not is_live:
        found = find_start(training) if group.rank == 0 else None
        state = training.run.peer_memory.recall(training.directory, group, found, training.log)
    training.is_loading = not is_in_step
    opened = open_session(
        training, group, None, state, member=member, is_live=is_live, kept=kept.replica if is_in_step else None
    )
    with opened as session:
        session.membership.take_request(requests)  # signals up to here are in `requests`, later ones in the session's
        training.is_loading = False
        if not is_live:
            training.saved_step = training.step
        session.replica.state.buffers = BufferCopies(training.module)
        if training.run.keeps_step_copies:
            session.replica.state.keep_step_copies()
        if is_live:
            if group.rank == 0:
                log_missing_steps(training, training.newest_steps)
            _log_change(session, view, kept, claims, time.perf_counter() - began_s)
        yield session


def _log_change(session: Session, view: View, kept: _Kept, claims: list[list[Any]], duration_s: float) -> None:
    session.log_event(
        WorkersChanged(
            num_workers=view.size,
            names=list(view.names),
            reason=view.reason,
            num_sent=sum(not _goes_on(claim, claims[0]) for claim in claims),
            duration_s=duration_s,
            lost=_describe_lost(session, view, kept, claims),
            repaired=session.repaired,
        )
    )
    for rank, claim in enumerate(claims):
        if claim and claim[:2] == claims[0][:2] and not _goes_on(claim, claims[0]):
            session.log_event(
                Warned(
                    message=f"worker {view.names[rank]} was at the same step as the first, but what workers have in "
                    "common differed; it was sent the first one's state"
                )
            )


def _describe_lost(session: Session, view: View, kept: _Kept, claims: list[list[Any]]) -> str:
    """Return words on what is lost with workers that have gone, or that could not keep their own state."""
    sync, words, progress = session.training.run.sync, [], session.replica.state.progress
    gone = [name for name in kept.names if name not in view.names]
    replaced = [n for n, claim in zip(view.names, claims, strict=True) if claim and not _goes_on(claim, claims[0])]
    if gone and kept.owes:
        words.append(f"residuals of {len(gone)} workers' codecs")
    if sync.keeps_replicas_equal:
        return "; ".join(words)
    if progress is not None:
        return "; ".join(filter(None, [*words, progress.lost]))
    names = ", ".join(gone + replaced)
    if names and isinstance(sync, GossipRule):
        words.append(f"the models of {names}, but for what others have mixed in")
        for name in gone + replaced:
            mixed = max((claim[4].get(name, 0) for claim in claims if _goes_on(claim, claims[0])), default=0)
            words.append(f"the samples of {name} after step {mixed}, up to step {claims[0][0]}")
    elif names and kept.exchanged < kept.step:
        words.append(f"what {names} learnt alone of the samples after step {kept.exchanged}")
    for name, claim in zip(view.names, claims, strict=True):
        if _goes_on(claim, claims[0]) and claim[0] < claims[0][0]:
            words.append(f"the samples of {name} after step {claim[0]}, up to step {claims[0][0]}")
    return "; ".join(words)


def _leave(
    training: Training,
    session: Session | None,
    group: Group | None,
    kept: _Kept,
    error: CommunicationError,
    view: View,
) -> _Kept:
    """Close the group, whose other workers then leave it too, and return what this worker has left."""
    if group is not None:
        group.close(error)
    if session is None:  # lost while the session was being opened, which changes nothing of who was at rank 0's step
        release_optimizer(training.optimizer)
        return kept if kept.replica is not None and not training.is_loading else _Kept(kept.step)
    session.replica.state.abandon_step()
    try:
        return _keep(session, view)
    finally:
        session.replica.close()


def forget_frames(error: BaseException | None) -> None:
    """Let go of what was on the stack of an error that is dealt with: the session, and with it buffers of the model."""
    while error is not None:
        error.__traceback__, error = None, error.__cause__ or error.__context__


def _keep(session: Session, view: View) -> _Kept:
    """Return what this worker has left of a session; nothing is exchanged."""
    training, replica, loader = session.training, session.replica, session.loader
    state = replica.state
    if state.is_torn:
        session.rates.reset()
        return _Kept(training.step)
    if replica.dispatcher is None:
        count_unfinished(session)
    else:
        loader.in_hand = None  # servers know whether its step counts
    session.rates.reset()
    tensors, document = capture_alone(replica)
    replica_digest = digest(tensors, replica)
    more, progress = capture_progress(session)
    noise = session.noise.own_state() if session.noise is not None else None
    in_memory = {"noise": noise, "saved_step": training.saved_step, "is_exchange_due": state.is_exchange_due}
    kept = KeptReplica.take(replica)
    return _Kept(
        training.step,
        is_whole=True,
        is_exchange_due=state.is_exchange_due,
        digest=replica_digest,
        names=view.names,
        steps_alone=state.steps_alone,
        mixed=_find_mixed(session, view),
        exchanged=state.last_exchange(),
        replica=kept,
        state=MemoryState(Path("memory"), document | progress | in_memory, tensors | more),
        owes=_holds_back(kept.own),
    )


def count_unfinished(session: Session) -> None:
    """Count the samples of the step in which workers were lost, if its update is done here, or due."""
    training, state = session.training, session.replica.state
    num_done = state.num_updates + state.is_exchange_due - session.first_update - (training.step - session.first_step)
    unfinished = session.unfinished if num_done else None
    if unfinished is not None:
        training.num_samples += unfinished.interval.num_samples
        session.loader.ack(unfinished)
        session.guard.end()  # its update is made: later ones are judged by its loss too
    training.step = session.loader.step
    if unfinished is not None:
        note_unfinished(session, unfinished.interval.num_samples)


def _find_mixed(session: Session, view: View) -> dict[str, int]:
    """Return the step after which each other worker's model was mixed into this one last, by name; only for gossip."""
    if not isinstance(session.training.run.sync, GossipRule):
        return {}
    state, first = session.replica.state, session.first_step
    mixed = {rank: first + number - session.first_update for rank, number in state.last_mixed().items()}
    return {name: mixed.get(rank, first) for rank, name in enumerate(view.names)}


def _holds_back(own: Mapping[str, Any]) -> bool:
    tensors: Mapping[str, Tensor] = own["feedback"] | own["sync"]
    return any(name.endswith("/worker") for name in tensors)


@contextmanager
def _closing(training: Training) -> Iterator[None]:
    """Finish in the end the checkpoint that is being written."""
    try:
        yield
    except BaseException:
        if training.saver is not None:
            training.saver.__exit__(Exception, None, None)  # an error of the save would hide the present one
        raise
    if training.saver is not None:
        training.saver.close()
