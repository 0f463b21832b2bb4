"""`bench codecs`: the kernels that encode with error feedback, beside a plain copy and beside plain torch."""

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from paceline.benchmarks.base import Benchmark, BenchmarkRow
from paceline.compression import kernels
from paceline.compression.int8 import Int8
from paceline.compression.one_bit import OneBit
from paceline.compression.rows import RowLayout
from paceline.compression.top_k import count_kept
from paceline.registry import register

CodecName = Literal["one_bit", "int8", "top_k"]


@register("codecs")
class CodecsBenchmark(Benchmark):
    """Throughput of fused encoding with error feedback, one thread, beside a plain copy and beside plain torch.

    It counts the least traffic: gradient and residual read, residual and payload written, whatever a kernel really
    moves. A copy counts what it reads and writes. All three run in turn on the same arrays. Normal gradients; the
    residual is what a few steps leave.
    """

    codecs: tuple[CodecName, ...] = ("one_bit", "int8", "top_k")
    num_elements: int = Field(default=10_000_000, ge=1)
    density: float = Field(default=0.01, gt=0, le=1)
    """Density of top_k."""
    num_pairs: int = Field(default=30, ge=2)
    """Samples of the codec and the copy; plain torch gets a third of them."""
    device: Literal["cpu", "cuda"] = "cpu"

    def measure(self) -> list[BenchmarkRow]:
        """Run all codecs."""
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return [row for codec in self.codecs for row in self._measure_one(codec)]
        finally:
            torch.set_num_threads(num_threads)

    def _measure_one(self, codec: CodecName) -> list[BenchmarkRow]:
        problem = _Problem.make(codec, self.num_elements, self.density, torch.device(self.device))
        fast = problem.encoder(kernels.find_kernels(codec, problem.value.device))
        plain = problem.encoder(importlib.import_module(f"{kernels.__name__}.torch_{codec}"))
        problem.check_equal(fast, plain)
        for _ in range(5):
            fast()
            problem.keep_residual()
        sides = {"copy": problem.copy, "fast": fast, "plain": plain}
        traffic = {"copy": 2 * problem.value.nbytes, "fast": problem.least_bytes, "plain": problem.least_bytes}
        speeds: dict[str, list[float]] = {side: [] for side in sides}
        for sample in range(-2, self.num_pairs):
            for side in sides if sample % 2 else reversed(sides):
                if side != "plain" or sample % 3 == 0:
                    took_s = self._time(sides[side])
                    if sample >= 0:
                        speeds[side].append(traffic[side] / took_s / 1e9)
        case = codec if codec != "top_k" else f"top_k {self.density:g}"
        metric = f"encode with feedback, {self.device}"
        beside_plain = speeds["fast"][::3]
        return [
            BenchmarkRow.of_pairs(self.name, case, metric, "GB/s", speeds["fast"], speeds["copy"], "copy"),
            BenchmarkRow.of_pairs(self.name, case, metric, "GB/s", beside_plain, speeds["plain"], "plain torch"),
        ]

    def _time(self, run: Callable[[], object]) -> float:
        self._synchronize()
        began_s = time.perf_counter()
        run()
        self._synchronize()
        return time.perf_counter() - began_s

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


@dataclass
class _Problem:
    """A gradient, its residual, and where a codec writes."""

    codec: CodecName
    value: Tensor
    residual: Tensor
    new_residual: Tensor
    payload: list[Tensor]
    rows: RowLayout | None = None
    num_kept: int = 0
    least_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.least_bytes = 3 * self.value.nbytes + sum(part.nbytes for part in self.payload)

    @classmethod
    def make(cls, codec: CodecName, num_elements: int, density: float, device: torch.device) -> "_Problem":
        value = torch.randn(num_elements, generator=torch.Generator().manual_seed(0)).to(device)
        arrays = codec, value, torch.zeros_like(value), torch.zeros_like(value)
        if codec == "top_k":
            num_kept = count_kept(value.shape, density)
            indices = torch.zeros(num_kept, dtype=torch.int32, device=device)
            return cls(*arrays, [indices, torch.zeros(num_kept, device=device)], num_kept=num_kept)
        settings = OneBit if codec == "one_bit" else Int8
        rows = RowLayout(num_elements, 1, settings.tile, settings.bits)
        return cls(*arrays, [rows.new_payload(device)], rows=rows)

    def encoder(self, module: ModuleType) -> Callable[[], object]:
        """Return a call of the codec's kernel of `module`."""
        if self.rows is None:
            return lambda: module.select(self.value, self.residual, self.num_kept, self.new_residual, *self.payload)
        return lambda: module.encode(self.value, self.residual, self.rows, *self.payload, self.new_residual)

    def copy(self) -> None:
        self.new_residual.copy_(self.value)

    def keep_residual(self) -> None:
        """Make what the last call left out the residual of the next."""
        self.residual, self.new_residual = self.new_residual, self.residual

    def check_equal(self, fast: Callable[[], object], plain: Callable[[], object]) -> None:
        """Raise where the kernels do not write the same; the first call compiles too."""
        plain()
        expected = [part.clone() for part in (*self.payload, self.new_residual)]
        fast()
        for part, wanted in zip((*self.payload, self.new_residual), expected, strict=True):
            if part.dtype == torch.float32:
                torch.testing.assert_close(part, wanted)
            elif not torch.equal(part, wanted):
                raise AssertionError(f"{self.codec} must encode as its reference in plain torch does, but does not")
