"""The recipe transformer_lm, of whose ranks some are killed, or held, in given phases of given steps.

The script is `script.json` beside this file, a copy for each run: a list of `[rank, step, phase, held, reached]`.
The rank is killed in that phase of the step that follows `step` updates, once. `held` and `reached` are `[rank, phase]`
pairs of the same step, so that what others have then is known: the ones wait in that phase until they know that the
rank is lost, and the rank waits until the others have reached theirs.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

import torch

from paceline.recipes import transformer_lm
from paceline.replica.reduction import GradientReduction
from paceline.replica.replica import Replica
from paceline.replica.worker_state import WorkerState
from paceline.training import loop, reforming_layouts

PHASES = ["forward", "backward", "reduce", "reduced", "vote", "voted", "update", "log"]


class Script:
    """What happens to this process."""

    def __init__(self):
        self.folder = Path(__file__).parent
        self.lines = json.loads((self.folder / "script.json").read_text())
        self.replica: Replica | None = None
        self.is_broken = threading.Event()

    def enter(self, phase, step):
        """Do what the script says of this phase of the step after `step` updates."""
        rank = self.replica.shard.world.rank
        lines = [(number, line) for number, line in enumerate(self.lines) if line[1] == step]
        lines = [(n, line) for n, line in lines if not (self.folder / f"killed-{n}-{line[0]}-{line[2]}").exists()]
        for number, (*_, held, reached) in lines:
            if [rank, phase] in held + reached:
                self.mark("reached", number, rank, phase)
        for number, (dying, _, when, held, reached) in lines:
            if [rank, phase] in held:
                assert self.is_broken.wait(60), "nobody was lost"
            if [rank, phase] == [dying, when]:
                while not all((self.folder / f"reached-{number}-{r}-{p}").exists() for r, p in held + reached):
                    time.sleep(0.01)
                self.mark("killed", number, rank, phase)
                os.kill(os.getpid(), signal.SIGKILL)

    def mark(self, *words):
        """Leave a file with these words."""
        (self.folder / "-".join(map(str, words))).touch()

    def watch(self, replica):
        """Note the replica, and enter forward and backward in its first block."""
        self.replica = replica
        self.is_broken.clear()
        block = next(m for m in replica.module.modules() if type(m).__name__.endswith("DecoderLayer"))

        def note(module, inputs, output):
            if torch.is_grad_enabled() and output.requires_grad:
                self.enter("forward", replica.num_updates)
                output.register_hook(lambda gradient: self.enter("backward", replica.num_updates))

        block.register_forward_hook(note)


def before(owner, name, phase, *, after="", offset=0):
    """Enter a phase before a function is called, and another one after it."""
    real = getattr(owner, name)

    def wrapped(*args, **kwargs):
        step = SCRIPT.replica.num_updates - offset
        SCRIPT.enter(phase, step)
        result = real(*args, **kwargs)
        if after:
            SCRIPT.enter(after, step)
        return result

    setattr(owner, name, wrapped)


def run():
    """Return the recipe's run."""
    return transformer_lm.run()


SCRIPT = Script()
if not hasattr(Replica, "is_scripted"):
    Replica.is_scripted = True
    real_init, real_break = Replica.__init__, reforming_layouts._break_off

    def start(self, *args, **kwargs):
        real_init(self, *args, **kwargs)
        SCRIPT.watch(self)

    def break_off(*arguments):
        real_break(*arguments)
        SCRIPT.is_broken.set()

    Replica.__init__, reforming_layouts._break_off = start, break_off
    before(GradientReduction, "receive", "reduce", after="reduced")
    before(WorkerState, "agree_on_update", "vote", after="voted")
    before(WorkerState, "end_update", "update", offset=1)
    before(loop, "log_step", "log", offset=1)
