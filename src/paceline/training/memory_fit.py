"""How much memory a run needs, whether it fits, and what would make it fit."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from math import ceil, prod

import torch
from torch import nn

from paceline.data.base import Splits
from paceline.data.batch import list_tensors
from paceline.errors import PacelineError, SettingsError
from paceline.memory import Category, Estimate, divide, estimate_step
from paceline.monitor.formatting import size
from paceline.optim import Adafactor
from paceline.parallel.expert import find_experts
from paceline.training.layout_rehearsal import estimate_layout
from paceline.training.model import resize, size_of
from paceline.training.rehearsal import (
    RehearsalError,
    check_device,
    choose_blocks,
    describe_step,
    guarded,
    outline,
)
from paceline.training.run import Run

_MARGIN = 4
"""Number of times that a rough bound must fit for the estimate to be skipped."""
_COPIES = 8
"""Number of copies of each output of a matrix at each position: more than any model keeps."""
_ENLARGING = ("upsampl", "transpose", "shuffle", "unpool", "fold", "interpolat")
"""Parts of the names of modules that make more positions than a sample has, such as `nn.ConvTranspose2d`."""
_MOST_ADVICE = 4
_KEPT: tuple[Category, ...] = ("parameters", "optimizer")
"""Purposes of which the rank with the most has at least as much as a division says."""


def estimate(run: Run, splits: Splits, num_ranks: int, device: torch.device) -> Estimate:
    """Return the memory that a step of `run` needs on each of `num_ranks` ranks.

    One whole step is rehearsed, with the run's own model, loss, optimizer, precision, micro-batches and savings;
    see `estimate_step`. With a layout each rank's own step is, and the one that needs the most counts
    (`estimate_layout`). Where that cannot be, such as with experts of other classes than `Experts`, offloading, or a
    tensor plan that is found by trying and too large for that, a whole model's step is divided as `divide` says, which
    is rougher.

    Raises:
        SettingsError: The model cannot be rehearsed, or its savings cannot be had.
    """
    check_device(run, device)
    num_workers = max(1, num_ranks // run.layout.ranks_of_worker)
    choices = choose_blocks(run, splits, num_workers, device)
    if not run.layout.is_plain and run.memory.offload == "none":
        try:
            return guarded(lambda: estimate_layout(run, splits, num_ranks, choices, device))
        except PacelineError:  # such as a plan too large to try; what is wrong with a layout its ranks will tell
            pass
    step = describe_step(run, splits, num_workers, device)
    whole = guarded(lambda: estimate_step(step, choices, run.sync, num_workers, run.count_steps(splits)))
    needed = whole
    if not run.layout.is_plain:
        needed = divide(whole, run.layout, run.num_micro_batches, _expert_share(outline(run.model, splits)))
    if run.memory.offloads_parameters:
        needed = _move_parameters(needed, outline(run.model, splits))
    return needed if run.ema is None else _add_averages(needed, run, splits)


def check_fit(run: Run, splits: Splits, num_ranks: int, device: torch.device, available: int) -> Estimate | None:
    """Refuse a run that needs more memory than each of its ranks has.

    A run that fits by far is not rehearsed, for that takes a second or more: where a fourth of memory holds 8 times the
    parameters and 8 times what every matrix of the model makes of every number of a micro-batch, and no module makes
    more positions than a sample has.

    Args:
        run: The run.
        splits: Training and held-out data.
        num_ranks: Number of all ranks.
        device: Device of each rank.
        available: Bytes of memory per rank.

    Returns:
        Estimate of the memory; None if the run fits by far.

    Raises:
        SettingsError: The run does not fit; the message names changes that would, the cheapest first. An estimate by
            division only warns, unless what ranks keep is too much already; so does one that fits if experts are used
            evenly alone.
    """
    if not run.memory.check:
        return None
    try:
        if guarded(lambda: _fits_by_far(run, splits, num_ranks, available)):
            return None
        needed = estimate(run, splits, num_ranks, device)
    except RehearsalError as error:
        warnings.warn(f"memory was not checked: {error}", stacklevel=2)
        return None
    if needed.peak_bytes <= available:
        if needed.most_bytes > available:
            warnings.warn(
                f"a rank's memory may not hold a step if experts are used unevenly: it needs {size(needed.peak_bytes)} "
                f"of {size(available)} there are, but up to {size(needed.most_bytes)} if tokens use the experts of one "
                "rank most; set the model's capacity_factor to bound that, and --memory.check false silences this",
                stacklevel=2,
            )
        return needed
    if needed.division and sum(needed.bytes_of[category] for category in _KEPT) <= available:
        warnings.warn(
            f"a rank's memory may not hold a step: an estimate by division is {size(needed.peak_bytes)} of "
            f"{size(available)} there are, and {needed.division}; `paceline memory` shows it, and --memory.check false "
            "silences this",
            stacklevel=2,
        )
        return needed
    # In so many times as many micro-batches, activations alone would be more than there is.
    least = run.num_micro_batches * needed.bytes_of["activations"] / max(available, 1)
    found = list(_find_changes(run, splits, num_ranks, device, available, least))
    advice = "; it would with " + ", or ".join(f"{change} ({size(num_bytes)})" for change, num_bytes in found)
    raise SettingsError(
        f"a rank's memory must hold a step, but it needs {size(needed.peak_bytes)} ({_list(needed)}) of "
        f"{size(available)} there are{advice if found else '; take more ranks, or a smaller model'}; "
        "--memory.check false starts it all the same"
    )


def _add_averages(needed: Estimate, run: Run, splits: Splits) -> Estimate:
    """Count a rank's moving averages with what the optimizer keeps: they are cut as parameters are."""
    parameters = outline(run.model, splits).parameters()
    num_bytes = sum(p.numel() * max(4, p.element_size()) for p in parameters if p.requires_grad)
    layout = run.layout
    num_holders = layout.tensor * layout.pipeline * (layout.sharded if layout.shards_parameters else 1)
    experts = _expert_share(outline(run.model, splits))
    held = needed.bytes_of["optimizer"] + ceil(num_bytes * (1 - experts + experts / layout.expert) / num_holders)
    return replace(needed, bytes_of={**needed.bytes_of, "optimizer": held})


def _expert_share(module: nn.Module) -> float:
    """Return the part of a model's parameters that are experts'."""
    held = sum(p.numel() for experts in find_experts(module).values() for p in experts.parameters())
    return held / sum(p.numel() for p in module.parameters())


def _fits_by_far(run: Run, splits: Splits, num_ranks: int, available: int) -> bool:
    if run.memory.recompute not in ("none", "full", "selective") or run.memory.offload != "none":
        return False
    grown = run.growth.size_at(run.count_steps(splits) if run.growth.steps else 0, size_of(run.model))
    module = outline(resize(run.model, grown), splits)
    kinds = {type(part).__name__.lower() for part in module.modules()}
    if any(part in kind for part in _ENLARGING for kind in kinds):
        return False
    shapes = [tuple(parameter.shape) for parameter in module.parameters()]
    sample = max(tensor.numel() for tensor in list_tensors(splits.train.read_first()))
    num_workers = max(1, num_ranks // run.layout.ranks_of_worker)
    positions = sample * -(-run.global_batch // (num_workers if run.fixed_shares is None else 1))
    outputs = sum(shape[0] if shape else 1 for shape in shapes)
    num_bytes = 4 * _COPIES * (sum(prod(shape) for shape in shapes) + positions * outputs)
    return _MARGIN * num_bytes <= available


def _find_changes(
    run: Run, splits: Splits, num_ranks: int, device: torch.device, available: int, least: float
) -> Iterator[tuple[str, int]]:
    """Yield changes that fit, with the bytes that they need; the ones that cost least come first."""
    found: set[str] = set()
    for setting, change, changed in _list_changes(run, num_ranks, device, least):
        if setting in found or len(found) == _MOST_ADVICE:
            continue
        try:
            num_bytes = estimate(changed, splits, num_ranks, device).peak_bytes
        except SettingsError:  # not with this model
            continue
        if num_bytes <= available:
            found.add(setting)
            yield change, num_bytes


def _list_changes(run: Run, num_ranks: int, device: torch.device, least: float) -> Iterator[tuple[str, str, Run]]:
    """Yield changes: which setting, in which words, and the run with it. Of each setting the mildest comes first."""
    is_virtual = run.num_virtual_workers is not None
    num_virtual = 2 * (run.num_virtual_workers or run.global_batch)
    while num_virtual <= run.global_batch:
        changed = run.model_copy(update={"num_virtual_workers": num_virtual})
        yield "virtual workers", f"--num_virtual_workers {num_virtual}", changed
        num_virtual *= 2
    most = 1 if is_virtual else max(1, run.global_batch // max(1, num_ranks // run.layout.ranks_of_worker))
    num_micro = run.num_micro_batches * 2
    while num_micro <= most:
        if num_micro >= least:
            change = f"--num_micro_batches {num_micro}"
            yield "micro-batches", change, run.model_copy(update={"num_micro_batches": num_micro})
        num_micro *= 2
    if run.memory.recompute == "none":
        for recompute in ("selective", "full"):
            yield "recompute", f"--memory.recompute {recompute}", _with_memory(run, recompute=recompute)
    if device.type != "cpu" and run.memory.offload == "none":
        for offload in ("optimizer", "activations", "both", *(["parameters"] if run.layout.is_plain else [])):
            yield "offload", f"--memory.offload {offload}", _with_memory(run, offload=offload)
    if run.optimizer.name != "adafactor":
        lean = Adafactor()
        yield "optimizer", "--optimizer adafactor", run.model_copy(update={"optimizer": lean})
    if run.layout.is_plain and num_ranks > 1 and not is_virtual:
        layout = run.layout.model_copy(update={"sharded": num_ranks})
        yield "layout", f"--layout.sharded {num_ranks}", run.model_copy(update={"layout": layout})
    if is_virtual:
        return
    leanest = _with_memory(run, recompute="full").model_copy(update={"num_micro_batches": most})
    yield "both", f"--num_micro_batches {most} --memory.recompute full", leanest


def _move_parameters(needed: Estimate, module: nn.Module) -> Estimate:
    """Return an estimate whose parameters, and what follows from them, are in CPU memory.

    On the device are one operation's: a copy of a parameter, and a copy of its gradient.
    """
    largest = max(parameter.nbytes for parameter in module.parameters())
    moved: tuple[Category, ...] = ("parameters", "gradients", "optimizer", "communication")
    host_bytes = needed.host_bytes + sum(needed.bytes_of[category] for category in moved)
    there: dict[Category, int] = {"parameters": largest, "gradients": largest, "optimizer": 0, "communication": 0}
    return replace(needed, bytes_of={**needed.bytes_of, **there}, host_bytes=host_bytes)


def _with_memory(run: Run, **changes: str) -> Run:
    return run.model_copy(update={"memory": run.memory.model_copy(update=changes)})


def _list(needed: Estimate) -> str:
    parts = sorted(needed.bytes_of.items(), key=lambda shard: -shard[1])
    return ", ".join(f"{category} {size(num_bytes)}" for category, num_bytes in parts if num_bytes)
