"""`bench checkpoints`: incremental checkpoints, parity and asynchronous saves beside full ones and a copy in memory."""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from paceline.benchmarks.base import Benchmark, BenchmarkRow
from paceline.checkpoint import AsyncSaver, CheckpointStore
from paceline.checkpoint.erasure import ErasureCode
from paceline.registry import register

_WIDTH = 512


@register("checkpoints")
class CheckpointsBenchmark(Benchmark):
    """What tiers of checkpoints cost, in one process with one thread; both sides of a row take turns.

    The states are those of AdamW, three tensors for each that is trained: a model that is trained whole; one of which
    one part in `frozen_parts` is trained, as with adapters; and an embedding of which each interval touches some rows,
    whose optimizer leaves the others as they are (torch.optim.SparseAdam).
    """

    megabytes: int = Field(default=128, ge=8)
    """Size of each state."""
    frozen_parts: int = Field(default=50, ge=2)
    """Trained part of the mostly frozen model: one in so many."""
    touched: tuple[float, ...] = (0.001, 0.01, 0.1)
    """Shares of an embedding's rows that change between two checkpoints."""
    codes: tuple[tuple[int, int], ...] = ((4, 1), (4, 2), (8, 2), (4, 3))
    """Numbers of data and parity blocks of erasure codes."""
    num_rounds: int = Field(default=5, ge=2)
    """Pairs of measurements of each row."""
    folder: str | None = None
    """Folder on the disk to measure; the system's own for temporary files by default."""

    def measure(self) -> list[BenchmarkRow]:
        """Return the rows."""
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            rows = [row for name in self._states() for row in self._compare_incremental(Path(folder), name)]
            rows += [self._compare_stall(Path(folder))]
        return rows + [self._compare_code(*code) for code in self.codes]

    def _states(self) -> dict[str, Callable[[dict[str, Tensor], int], None]]:
        """Return functions that change a state as training does in one interval, by name."""

        def train_all(state: dict[str, Tensor], step: int) -> None:
            for tensor in state.values():
                tensor.add_(1e-3)

        def train_part(state: dict[str, Tensor], step: int) -> None:
            rows = len(state["weight"]) // self.frozen_parts
            for tensor in state.values():
                tensor[:rows].add_(1e-3)

        changes: dict[str, Callable[[dict[str, Tensor], int], None]] = {
            "all trained": train_all,
            f"1 part in {self.frozen_parts} trained": train_part,
        }
        for share in self.touched:

            def touch(state: dict[str, Tensor], step: int, share: float = share) -> None:
                generator = torch.Generator().manual_seed(step)
                rows = torch.randperm(len(state["weight"]), generator=generator)[: int(share * len(state["weight"]))]
                for tensor in state.values():
                    tensor[rows] += 1e-3

            changes[f"{share:.1%} of an embedding's rows touched"] = touch
        return changes

    def _make_state(self) -> dict[str, Tensor]:
        num_rows = self.megabytes * 10**6 // (3 * 4 * _WIDTH)
        return {name: torch.randn(num_rows, _WIDTH) for name in ("weight", "exp_avg", "exp_avg_sq")}

    def _compare_incremental(self, folder: Path, name: str) -> list[BenchmarkRow]:
        change, state = self._states()[name], self._make_state()
        seconds: dict[str, list[float]] = {"incremental": [], "full": []}
        num_bytes: dict[str, list[float]] = {"incremental": [], "full": []}
        place = folder / str(len(list(folder.iterdir())))
        stores = {
            "incremental": CheckpointStore(place / "incremental", keep=1, incremental=10**6),
            "full": CheckpointStore(place / "full", keep=1),
        }
        for step in range(self.num_rounds + 1):
            for side, store in stores.items():
                saved = store.save(state, {}, step)
                if step:  # the first is full on both sides
                    seconds[side].append(saved.duration_s)
                    num_bytes[side].append(saved.num_bytes)
            change(state, step)
        for store in stores.values():
            store.close()
        case = f"{self.megabytes} MB, {name}"
        measured = (("written", "B", num_bytes), ("time", "s", seconds))
        return [
            BenchmarkRow.of_pairs(self.name, case, metric, unit, of["incremental"], of["full"], "full")
            for metric, unit, of in measured
        ]

    def _compare_stall(self, folder: Path) -> BenchmarkRow:
        """Time for which an asynchronous save stops training, when its buffers are there, and a copy in memory."""
        state = self._make_state()
        copies = {name: tensor.clone() for name, tensor in state.items()}
        times: dict[str, list[float]] = {"save": [], "copy": []}
        with CheckpointStore(folder / "stall", keep=1) as store, AsyncSaver(store) as saver:

            def copy() -> None:
                for name, tensor in state.items():
                    copies[name].copy_(tensor)

            for step in range(2 * self.num_rounds + 1):
                sides: dict[str, Callable[[], None]] = {"save": partial(saver.start, state, {}, step), "copy": copy}
                for side in ("save", "copy") if step % 2 else ("copy", "save"):  # the second finds the cache warm
                    began_s = time.perf_counter()
                    sides[side]()
                    if step:  # the first makes the buffers
                        times[side].append(time.perf_counter() - began_s)
                    saver.wait()
        case = f"{self.megabytes} MB, asynchronous save"
        return BenchmarkRow.of_pairs(self.name, case, "stall", "s", times["save"], times["copy"], "one copy in memory")

    def _compare_code(self, num_data: int, num_parity: int) -> BenchmarkRow:
        """Time to make parity, and to copy the data."""
        code = ErasureCode(num_data, num_parity)
        length = self.megabytes * 10**6 // num_data // 64 * 64
        data = np.random.default_rng(0).integers(0, 256, (num_data, length), np.uint8)
        copy, parity = np.empty_like(data), np.empty((num_parity, length), np.uint8)
        seconds: list[float] = []
        copying: list[float] = []
        for turn in range(self.num_rounds + 1):
            began_s = time.perf_counter()
            code.encode(data, parity)
            between_s = time.perf_counter()
            np.copyto(copy, data)
            if turn:  # the first compiles
                seconds.append(between_s - began_s)
                copying.append(time.perf_counter() - between_s)
        rates = [data.nbytes / 1e9 / s for s in seconds], [data.nbytes / 1e9 / s for s in copying]
        case = f"{self.megabytes} MB, {num_data} data and {num_parity} parity blocks"
        return BenchmarkRow.of_pairs(self.name, case, "encoded", "GB/s", *rates, "one copy in memory")
