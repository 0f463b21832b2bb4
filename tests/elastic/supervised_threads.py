"""Threads that a supervisor runs as its workers."""

import queue
import threading

import torch.distributed as dist

from paceline.elastic import Evicted, StoreMember
from paceline.elastic.journal import Journal
from paceline.elastic.protocol import Coordinator
from paceline.elastic.supervisor import EndVerdict, Supervisor, Workforce
from paceline.errors import CommunicationError


class Threads(Workforce):
    """Workers that are threads, each of which runs ``script(member)``; the name of the end is what it returns."""

    def __init__(self, store, script, obstacle=""):
        self.store, self.script, self.obstacle = store, script, obstacle
        self.members, self.ended, self.slots, self.killed = {}, queue.Queue(), {}, []
        self.num_restarts = 0

    def start(self, name, slot, epoch):
        self.slots[name] = slot
        member = self.members[name] = StoreMember(lambda: self.store, name, obstacle=self.obstacle)

        def run():
            try:
                end = self.script(member)
            except Evicted:
                end = "done"
            except CommunicationError:
                end = "gave_up"
            member.close()
            if name in self.members:
                self.ended.put((name, end, f"{name} was lost"))

        threading.Thread(target=run, daemon=True).start()

    def kill(self, name):
        if self.members.pop(name, None):
            self.killed.append(name)
            self.ended.put((name, "killed", f"{name} was killed"))

    def wait(self, timeout_s):
        try:
            return [self.ended.get(timeout=timeout_s)]
        except queue.Empty:
            return []

    def end_all(self):
        self.num_restarts += 1
        self.members.clear()
        self.ended = queue.Queue()


def supervise(
    tmp_path,
    settings,
    script,
    *,
    obstacle="",
    requests=(),
    patience=None,
    is_final=False,
    judge=None,
    tell=lambda _: None,
    store=None,
    **options,
):
    store = store or dist.HashStore()
    workforce = Threads(store, script, obstacle)
    waiting = list(requests)

    def read_requests(coordinator):
        due = [fact for epoch, fact in waiting if coordinator.view and coordinator.epoch >= epoch]
        waiting[:] = [pair for pair in waiting if pair[1] not in due]
        return due

    with Journal(tmp_path / "journal", settings) as journal:
        supervisor = Supervisor(
            Coordinator(settings),
            store,
            workforce,
            journal,
            judge=judge or (lambda epoch: EndVerdict(is_final, 0, "as the log says")),
            tell_restart=lambda epoch, reason: None,
            read_requests=read_requests,
            patience=patience,
            **options,
        )
        tell(supervisor)
        supervisor.run()
    return supervisor, workforce
