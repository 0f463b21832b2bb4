"""`bench memory`: the peak memory of a run with each way to save it, beside what was estimated."""

from typing import Any, Literal

from pydantic import Field

from paceline.benchmarks.base import Benchmark, BenchmarkRow
from paceline.benchmarks.reproductions.base import train_once
from paceline.benchmarks.workers import Workers
from paceline.errors import SettingsError, unknown_name
from paceline.memory import guess_device
from paceline.memory.available import PROCESS_BYTES
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
LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded 4": {"layout": {"sharded": 4}},
    "sharded 4, zero 2": {"layout": {"sharded": 4, "zero_stage": 2}},
    "sharded 4, zero 1": {"layout": {"sharded": 4, "zero_stage": 1}},
    "sharded 2, data 2, 4 micro-batches": {"layout": {"sharded": 2}, "num_micro_batches": 4},
    "tensor 2, data 2": {"layout": {"tensor": 2}},
    "tensor 4": {"layout": {"tensor": 4}},
    "expert 4": {"layout": {"expert": 4}, "model": {"num_experts": 8}},
    "expert 2, data 2": {"layout": {"expert": 2}, "model": {"num_experts": 8}},
    "context 2, data 2": {"layout": {"context": 2}},
    "pipeline 4, 1f1b": {"layout": {"pipeline": 4}, "pipeline": {"order": "1f1b"}},
    "pipeline 2, interleaved, data 2": {"layout": {"pipeline": 2}, "pipeline": {"order": "interleaved"}},
    "pipeline 2, zero bubble, data 2": {"layout": {"pipeline": 2}, "pipeline": {"order": "zero_bubble"}},
    "pipeline 2, gpipe, data 2": {"layout": {"pipeline": 2}, "pipeline": {"order": "gpipe"}},
    "sharded 2, tensor 2": {"layout": {"sharded": 2, "tensor": 2}},
    "sharded 2, pipeline 2": {"layout": {"sharded": 2, "pipeline": 2}, "pipeline": {"order": "1f1b"}},
    "tensor 2, pipeline 2": {"layout": {"tensor": 2, "pipeline": 2}, "pipeline": {"order": "1f1b"}},
}
"""Settings of a run on four ranks, by its layout."""
LAYOUTS_OF_EIGHT: dict[str, dict[str, Any]] = {
    "sharded 2, tensor 2, pipeline 2": {
        "layout": {"sharded": 2, "tensor": 2, "pipeline": 2},
        "pipeline": {"order": "1f1b"},
    },
    "tensor 2, pipeline 2, data 2": {
        "layout": {"data": 2, "tensor": 2, "pipeline": 2},
        "pipeline": {"order": "1f1b"},
    },
}
"""Settings of a run on eight ranks, by its layout."""
_ALL = TECHNIQUES | LAYOUTS | LAYOUTS_OF_EIGHT


@register("memory")
class MemoryBenchmark(Benchmark):
    """Peak memory of the rank that needs the most, in a short run with each way to save memory, beside its estimate.

    On CPUs tensors are counted, on GPUs it is what torch's allocator says. Offloading is left out without GPUs. A row
    each says what a process needs beside its tensors.
    """

    recipe: str = "transformer_lm"
    model: Model = TransformerLM(width=256, num_layers=6, num_heads=4)
    global_batch: int = Field(default=32, ge=2)
    techniques: tuple[str, ...] | Literal["layouts"] = tuple(TECHNIQUES)
    """Ways to save memory; ``layouts`` is all layouts of four or eight ranks (``--workers.num_workers 4``)."""
    workers: Workers = Workers()
    """Ranks of the benchmark; two for the sharded cases."""

    def measure(self) -> list[BenchmarkRow]:
        """Train with each."""
        layouts = LAYOUTS_OF_EIGHT if self.workers.num_workers == 8 else LAYOUTS
        chosen = tuple(layouts) if self.techniques == "layouts" else self.techniques
        if unknown := [name for name in chosen if name not in _ALL]:
            raise unknown_name("technique", unknown[0], _ALL)
        device = guess_device(self.workers.num_workers)
        names = [name for name in chosen if device.type != "cpu" or "offload" not in name]
        return [row for name in names for row in self._measure(name)]

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
        for name, value in _ALL[technique].items():
            document[name] = {**document[name], **value} if isinstance(value, dict) else value
        return Run.model_validate(document)

    def _measure(self, technique: str) -> list[BenchmarkRow]:
        run, num_workers = self.make_run(technique), self.workers.num_workers
        estimated = estimate(run, run.open_data(), num_workers, guess_device(num_workers)).peak_bytes
        measured = train_once(run, self.recipe, self.workers).memory_measured
        if not measured:
            raise SettingsError(f"every run must tell what it measured, but that with {technique} did not")
        peak, beside = measured[0].event.peak_bytes, measured[0].event.beside_bytes
        sides = [("peak memory", peak, estimated, "estimated")]
        sides += [("beside tensors", beside, PROCESS_BYTES, "allowed for")] * (beside > 0)
        return [
            BenchmarkRow(self.name, technique, metric, "MB", ours / 1e6, theirs / 1e6, about, ours / theirs)
            for metric, ours, theirs, about in sides
        ]
