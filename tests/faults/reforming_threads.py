"""Workers as threads of one process: one of them is lost, or joins, and each is seen before and after it goes on."""

import copy
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from scripted_member import Epoch, ScriptedMember
from test_reforming import NUM_STEPS, make_run

from paceline.comm import LocalGroup
from paceline.elastic.member import Evicted
from paceline.monitor.events import RunFinished, StepFinished, WorkersChanged
from paceline.monitor.log import EventLog
from paceline.monitor.reader import read_log, select
from paceline.optim import SGD
from paceline.replica.worker_state import WorkerState
from paceline.sync.outer_parameters import OuterParameters
from paceline.training import loop, train

LOST_STEP = 5
"""Number of updates before the one in which a worker is lost."""


class LostError(Exception):
    """A worker is gone."""


class ThreadMember(ScriptedMember):
    """The membership of a thread."""

    rooms: dict
    lock = threading.Lock()

    def open_group(self, view, device, timeout_s, transport):
        with self.lock:
            if view.epoch not in self.rooms:
                self.rooms[view.epoch] = LocalGroup.create(view.size, timeout_s=20.0, epoch=view.epoch)
        return self.rooms[view.epoch][view.rank]


def copy_of(optimizer):
    """Return copies of an optimizer's state, by the number of the parameter and key."""
    states = enumerate(optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"])
    return {f"{number} {key}": torch.as_tensor(value).clone() for number, s in states for key, value in s.items()}


def snapshot(state):
    """Return copies of a worker's parameters and of its rule's state."""
    sync = state._synchroniser
    own, shared = (sync.state(), sync.shared_state()) if sync is not None else ({}, {})
    return SimpleNamespace(
        parameters={name: p.detach().clone() for name, p in state._parameters.items()},
        own={name: t.clone() for name, t in own.items()},
        shared={name: t.clone() for name, t in shared.items()},
        document=copy.deepcopy(state.document()["sync_document"]),
        is_due=state.is_exchange_due,
        num_updates=state.num_updates,
    )


def run_threads(folder, monkeypatch, sync, epochs, lose=nullcontext, dying="", **changes):
    """Train as threads, in which the `dying` worker is lost; return each worker before and after it went on."""
    member_type = type("Member", (ThreadMember,), {"rooms": {}})
    store, seen, errors = dist.HashStore(), {}, []
    settings = {"optimizer": SGD(learning_rate=0.05, momentum=0.9), "sync": sync, "hash_interval": 0, "ema": None}
    run = make_run(**(settings | {"evaluate_interval": 0, "checkpoint_interval": 0} | changes))
    real = WorkerState.settle

    def settle(self, optimizer, *, is_new):
        before = snapshot(self)
        words = real(self, optimizer, is_new=is_new)
        name = threading.current_thread().name
        seen[self._shard.group.epoch, name] = SimpleNamespace(
            before=before, after=snapshot(self), is_new=is_new, words=words, optimizer=copy_of(optimizer)
        )
        return words

    monkeypatch.setattr(WorkerState, "settle", settle)
    if dying:
        lose(monkeypatch, dying)

    def work(name, number):
        member = member_type(store, name, [Epoch(*epoch) for epoch in epochs])
        try:
            with EventLog(folder / "events.jsonl", run="r", rank=number) as log:
                train(run, folder, LocalGroup(), log, recipe="test", member=member)
        except (Evicted, LostError):
            pass
        except BaseException as error:
            errors.append(error)
            raise

    names = sorted({name for epoch in epochs for name in epoch[0]})
    threads = [threading.Thread(target=work, args=(name, n), name=name, daemon=True) for n, name in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads)
    return seen, read_log(folder / "events.jsonl")


def lose_in(owner, method, is_there):
    """Return a function that lets a worker be lost in a method, where `is_there(*arguments)`."""

    def lose(monkeypatch, dying):
        real = getattr(owner, method)

        def run(*arguments, **options):
            if threading.current_thread().name == dying and is_there(*arguments):
                raise LostError
            return real(*arguments, **options)

        monkeypatch.setattr(owner, method, run)

    return lose


in_a_step = lose_in(loop, "train_step", lambda session, batch, step: step == LOST_STEP)
in_an_exchange = lose_in(OuterParameters, "send", lambda own, weight, total, number, *_: number == LOST_STEP)
WITHOUT_W1 = [[["w0", "w1", "w2", "w3"]], [["w0", "w2", "w3"]]]


def mean_of(workers, weights=None):
    weights = weights or [1.0] * len(workers)
    return {
        name: sum(weight * one[name].double() for weight, one in zip(weights, workers, strict=True)) / sum(weights)
        for name in workers[0]
    }


def assert_equal(found, expected, atol=1e-6):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].double(), tensor.double(), rtol=0, atol=atol, msg=name)


def changed_in(records, num_workers=3, num_steps=NUM_STEPS):
    (changed,) = select(records, WorkersChanged)
    assert changed.event.num_workers == num_workers
    (ended,) = select(records, RunFinished)
    assert ended.step == num_steps
    assert ended.event.held_out_loss < 1.3
    steps = [record.step for record in select(records, StepFinished)]
    assert len(set(steps)) == len(steps), "no update counts twice"
    return changed
