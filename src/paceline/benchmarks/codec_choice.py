"""`bench codec_choice`: codec auto on a link whose bandwidth changes, beside each codec alone."""

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from paceline.benchmarks.base import Benchmark, BenchmarkRow, compare_pairs
from paceline.benchmarks.language import LanguageTask, make_rule_side
from paceline.benchmarks.problems import joined
from paceline.comm import Group
from paceline.compression import Codec, Int8, NoCodec, OneBit, TopK
from paceline.errors import SettingsError
from paceline.registry import register
from paceline.sync import EveryStep
from paceline.testing.netlab import Netlab
from paceline.topology.units import BytesPerSecond

_TIMEOUT_S = 3600.0
_TURN_STEPS = 5
"""Steps that a side takes one after another, so that all have the same share of what else the machine does."""
_POLL_S = 0.02


@register("codec_choice")
class CodecChoiceBenchmark(Benchmark):
    """Codec auto on a link whose bandwidth changes, beside each codec alone.

    Workers, each on a host, hold all sides and take their steps in turn; then the bandwidth of all links changes. Time
    is rank 0's, of its own steps; losses are held out, after all steps.
    """

    task: LanguageTask = LanguageTask(
        width=96,
        num_layers=2,
        sequence_length=64,
        samples_per_worker=4,
        held_out_samples=256,
    )
    """Task to train; its `num_steps` are those of the trace."""
    trace: tuple[BytesPerSecond, ...] = tuple(map(BytesPerSecond.parse, ("1gbit", "20mbit", "100mbit", "1gbit")))
    """Bandwidths of the links, one after another."""
    steps_each: int = Field(default=100, gt=0, multiple_of=_TURN_STEPS)
    """Steps under each bandwidth, in turns of five."""
    codecs: tuple[Codec, ...] = (NoCodec(), Int8(), OneBit(), TopK())
    """Codecs that each train alone, all the trace; none among them."""
    num_hosts: int = Field(default=4, ge=2)
    """Hosts with one worker each: network namespaces of this machine; needs root."""

    @model_validator(mode="after")
    def _check_codecs(self) -> Self:
        if not any(isinstance(codec, NoCodec) for codec in self.codecs):
            raise SettingsError("codecs must have none among them, but it is missing; add it")
        return self

    def measure(self) -> list[BenchmarkRow]:
        """Train all sides on the trace."""
        rules = {"auto": EveryStep.model_validate({"codec": "auto"})}
        rules |= {codec.name: EveryStep(codec=codec) for codec in self.codecs}
        task = self.task.model_copy(update={"num_steps": len(self.trace) * self.steps_each})
        with tempfile.TemporaryDirectory() as directory, Netlab(self.num_hosts, 8 * self.trace[0]) as lab:
            arguments = {
                "task": task.model_dump(mode="json"),
                "rules": {name: rule.model_dump(mode="json") for name, rule in rules.items()},
                "num_parts": len(self.trace),
                "steps_each": self.steps_each,
                "directory": directory,
            }
            with _changing(lab, list(self.trace), Path(directory)):
                results = lab.run(train_on_trace, arguments, timeout_s=_TIMEOUT_S)  # type: ignore[arg-type]
        failed = [result for result in results if result.exit_code != 0]
        if failed:
            raise RuntimeError(
                f"rank {failed[0].rank} must end well, but got {failed[0].exit_code}:\n{failed[0].output}"
            )
        value: Any = results[0].value
        return self._describe(value["seconds"], value["losses"], value["changes"])

    def _describe(
        self, seconds: dict[str, list[float]], losses: dict[str, float], changes: list[list[Any]]
    ) -> list[BenchmarkRow]:
        links = ", ".join(f"{8 * speed / 1e6:g}" for speed in self.trace)
        case = f"{self.num_hosts} hosts at {links} Mbit/s, {self.steps_each} steps each"
        per_part = len(seconds["auto"]) // len(self.trace)
        fixed = [name for name in seconds if name != "auto"]
        rows = []
        for name in sorted(fixed, key=lambda name: sum(seconds[name])):
            ours, theirs = _TURN_STEPS * sum(seconds["auto"]), _TURN_STEPS * sum(seconds[name])
            rows.append(BenchmarkRow(self.name, case, "time of all steps", "s", ours, theirs, name, ours / theirs))
        for part, speed in enumerate(self.trace):
            place = slice(part * per_part, (part + 1) * per_part)
            medians = {name: statistics.median(times[place]) for name, times in seconds.items()}
            best = min(fixed, key=lambda name: medians[name])
            at = f"auto, part {part + 1} at {8 * speed / 1e6:g} Mbit/s"
            ratio, upper = compare_pairs(seconds["auto"][place], seconds[best][place])
            rows.append(
                BenchmarkRow(
                    self.name, at, "median step", "s", medians["auto"], medians[best], best, ratio, ratio_upper=upper
                )
            )
            first = part * self.steps_each
            begun_with = next((codec for step, codec in reversed(changes) if step <= first), "none")
            taken = [(step - first, codec) for step, codec in changes if first < step <= first + self.steps_each]
            if not taken and begun_with != "none":
                taken = [(0, begun_with)]  # which it kept
            if taken:
                late, codec = taken[0]
                codecs = " then ".join(each for _, each in taken)
                metric = f"steps until {codec}" + (f" ({codecs})" if len(taken) > 1 else "")
                rows.append(BenchmarkRow(self.name, at, metric, "steps", late, 20, "bound", late / 20))
        for name in fixed:
            ratio = losses["auto"] / losses[name]
            rows.append(
                BenchmarkRow(self.name, case, "held-out loss", "nats", losses["auto"], losses[name], name, ratio)
            )
        return rows


@contextlib.contextmanager
def _changing(lab: Netlab, trace: list[float], directory: Path) -> Iterator[None]:
    """While active, change the bandwidth of all links when rank 0 asks for it, by a file."""
    is_over = threading.Event()

    def watch() -> None:
        for part, bytes_per_s in enumerate(trace):
            while not (directory / f"ask{part}").exists():
                if is_over.wait(_POLL_S):
                    return
            for host in range(lab.num_hosts):
                lab.set_bandwidth(host, 8 * bytes_per_s)
            (directory / f"done{part}").touch()

    watcher = threading.Thread(target=watch, name="paceline-trace")
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def train_on_trace(
    task: dict[str, Any], rules: dict[str, Any], num_parts: int, steps_each: int, directory: str
) -> dict[str, Any]:
    """Train all sides, as one worker of several; return the seconds of a side's steps by turn, losses and changes."""
    settings = LanguageTask.model_validate(task)
    splits = settings.open()
    seconds: dict[str, list[float]] = {name: [] for name in rules}
    changes: list[list[Any]] = []
    with joined() as group:
        sides = {
            name: make_rule_side(settings, splits, group, EveryStep.model_validate(rule))
            for name, rule in rules.items()
        }
        batches = {name: iter(settings.load(splits, group)) for name in rules}
        number = 0
        for part in range(num_parts):
            _ask(group, Path(directory), part)
            for _ in range(steps_each // _TURN_STEPS):
                for name, side in sides.items():
                    group.barrier()
                    began_s = time.perf_counter()
                    for step in range(number, number + _TURN_STEPS):
                        side.step(step, next(batches[name]))
                    seconds[name].append((time.perf_counter() - began_s) / _TURN_STEPS)
                number += _TURN_STEPS
                changes += [[change.step, change.codec] for change in sides["auto"].take_codec_changes()]
        losses = {name: settings.judge(side.module, splits, group) for name, side in sides.items()}
        for side in sides.values():
            side.close()
    return {"seconds": seconds, "losses": losses, "changes": changes}


def _ask(group: Group, directory: Path, part: int) -> None:
    """Have the bandwidth of a part of the trace set, on all workers."""
    group.barrier()
    if group.rank == 0:
        (directory / f"ask{part}").touch()
        while not (directory / f"done{part}").exists():
            time.sleep(_POLL_S)
    group.barrier()
