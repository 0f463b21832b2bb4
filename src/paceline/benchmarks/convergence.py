"""`bench convergence`: what rules and codecs make of the same samples, beside synchronous training."""

import statistics
from typing import Any

from pydantic import Field

from paceline.benchmarks.base import Benchmark, BenchmarkRow
from paceline.benchmarks.comparison import compare_means
from paceline.benchmarks.language import LanguageTask, make_rule_side
from paceline.benchmarks.problems import joined
from paceline.benchmarks.workers import Workers
from paceline.comm import Group
from paceline.compression import Int8, NoCodec
from paceline.data import Splits
from paceline.registry import Family, register
from paceline.sync import DiLoCo, EveryStep, LocalSGD, Rule, StreamingDiLoCo
from paceline.sync.periodic import PeriodicRule

_OUTER = {"period": 10, "synchronous_steps": 200}
"""Chosen with a seed of its own, 100; so are the other settings of the default rules."""


@register("convergence")
class ConvergenceBenchmark(Benchmark):
    """Held-out loss of a small language model after the same samples, to that of every_step; several seeds.

    All runs are made by the same workers, one after another: each rule, and each codec with its rule, with the same
    settings of the training and the same seeds. Ratios are of means over seeds, and bootstrap bounds draw seeds.
    Random guessing is 5.5 nats a byte.
    """

    task: LanguageTask = LanguageTask(
        width=64,
        num_layers=2,
        sequence_length=64,
        samples_per_worker=8,
        learning_rate=3e-3,
        num_steps=600,
        held_out_samples=512,
    )
    """Task to train; its seed is varied."""
    rules: tuple[Rule, ...] = (
        LocalSGD(period=10, synchronous_steps=400),
        DiLoCo(**_OUTER),
        DiLoCo(**_OUTER, codec=Int8()),
        StreamingDiLoCo(**_OUTER, mixing=0.0),
        StreamingDiLoCo(**_OUTER, mixing=0.0, codec=Int8()),
    )
    """Rules to compare with every_step."""
    num_seeds: int = Field(default=5, ge=1)
    """Runs of each rule."""
    first_seed: int = Field(default=0, ge=0)
    """The seeds go up from it."""
    workers: Workers = Workers(num_workers=4)
    """Workers of the benchmark."""

    def measure(self) -> list[BenchmarkRow]:
        """Train with each rule and seed, and compare."""
        rules = [EveryStep(), *self.rules]
        seeds = range(self.first_seed, self.first_seed + self.num_seeds)
        tasks = [self.task.model_copy(update={"seed": seed}).model_dump(mode="json") for seed in seeds]
        by_rank = self.workers.start(train_rules, tasks, [rule.model_dump(mode="json") for rule in rules])
        reference, *others = by_rank[0]
        return [
            row
            for rule, ours in zip(self.rules, others, strict=True)
            for row in self._describe(describe_rule(rule), ours, reference)
        ]

    def _describe(
        self, case: str, ours: dict[str, list[float]], reference: dict[str, list[float]]
    ) -> list[BenchmarkRow]:
        rows = []
        for metric, unit in (("loss", "nats"), ("sent", "bytes")):
            mean_ratio = compare_means(ours[metric], reference[metric])
            is_loss = metric == "loss"
            row = BenchmarkRow(
                self.name,
                case,
                f"held-out loss, {self.task.num_steps} steps, {self.num_seeds} seeds" if is_loss else "sent in all",
                unit,
                statistics.mean(ours[metric]),
                statistics.mean(reference[metric]),
                "every_step",
                mean_ratio.ratio,
                ratio_upper=mean_ratio.upper if is_loss else None,
                ratio_lower=mean_ratio.lower if is_loss else None,
            )
            rows.append(row)
        return rows


def describe_rule(rule: Rule) -> str:
    """Return the names of a rule and its codec, with what each has been given beyond its defaults."""
    codec = rule.codec if isinstance(rule, EveryStep | PeriodicRule) else NoCodec()
    of_codec = "" if isinstance(codec, NoCodec) else "".join(f" {each}" for each in [codec.name, *_list_given(codec)])
    return ", ".join([f"{rule.name}{of_codec}", *(each for each in _list_given(rule) if not each.startswith("codec "))])


def _list_given(settings: Family) -> list[str]:
    fields = type(settings).model_fields
    values = {name: getattr(settings, name) for name in fields if name != "name"}
    return [f"{name} {value}" for name, value in values.items() if value != fields[name].get_default()]


def train_rules(tasks: list[dict[str, Any]], rules: list[dict[str, Any]]) -> list[dict[str, list[float]]]:
    """Train with each rule and each task, as one worker of several, which find each other by torchrun's environment.

    Args:
        tasks: Settings of each `LanguageTask`, as JSON; all of the same text.
        rules: Settings of the rules, as JSON.

    Returns:
        Of each rule, by task: loss, held out; sent, bytes of this worker.
    """
    settings = [LanguageTask.model_validate(task) for task in tasks]
    splits = settings[0].open()
    results = []
    with joined() as group:
        for rule in map(Rule.model_validate, rules):
            ends = [_train(task, splits, group, rule) for task in settings]
            results.append({"loss": [loss for loss, _ in ends], "sent": [float(sent) for _, sent in ends]})
    return results


def _train(task: LanguageTask, splits: Splits, group: Group, rule: Rule) -> tuple[float, int]:
    side = make_rule_side(task, splits, group, rule)
    sent = 0
    for number, batch in zip(range(task.num_steps), task.load(splits, group), strict=False):
        sent += side.step(number, batch)
    with side.consensus():
        loss = task.judge(side.module, splits, group)
    side.close()
    return loss, sent
