"""Scaling efficiency by bandwidth, and of ResNet-50, BERT-Large and GPT-3 on 16 to 1,024 nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any, Literal

from pydantic import Field

from paceline.benchmarks.reproductions.predicted import (
    BERT_LARGE,
    GPT3,
    IMAGE,
    RESNET50,
    Amount,
    PredictedRow,
    PredictedTable,
    Several,
    Steps,
    contains,
    predicted,
)
from paceline.monitor.formatting import number
from paceline.registry import register

_ON_NODE = 8
"""Devices of a node, A100."""


def _row(
    model: dict[str, Any], sample: dict[str, Any], nodes: int, batch: float, link: str, micro_batch: float
) -> dict[str, Any]:
    """Return the step of replicas on nodes with one card for all their devices."""
    ranks = nodes * _ON_NODE
    return {
        "model": model, "sample": sample, "device": "a100_80gb",
        "cluster": {"name": "dgx_a100", "bandwidth": link, "nics_per_host": 1}, "num_ranks": ranks,
        "micro_batch": min(micro_batch, batch), "global_batch": float(batch * ranks), "precision": "fp16",
        "optimizer": "momentum" if model is RESNET50 else "adamw", "attention": "eager",
    }  # fmt: skip


def _gpt3_row(nodes: int, batch: float, link: str) -> dict[str, Any]:
    """Return the step of GPT-3: a node alone holds all layers, whether they fit or not; of more, 16 share them."""
    pipeline = 1 if nodes == 1 else 16
    data = 1 if nodes == 1 else nodes // pipeline
    return {
        **_row(GPT3, {"tokens": 2048}, nodes, batch, link, 1.0),
        "layout": {"data": data, "sharded": 1, "context": 1, "tensor": _ON_NODE, "pipeline": pipeline},
        "pipeline": {"order": "1f1b", "stages_per_rank": 1}, "recompute": "full", "micro_batch": 1.0,
    }  # fmt: skip


@register("bandwidth")
class Bandwidth(PredictedTable):
    """Scaling efficiency of ResNet-50 on 2 to 1,024 nodes by 25, 100 and 200 Gb/s of a node.

    The work of each device stays; the figure states neither model nor batch.
    """

    num_nodes: tuple[Several, ...] = (2, 16, 128, 1024)
    batch: int = Field(default=64, ge=1)
    """Images of a device in a step."""
    links: tuple[str, ...] = ("25gbit", "100gbit", "200gbit")
    """Bandwidth of a node."""

    def reproduce(self) -> list[PredictedRow]:
        """Predict it."""
        rows = []
        for link in self.links:
            steps = Steps(
                [_row(RESNET50, IMAGE, nodes, self.batch, link, self.batch) for nodes in (1, *self.num_nodes)]
            )
            for place, nodes in enumerate(self.num_nodes, start=1):
                ours = steps.ratio(0, place)
                note = "" if ours[2] >= 0.5 else "below the whole figure"
                rows.append(predicted(f"{link}, {nodes:,} nodes: efficiency", ours, "0.5 to 1", note))
        return rows


_PUBLISHED = {
    "ResNet-50": (0.95, 0.89, 0.78, 0.62),
    "BERT-Large": (0.93, 0.86, 0.72, 0.55),
    "GPT-3": (0.91, 0.83, 0.69, 0.51),
}
_NODES = (16, 64, 256, 1024)
_BATCHES: dict[str, tuple[float, ...]] = {
    "ResNet-50": (2, 4, 8, 16, 32, 64, 128, 256),
    "BERT-Large": (1, 2, 4, 8, 16, 32, 64),
    "GPT-3": (0.25, 0.5, 1, 2, 4, 8),
}
"""Samples of a device in a step that are searched, the work of each device being the same on all nodes."""
_WHOLE: dict[str, tuple[int, ...]] = {
    "ResNet-50": (8192, 16384, 32768, 65536, 131072),
    "BERT-Large": (8192, 16384, 32768, 65536),
    "GPT-3": (1024, 2048, 4096, 8192),
}
"""Global batches that are searched, the same on all nodes."""
_LARGEST: dict[str, float] = {"ResNet-50": 256, "BERT-Large": 32, "GPT-3": 1}
"""Largest micro-batch."""
Way = Literal["weak", "strong"]


@dataclass(frozen=True)
class _Tried:
    """A batch and a link, with the efficiency on each number of nodes, and its ratio to that on the fewest."""

    words: str
    efficiency: tuple[Amount, ...]
    falls: tuple[Amount, ...]

    def gives(self, published: Sequence[float]) -> bool:
        """Return whether all numbers, and how they fall, are in our intervals: the fall is surer than the numbers."""
        falls = [one / published[0] for one in published]
        return all(map(contains, (*self.efficiency, *self.falls), (*published, *falls)))

    def distance(self, published: Sequence[float]) -> float:
        """Return the largest logarithm of a ratio of ours to theirs."""
        return max(abs(log(ours[0] / theirs)) for ours, theirs in zip(self.efficiency, published, strict=True))


@register("scaling-efficiency")
class ScalingEfficiency(PredictedTable):
    """Scaling efficiency of ResNet-50, BERT-Large and GPT-3 on 16, 64, 256 and 1,024 nodes.

    Neither batch nor link is stated, and both matter more than the nodes: all pairs are searched for one that gives all
    four numbers of a model, with the work of each device the same (weak) and with the same global batch (strong); and
    for each number the nearest pair. Efficiency is to one node of 8 A100, whose devices share one card.
    """

    links: tuple[str, ...] = ("10gbit", "25gbit", "50gbit", "100gbit", "200gbit", "400gbit")
    """Bandwidths of a node that are searched."""

    def reproduce(self) -> list[PredictedRow]:
        """Search and predict."""
        rows = []
        for model in _PUBLISHED:
            for way in ("weak", "strong"):
                rows += self._search(model, way)
        return rows

    def _search(self, model: str, way: Way) -> list[PredictedRow]:
        published = _PUBLISHED[model]
        batches = _BATCHES[model] if way == "weak" else _WHOLE[model]
        tried = self._try(model, way, [(batch, link) for batch in batches for link in self.links])
        giving = [one for one in tried if one.gives(published)]
        best = min(giving or tried, key=lambda one: one.distance(published))
        verdict = f"{best.words} gives all four" if giving else f"no pair gives all four; nearest: {best.words}"
        rows = []
        for place, (nodes, theirs) in enumerate(zip(_NODES, published, strict=True)):
            near = min(tried, key=lambda one: abs(log(one.efficiency[place][0] / theirs)))
            ours = near.efficiency[place]
            gives = "gives" if contains(ours, theirs) else "is nearest with"
            note = verdict if place == 0 else ""
            note += ("; " if note else "") + f"alone: {near.words} {gives} {number(ours[0])}"
            what = f"{model}, {way}, {nodes:,} nodes: efficiency"
            rows.append(predicted(what, best.efficiency[place], f"{theirs:g}", note))
        return rows

    def _try(self, model: str, way: Way, pairs: Sequence[tuple[float, str]]) -> list[_Tried]:
        nodes = (1, *_NODES)
        steps = Steps(
            [
                self._row(model, one, batch if way == "weak" else batch / (one * _ON_NODE), link)
                for batch, link in pairs
                for one in nodes
            ]
        )
        factors = [1.0 if way == "weak" else 1 / one for one in nodes]
        found = []
        for place, (batch, link) in enumerate(pairs):
            alone = place * len(nodes)
            efficiency = [steps.ratio(alone, alone + one, factors[one]) for one in range(1, len(nodes))]
            falls = [steps.ratio(alone + 1, alone + one, factors[one] / factors[1]) for one in range(1, len(nodes))]
            whole = f"{batch:g} a device" if way == "weak" else f"global batch {batch:,}"
            found.append(_Tried(f"{whole}, {link}", tuple(efficiency), tuple(falls)))
        return found

    def _row(self, model: str, nodes: int, batch: float, link: str) -> dict[str, Any]:
        if model == "GPT-3":
            return _gpt3_row(nodes, batch, link)
        shape, sample = (RESNET50, IMAGE) if model == "ResNet-50" else (BERT_LARGE, {"tokens": 512})
        return _row(shape, sample, nodes, batch, link, _LARGEST[model])
