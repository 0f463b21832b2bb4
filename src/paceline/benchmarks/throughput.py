"""`bench throughput`: tokens a second of a compiled language model, and model FLOPs utilisation."""

import re
import time

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.benchmarks.base import Benchmark, BenchmarkRow
from paceline.benchmarks.problems import Step, joined, make_optimizer
from paceline.benchmarks.workers import Workers
from paceline.comm import Group
from paceline.data import Spec
from paceline.recipes.transformer_lm import TransformerLM
from paceline.registry import register
from paceline.replica.checks import Precision
from paceline.replica.replica import Replica
from paceline.training.compiling import NO_COMPILER, check_compiler, compile_blocks

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""Peak of a device, by words of its name: dense, half precision with sums in single precision, as its maker states."""


@register("throughput")
class ThroughputBenchmark(Benchmark):
    """Tokens a second of the Transformer recipe's model, compiled block by block, beside a plain compiled loop.

    The plain loop compiles the whole model; with several workers it is DistributedDataParallel. Both sides run in the
    same processes and take steps in turn. MFU is what the model needs of a device's peak, after Chowdhery et al.
    (2022, arXiv:2204.02311, appendix B): (6 N + 12 L Q T) FLOPs a token, N parameters, L layers of width Q, T tokens.
    """

    model: TransformerLM = TransformerLM(width=384, num_layers=7, num_heads=6)
    vocabulary: int = Field(default=256, ge=2)
    sequence_length: int = Field(default=128, ge=2)
    batch: int = Field(default=8, ge=1)
    """Sequences of each worker."""
    precision: Precision = "bf16"
    compiler: str = "inductor"
    """Compiler of both sides; none for no compilation."""
    num_pairs: int = Field(default=40, ge=4)
    """Timed pairs of steps."""
    peak_flops: float | None = Field(default=None, gt=0)
    """Peak of one worker's device in this precision, per second; by default by its name, in half precision. Without it
    there is no MFU."""
    workers: Workers = Workers(num_workers=1)
    """Workers of the benchmark; with GPUs, one each."""

    @property
    def spec(self) -> Spec:
        """What the model is made for."""
        return Spec(self.vocabulary, (self.sequence_length,))

    def measure(self) -> list[BenchmarkRow]:
        """Time both sides."""
        results = self.workers.start(time_steps, self.model_dump(mode="json"))
        ours, reference, name, num_parameters = results[0]
        num_tokens = self.batch * self.sequence_length * self.workers.num_workers
        case = f"{num_parameters / 1e6:.0f}M, {self.precision}, {self.compiler}, {self.workers.num_workers} x {name}"
        ours, reference = ([num_tokens / seconds for seconds in times] for times in (ours, reference))
        rows = [BenchmarkRow.of_pairs(self.name, case, "tokens", "1/s", ours, reference, "plain loop")]
        peak = self.peak_flops or self._find_peak(name)
        if peak is not None:
            shape = self.model
            of_token = 6 * num_parameters + 12 * shape.num_layers * shape.width * self.sequence_length
            factor = 100 * of_token / (peak * self.workers.num_workers)
            ours, reference = ([factor * rate for rate in rates] for rates in (ours, reference))
            rows.append(BenchmarkRow.of_pairs(self.name, case, "MFU", "%", ours, reference, "plain loop"))
        return rows

    def _find_peak(self, name: str) -> float | None:
        if self.precision == "fp32":
            return None
        return next((flops for words, flops in _PEAK_FLOPS.items() if re.search(rf"\b{words}\b", name)), None)


def time_steps(settings: dict[str, object]) -> tuple[list[float], list[float], str, int]:
    """Return the seconds of each side's steps, the device's name and the parameters. Every worker runs it."""
    bench = ThroughputBenchmark.model_validate(settings)
    with joined() as group:
        check_compiler(bench.compiler, group.device)
        torch.manual_seed(0)
        modules = [bench.model.build(bench.spec).to(group.device) for _ in range(2)]
        shape = bench.batch, bench.sequence_length + 1
        tokens = torch.randint(bench.vocabulary, shape, device=group.device)
        sides = [_make_ours(bench, modules[0], tokens, group), _make_plain(bench, modules[1], tokens, group)]
        times: list[list[float]] = [[], []]
        for pair in range(-4, bench.num_pairs):
            for side in (0, 1) if pair % 2 else (1, 0):
                group.barrier()
                elapsed_s = _time(sides[side], group.device)
                if pair >= 0:
                    times[side].append(elapsed_s)
        name = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else "CPU thread"
        return times[0], times[1], name, sum(parameter.numel() for parameter in modules[0].parameters())


def _time(step: Step, device: torch.device) -> float:
    began_s = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began_s


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), tokens[:, 1:].flatten())


def _make_ours(bench: ThroughputBenchmark, module: nn.Module, tokens: Tensor, group: Group) -> Step:
    if bench.compiler != NO_COMPILER:
        compile_blocks(module, bench.compiler)
    replica = Replica(module, make_optimizer(module), group=group, precision=bench.precision, hash_interval=0)

    def step() -> None:
        replica.backward(_loss(replica(tokens[:, :-1]), tokens), weight=tokens.numel())
        replica.update()

    return step


def _make_plain(bench: ThroughputBenchmark, module: nn.Module, tokens: Tensor, group: Group) -> Step:
    model = DistributedDataParallel(module, gradient_as_bucket_view=True) if group.size > 1 else module
    if bench.compiler != NO_COMPILER:
        model.compile(backend=bench.compiler)
    optimizer = make_optimizer(module)
    dtype = _DTYPES.get(bench.precision, torch.float32)

    def step() -> None:
        with torch.autocast(group.device.type, dtype, enabled=bench.precision != "fp32"):
            logits = model(tokens[:, :-1])
        _loss(logits, tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
