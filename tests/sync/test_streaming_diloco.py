"""Streaming DiLoCo: fragments are all of the model, each is in its turn, and what is on its way is never lost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from stepping import descend, flatten, make_linear, make_sgd, run_step, train
from torch import nn

from paceline.checkpoint import CheckpointStore
from paceline.comm import LocalGroup, join
from paceline.errors import SettingsError
from paceline.replica.replica import Replica
from paceline.replica.state import capture, restore
from paceline.sync import DiLoCo, StreamingDiLoCo
from paceline.sync.fragments import cut_into_fragments
from paceline.testing.processes import run_processes


def uneven(rank, step):
    return 1.0 + (3 * rank + step) % 4


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_with_one_fragment_and_no_delay_and_mixing_it_is_diloco(size):
    rule = StreamingDiLoCo(period=3, num_fragments=1, delay=0, mixing=0.0)
    assert torch.equal(train(size, rule, 10, uneven), train(size, DiLoCo(period=3), 10, uneven))


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    shapes=st.lists(st.lists(st.integers(1, 40), max_size=3), min_size=1, max_size=12),
    num_fragments=st.integers(1, 8),
)
def test_fragments_partition_all_parameters_and_are_balanced(shapes, num_fragments):
    tensors = {f"p{place}": torch.zeros(shape) for place, shape in enumerate(shapes)}
    num_rows = sum(len(tensor) if tensor.dim() else 1 for tensor in tensors.values())
    if num_rows < num_fragments:
        with pytest.raises(SettingsError, match=f"num_fragments must be at most {num_rows}"):
            cut_into_fragments(tensors, num_fragments)
        return
    fragments = cut_into_fragments(tensors, num_fragments)
    assert len(fragments) == num_fragments
    names = [name for fragment in fragments for name in fragment]
    assert len(names) == len(set(names))
    for fragment in fragments:
        for view in fragment.values():
            view += 1
    assert all(bool((tensor == 1).all()) for tensor in tensors.values()), "each element in exactly one fragment"
    largest_row = max(t.nbytes / (len(t) if t.dim() else 1) for t in tensors.values())
    mean = sum(tensor.nbytes for tensor in tensors.values()) / num_fragments
    largest = max(sum(view.nbytes for view in fragment.values()) for fragment in fragments)
    assert largest <= max(1.1 * mean, mean + largest_row)


@pytest.mark.parametrize("num_fragments", [2, 4, 8, 16])
def test_the_largest_exchange_is_a_fragments_share_of_diloco(num_fragments):
    """Of a model with one tensor that is half of it, and with layers of many sizes."""
    module = nn.ModuleDict(
        {
            "embedding": nn.Embedding(500, 24),
            "first": nn.Linear(24, 96),
            "second": nn.Linear(96, 24),
            "norm": nn.LayerNorm(24),
            "head": nn.Linear(24, 200),
        }
    )
    shapes = [parameter.shape for parameter in module.parameters()]
    whole = DiLoCo(period=32).traffic(shapes, 4)[0]
    parts = StreamingDiLoCo(period=32, num_fragments=num_fragments).traffic(shapes, 4)
    assert len(parts) == num_fragments
    assert max(part.num_bytes for part in parts) <= 1.1 / num_fragments * whole.num_bytes
    assert max(part.wire_bytes for part in parts) <= 1.1 / num_fragments * whole.wire_bytes
    assert sum(part.num_bytes for part in parts) == whole.num_bytes


def _stream(num_steps, rule, size):
    """The paper's second algorithm, one worker after another: where each of them is after each step."""
    start = flatten(make_linear())
    places = make_linear()
    nn.utils.vector_to_parameters(torch.arange(len(start), dtype=torch.float64), places.parameters())
    cut = cut_into_fragments({name: p.detach() for name, p in places.named_parameters()}, rule.num_fragments)
    fragments = [torch.cat([view.flatten() for view in fragment.values()]).long() for fragment in cut]
    workers = [start.clone() for _ in range(size)]
    common, velocity = start.clone(), torch.zeros_like(start)
    weights = torch.zeros(rule.num_fragments, size, dtype=torch.float64)
    sent, seen, num_rounds = {}, [], [0] * rule.num_fragments
    for step in range(num_steps):
        workers = [descend(where, rank, [step]) for rank, where in enumerate(workers)]
        weights += torch.tensor([uneven(rank, step) for rank in range(size)])
        for number, (fragment, turn) in enumerate(zip(fragments, rule.turns, strict=True)):
            if (step + 1) % rule.period == turn:
                shares = weights[number] / weights[number].sum()
                gone = [share * (common - where)[fragment] for share, where in zip(shares, workers, strict=True)]
                sent[step + rule.delay] = number, sum(gone)
                weights[number] = 0
        if step in sent:
            number, difference = sent.pop(step)
            fragment = fragments[number]
            warmup = rule.outer_momentum_warmup
            momentum = 0.9 * min(1, num_rounds[number] / warmup) if warmup else 0.9
            num_rounds[number] += 1
            velocity[fragment] = momentum * velocity[fragment] + difference
            common[fragment] -= 0.7 * (difference + momentum * velocity[fragment])
            for where in workers:
                where[fragment] = rule.mixing * where[fragment] + (1 - rule.mixing) * common[fragment]
        seen.append(torch.stack(workers))
    return torch.stack(seen, dim=1)


@pytest.mark.parametrize("delay", [0, 1, 2, 5])
@pytest.mark.parametrize(("mixing", "warmup"), [(0.0, 0), (0.25, 0), (0.25, 3)])
def test_it_is_the_papers_algorithm(delay, mixing, warmup):
    settings = {"delay": delay, "mixing": mixing, "outer_momentum": 0.9, "outer_momentum_warmup": warmup}
    rule = StreamingDiLoCo(period=6, num_fragments=2, **settings)
    torch.testing.assert_close(train(3, rule, 20, uneven), _stream(20, rule, 3), rtol=1e-10, atol=1e-11)


def test_an_exchange_is_waited_for_only_where_it_is_applied(monkeypatch):
    """Or where the next fragment leaves: one is on the wire at a time."""
    waits = []
    wait = LocalGroup._wait

    def note(self, operation, sequence):
        if operation.name.startswith("fragment") and self.rank == 0:
            waits.append((operation.name, current[0]))
        wait(self, operation, sequence)

    monkeypatch.setattr(LocalGroup, "_wait", note)
    current = [0]
    rule = StreamingDiLoCo(period=8, num_fragments=2, delay=3)

    def work(group):
        module = make_linear()
        replica = Replica(module, make_sgd(module), group=group, sync=rule)
        for step in range(12):
            if group.rank == 0:
                current[0] = step
            result = run_step(replica, step)
            assert (result.wire_bytes > 0) == (step in (3, 7, 11))
        replica.close()

    LocalGroup.run(2, work)
    assert waits == [("fragment 0 0", 6), ("fragment 1 0", 10)]


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("stop_at", [3, 4, 5, 7])
def test_what_is_on_the_wire_is_in_the_checkpoint(codec, stop_at, tmp_path):
    """A fragment that was sent before is applied after all the same, bit for bit, also among more workers."""
    rule = StreamingDiLoCo(period=4, num_fragments=2, delay=2, codec={"name": codec, "dense_below": 0})

    def fail(path, reason):
        raise AssertionError(f"{path} is damaged: {reason}")

    def work(group, is_stopped, num_before=2):
        module = make_linear(dtype=torch.float32)
        replica = Replica(module, make_sgd(module, 0.9), group=group, sync=rule)
        with CheckpointStore(tmp_path) as store:
            for step in range(stop_at if num_before != 2 else 0, 9):
                if is_stopped and step == stop_at:
                    if num_before == 2:
                        tensors, document = capture(replica)
                        if group.rank == 0:
                            store.save(tensors, document, step)
                        replica.close()
                        module = make_linear(seed=3, dtype=torch.float32)
                        replica = Replica(module, make_sgd(module, 0.9), group=group, sync=rule)
                    restore(store.find_newest_valid(fail) if group.rank == 0 else None, replica)
                run_step(replica, step, uneven(group.rank, step))
        _, shared = replica.state.sync_state()
        result = flatten(module), {name: tensor.clone() for name, tensor in shared.items()}
        replica.close()
        return result

    straight = LocalGroup.run(2, lambda group: work(group, False))
    resumed = LocalGroup.run(2, lambda group: work(group, True))
    for (one, one_shared), (other, other_shared) in zip(straight, resumed, strict=True):
        assert torch.equal(one, other)
        assert one_shared.keys() == other_shared.keys()
        assert all(torch.equal(tensor, other_shared[name]) for name, tensor in one_shared.items())
    joined = LocalGroup.run(3, lambda group: work(group, True, num_before=3))
    assert all(where.isfinite().all() for where, _ in joined)
    for name in joined[0][1]:
        assert all(torch.equal(joined[0][1][name], shared[name]) for _, shared in joined), "the same on all workers"


def test_fragments_that_were_cut_otherwise_are_refused():
    def work(group, num_fragments):
        module = make_linear()
        rule = StreamingDiLoCo(period=4, num_fragments=num_fragments)
        replica = Replica(module, make_sgd(module), group=group, sync=rule)
        run_step(replica, 0)
        state = replica.state.sync_state()
        replica.close()
        return replica, state

    for replica, _ in LocalGroup.run(1, lambda group: work(group, 2)):
        [(_, (own, shared))] = LocalGroup.run(1, lambda group: work(group, 4))
        with pytest.raises(
            SettingsError, match=r"fragment 0 must have the blocks of the checkpoint, but .* is not in it"
        ):
            replica.state.load_sync_state([own], shared)


def stream_among_processes() -> list[list[float]]:
    """Return where this process is after each step, and what it sent."""
    rule = StreamingDiLoCo(period=6, num_fragments=2, delay=2)
    seen = []
    with join() as group:
        module = make_linear()
        replica = Replica(module, make_sgd(module), group=group, sync=rule)
        for step in range(10):
            run_step(replica, step, uneven(group.rank, step))
            seen.append(flatten(module).tolist())
        replica.close()
    return seen


def test_processes_do_what_threads_do():
    rule = StreamingDiLoCo(period=6, num_fragments=2, delay=2)
    results = run_processes(3, stream_among_processes)
    for result in results:
        assert result.exit_code == 0, result.output
    seen = torch.tensor([result.value for result in results], dtype=torch.float64)
    torch.testing.assert_close(seen, train(3, rule, 10, uneven), rtol=1e-11, atol=1e-12)


def test_what_cannot_work_is_refused():
    with pytest.raises(ValidationError, match="got delay 4, num_fragments 4, period 4"):
        StreamingDiLoCo(period=4, delay=4)
    with pytest.raises(ValidationError, match="num_fragments at most period"):
        StreamingDiLoCo(period=4, num_fragments=5)
    with pytest.raises(SettingsError, match="num_fragments must be at most 4, the rows of all parameters"):
        train(1, StreamingDiLoCo(period=9, num_fragments=9), 1)
