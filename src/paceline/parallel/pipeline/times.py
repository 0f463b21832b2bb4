"""The times of a pipeline rank's work, which measure the bubble of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from paceline.comm.streams import record
from paceline.errors import SettingsError
from paceline.monitor.events import PipelineMeasured

WorkKind = Literal["forward", "backward", "inputs", "weights"]
"""Kind of work: backward to inputs and weights at once, or, if the order splits it, inputs or weights."""


@dataclass(frozen=True)
class Span:
    """One operation of a rank, by `time.perf_counter`."""

    work: WorkKind
    stage: int
    micro_batch: int
    began_s: float
    ended_s: float


@dataclass
class Clock:
    """Recorder of spans; records while `is_running`."""

    device: torch.device
    is_running: bool = False
    _open: list[tuple[WorkKind, int, int, Any, Any]] = field(default_factory=list)
    """Operations with their beginnings and ends: times, or on a GPU events of its queue."""
    _start: tuple[float, Any] = (0.0, None)

    def start(self) -> None:
        """Record from now on."""
        self.is_running, self._open = True, []
        if self.device.type != "cpu":  # once a timed step: events tell times from this one
            torch.accelerator.synchronize(self.device)
            self._start = time.perf_counter(), record(self.device, is_timed=True)

    def stop(self) -> list[Span]:
        """Record no longer, and return what was recorded, waiting once for all of it on a GPU."""
        self.is_running = False
        if self._open and self.device.type != "cpu":
            self._open[-1][-1].synchronize()
        return [
            Span(work, stage, micro_batch, self._to_s(began), self._to_s(ended))
            for work, stage, micro_batch, began, ended in self._open
        ]

    @contextmanager
    def watch(self, work: WorkKind, stage: int, micro_batch: int) -> Iterator[None]:
        """Time the code inside."""
        if not self.is_running:
            yield
            return
        began = self._now()
        yield
        self._open.append((work, stage, micro_batch, began, self._now()))

    def _now(self) -> Any:
        return time.perf_counter() if self.device.type == "cpu" else record(self.device, is_timed=True)

    def _to_s(self, moment: Any) -> float:
        if self.device.type == "cpu":
            return float(moment)
        began_s, began = self._start
        return began_s + float(began.elapsed_time(moment)) / 1e3


@dataclass(frozen=True)
class PipelineTimes:
    """Work of one rank in one step."""

    order: str
    ranks: list[int]
    """Ranks of the world, in the order of the pipeline."""
    num_micro_batches: int
    stages_per_rank: int
    formula: float | None
    """Bubble by the order's own formula."""
    spans: list[Span]

    @property
    def busy_s(self) -> float:
        """Time that the rank computed."""
        return sum(span.ended_s - span.began_s for span in self.spans)

    def to_event(self) -> PipelineMeasured:
        """Return these times as an event."""
        to_unix_s = time.time() - time.perf_counter()
        first_s = min(span.began_s for span in self.spans)
        return PipelineMeasured(
            order=self.order,
            ranks=self.ranks,
            num_micro_batches=self.num_micro_batches,
            stages_per_rank=self.stages_per_rank,
            formula=self.formula,
            began_unix_s=first_s + to_unix_s,
            works=[span.work for span in self.spans],
            stages=[span.stage for span in self.spans],
            micro_batches=[span.micro_batch for span in self.spans],
            began_s=[span.began_s - first_s for span in self.spans],
            ended_s=[span.ended_s - first_s for span in self.spans],
        )


class TimedStage(PipelineStage):
    """Torch's stage with timed work, backward without autocast, and contiguous messages."""

    def __init__(self, *args: Any, clock: Clock, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._clock = clock

    @property
    def buffers(self) -> list[Tensor]:
        """Tensors that it receives values and gradients into."""
        tables = (self.args_recv_info, self.grad_recv_info)
        received = [info for table in tables for infos in table.values() for info in infos]
        return [info.buffer for info in received if info.buffer is not None]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a micro-batch forward."""
        with self._clock.watch("forward", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run a micro-batch backward; to the inputs only if `full_backward` is false."""
        work: WorkKind = "backward" if full_backward else "inputs"
        with self._clock.watch(work, self.stage_index, bwd_chunk_id), self._without_autocast():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if bwd_chunk_id in self.bwd_cache:
            self.bwd_cache[bwd_chunk_id] = tuple(
                grad.contiguous() if isinstance(grad, Tensor) else grad for grad in self.bwd_cache[bwd_chunk_id]
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run a micro-batch backward to the weights."""
        with self._clock.watch("weights", self.stage_index, bwd_chunk_id), self._without_autocast():
            try:
                super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            except RuntimeError as error:
                if "graph a second time" not in str(error):
                    raise
                raise SettingsError(
                    "pipeline.order must not split backward for a model whose stage uses a parameter several times, "
                    "which torch cannot; take 1f1b or interleaved (--pipeline.order 1f1b)"
                ) from error

    def _without_autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, enabled=False)
