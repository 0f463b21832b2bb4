"""What a comparison is: the same training in several ways, each by its name alone, and each with several seeds."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.compression import Codec
from paceline.errors import SettingsError, unknown_name
from paceline.registry import list_variants
from paceline.sync import Rule

Overrides = list[tuple[str, str]]
Curve = Sequence[tuple[int, float]]
"""Held-out losses, each with its step, in order."""

_NUM_RESAMPLES = 10_000
_WITH_INT8 = ("diloco int8", "streaming_diloco int8")


@dataclass(frozen=True)
class RunOutcome:
    """How one run ended."""

    loss: float
    """Held out."""
    accuracy: float | None
    wire_bytes: int
    """Bytes that one worker sent in all steps."""
    step_s: float
    """Mean duration of a step."""
    curve: Curve


Outcomes = Sequence[RunOutcome]
"""Outcomes of one way, by seed."""


def choose_rules(names: Sequence[str] | None, *, host_size: int | None = None) -> dict[str, Overrides]:
    """Return every_step, then the rules named, by default all; ``diloco int8`` is a rule with a codec.

    Args:
        names: Names of rules, each with a codec or without.
        host_size: Number of workers on each host, for rules that would find it out where they run; None leaves it.

    Raises:
        UnknownNameError: There is no such rule, or codec.
        SettingsError: A rule takes no codec.
    """
    rules = list_variants(Rule)  # type: ignore[type-abstract]
    chosen = [*rules, *_WITH_INT8] if names is None else names
    return {name: _make_rule(name, rules, host_size) for name in dict.fromkeys(["every_step", *chosen])}


def choose_codecs(names: Sequence[str] | None, *, host_size: int | None = None) -> dict[str, Overrides]:
    """Return none, then the codecs named, by default all; they work with the run's rule.

    Raises:
        UnknownNameError: There is no such codec.
    """
    codecs = list_variants(Codec)  # type: ignore[type-abstract]
    for name in names or ():
        if name not in codecs:
            raise unknown_name("each of --only", name, codecs)
    return {name: [("sync.codec", name)] for name in dict.fromkeys(["none", *(codecs if names is None else names)])}


COMPARISONS: Mapping[str, Callable[..., dict[str, Overrides]]] = {"codecs": choose_codecs, "sync": choose_rules}
"""Functions that choose the ways of a comparison, by its name: overrides of a run; the first way is the reference."""


def _make_rule(name: str, rules: Mapping[str, type[Rule]], host_size: int | None) -> Overrides:
    rule, _, codec = name.partition(" ")
    if rule not in rules:
        raise unknown_name("each of --only", rule, rules)
    overrides = [("sync", rule)]
    fields = rules[rule].model_fields
    if codec:
        codecs = list_variants(Codec)  # type: ignore[type-abstract]
        if codec not in codecs:
            raise unknown_name("the codec in each of --only", codec, codecs)
        if "codec" not in fields:
            raise SettingsError(
                f"each of --only must be a rule that takes a codec, but got {name!r}; leave {codec} out"
            )
        overrides.append(("sync.codec", codec))
    if host_size is not None and "host_size" in fields and fields["host_size"].default is None:
        overrides.append(("sync.host_size", str(host_size)))
    return overrides


@dataclass(frozen=True)
class MeanRatio:
    """The mean of some losses to the mean of others of the same seeds."""

    ratio: float
    lower: float | None
    """Lower bound of its bootstrap 95% interval (one-sided), in which seeds are drawn for both; None with one seed."""
    upper: float | None
    """Upper bound likewise."""


def compare_means(ours: Sequence[float], reference: Sequence[float]) -> MeanRatio:
    """Return how the mean of `ours` stands to that of `reference`; both by seed."""
    pairs = list(zip(ours, reference, strict=True))
    if len(pairs) == 1:
        return MeanRatio(_ratio_of_means(pairs), None, None)
    generator = random.Random(0)
    ratios = sorted(_ratio_of_means(generator.choices(pairs, k=len(pairs))) for _ in range(_NUM_RESAMPLES))
    return MeanRatio(
        _ratio_of_means(pairs), ratios[round(0.05 * _NUM_RESAMPLES)], ratios[round(0.95 * _NUM_RESAMPLES) - 1]
    )


def _ratio_of_means(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(ours for ours, _ in pairs) / sum(reference for _, reference in pairs)
