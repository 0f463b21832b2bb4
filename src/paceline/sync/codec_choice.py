"""Which codec reaches a loss first: predicted step times, times the steps that a codec takes to the same loss.

A pure function of numbers: `rank_codecs` measures nothing and keeps nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Size

from paceline.comm.link_speed import LinkSpeed
from paceline.compression import Codec, NoCodec
from paceline.sync.reducers import CODED_BUCKET_BYTES
from paceline.sync.rule import find_exposed_s

CodecOf = Literal["gradient", "step"]

_PLAIN_BUCKET_BYTES = 4 * 2**20
"""Size of a bucket without a codec, by default."""
_FIRST_BUCKET_BYTES = 2**20
"""Size of the first bucket, if others follow."""
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class MeasuredLoss:
    """Held-out loss with a codec, to that without one after the same steps at the same learning rate.

    Args:
        ratio: The ratio.
        source: Measurement, as a place in docs.
    """

    ratio: float
    source: str


_SAME = MeasuredLoss(1.0, "the same sums")
_VIT = "docs/LOG.md, 2026-11-23: simulation of a ViT, AdamW, 500 steps, 8 workers of one sample, the worst of four"
_SMALL = "docs/LOG.md, length of coded steps with 4 and 8 workers:"
_INT8 = MeasuredLoss(1.0, "docs/benchmarks/convergence-codecs.json: 0.999, 600 steps, 4 workers, 3 seeds")
_HALF = MeasuredLoss(1.0, "as int8, which rounds more coarsely")
_SGD = "docs/LOG.md: MNIST, SGD, 150 steps, 3 seeds"
LOSSES: Mapping[tuple[str, CodecOf, bool], MeasuredLoss] = {
    ("none", "gradient", True): _SAME,
    ("none", "gradient", False): _SAME,
    ("bf16", "gradient", True): _HALF,
    ("bf16", "gradient", False): _HALF,
    ("fp16", "gradient", True): _HALF,
    ("fp16", "gradient", False): _HALF,
    ("int8", "gradient", True): _INT8,
    ("int8", "gradient", False): MeasuredLoss(
        1.0, "docs/benchmarks/compare-codecs-mnist-dense-steps.json: 0.999, 3 seeds"
    ),
    ("one_bit", "step", True): MeasuredLoss(1.01, f"{_VIT}; {_SMALL} 0.947, 0.962"),
    ("top_k", "step", True): MeasuredLoss(1.088, f"{_VIT}; {_SMALL} 0.984, 0.969"),
    ("power_sgd", "step", True): MeasuredLoss(1.0, f"{_VIT}; {_SMALL} 0.986, 0.964"),
    ("one_bit", "gradient", False): MeasuredLoss(1.12, _SGD),
    ("top_k", "gradient", False): MeasuredLoss(1.19, _SGD),
    ("power_sgd", "gradient", False): MeasuredLoss(1.05, _SGD),
}
"""Losses by codec, what it encodes, and whether the optimizer is adaptive. What is not here was not measured."""

LOSS_BY_STEPS = 0.25
"""Exponent e of the loss's fall, steps ** -e, by which a ratio of losses becomes one of steps: 0.246 from 300 to 600
steps (docs/benchmarks/coded-steps-4-workers.json and convergence-codecs.json, every_step without a codec)."""

_COPIES = {"bf16": 10.0, "fp16": 10.0, "int8": 10.0, "one_bit": 13.0, "top_k": 12.0, "power_sgd": 31.0}
"""Time of encoding and decoding a block, in copies of it: one thread of a CPU, a block of 1,024 x 1,024, 4 workers."""


@dataclass(frozen=True)
class CodecPrice:
    """What one step with a codec sends and computes.

    Args:
        codec: The codec.
        codec_of: Input of the codec.
        sent_bytes: Bytes that a worker sends.
        num_messages: Collectives one after another.
        num_buckets: Buckets, of which the last can never hide behind computing.
        encode_s: Time of encoding and decoding.
    """

    codec: Codec
    codec_of: CodecOf
    sent_bytes: int
    num_messages: int
    num_buckets: int
    encode_s: float

    def wire_s(self, link: LinkSpeed) -> float:
        """Return the time of all collectives, one after another."""
        return self.num_messages * link.latency_s + self.sent_bytes / link.bytes_per_s


def count_buckets(codec: Codec, num_bytes: float, bucket_bytes: int | None = None) -> int:
    """Return the number of buckets of so many bytes of gradients; by default they have the codec's own size."""
    default_bytes = _PLAIN_BUCKET_BYTES if isinstance(codec, NoCodec) else CODED_BUCKET_BYTES
    num_buckets = math.ceil(num_bytes / (bucket_bytes or codec.bucket_bytes or default_bytes))
    return max(num_buckets, 2 if num_bytes > _FIRST_BUCKET_BYTES else 1)


def price_codec(
    codec: Codec,
    shapes: Sequence[Size],
    num_workers: int,
    *,
    is_adaptive: bool,
    copy_bytes_per_s: float,
    bucket_bytes: int | None = None,
) -> CodecPrice:
    """Return the price of a step.

    Args:
        codec: The codec.
        shapes: Shapes of the parameters.
        num_workers: Number of workers.
        is_adaptive: Whether the optimizer is adaptive, so that codecs which suit steps encode steps.
        copy_bytes_per_s: Speed at which a worker copies memory, which tells that of its codecs.
        bucket_bytes: Size of a bucket; None for the codec's own.
    """
    num_bytes = _FLOAT_BYTES * sum(shape.numel() for shape in shapes)
    sent_bytes = sum(codec.wire_bytes(shape, num_workers) for shape in shapes)
    is_plain = isinstance(codec, NoCodec)
    num_buckets = count_buckets(codec, num_bytes, bucket_bytes)
    rounds = max(len(codec.payloads(shape, num_workers)) for shape in shapes)
    return CodecPrice(
        codec,
        "step" if codec.suits_steps and is_adaptive else "gradient",
        sent_bytes,
        num_buckets * (1 if is_plain else rounds + 1),  # small blocks, uncompressed
        num_buckets,
        _COPIES.get(codec.name, 0.0 if is_plain else 31.0) * num_bytes / copy_bytes_per_s,
    )


@dataclass(frozen=True)
class StepNumbers:
    """Numbers of a training on a link, from which step times follow.

    Args:
        compute_s: Time of a step that waits for no exchange.
        gradient_overlap_s: Part of it behind which an exchange of gradients can hide.
        step_overlap_s: Part of it behind which an exchange of steps can hide; 0 if they are made after backward.
        link: Speed of the link.
        is_adaptive: Whether the optimizer is adaptive, such as Adam.
        steps_refused: Reason why steps cannot be coded; empty if they can.
    """

    compute_s: float
    gradient_overlap_s: float
    step_overlap_s: float
    link: LinkSpeed
    is_adaptive: bool
    steps_refused: str = ""


@dataclass(frozen=True)
class CodecForecast:
    """Prediction for one codec.

    Args:
        price: Price of a step with it.
        step_s: Time of a step.
        steps_factor: Steps to the same loss, to those without a codec.
        refused: Reason why it is never chosen; empty if it may be.
    """

    price: CodecPrice
    step_s: float
    steps_factor: float
    refused: str

    @property
    def cost_s(self) -> float:
        """Time that makes as much progress as a step without a codec."""
        return self.step_s * self.steps_factor

    @property
    def name(self) -> str:
        """Name of the codec."""
        return self.price.codec.name

    def explain(self) -> str:
        """Return the prediction in words."""
        steps = "" if self.steps_factor == 1 else f", {self.steps_factor:.2f} times the steps to the same loss"
        refused = f"; kept out: {self.refused}" if self.refused else ""
        return f"{self.name} {1000 * self.step_s:.3g} ms a step{steps}{refused}"


def rank_codecs(
    prices: Sequence[CodecPrice],
    numbers: StepNumbers,
    *,
    max_loss: float,
    corrections: Mapping[str, float] | None = None,
) -> list[CodecForecast]:
    """Return the predictions: those that may be chosen first, the best of them first.

    Args:
        prices: Prices of the codecs, with none among them.
        numbers: Training and link.
        max_loss: Largest loss to that without a codec, of a codec that may be chosen.
        corrections: Measured step time to the predicted one, by name of the codec, where it is known.
    """
    forecasts = []
    for price in prices:
        overlap_s = numbers.gradient_overlap_s if price.codec_of == "gradient" else numbers.step_overlap_s
        wire_s = price.wire_s(numbers.link)
        # The last bucket cannot hide: backward is over when it is ready. Encoding takes time from computing.
        exposed_s = find_exposed_s(wire_s, overlap_s, 1 / price.num_buckets)
        step_s = (numbers.compute_s + price.encode_s + exposed_s) * (corrections or {}).get(price.codec.name, 1.0)
        measured = LOSSES.get((price.codec.name, price.codec_of, numbers.is_adaptive))
        ratio = measured.ratio if measured is not None else math.inf
        refused = _refuse(price, measured, numbers, max_loss)
        forecasts.append(CodecForecast(price, step_s, ratio ** (1 / LOSS_BY_STEPS), refused))
    return sorted(forecasts, key=lambda each: (bool(each.refused), each.cost_s))


def find_link(price: CodecPrice, wire_s: float, latency_s: float) -> LinkSpeed:
    """Return the speed of a link on which the collectives of a step with this price took `wire_s`.

    Where latency is nearly all of it, bytes say little about the bandwidth: they count as a tenth of the time.
    """
    bytes_s = max(wire_s - price.num_messages * latency_s, wire_s / 10, 1e-9)
    return LinkSpeed(latency_s, max(price.sent_bytes, 1) / bytes_s)


def _refuse(price: CodecPrice, measured: MeasuredLoss | None, numbers: StepNumbers, max_loss: float) -> str:
    if price.codec_of == "step" and numbers.steps_refused:
        return f"an adaptive optimizer bears it where steps are coded only, which cannot be {numbers.steps_refused}"
    if measured is None:
        return "its loss with this kind of optimizer was not measured"
    if price.codec.model_copy(update={"dense_below": 0}) != type(price.codec)(dense_below=0):
        return "its loss was measured with default settings only"
    if measured.ratio > max_loss:
        return f"its loss is {measured.ratio:g} of that without a codec, more than {max_loss:g}"
    return ""
