"""Watch over the exchanges of sharded blocks: ranks that wait in different ones are told so, long before a time-out.

A model that chooses blocks by its samples gathers others on each rank, or more of them. No sample need show that.
"""

import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from paceline.comm.heartbeat import run_within
from paceline.comm.progress import PROGRESS
from paceline.comm.threads import start_thread
from paceline.errors import CommunicationError, MismatchError
from paceline.parallel.mesh import Mesh, disconnect

_LOOK_S = 5.0
"""Time of waiting between two looks at the others."""
_STILL_S = 20.0
"""Time after which ranks that all wait in different operations wait for ever."""
_TICK_S = 1.0
_STORE_TIMEOUT_S = 3.0
_NUM_KEPT = 512
"""Number of the last exchanges that ranks tell each other."""
_SAID = "gathers/said"


class GatherWatch:
    """Numbers and names the exchanges of a sharded module's blocks, and compares them where one takes long; on CPUs.

    Ranks differ for certain if two had other blocks under one number. Where the sharded axis has all ranks they also do
    if all live, wait, and are in different operations for `_STILL_S`: one of them has no more blocks to gather.
    A thread posts the last exchanges only while this rank waits, or after a pause: not in a training that goes on.

    Args:
        module: Module of this rank, with the names of its blocks.
        parts: Modules that `shard_module` returned: itself, or the stages of a pipeline.
        mesh: Mesh of the layout.
        sums_gradients: Whether torch sums the gradients, and no codec.
        advice: Advice about ranks that differ.
    """

    def __init__(
        self, module: nn.Module, parts: Sequence[nn.Module], mesh: Mesh, *, sums_gradients: bool, advice: str
    ) -> None:
        self._mesh = mesh
        self._advice = advice
        self._recent: deque[str] = deque(maxlen=_NUM_KEPT)
        self._num_begun = self._waiting = 0
        self._closed = threading.Event()
        names = {id(block): name for name, block in module.named_modules()}
        for block in (block for part in parts for block in part.modules() if isinstance(block, FSDPModule)):
            name = names.get(id(block), "") or "the model itself"
            block.set_custom_all_gather(_WatchedGather(self, name))
            if sums_gradients:
                block.set_custom_reduce_scatter(_WatchedSum(self, name))
        # The thread refers to the watch weakly: a dropped model is not kept alive.
        start_thread(_keep_posting, weakref.ref(self), self._closed, name="paceline-gathers", stop=self._closed.set)
        mesh.close_with(self._closed.set)

    def run(self, what: str, start: Callable[[], dist.Work | None]) -> None:
        """Run an exchange with the other ranks of the axis.

        Args:
            what: Name of the exchange.
            start: Function that begins it.

        Raises:
            MismatchError: Ranks run different ones; the message names them.
        """
        self._num_begun += 1
        self._recent.append(what)
        self._waiting = self._num_begun
        work = start()
        look: _Look | None = None
        assert work is not None
        while True:
            try:
                work.wait(timedelta(seconds=_LOOK_S))
                break
            except RuntimeError:  # it takes longer, or has failed
                has_failed = work.is_completed()
                look = (look or _Look()).follow(self._read_others())
                self._refuse(look)
                if has_failed:
                    raise
        self._waiting = 0

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Around operations of other groups, which fail too once another rank has found that blocks differ."""
        try:
            yield
        except CommunicationError as error:
            if said := read_mismatch(self._mesh):
                raise MismatchError(said) from error
            raise

    def post(self, beat: int) -> None:
        """Post the last exchanges of this rank, and what it waits in."""
        assert self._mesh.store is not None
        self._mesh.store.set(f"gathers/{self._mesh.world.rank}", json.dumps(self.describe() | {"beat": beat}))

    def describe(self) -> dict[str, Any]:
        """Return the last exchanges of this rank, the number of the first of these, and what it waits in."""
        recent, number, waits = list(self._recent), self._waiting, list(PROGRESS.waits.values())
        doing = f"waits in exchange {number}, the {recent[-1]}" if number else ""
        doing = doing or (f"waits in operation {waits[0]} of another group" if waits else "")
        return {"first": self._num_begun - len(recent) + 1, "recent": recent, "waits": doing}

    def _read_others(self) -> dict[int, dict[str, Any]]:
        """Return what other ranks of the axis posted last, empty for those that have posted nothing."""
        found = {}
        for rank in self._mesh.ranks("sharded"):
            if rank != self._mesh.world.rank:
                stored = run_within(_STORE_TIMEOUT_S, partial(_read, self._mesh, f"gathers/{rank}"))
                found[rank] = json.loads(stored) if stored else {}
        return found

    def _refuse(self, look: "_Look") -> None:
        """Raise `MismatchError`, on other ranks too, if one has said so or ranks differ."""
        said = read_mismatch(self._mesh) or self._compare(look)
        if not said:
            return
        store = self._mesh.store
        assert store is not None
        run_within(_STORE_TIMEOUT_S, lambda: store.set(_SAID, said))
        self._closed.set()
        disconnect()  # otherwise the end of the process would wait for this exchange
        raise MismatchError(said)

    def _compare(self, look: "_Look") -> str:
        """Return how ranks differ, with the advice; empty if they may be only slow."""
        mine, names, rank = self.describe(), self._mesh.world.names, self._mesh.world.rank
        own, told = _number(mine), ""
        for other, posted in look.posts.items():
            theirs = _number(posted) if posted else {}
            if differing := [number for number in own if theirs.get(number, own[number]) != own[number]]:
                first = differing[0]
                runs = sorted([(rank, own[first]), (other, theirs[first])])
                told = " and ".join(f"the {what} on rank {names[one]}" for one, what in runs)
                told = f"exchange {first} is {told}"
                break
        is_whole = self._mesh.size("sharded") == self._mesh.world.size
        waits = {rank: mine["waits"], **{other: posted.get("waits", "") for other, posted in look.posts.items()}}
        if not told and is_whole and look.still_s >= _STILL_S and all(waits.values()) and len(set(waits.values())) > 1:
            told = ", and ".join(f"rank {names[one]} {doing}" for one, doing in sorted(waits.items()))
        begin = "ranks that share parameters must gather the same blocks, but"
        return f"{begin} {told}, since the model chooses blocks by its samples; {self._advice}" if told else ""


class _Look:
    """What other ranks posted, and the time for which all have lived and nothing else has changed."""

    def __init__(self) -> None:
        self.posts: dict[int, dict[str, Any]] = {}
        self._since_s = time.monotonic()

    @property
    def still_s(self) -> float:
        return time.monotonic() - self._since_s

    def follow(self, posts: dict[int, dict[str, Any]]) -> "_Look":
        """Return the next look."""
        after = _Look()
        after.posts = posts
        if posts.keys() == self.posts.keys() and all(map(_is_waiting_still, self.posts.values(), posts.values())):
            after._since_s = self._since_s
        return after


def _is_waiting_still(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return bool(before) and before | {"beat": 0} == after | {"beat": 0} and before["beat"] != after["beat"]


def read_mismatch(mesh: Mesh) -> str:
    """Return what a rank has found of blocks that differ, if one has."""
    said = run_within(_STORE_TIMEOUT_S, lambda: _read(mesh, _SAID)) if mesh.store is not None else None
    return (said or b"").decode()


def _read(mesh: Mesh, key: str) -> bytes:
    store = mesh.store
    return store.get(key) if store is not None and store.check([key]) else b""


def _number(posted: Mapping[str, Any]) -> dict[int, str]:
    return dict(enumerate(posted["recent"], posted["first"]))


def _keep_posting(watch: "weakref.ref[GatherWatch]", closed: threading.Event) -> None:
    before: dict[str, Any] | None = None
    posted: dict[str, Any] = {}
    beat = 0
    while not closed.wait(_TICK_S):
        if (watched := watch()) is None:
            return
        now = watched.describe()
        # What others have read of a wait must not stand once it is over.
        if (now == before and (now != posted or now["waits"])) or (now != posted and posted.get("waits")):
            beat += 1
            try:
                watched.post(beat)
            except RuntimeError:
                return  # without a store there is nobody to tell
            posted = now
        before = now
        del watched


class _WatchedGather(DefaultAllGather):
    """The gather of one block's parameters, as FSDP2 calls it."""

    def __init__(self, watch: GatherWatch, name: str) -> None:
        self._watch, self._what = watch, f"gather of {name}"

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather, and wait for it: on CPUs FSDP2 asks for nothing else."""
        start = super().__call__
        self._watch.run(self._what, lambda: start(output_tensor, input_tensor, group, True))


class _WatchedSum(DefaultReduceScatter):
    """The sum of one block's gradients, as FSDP2 calls it."""

    def __init__(self, watch: GatherWatch, name: str) -> None:
        self._watch, self._what = watch, f"sum of the gradients of {name}"

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Sum, and wait for it."""
        start = super().__call__
        self._watch.run(self._what, lambda: start(output_tensor, input_tensor, group, op, True))
