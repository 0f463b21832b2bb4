"""Which blocks to recompute, so that activations stay within a budget and as little as can be is computed twice.

Rematerialisation under a budget, as DTR (Kirisame 2021) does it, but chosen before training rather than as memory runs
out: blocks run in one order, each keeps all, what selective recomputation keeps, or its input, and the best choice of
all is found exactly. With a budget that everything fits into nothing is recomputed; with the least possible one every
block is, in full.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.errors import SettingsError
from paceline.memory.recompute import Choice
from paceline.memory.rehearsal import StepDescription, rehearse
from paceline.memory.settings import Recompute

_STEPS = 2048
"""Parts that a budget is counted in; bytes are rounded up to one."""
_NUM_TRIES = 4


@dataclass(frozen=True)
class Block:
    """What one block costs, in the order in which blocks run."""

    name: str
    kept: Mapping[Recompute, int]
    """Bytes that stay after its forward, by what is recomputed."""
    cost: Mapping[Recompute, float]
    """What recomputing costs, in floating-point operations; 0 for none."""


class _Best(NamedTuple):
    cost: float
    choices: tuple[Recompute, ...]


def choose(blocks: Sequence[Block], budget_bytes: int, before_bytes: int = 0, after_bytes: int = 0) -> list[Recompute]:
    """Return what to recompute of each block; of all choices that fit, one with the least cost.

    Bytes add up as blocks run forward. When backward comes to a block that is recomputed, all its activations are there
    at once, beside what the blocks before it kept.

    Args:
        blocks: In the order in which they run.
        budget_bytes: Most bytes of activations at any time.
        before_bytes: What is kept before the first block.
        after_bytes: What is there after the last one, until backward comes to it.

    Returns:
        As many as there are blocks; empty where nothing fits, and where there are none.
    """
    unit = max(budget_bytes / _STEPS, 1.0)
    best: dict[int, _Best] = {-int(-before_bytes // unit): _Best(0.0, ())}
    limit = int(budget_bytes // unit)
    for block in blocks:
        whole = -int(-block.kept["none"] // unit)
        following: dict[int, _Best] = {}
        for used, (cost, choices) in best.items():
            for choice, kept in block.kept.items():
                filled = used - int(-kept // unit)
                peak = filled if choice == "none" else max(filled, used + whole)
                total = cost + block.cost[choice]
                if peak <= limit and (filled not in following or total < following[filled].cost):
                    following[filled] = _Best(total, (*choices, choice))
        best = following
    after = -int(-after_bytes // unit)
    fitting = [found for used, found in best.items() if used + after <= limit]
    return list(min(fitting).choices) if fitting else []


def plan(step: StepDescription, names: Sequence[str], budget_bytes: int) -> dict[str, Choice]:
    """Return what to recompute of which blocks of a model, so that its activations stay within a budget.

    Costs are measured on tensors without contents, and so is the choice: where it needs more than was reckoned, the
    next is given that much less.

    Raises:
        SettingsError: Not even recomputing all in full fits; the message says how much does.
    """
    everything: dict[str, Choice] = dict.fromkeys(names, "full")
    plain = rehearse(step, watched=names)
    if plain.peak_activation_bytes <= budget_bytes:
        return {}
    selective = rehearse(step, dict.fromkeys(names, "selective"), watched=names)
    full = rehearse(step, everything, watched=names)
    if full.peak_activation_bytes > budget_bytes:
        raise SettingsError(
            f"memory.recompute must be a budget of at least {full.peak_activation_bytes} bytes, which activations take "
            f"when all {len(names)} blocks are recomputed in full, but got {budget_bytes}; raise it, or "
            "--num_micro_batches"
        )
    blocks = [
        Block(
            name,
            {
                "none": use.kept_bytes,
                "selective": selective.blocks[name].kept_bytes,
                "full": full.blocks[name].kept_bytes,
            },
            {"none": 0.0, "selective": use.cost - use.cost_of_kept, "full": use.cost},
        )
        for name, use in plain.blocks.items()
    ]
    aim = budget_bytes
    for _ in range(_NUM_TRIES):
        chosen = choose(blocks, aim, plain.before_bytes, plain.after_bytes)
        choices: dict[str, Choice] = {
            block.name: choice for block, choice in zip(blocks, chosen, strict=False) if choice != "none"
        }
        if not chosen:
            break
        excess = rehearse(step, choices).peak_activation_bytes - budget_bytes
        if excess <= 0:
            return choices
        aim -= excess
    return everything
