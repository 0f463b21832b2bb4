"""Judgement of a run that was hit, by its log, its last checkpoint, and those of one that was not."""

import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from scenarios import EXACT, GLOBAL_BATCH, GOING_ON, NUM_STEPS, OWN_PACE, SETTINGS, Scenario

from paceline.checkpoint import Checkpoint, CheckpointStore
from paceline.monitor.events import (
    AnomalyFound,
    Evaluated,
    ReplicasHealed,
    Restarted,
    RunFinished,
    StepFinished,
    WorkersChanged,
)
from paceline.monitor.reader import read_log, select, summarise

LOSS_MARGIN = 0.1
"""Largest difference of held-out losses, in nats: those of four seeds differ by about as much."""
_OWN_WAY = (*OWN_PACE, "adaptive_local_sgd")
"""Rules whose weights differ from run to run, because they depend on times."""
_OTHER_SUMS = 1e-4
"""Largest difference of weights, relative to their norm, where sums are made in another order."""
_CONSERVED = 1e-6
"""Largest difference of a mean from that of what was put in, relative to its norm."""


@dataclass
class Outcome:
    """What came of a scenario."""

    scenario: Scenario
    problems: list[str] = field(default_factory=list)
    num_struck: int = 0
    num_changes: int = 0
    num_restarts: int = 0
    num_resumes: int = 0
    """Number of times that the training was started again by a person."""
    num_again: int = 0
    """Updates that were done and done again."""
    num_lost: int = 0
    """Changes after which something was named as lost."""
    pauses_s: list[float] = field(default_factory=list)
    """Time from each fault to the next update."""
    wall_s: float = 0.0
    is_damaged: bool = False
    """Whether a checkpoint was damaged, from which the training goes on."""


def judge(outcome: Outcome, folder: Path, straights: Sequence[Path]) -> None:
    """Judge a run in `folder` by runs that were not hit, which differ in nothing, but see `OWN_PACE`."""
    if outcome.problems:
        return
    _judge_log(outcome, folder)
    _judge_position(outcome, folder)
    _judge_exchanges(outcome, folder)
    _judge_weights(outcome, folder, straights[0])
    loss, others = _final_loss(folder / "run"), [_final_loss(path / "run") for path in straights]
    if not min(others) - LOSS_MARGIN <= loss <= max(others) + LOSS_MARGIN:
        outcome.problems.append(f"held-out loss {loss:.3f}, undisturbed {', '.join(f'{one:.3f}' for one in others)}")


def _judge_log(outcome: Outcome, folder: Path) -> None:
    records = read_log(folder / "run" / "events.jsonl")
    if len(select(records, RunFinished)) != 1:
        outcome.problems.append(f"finished {len(select(records, RunFinished))} times")
    changes = select(records, WorkersChanged)
    outcome.num_changes, outcome.num_restarts = len(changes), len(select(records, Restarted))
    outcome.num_lost = sum(bool(change.event.lost) for change in changes)
    told = select(records, StepFinished)
    is_together = outcome.scenario.rule not in OWN_PACE  # else each worker tells of its own steps
    outcome.num_again = len(told) - len({record.step for record in told}) if is_together else 0
    starts = outcome.num_restarts + outcome.num_resumes
    if outcome.scenario.name == "kill" and outcome.scenario.rule in GOING_ON and outcome.num_restarts:
        outcome.problems.append("all started again, and did not go on without the lost worker")
    at_most = 2 * int(str(SETTINGS["checkpoint_interval"])) * starts
    if outcome.num_again > at_most:
        outcome.problems.append(f"{outcome.num_again} updates were made again after {starts} starts from a checkpoint")
    if is_together:
        wrong = [one.step for one in summarise(records).steps if one.event.position != GLOBAL_BATCH * one.step]
        if wrong:
            outcome.problems.append(f"not each sample counts once, at steps {wrong}")
    for path in sorted(folder.glob("struck-*")):
        outcome.num_struck += 1
        struck_s = json.loads(path.read_text())["unix_s"]
        times = [struck_s, *(record.unix_s for record in told if record.unix_s > struck_s)]
        if outcome.scenario.name != "clock":
            outcome.pauses_s.append(max((b - a for a, b in itertools.pairwise(times)), default=0.0))
    for name, kind in (("NaN", AnomalyFound), ("flipped bit", ReplicasHealed)):
        if outcome.scenario.name == name and outcome.num_struck and not select(records, kind):
            outcome.problems.append(f"nobody noticed the {name}")

    if outcome.is_damaged and " is skipped: " not in (folder / "output.txt").read_text(errors="replace"):
        outcome.problems.append("a damaged checkpoint was taken for a whole one")
    sizes = outcome.scenario.sizes
    if sizes and (not changes or changes[-1].event.num_workers != sizes[-1]):
        outcome.problems.append(f"workers must be {sizes[-1]} in the end, but were others")


def is_finished(folder: Path) -> bool:
    """Return whether the training in a folder has ended whole."""
    return bool(select(read_log(folder / "run" / "events.jsonl"), RunFinished))


def _judge_position(outcome: Outcome, folder: Path) -> None:
    """Each sample of the run was claimed and used once."""
    loader = _newest(folder).read_document()["loader"]
    expected = NUM_STEPS * GLOBAL_BATCH
    if loader["low_water"] != expected or loader["done_above"]:
        outcome.problems.append(f"used samples up to {loader['low_water']}, {loader['done_above']}, not {expected}")


def _judge_weights(outcome: Outcome, folder: Path, straight: Path) -> None:
    rule = outcome.scenario.rule
    is_same = rule == EXACT or not outcome.num_changes
    if rule in _OWN_WAY or outcome.scenario.name == "NaN":
        return
    if is_same and digest_weights(folder) != digest_weights(straight):
        outcome.problems.append(
            f"weights differ from those of the undisturbed run by {_distance(folder, straight):.1e}"
        )
    elif rule == "every_step" and (distance := _distance(folder, straight)) > _OTHER_SUMS:
        outcome.problems.append(f"weights differ by {distance:.1e}, more than other sums explain")


def _judge_exchanges(outcome: Outcome, folder: Path) -> None:
    """The mean that workers got is that of what was put in, and its weight that of all of them."""
    put: dict[tuple[object, ...], list[dict[str, float]]] = defaultdict(list)
    got: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for path in folder.glob("exchanges-*.jsonl"):
        for line in path.read_text().splitlines():
            one = json.loads(line)
            key = one["epoch"], one["name"], one["step"], one["number"]
            if "mean" in one:
                got[key].append(one["mean"])
            else:
                put[key].append(one)
    for key, means in got.items():
        weights = sum(one["weight"] for one in put[key])
        totals = {one["total"] for one in put[key]}
        expected, norm = (sum(one[name] for one in put[key]) for name in ("sum", "norm"))
        total = 1.0 if outcome.scenario.rule == "easgd" else weights  # its centre gets the sum of the pulls
        if len(totals) != 1 or abs(total - max(totals)) > _CONSERVED * total:
            outcome.problems.append(f"weights of exchange {key} are {weights}, of {totals}")
        elif any(abs(mean * total - expected) > _CONSERVED * norm for mean in means):
            outcome.problems.append(f"exchange {key} put in {expected}, and got out {[m * total for m in means]}")


def digest_weights(folder: Path) -> str:
    """Return a digest of the parameters in the newest checkpoint."""
    found = hashlib.sha256()
    for _, tensor in _weights(folder):
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def _distance(folder: Path, straight: Path) -> float:
    """Return the distance of two runs' weights, relative to their norm."""
    mine, theirs = (torch.cat([tensor.double().flatten() for _, tensor in _weights(one)]) for one in (folder, straight))
    return float((mine - theirs).norm() / theirs.norm())


def _weights(folder: Path) -> list[tuple[str, torch.Tensor]]:
    checkpoint = _newest(folder)
    return [(name, checkpoint.read(name)) for name in sorted(checkpoint.list_tensors()) if name.startswith("model/")]


def _newest(folder: Path) -> Checkpoint:
    return Checkpoint.open(CheckpointStore(folder / "run" / "checkpoints").list_checkpoints()[0])


def _final_loss(run: Path) -> float:
    return select(read_log(run / "events.jsonl"), Evaluated)[-1].event.loss
