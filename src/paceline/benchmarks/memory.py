"""`bench memory`: the peak memory of a run with each way to save it, beside what was estimated."""

from typing import Any

from pydantic import Field

from paceline.benchmarks.base import Benchmark, BenchmarkRow
from paceline.benchmarks.reproductions.base import train_once
from paceline.benchmarks.workers import Workers
from paceline.errors import SettingsError, unknown_name
from paceline.memory import guess_device
from paceline.recipes import find_recipe
from paceline.recipes.transformer_lm import TransformerLM
from paceline.registry import register
from paceline.training.memory_fit import estimate
from paceline.training.memory_probe import MEASURED_STEP
from paceline.training.model import Model
from paceline.training.run import Run

TECHNIQUES: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"precision": "bf16"},
    "micro-batches": {"num_micro_batches": 4},
    "recompute selective": {"memory": {"recompute": "selective"}},
    "recompute full": {"memory": {"recompute": "full"}},
    "offload activations": {"memory": {"offload": "activations"}},
    "offload optimizer": {"memory": {"offload": "optimizer"}},
    "offload both": {"memory": {"offload": "both"}},
    "sgd": {"optimizer": "sgd"},
    "adafactor": {"optimizer": "adafactor"},
    "adamw_8bit": {"optimizer": "adamw_8bit"},
    "zero 1": {"layout": {"sharded": 2, "zero_stage": 1}},
    "zero 2": {"layout": {"sharded": 2, "zero_stage": 2}},
    "zero 3": {"layout": {"sharded": 2, "zero_stage": 3}},
}
"""Settings of a run, by what is saved with."""


@register("memory")
class MemoryBenchmark(Benchmark):
    """Peak memory of rank 0 in a short run with each way to save memory, beside its estimate.

    On CPUs tensors are counted, on GPUs it is what torch's allocator says. Offloading is left out without GPUs.
    """

    recipe: str = "transformer_lm"
    model: Model = TransformerLM(width=256, num_layers=6, num_heads=4)
    global_batch: int = Field(default=32, ge=2)
    techniques: tuple[str, ...] = tuple(TECHNIQUES)
    workers: Workers = Workers()
    """Workers of the benchmark; two for the sharded cases."""

    def measure(self) -> list[BenchmarkRow]:
        """Train with each."""
        if unknown := [name for name in self.techniques if name not in TECHNIQUES]:
            raise unknown_name("technique", unknown[0], TECHNIQUES)
        device = guess_device(self.workers.num_workers)
        names = [name for name in self.techniques if device.type != "cpu" or "offload" not in name]
        return [self._measure(name) for name in names]

    def make_run(self, technique: str) -> Run:
        """Return the run that memory is saved in with a technique."""
        run = find_recipe(self.recipe)()
        changes = {
            "model": self.model,
            "global_batch": self.global_batch,
            "num_steps": MEASURED_STEP + 2,
            "evaluate_interval": 0,
            "evaluate_samples": self.workers.num_workers,
            "checkpoint_interval": 0,
        }
        document = run.model_copy(update=changes).model_dump(mode="json")
        for name, value in TECHNIQUES[technique].items():
            document[name] = {**document[name], **value} if isinstance(value, dict) else value
        return Run.model_validate(document)

    def _measure(self, technique: str) -> BenchmarkRow:
        run, num_workers = self.make_run(technique), self.workers.num_workers
        estimated = estimate(run, run.open_data(), num_workers, guess_device(num_workers)).peak_bytes
        measured = train_once(run, self.recipe, self.workers).memory_measured
        if not measured:
            raise SettingsError(f"every run must tell what it measured, but that with {technique} did not")
        peak = measured[0].event.peak_bytes
        return BenchmarkRow(
            self.name, technique, "peak memory", "MB", peak / 1e6, estimated / 1e6, "estimated", peak / estimated
        )
