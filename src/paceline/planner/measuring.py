"""What each worker measures for a profile: products, memory, a model's step, messages and exchanges."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.comm.join import join
from paceline.comm.link_speed import fit_speed
from paceline.data.base import Splits
from paceline.data.batch import Batch, map_tensors
from paceline.data.order import Interval
from paceline.memory import find_recomputable
from paceline.replica.replica import Replica
from paceline.training.building import build_model
from paceline.training.run import Run

_SQUARES = (256, 512, 1024)
_EXCHANGE_BYTES = (2**10, 2**13, 2**16, 2**18, 2**20, 2**22, 2**23, 2**24)
_MESSAGE_BYTES = (2**10, 2**18, 2**21)
_LEAST_S = 0.1
"""Time for which something short is repeated."""
_MOST_REPEATS = 40
_MODEL_S = 8.0
"""Time for which the model's steps are repeated."""
_LEAST_ROUNDS = 3


def measure_rank(run: Run, samples: int, num_threads: int, shapes: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """Return what this worker measures, together with all others, as JSON.

    Args:
        run: The run.
        samples: Samples of a micro-batch.
        num_threads: Threads of a worker.
        shapes: Rows, columns and depth of the model's products.
    """
    torch.set_num_threads(num_threads)
    with join(transport="auto") as group:
        measured: dict[str, Any] = {
            "products": [
                [*shape, _measure_product(shape, group)]
                for shape in dict.fromkeys([*((n, n, n) for n in _SQUARES), *shapes])
            ],
            "memory_bytes_per_s": _measure_memory(group),
            "launch_s": _measure_launch(),
        }
        measured |= _measure_model(run, run.open_data(), samples, group)
        measured["exchanges"] = [_measure_exchange(size, group) for size in _EXCHANGE_BYTES] if group.size > 1 else []
        measured["links"] = _measure_links(group)
    return measured


def _repeat(action: Callable[[], object], group: Group | None = None, least_s: float = _LEAST_S) -> float:
    """Return the median seconds of an action, begun by all workers together."""
    action()
    if group is not None:
        group.barrier()
    times: list[float] = []
    while sum(times) < least_s and len(times) < _MOST_REPEATS:
        began_s = time.perf_counter()
        action()
        times.append(time.perf_counter() - began_s)
    return median(times)


def _measure_product(shape: tuple[int, int, int], group: Group) -> float:
    """Return the flop/s of a product while all workers compute it."""
    rows, columns, depth = shape
    one, other = torch.randn(rows, depth), torch.randn(depth, columns)
    return 2.0 * rows * columns * depth / _repeat(lambda: one @ other, group)


def _measure_memory(group: Group) -> float:
    """Return the bytes that a worker reads and writes in a second, far beyond its caches."""
    one, other = torch.empty(2**24), torch.ones(2**24)
    return 2.0 * one.nbytes / _repeat(lambda: one.copy_(other), group, 3 * _LEAST_S)


def _measure_launch() -> float:
    small = torch.ones(8)

    def add_many() -> None:
        for _ in range(100):
            small.add(1.0)

    return _repeat(add_many) / 100


def _measure_model(run: Run, splits: Splits, samples: int, group: Group) -> dict[str, Any]:
    """Return the times of a step, by its parts and whole, for two sizes of a micro-batch, while all workers compute.

    Sizes and whole steps take turns, so that what else runs on the machine slows all of them alike, and the quickest
    quarter of each counts.
    """
    meter = _ModelMeter(run, splits, samples, group)
    group.barrier()
    began_s = time.perf_counter()
    meter.take_turn()
    longest_s = max(group.gather_documents(time.perf_counter() - began_s, name="profile"))
    meter.forget()
    for _ in range(min(_MOST_REPEATS, max(_LEAST_ROUNDS, int(_MODEL_S / longest_s)))):
        meter.take_turn()
    return meter.collect()


class _ModelMeter:
    """A replica's steps alone, with micro-batches of two sizes, and its steps with all workers, one after another."""

    def __init__(self, run: Run, splits: Splits, samples: int, group: Group) -> None:
        self._run = run
        alone, shared = (build_model(run, splits, group).train() for _ in range(2))
        self._blocks = find_recomputable(alone)
        self._num_bytes = float(sum(p.nbytes for p in alone.parameters() if p.requires_grad))
        self._sizes = (samples, 2 * samples)
        self._batches = [_make_batch(splits, size) for size in self._sizes]
        groups = (group.subgroup([group.rank], "profile"), group)
        self._alone, self._shared = (
            Replica(one, run.optimizer.build(one), group=of, clip_norm=run.clip_norm, precision=run.precision)
            for one, of in zip((alone, shared), groups, strict=True)
        )
        self.forget()

    def forget(self) -> None:
        """Drop all times."""
        self._parts: tuple[list[tuple[float, float, float]], ...] = ([], [])
        self._steps: list[float] = []
        self._times = _Times()

    def take_turn(self) -> None:
        """Time each once; every worker does as often."""
        for index, batch in enumerate(self._batches):
            with self._times.noting(self._blocks if index else {}):
                self._parts[index].append(_run_step(self._run, self._alone, batch, self._times))
        self._steps.append(sum(_run_step(self._run, self._shared, self._batches[0])))

    def collect(self) -> dict[str, Any]:
        """Return the times."""
        forwards, backwards, updates = ([[step[part] for step in one] for one in self._parts] for part in range(3))
        return {
            "samples": self._sizes,
            "num_bytes": self._num_bytes,
            "forward_s": [_quick(one) for one in forwards],
            "backward_s": [_quick(one) for one in backwards],
            "optimizer_s": _quick(updates[0] + updates[1]),
            "step_s": _quick(self._steps),
            "blocks": [
                {
                    "name": name,
                    "num_bytes": float(sum(p.nbytes for p in block.parameters() if p.requires_grad)),
                    "forward_s": _quick(self._times.forward.get(name, [0.0])),
                    "backward_s": _quick(self._times.backward.get(name, [0.0])),
                }
                for name, block in self._blocks.items()
            ],
        }


def _quick(times: Sequence[float]) -> float:
    """Return the time that a quarter of some are below."""
    return sorted(times)[len(times) // 4]


def _run_step(run: Run, replica: Replica, batch: Batch, times: "_Times | None" = None) -> tuple[float, float, float]:
    """Return the times of forward, backward and update of a replica's step."""
    began_s = time.perf_counter()
    loss = run.loss.loss(replica, batch)
    forward_s = time.perf_counter()
    replica.backward(loss.mean, weight=loss.weight)
    backward_s = time.perf_counter()
    if times is not None:
        times.end(backward_s)
    replica.update()
    return forward_s - began_s, backward_s - forward_s, time.perf_counter() - backward_s


def _make_batch(splits: Splits, size: int) -> Batch:
    """Return a batch of one sample, many times: what is in it does not change how long it takes."""
    data = map_tensors(lambda one: torch.cat([one[:1]] * size), splits.train.read_first())
    return Batch(data, size, Interval(0, size))


class _Times:
    """Times of blocks: of forward by their calls, of backward by when gradients of outputs are there."""

    def __init__(self) -> None:
        self.forward: dict[str, list[float]] = {}
        self.backward: dict[str, list[float]] = {}
        self._began_s = 0.0
        self._last: tuple[str, float] | None = None

    @contextmanager
    def noting(self, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
        """Inside, forward and backward of blocks are timed."""
        handles = [block.register_forward_pre_hook(self.begin) for block in blocks.values()]
        handles += [block.register_forward_hook(self.leave(name)) for name, block in blocks.items()]
        try:
            yield
        finally:
            self.end()
            for handle in handles:
                handle.remove()

    def begin(self, module: nn.Module, args: Any) -> None:
        """Note that a block begins."""
        self._began_s = time.perf_counter()

    def reach(self, name: str) -> None:
        """Note that the gradient of a block's output is there: the block after it has ended, and it begins."""
        now_s = time.perf_counter()
        self.end(now_s)
        self._last = name, now_s

    def end(self, now_s: float | None = None) -> None:
        """Note that backward of the block that runs has ended."""
        if self._last is not None:
            name, began_s = self._last
            self.backward.setdefault(name, []).append((now_s or time.perf_counter()) - began_s)
            self._last = None

    def leave(self, name: str) -> Callable[..., None]:
        """Return a hook of a block's end."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.forward.setdefault(name, []).append(time.perf_counter() - self._began_s)
            first = output[0] if isinstance(output, tuple | list) else output
            if isinstance(first, Tensor) and first.requires_grad:
                first.register_hook(lambda grad: self.reach(name))

        return hook


def _measure_exchange(num_bytes: int, group: Group) -> list[float]:
    """Return size, seconds and seconds of the processor of an all-reduce."""
    buffer = group.allocate(num_bytes // 4, torch.float32)
    buffer.zero_()
    for _ in range(2):
        group.all_reduce(buffer, name="profile").wait()
    group.barrier()
    number = 4 if num_bytes > 2**20 else 20
    cpu_s, began_s = time.process_time(), time.perf_counter()
    for _ in range(number):
        group.all_reduce(buffer, name="profile").wait()
    return [num_bytes, (time.perf_counter() - began_s) / number, (time.process_time() - cpu_s) / number]


def _measure_links(group: Group) -> list[list[float]]:
    """Return ranks, latency and bandwidth of messages between each two workers, which the lower of both measures."""
    found = []
    for one in range(group.size):
        for other in range(one + 1, group.size):
            if group.rank in (one, other):
                points = [(size, _exchange_messages(size, group, one, other)) for size in _MESSAGE_BYTES]
                speed = fit_speed(points)
                if speed is not None and group.rank == one:
                    found.append([one, other, speed.latency_s, min(speed.bytes_per_s, 1e15)])
            group.barrier()
    return found


def _exchange_messages(num_bytes: int, group: Group, one: int, other: int, number: int = 6) -> float:
    """Return the seconds of a message one way, as half of a ping and its answer."""
    message = torch.zeros(num_bytes // 4)
    times = []
    for tag in range(number):
        began_s = time.perf_counter()
        if group.rank == one:
            group.send(message, other, tag=2 * tag, name="ping").wait()
            group.receive(message, other, tag=2 * tag + 1, name="answer").wait()
        else:
            group.receive(message, one, tag=2 * tag, name="ping").wait()
            group.send(message, one, tag=2 * tag + 1, name="answer").wait()
        times.append((time.perf_counter() - began_s) / 2)
    return median(times[1:])
