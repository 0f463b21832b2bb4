"""Workers on other machines, which their agents offer, beside those of this machine; the launcher's side."""

import bisect
import contextlib
import dataclasses
import signal
import time
from pathlib import Path

from torch.distributed import Store

from paceline.data import Source
from paceline.elastic.facts import End, Fact, HostLost, Offered, Withdrawn, host_of
from paceline.elastic.protocol import Coordinator
from paceline.elastic.supervisor import Workforce
from paceline.launch import agent_messages as messages
from paceline.launch.processes import GRACE_S
from paceline.launch.worker import load_run
from paceline.launch.workforce import LocalWorkforce
from paceline.monitor.events import Warned
from paceline.monitor.log import EventLog
from paceline.training.run_file import RunFile

SILENCE_S = 5.0
"""Time without a sign of life after which an agent's machine counts as lost."""
_LOOK_S = 0.25
_CLOSE_S = 3.0


class _Agent:
    """One agent, as the launcher knows it."""

    def __init__(self, number: int, now_s: float) -> None:
        self.number = number
        self.host = ""
        """Name of its machine, once its workers are taken."""
        self.offer: messages.Offer | None = None
        self.demand = messages.Demand()
        self.seen_s = now_s
        """Time of its last sign of life."""
        self.num_copied = 0
        self.fault = ""
        """Reason why what it wrote cannot be understood; empty if it can."""
        self.is_withdrawn = False
        self.told: set[str] = set()
        """Names of workers whose end was told."""


class SpreadWorkforce(Workforce):
    """Processes of this machine, and of those whose agents offer workers.

    Args:
        local: Processes of this machine.
        store: Store of the run.
        log: Log of the run, which the lines of workers elsewhere are copied to.
        most_workers: Largest number of workers that the run can have.
        why_most: Reason for that number.
    """

    def __init__(self, local: LocalWorkforce, store: Store, log: EventLog, most_workers: int, why_most: str) -> None:
        self._local, self._store, self._log = local, store, log
        self._most_workers, self._why_most = most_workers, why_most
        self._agents: list[_Agent] = []
        self._num_known = self._num_mails = 0
        self._looked_s = 0.0
        self._orphans: list[str] = []
        """Machines whose workers a launcher before had taken, and whose agents are gone."""
        self._ended: list[tuple[str, End, str]] = []
        self._signals: list[int] = []

    def take_over(self, coordinator: Coordinator) -> None:
        """Make the processes that another launcher has left this one's, here and where agents are that it had taken."""
        self._local.take_over(coordinator)
        self._num_known = self._store.add(messages.NUM_AGENTS, 0)
        for number in range(1, self._num_known + 1):
            agent = _Agent(number, time.monotonic())
            with contextlib.suppress(messages.DocumentError):  # the next look refuses it
                agent.demand = (
                    messages.read(self._store, messages.demand_key(number), messages.Demand) or messages.Demand()
                )
                agent.num_copied = self._find_copied(number)
            if agent.demand.over:
                continue
            agent.host = agent.demand.host if agent.demand.host in coordinator.places else ""
            agent.told = set(agent.demand.start) - set(coordinator.workers)
            self._agents.append(agent)
        here = {agent.host for agent in self._agents}
        self._orphans = [host for host in coordinator.places if host not in here]

    def _find_copied(self, number: int) -> int:
        """Return how many pieces of an agent's log were copied: these are dropped, and those after them are not."""
        offer = messages.read(self._store, messages.offer_key(number), messages.Offer)
        pieces = range(offer.num_chunks if offer is not None else 0)
        return bisect.bisect_left(
            pieces, True, key=lambda piece: self._store.check([messages.chunk_key(number, piece)])
        )

    def forget(self, name: str) -> None:
        """Forget one of this machine; agents need not be told."""
        self._local.forget(name)

    def read_news(self) -> list[str]:
        """Return those of this machine's processes; agents tell their own people."""
        return self._local.read_news()

    def invite(self, directory: Path, launcher_timeout_s: float, *, leaves_on_sigterm: bool) -> None:
        """Let agents offer workers to the run in a directory.

        Args:
            directory: Directory of the run.
            launcher_timeout_s: Time for which workers train on without a launcher.
            leaves_on_sigterm: Whether SIGTERM to one worker lets it leave, and does not stop all.
        """
        file = RunFile.load(directory)
        train = load_run(file).open_data().train
        num_samples = len(train) if isinstance(train, Source) else -1
        document = file.model_dump(mode="json")
        code = messages.digest_code(file.recipe)
        invitation = messages.Invitation(
            directory.name, document, num_samples, code, messages.find_versions(), leaves_on_sigterm, launcher_timeout_s
        )
        messages.write(self._store, messages.INVITATION, invitation)

    def read_facts(self, coordinator: Coordinator) -> list[Fact]:
        """Return what agents offer and withdraw, and which machines are lost, since the last call."""
        now_s = time.monotonic()
        self._hand_on_signals()
        if self._orphans:
            return [HostLost(self._orphans.pop(), "its agent was lost with the launcher before")]
        num_mails = self._store.add(messages.MAIL, 0)
        if num_mails == self._num_mails and now_s - self._looked_s < _LOOK_S:
            return []
        if now_s - self._looked_s > 4 * _LOOK_S:  # this process itself stood still
            for agent in self._agents:
                agent.seen_s = now_s
        self._num_mails, self._looked_s = num_mails, now_s
        num_agents = self._store.add(messages.NUM_AGENTS, 0)
        self._agents += [_Agent(number, now_s) for number in range(self._num_known + 1, num_agents + 1)]
        self._num_known = num_agents
        return [fact for agent in list(self._agents) for fact in self._read_agent(agent, coordinator, now_s)]

    def start(self, name: str, slot: int, epoch: int) -> None:
        """Start it here, or ask its agent to."""
        agent = self._find(host_of(name))
        if agent is not None:
            known = agent.demand.start
            self._send(agent, start=known if name in known else known | {name: (slot, epoch)})
        elif host_of(name):
            self._ended.append((name, "killed", f"{name} was not started: its machine is gone"))
        else:
            self._local.start(name, slot, epoch)

    def kill(self, name: str) -> None:
        """Kill it here, or ask its agent to."""
        agent = self._find(host_of(name))
        if agent is not None:
            self._send(agent, kill=(*agent.demand.kill, name))
        elif not host_of(name):
            self._local.kill(name)

    def locate(self, name: str) -> str:
        """Ask it, or name its machine."""
        return f" on {host_of(name)}" if host_of(name) else self._local.locate(name)

    def wait(self, timeout_s: float) -> list[tuple[str, End, str]]:
        """Wait for those of this machine; what agents have told is known already."""
        ended, self._ended = self._ended, []
        return ended + self._local.wait(0 if ended else timeout_s)

    def end_all(self) -> None:
        """Ask all to end, those elsewhere too, and wait until they have."""
        self._signals.append(signal.SIGTERM)
        self._hand_on_signals()
        self._local.end_all()
        deadline_s = time.monotonic() + GRACE_S
        while any(self._list_running(agent) for agent in self._agents) and time.monotonic() < deadline_s:
            for agent in list(self._agents):
                self._look_at(agent, time.monotonic())
                if agent.fault or time.monotonic() - agent.seen_s > SILENCE_S:
                    agent.told |= set(agent.demand.start)  # nobody waits for them; the next look drops the agent
            time.sleep(0.02)
        for agent in self._agents:
            self._send(agent, kill=(*agent.demand.kill, *self._list_running(agent)))
            agent.told |= set(agent.demand.start)
        self._ended = []

    def signal(self, number: int) -> None:
        """Send a signal to all. It may be called in a handler: agents are told of it soon."""
        self._local.signal(number)
        self._signals.append(number)

    def close(self, reason: str) -> None:
        """Tell all agents that nothing more is wanted of them, and wait a while until they know."""
        for agent in self._agents:
            self._send(agent, over=reason)
        deadline_s = time.monotonic() + _CLOSE_S
        while self._agents and time.monotonic() < deadline_s:
            for agent in list(self._agents):
                self._look_at(agent, time.monotonic())
                if agent.fault or (agent.offer is not None and agent.offer.is_closed):
                    self._agents.remove(agent)
            time.sleep(0.02)

    def drop_host(self, host: str, reason: str) -> list[Fact]:
        """Tell the agent of a machine that nothing more is wanted of it, which ends its workers, and then itself."""
        agent = self._find(host)
        return self._drop(agent, reason, is_refused=True) if agent is not None else []

    def _read_agent(self, agent: _Agent, coordinator: Coordinator, now_s: float) -> list[Fact]:
        self._look_at(agent, now_s)
        if agent.fault:
            self._log.write(Warned(message=f"an agent was refused: {agent.fault}"), step=-1)
            return self._drop(agent, agent.fault, is_refused=True)
        offer = agent.offer
        silent_s = now_s - agent.seen_s
        if silent_s > SILENCE_S or (offer is not None and offer.is_closed):
            said = "its agent has ended" if silent_s <= SILENCE_S else f"no sign of life for {silent_s:.1f} s"
            return self._drop(agent, f"{agent.host} was lost: {said}")
        if offer is None:
            return []
        if not agent.host:
            return self._judge(agent, offer, coordinator)
        if offer.is_leaving and not agent.is_withdrawn:
            agent.is_withdrawn = True
            return [Withdrawn(agent.host)]
        if agent.is_withdrawn and not any(host_of(name) == agent.host for name in coordinator.workers):
            return self._drop(agent, "its workers have left")
        return []

    def _look_at(self, agent: _Agent, now_s: float) -> None:
        """Read what an agent says; what is none of this version's documents is its fault, and no error here."""
        try:
            offer = messages.read(self._store, messages.offer_key(agent.number), messages.Offer)
            if offer is None or (agent.offer is not None and offer.beat == agent.offer.beat):
                return
            self._copy_log(agent, offer)
        except messages.DocumentError as error:
            agent.fault = str(error)
            return
        if offer.asked and not (agent.offer is not None and agent.offer.asked):
            self._local.tell_asked(offer.asked)
        agent.offer, agent.seen_s = offer, now_s
        for name, (end, reason) in offer.ended.items():
            if name not in agent.told:
                agent.told.add(name)
                self._ended.append((name, end, reason))

    def _copy_log(self, agent: _Agent, offer: messages.Offer) -> None:
        for chunk in range(agent.num_copied, offer.num_chunks):
            key = messages.chunk_key(agent.number, chunk)
            if not self._store.check([key]):  # to ask for it would wait
                raise messages.DocumentError(
                    f"an agent must have sent the {offer.num_chunks} pieces of the log that it names, but {key} is not "
                    "there; start it again"
                )
            self._log.copy(self._store.get(key))
            self._store.delete_key(key)
            agent.num_copied = chunk + 1

    def _judge(self, agent: _Agent, offer: messages.Offer, coordinator: Coordinator) -> list[Fact]:
        """Take an agent's workers, or say why not."""
        if coordinator.view is None:  # it is not known yet whether workers may join
            return []
        free = self._most_workers - coordinator.target
        why = coordinator.obstacle or coordinator.fixed
        reason = why and (f"workers of this run must stay the same, but {offer.num_workers} more were offered: {why}")
        if not reason and offer.num_workers > free:
            reason = (
                f"--workers must be at most {free}, as the run has {coordinator.target} and can have "
                f"{self._most_workers}, {self._why_most}, but got {offer.num_workers}; offer fewer"
            )
        if reason:
            self._send(agent, over=reason, is_refused=True)
            self._agents.remove(agent)
            return []
        taken = {other.host for other in self._agents} | set(coordinator.places)
        names = [offer.host, *(f"{offer.host}-{number}" for number in range(2, len(taken) + 3))]
        agent.host = next(name for name in names if name not in taken)
        self._send(agent, host=agent.host)
        return [Offered(agent.host, offer.num_workers)]

    def _drop(self, agent: _Agent, reason: str, *, is_refused: bool = False) -> list[Fact]:
        self._send(agent, over=reason, is_refused=is_refused)
        self._agents.remove(agent)
        return [HostLost(agent.host, reason)] if agent.host else []

    def _find(self, host: str) -> _Agent | None:
        return next((agent for agent in self._agents if host and agent.host == host), None)

    def _list_running(self, agent: _Agent) -> list[str]:
        return [name for name in agent.demand.start if name not in agent.told]

    def _hand_on_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            for agent in self._agents:
                self._send(agent, signals=(*agent.demand.signals, number))

    def _send(self, agent: _Agent, **changes: object) -> None:
        agent.demand = dataclasses.replace(agent.demand, **changes)  # type: ignore[arg-type]
        messages.write(self._store, messages.demand_key(agent.number), agent.demand)
