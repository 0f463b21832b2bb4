"""Choice of blocks to recompute, so that activations stay within a budget and recomputing costs the least.

Rematerialisation under a budget, as in DTR (Kirisame 2021), but chosen before training rather than when memory runs
out: blocks run in a fixed order, each keeps all activations, those of selective recomputation, or its input, and the
best choice is found exactly. If the budget fits everything, nothing is recomputed; with the smallest possible budget
every block is, in full.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.errors import SettingsError
from paceline.memory.recompute import Choice
from paceline.memory.rehearsal import StepDescription, rehearse
from paceline.memory.settings import Recompute

_STEPS = 2048
"""Number of units of a budget; bytes are rounded up to one unit."""
_NUM_TRIES = 4


@dataclass(frozen=True)
class Block:
    """Costs of one block; blocks are in the order of execution."""

    name: str
    kept: Mapping[Recompute, int]
    """Bytes that stay after its forward, by recomputation."""
    cost: Mapping[Recompute, float]
    """Cost of recomputing, in floating-point operations; 0 for none."""


class _Best(NamedTuple):
    cost: float
    choices: tuple[Recompute, ...]


def choose(blocks: Sequence[Block], budget_bytes: int, before_bytes: int = 0, after_bytes: int = 0) -> list[Recompute]:
    """Return the recomputation of each block; of all choices that fit, one with the least cost.

    Bytes add up as blocks run forward. When backward reaches a recomputed block, all its activations exist
    at once, beside those that earlier blocks kept.

    Args:
        blocks: Blocks in the order of execution.
        budget_bytes: Most bytes of activations at any time.
        before_bytes: Activations kept before the first block.
        after_bytes: Activations after the last block, until backward reaches it.

    Returns:
        As many choices as there are blocks; empty if nothing fits, or there are no blocks.
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
    """Return the blocks of a model to recompute, so that its activations stay within a budget.

    Costs are measured on tensors without contents, and so is the choice: if it needs more than was computed, the
    next try gets that much less.

    Raises:
        SettingsError: Even recomputing all blocks in full does not fit; the message says which budget does.
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
            "num_micro_batches"
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
