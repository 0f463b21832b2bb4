"""Contract of every synchronisation `Rule`: checks that run over any rule, with workers that are threads.

A new rule is tested the day it is registered: `every_rule` finds it, and `check_rule` runs all of `RULE_CHECKS`.
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.checkpoint import Checkpoint, CheckpointStore
from paceline.comm.local_group import LocalGroup
from paceline.registry import list_variants
from paceline.replica.replica import Replica
from paceline.replica.state import capture, restore
from paceline.replica.step_result import StepResult
from paceline.sync import Rule, Traffic
from paceline.testing.checks import run_checks

Check = Callable[[Rule], str | None]
"""Check of a rule: raises if the rule fails it; returns the reason if it does not apply to the rule."""

NUM_STEPS = 12
WORKERS = (1, 2, 3, 5)
COLLECTIVES = ("all_reduce", "broadcast", "send", "push", "pull")


def every_rule() -> dict[str, Rule]:
    """Return each registered rule, exchanging often."""
    rules: dict[str, Rule] = {}
    for name, variant in list_variants(Rule).items():  # type: ignore[type-abstract]
        soon = {"period": 4, "synchronous_steps": 0}
        often = {key: value for key, value in soon.items() if key in variant.model_fields}
        rules[name] = variant.model_validate(often)
        if "asynchronous" in variant.model_fields:
            rules[f"{name} asynchronous"] = variant.model_validate({**often, "asynchronous": True})
        if "synchronous_steps" in variant.model_fields:
            rules[f"{name} after synchronous steps"] = variant.model_validate({**often, "synchronous_steps": 5})
    return rules


def check_rule(rule: Rule) -> list[str]:
    """Run every check of `RULE_CHECKS`; return a line of each: ``passed: NAME`` or ``skipped: NAME (reason)``.

    Raises:
        AssertionError: The rule breaks the contract; the message begins with the check's name.
    """
    return run_checks(RULE_CHECKS, rule)


def settings_survive_json(rule: Rule) -> None:
    """A rule read from its own JSON is equal to it."""
    assert Rule.model_validate(rule.model_dump(mode="json")) == rule


def changes_are_announced(rule: Rule) -> None:
    """A worker's reduce group and reducer change only at steps that `next_change` announces."""

    def ask(group: LocalGroup) -> list[tuple[list[int], int]]:
        return [(list(rule.reduce_ranks(group, step)), rule.phase(step)) for step in range(20)]

    for answers in LocalGroup.run(4, ask):
        for step in range(20):
            change = rule.next_change(step)
            assert change is None or change > step, f"the change after step {step} is announced for step {change}"
            same = answers[step : 20 if change is None else change]
            assert all(answer == same[0] for answer in same), f"a change between {step} and {change} is not announced"


def any_number_of_workers_learns(rule: Rule) -> None:
    """With any number of workers the consensus improves, and is the same on all of them."""
    for size in WORKERS:
        before = _held_out_loss(make_module())
        judged = LocalGroup.run(size, lambda group: _train(group, rule)[1:])
        for losses in zip(*judged, strict=True):
            assert len(set(losses)) == 1, f"{size} workers evaluate the consensus differently: {losses}"
        losses = [loss for loss, _ in judged]
        assert losses[0] < 0.9 * before, f"{size} workers: {before} before training, {losses[0]} after"


def uneven_shares_are_taken(rule: Rule) -> None:
    """Workers may have different weights from step to step, and some may have no samples."""

    def weigh(rank: int, step: int) -> float:
        return 0.0 if (rank + step) % 3 == 0 and rank else 1.0 + rank + step % 2

    for result in LocalGroup.run(3, lambda group: _train(group, rule, weigh=weigh)):
        assert all(math.isfinite(loss) for loss in result[0]), f"losses are {result[0]}"
        assert math.isfinite(result[1]), f"the consensus' loss is {result[1]}"


def workers_count_by_their_samples(rule: Rule) -> str | None:
    """A worker whose samples weigh next to nothing hardly moves the consensus, and one with as many as others does."""
    if rule.is_asynchronous:
        return "asynchronous workers end at other places each time"
    if not rule.weighs_samples:
        return "its class says weighs_samples = False"
    num_steps = _count_steps(rule.traffic([parameter.shape for parameter in make_module().parameters()], 3), 2)

    def change(weight: float) -> float:
        """Return how far the consensus is from that with other data on rank 2, whose samples weigh `weight`."""
        ends = [
            LocalGroup.run(3, lambda group, data=data: _train_on(group, rule, num_steps, weight, data))[0]  # type: ignore[misc]
            for data in (2, 77)
        ]
        return float((ends[0] - ends[1]).norm())

    full, light = change(1.0), change(1e-4)
    assert full > 0, "the data of each worker must reach the consensus, but rank 2's does not"
    assert light < full / 2, (
        f"workers must count by `step.weight`, but other data on rank 2 move the consensus by {light:.2g} if its "
        f"samples weigh 0.0001, and by {full:.2g} if they weigh 1; weigh, or let `weighs_samples` return False"
    )
    return None


def accumulated_gradients_are_one_gradient(rule: Rule) -> None:
    """Two micro-batches have the effect of one batch of both.

    In double precision: codecs may make much of the last bits of a sum, which are other ones on each kind of processor.
    """
    size = 1 if rule.is_asynchronous else 2  # with several, the result depends on their order
    double = torch.float64
    whole = LocalGroup.run(size, lambda group: _train(group, rule, dtype=double)[1])
    halves = LocalGroup.run(size, lambda group: _train(group, rule, num_micro_batches=2, dtype=double)[1])
    assert math.isclose(whole[0], halves[0], rel_tol=1e-6), f"{whole[0]} in one, {halves[0]} in two"


def a_killed_run_goes_on_bit_for_bit(rule: Rule) -> None:
    """State that was saved at any step and loaded by new workers leads to the same bits.

    Of several asynchronous workers only the loaded state is compared: later results depend on their order.
    """
    if rule.is_asynchronous:
        LocalGroup.run(3, lambda group: _train_and_stop(group, rule, 6))
    size = 1 if rule.is_asynchronous else 3
    straight = LocalGroup.run(size, lambda group: _train_and_stop(group, rule, None))
    for stop_at in (3, 6):
        resumed = LocalGroup.run(size, lambda group, stop_at=stop_at: _train_and_stop(group, rule, stop_at))  # type: ignore[misc]
        for rank, (one, other) in enumerate(zip(straight, resumed, strict=True)):
            for name, tensor in one.items():
                assert torch.equal(tensor, other[name]), f"stopped at {stop_at}, rank {rank}'s {name} differs"


def another_number_of_workers_goes_on(rule: Rule) -> None:
    """Two and five workers load a checkpoint of three: they start from the consensus, and continue to improve."""
    with tempfile.TemporaryDirectory() as directory, CheckpointStore(Path(directory)) as store:
        [(before, saved), *_] = LocalGroup.run(3, lambda group: _save(group, rule, store))
        for size in (2, 5):
            results = LocalGroup.run(size, lambda group: _load_and_train(group, rule, store))
            for loaded, after in results:
                assert math.isclose(loaded, saved, rel_tol=1e-5), f"{size} workers: {saved} saved, {loaded} loaded"
                assert after < before, f"{size} workers: {before} at first, {after} after going on"


def prices_are_stated(rule: Rule) -> None:
    """Bytes that a worker sends over some periods agree with `traffic`, within a twentieth."""
    shapes = [parameter.shape for parameter in make_module().parameters()]
    traffic = rule.traffic(shapes, 4)
    assert traffic, "a rule must state its traffic"
    num_bytes = 4 * sum(shape.numel() for shape in shapes)
    for each in traffic:
        assert each.collective in COLLECTIVES, f"a collective must be one of {', '.join(COLLECTIVES)}, but got {each}"
        assert 0 < each.num_bytes <= num_bytes, f"buffers must be of the model's {num_bytes} bytes, but got {each}"
        assert each.wire_bytes > 0, f"a worker must send something, but got {each}"
        assert each.period >= 1, f"a period must be of a step at least, but got {each}"
    # In asynchronous workers' last step only their requests are certain to be counted, not the replies.
    num_periods = 40 if rule.is_asynchronous else 4
    num_steps = _count_steps(traffic, num_periods)
    stated = sum(each.wire_bytes * each.count(num_steps) for each in traffic)
    sent = LocalGroup.run(4, lambda group: sum(_run(group, rule, num_steps)[1]))
    mean = sum(sent) / len(sent)
    assert math.isclose(mean, stated, rel_tol=0.05), f"{stated:.0f} bytes stated for {num_steps} steps, {mean:.0f} sent"


RULE_CHECKS: tuple[Check, ...] = (
    settings_survive_json,
    changes_are_announced,
    any_number_of_workers_learns,
    uneven_shares_are_taken,
    workers_count_by_their_samples,
    accumulated_gradients_are_one_gradient,
    a_killed_run_goes_on_bit_for_bit,
    another_number_of_workers_goes_on,
    prices_are_stated,
)


def make_module() -> nn.Module:
    """Return a small network, always the same."""
    generator = torch.Generator().manual_seed(3)
    module = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return module


def make_batch(rank: int, step: int, num_samples: int = 8) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a fixed function with a little noise."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(num_samples, 6, generator=generator)
    clean = torch.stack([inputs[:, 0] - inputs[:, 1], inputs[:, 2].sin(), inputs[:, 3:].mean(1)], 1)
    return inputs, clean + 0.01 * torch.randn(num_samples, 3, generator=generator)


def _held_out_loss(module: nn.Module) -> float:
    dtype = next(module.parameters()).dtype
    inputs, targets = (each.to(dtype) for each in make_batch(rank=999, step=999, num_samples=256))
    with torch.no_grad():
        return float(F.mse_loss(module(inputs), targets))


def _make_replica(group: LocalGroup, rule: Rule, dtype: torch.dtype = torch.float32) -> Replica:
    module = make_module().to(dtype)
    return Replica(module, torch.optim.SGD(module.parameters(), lr=0.1), group=group, sync=rule, clip_norm=10.0)


def _step(
    replica: Replica, step: int, weight: float = 1.0, num_micro_batches: int = 1, rank: int | None = None
) -> StepResult:
    dtype = next(replica.module.parameters()).dtype
    inputs, targets = (each.to(dtype) for each in make_batch(replica.group.rank if rank is None else rank, step))
    parts = list(zip(inputs.chunk(num_micro_batches), targets.chunk(num_micro_batches), strict=True))
    for number, (some_inputs, some_targets) in enumerate(parts):
        loss = F.mse_loss(replica(some_inputs), some_targets)
        replica.backward(loss, weight=weight / num_micro_batches, last=number == num_micro_batches - 1)
    return replica.update()


def _judge(replica: Replica) -> float:
    with replica.consensus():
        return _held_out_loss(replica.module)


def _train(
    group: LocalGroup,
    rule: Rule,
    weigh: Callable[[int, int], float] = lambda rank, step: 1.0,
    num_micro_batches: int = 1,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[float], float, float]:
    """Return the losses of the steps, the final loss of the consensus, and its loss before the last step.

    One of the two is amid a period, unless every step ends one.
    """
    replica = _make_replica(group, rule, dtype)
    losses = []
    before = 0.0
    for step in range(3 * NUM_STEPS):
        before = _judge(replica) if step == 3 * NUM_STEPS - 1 else before
        losses.append(_step(replica, step, weigh(group.rank, step), num_micro_batches).loss)
    judged = _judge(replica)
    replica.close()
    return losses, judged, before


def _train_on(group: LocalGroup, rule: Rule, num_steps: int, weight: float, data: int) -> Tensor:
    """Return the consensus in one tensor; rank 2's samples are those of rank `data`, and weigh `weight`."""
    replica = _make_replica(group, rule)
    is_last = group.rank == 2
    for step in range(num_steps):
        _step(replica, step, weight if is_last else 1.0, rank=data if is_last else None)
    with replica.consensus():
        end = torch.cat([parameter.detach().flatten() for parameter in replica.module.parameters()])
    replica.close()
    return end


def _count_steps(traffic: Sequence[Traffic], num_periods: int) -> int:
    """Return the number of steps up to the end of the last of some whole periods."""
    return max(each.first_step for each in traffic) + math.lcm(*(each.period for each in traffic)) * num_periods


def _run(group: LocalGroup, rule: Rule, num_steps: int) -> tuple[Replica, Sequence[int]]:
    replica = _make_replica(group, rule)
    sent = [_step(replica, step).wire_bytes for step in range(num_steps - 1)]
    with replica.consensus():  # all exchanges of these steps end
        pass
    sent.append(_step(replica, num_steps - 1).wire_bytes)
    replica.close()
    return replica, sent


def _train_and_stop(group: LocalGroup, rule: Rule, stop_at: int | None) -> dict[str, Tensor]:
    """Return this worker's tensors after some steps, saved and loaded in between if requested."""
    replica = _make_replica(group, rule)
    for step in range(NUM_STEPS):
        if step == stop_at:
            with tempfile.TemporaryDirectory() as directory, CheckpointStore(Path(directory)) as store:
                _save_to(store, replica, step)
                saved = _read(replica)
                replica.close()
                replica = _make_replica(group, rule)
                with torch.no_grad():
                    for parameter in replica.module.parameters():
                        parameter.zero_()
                restore(_newest(store) if group.rank == 0 else None, replica)
                group.barrier()
                for name, tensor in _read(replica).items():
                    assert torch.equal(tensor, saved[name]), f"rank {group.rank}'s {name} is not as it was saved"
        _step(replica, step, weight=1.0 + group.rank)
    state = _read(replica)
    replica.close()
    return state


def _read(replica: Replica) -> dict[str, Tensor]:
    """Return copies of a worker's parameters, and of the consensus."""
    state = {name: tensor.clone() for name, tensor in replica.module.state_dict().items()}
    with replica.consensus():
        return state | {f"consensus of {name}": each.clone() for name, each in replica.module.state_dict().items()}


def _save(group: LocalGroup, rule: Rule, store: CheckpointStore) -> tuple[float, float]:
    replica = _make_replica(group, rule)
    before = _judge(replica)
    for step in range(NUM_STEPS - 1):
        _step(replica, step)
    _save_to(store, replica, NUM_STEPS - 1)
    saved = _judge(replica)
    replica.close()
    return before, saved


def _load_and_train(group: LocalGroup, rule: Rule, store: CheckpointStore) -> tuple[float, float]:
    replica = _make_replica(group, rule)
    restore(_newest(store) if group.rank == 0 else None, replica)
    loaded = _judge(replica)
    for step in range(NUM_STEPS, 2 * NUM_STEPS):
        _step(replica, step)
    after = _judge(replica)
    replica.close()
    return loaded, after


def _save_to(store: CheckpointStore, replica: Replica, step: int) -> None:
    tensors, document = capture(replica)
    if replica.group.rank == 0:
        store.save(tensors, document, step)


def _newest(store: CheckpointStore) -> Checkpoint | None:
    def fail(path: Path, reason: str) -> None:
        raise AssertionError(f"{path} is damaged: {reason}")

    return store.find_newest_valid(fail)
