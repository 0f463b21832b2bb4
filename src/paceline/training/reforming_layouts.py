"""Training of a layout with replicas, whose workers are replaced: the others keep their processes and their parts.

Each worker has a place in the layout. When one is lost, the others drop the step under way, keep their parts of the
state in memory, and wait for another worker in the lost one's place. All then lay a new model over the new group: those
that have a part load their own, and the new one is sent its part by a rank that holds the same.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoint import SavedState
from paceline.comm.group import Group
from paceline.comm.membership import Membership
from paceline.comm.torch_group import first_sentence, is_lost_peer
from paceline.elastic.facts import View
from paceline.elastic.member import Member
from paceline.errors import CommunicationError, PacelineError, PeerTimeoutError
from paceline.monitor.events import WorkersChanged
from paceline.monitor.log import EventLog
from paceline.parallel.mesh import abandon_meshes, disconnect
from paceline.parallel.mismatch import explain_failure
from paceline.replica.buffer_copies import BufferCopies
from paceline.replica.living import KeptPart, LivingState, LostPartError
from paceline.replica.replica import Replica
from paceline.replica.state import keep_part, share_parts
from paceline.replica.worker_state import WorkerState
from paceline.training.missing_steps import log_missing_steps, read_steps, show_steps
from paceline.training.reforming import count_unfinished, forget_frames
from paceline.training.run import Run
from paceline.training.saving import capture_progress
from paceline.training.session import Session, open_session
from paceline.training.training import Training, rebuild, start_training

_KNOWN_WITHIN_S = 3.0
"""Time in which the launcher notices that a worker has died."""
_UPDATE_WITHIN_S = 1.0
"""Time that an update has to end when others are lost."""


class LayoutMember:
    """A worker's way through the views of a layout whose workers are replaced.

    Args:
        run: The run.
        directory: Directory of the run.
        alone: Group of this worker alone.
        log: Log of this worker.
        recipe: Path of the recipe.
        member: Connection to the supervisor.
    """

    def __init__(self, run: Run, directory: Path, alone: Group, log: EventLog, recipe: str, member: Member) -> None:
        self._run, self._directory, self._device = run, directory, alone.device
        self._log, self._recipe, self._member = log, recipe, member
        self.training: Training | None = None
        """The training; None before the first view."""
        self._kept: list[KeptPart] = []
        """Parts of the state that this worker has in memory, while it trains with nobody."""
        self._names: tuple[str, ...] = ()
        """Workers of the session before."""
        self._state: WorkerState | None = None
        """State of the present session; None before the first step of the first one."""
        self._began_s = time.perf_counter()
        self._requests = Membership()

    def train(self, run_steps: Callable[[Session], bool]) -> bool:
        """Train from view to view, and return what `run_steps` returns in the last one.

        Raises:
            CommunicationError: Workers are lost, and all are to start again from the newest checkpoint.
            Evicted: This worker belongs to the training no longer.
        """
        with self._requests.stopping_on_signals(may_interrupt=False), self._closing():
            while True:
                view = self._member.next_view(self._run.timeout_s)
                if view.step < 0 and self.training is not None:
                    raise CommunicationError("no worker holds a whole state any more; all must start again")
                self._log.rank, self._log.epoch = view.rank, view.epoch
                ended = self._train_in(view, run_steps)
                if ended is not None:
                    return ended

    def _is_updating(self) -> bool:
        return self._state is not None and self._state.is_torn

    @contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self.training is not None:
                self.training.store.close()

    def _train_in(self, view: View, run_steps: Callable[[Session], bool]) -> bool | None:
        """Train in a view; return None if others are lost."""
        member, session, group = self._member, None, None
        try:
            group = member.open_group(view, self._device, self._run.timeout_s, "auto")
            group.leave_losses_to_supervisor()
            member.call_when_broken(view.epoch, partial(_break_off, group, self._is_updating))
            state = self._build(view, group)
            assert self.training is not None
            states: list[LivingState] = []
            find = partial(self._share, states) if view.step >= 0 else state
            with open_session(self.training, group, None, find, is_live=view.step >= 0) as session:
                session.membership.take_request(self._requests)  # signals up to here; later ones are the session's
                self._begin(session, view, states)
                has_ended = run_steps(session)
            group.close()
            return has_ended
        except (RuntimeError, CommunicationError) as error:
            lost = self._explain(error, view, session)
            self._leave(session, group, lost)
            forget_frames(error)
            done = max((part.step for part in self._kept), default=0)
            hung_ranks = error.hung_ranks if isinstance(error, PeerTimeoutError) else ()
            accused = tuple(view.names[rank] for rank in hung_ranks)
            member.report_loss(done, is_whole=bool(self._kept), reason=str(lost), accused=accused)
            if session is not None:
                self._requests.take_request(session.membership)
            return None
        except BaseException as error:
            if group is not None:
                group.close(error)
            raise

    def _build(self, view: View, group: Group) -> SavedState | None:
        """Lay a model over the new group; return the checkpoint, on rank 0, if there is no state in memory."""
        run = self._run.fit_workers(self._run.count_workers(group.size))
        if self.training is not None:
            rebuild(self.training, group)
            return None
        is_live = view.step >= 0
        self.training, state = start_training(
            run, self._directory, group, self._log, self._recipe, is_resumed=not is_live
        )
        self.training.outlives_workers = True
        return state

    def _share(self, states: list[LivingState], replica: Replica) -> SavedState:
        """Return the state in memory of all ranks, and add it to `states`."""
        try:
            states.append(share_parts(self._kept, replica))
        except LostPartError:  # all find it, and say so
            self._kept = []
            raise
        return states[0]

    def _begin(self, session: Session, view: View, states: list[LivingState]) -> None:
        """Train on: what was kept is in the module now."""
        state, training = session.replica.state, session.training
        if not states:
            training.saved_step = training.step
        self._state, state.buffers = state, BufferCopies(training.module)
        state.on_undecided = partial(self._keep, session, is_copied=True)
        if states:
            has_kept = bool(self._kept)
            sources = [view.names[rank] for rank in sorted(states[0].healed)]
            said = [has_kept, sources, self._names, show_steps(training)]
            self._kept = []
            everybody = session.replica.shard.world.gather_documents(said, name="who was healed")
            if view.rank == 0:
                log_missing_steps(training, read_steps(step for *_, steps in everybody for step in steps))
            self._log_change(session, view, everybody)
        self._names = view.names

    def _log_change(self, session: Session, view: View, said: list[tuple[bool, list[str], list[str], Any]]) -> None:
        healed = [
            f"{view.names[rank]} was sent its part of the model by {' and '.join(sources)}"
            for rank, (_, sources, *_) in enumerate(said)
            if sources
        ]
        before = next((names for has_kept, _, names, _ in said if has_kept), [])
        gone = [name for name in before if name not in view.names]
        session.log_event(
            WorkersChanged(
                num_workers=view.size,
                names=list(view.names),
                reason=view.reason,
                num_sent=sum(bool(sources) for _, sources, *_ in said),
                duration_s=time.perf_counter() - self._began_s,
                lost=f"of {', '.join(gone)} nothing but the work after step {session.training.step}" if gone else "",
                repaired="; ".join(healed),
            )
        )

    def _explain(self, error: RuntimeError | CommunicationError, view: View, session: Session | None) -> PacelineError:
        """Return the error that says that others are lost; raise one that is not about that."""
        if isinstance(error, CommunicationError) and session is None:
            return error
        # Whatever torch says of connections that were closed under it.
        if self._member.is_broken(view.epoch, _KNOWN_WITHIN_S):
            return CommunicationError(f"a worker of epoch {view.epoch} was lost: {first_sentence(error)}")
        if not isinstance(error, CommunicationError) and not is_lost_peer(error):
            raise error
        mesh = session.replica.shard.mesh if session is not None else None
        if mesh is None:
            return CommunicationError(str(error))
        explained = explain_failure(error, mesh, f"rank {view.rank} of {view.size} lost others of its layout")
        if not isinstance(explained, CommunicationError):
            raise explained from error
        return explained

    def _leave(self, session: Session | None, group: Group | None, error: PacelineError) -> None:
        """End this view's connections, which the others then notice, and keep this worker's part of the state."""
        self._began_s = time.perf_counter() if session is not None else self._began_s
        if group is not None:
            group.close(error)
        disconnect()
        if session is not None:
            session.replica.state.abandon_step()
            session.loader.in_hand = None  # its step is dropped, unless it is counted here
            count_unfinished(session)
            self._keep(session)
        abandon_meshes()
        if session is not None:
            session.replica.close()

    def _keep(self, session: Session, *, is_copied: bool = False) -> None:
        """Keep the present state in memory, unless an update has begun to change it; copied, if one is about to."""
        training, replica = session.training, session.replica
        if replica.state.is_torn:
            return
        session.loader.in_hand = None
        tensors, document = capture_progress(session)
        more = {"saved_step": training.saved_step, "is_exchange_due": False, "noise": None}
        part = keep_part(replica, training.step, document | more, tensors, is_copied=is_copied)
        if part is not None:
            self._kept.append(part)


def _break_off(group: Group, is_updating: Callable[[], bool]) -> None:
    """End operations with workers that are lost, in another thread than that of training.

    An update that has begun is left to its end: where ranks share the optimizer, they exchange what they have updated,
    and those of a replica that is whole can.
    """
    deadline_s = time.monotonic() + _UPDATE_WITHIN_S
    while is_updating() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    group.close(CommunicationError("a worker was lost"))
    disconnect()
