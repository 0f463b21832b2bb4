"""Codec auto in training: residuals survive every change, workers stay equal, and a resume is bit for bit."""

import copy

import pytest
import torch
from pydantic import ValidationError

from paceline.checkpoint import CheckpointStore
from paceline.comm import LocalGroup
from paceline.errors import NonFiniteError, SettingsError
from paceline.replica import reduction
from paceline.replica.codec_chooser import CodecChooser, StepMeasurement
from paceline.replica.replica import Replica
from paceline.replica.state import capture, restore
from paceline.sync import DiLoCo, EveryStep

CANDIDATES = (
    {"name": "int8", "dense_below": 0},
    {"name": "one_bit", "dense_below": 0},
    {"name": "top_k", "density": 0.2, "dense_below": 0},
    {"name": "power_sgd", "low_rank": 1, "dense_below": 0},
)
AUTO = EveryStep(codec={"name": "auto", "candidates": CANDIDATES})
SIZE = 3


@pytest.fixture
def script(monkeypatch):
    """Return a dict, by step, of the codec that all workers choose after it: nothing else is ever chosen."""
    choices = {}

    def hear(self, values):
        assert values is not None
        self.heard = getattr(self, "heard", -1) + 1
        step = self.heard + getattr(self, "began", 0)
        if step in choices:
            assert not self._queue
            self._queue = self._plan(self._prices[choices[step]])

    monkeypatch.setattr(CodecChooser, "hear", hear)
    return choices


class Sums(torch.nn.Module):
    """Gradients do not depend on parameters, so that what was applied can be compared with what was computed."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Parameter(torch.zeros(8, 6)), torch.nn.Parameter(torch.zeros(10))

    def forward(self, inputs):
        return (self.first * inputs[:48].view(8, 6)).sum() + (self.second * inputs[48:]).sum()


def inputs_of(rank, step):
    return torch.randn(58, generator=torch.Generator().manual_seed(100 * step + rank))


def flatten(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).double()


def make_sgd(module):
    return torch.optim.SGD(module.parameters(), lr=1.0)


def make_adam(module):
    return torch.optim.Adam(module.parameters(), lr=0.1, betas=(0.5, 0.9))


def step_with(replica, step):
    replica.backward(replica(inputs_of(replica.group.rank, step)), weight=1.0 + replica.group.rank)
    replica.update()


def weights():
    return [(1.0 + rank) / sum(range(1, SIZE + 1)) for rank in range(SIZE)]


def held_back(replica):
    """Return this worker's residuals, as one vector."""
    codec, states = replica._reduction.chooser.codec, replica.state.feedback()
    reducer = replica._reduction.gradients.reducer
    codec = getattr(reducer, "carried", None) or codec
    total = []
    for name, parameter in replica.module.named_parameters():
        state = {k.removeprefix(f"{name}/"): v for k, v in states.items() if k.startswith(f"{name}/")}
        kept = codec.residual(state, parameter.shape, replica.group.rank, replica.group.size)
        total.append(torch.zeros(parameter.numel()) if kept is None else kept.flatten())
    return torch.cat(total).double()


def test_what_gradient_codecs_hold_back_survives_every_change(script):
    script.update({2: "int8", 5: "top_k", 8: "power_sgd", 11: "one_bit", 14: "none", 16: "top_k"})

    def work(group):
        module = Sums()
        replica = Replica(module, make_sgd(module), group=group, sync=AUTO, bucket_bytes=64, hash_interval=1)
        seen = []
        for step in range(20):
            step_with(replica, step)
            seen.append((flatten(module), held_back(replica)))
        changes = [(change.step, change.before, change.codec) for change in replica.state.take_codec_changes()]
        replica.close()
        return seen, changes

    done = LocalGroup.run(SIZE, work)
    assert [codec for _, _, codec in done[0][1]] == ["int8", "top_k", "power_sgd", "one_bit", "none", "top_k"]
    assert done[0][1] == done[1][1] == done[2][1]
    wanted = torch.zeros(58, dtype=torch.float64)
    was_held = []
    for step in range(20):
        wanted += sum(share * inputs_of(rank, step).double() for rank, share in enumerate(weights()))
        kept = sum(seen[step][1] for seen, _ in done)
        was_held.append(float(kept.norm()))
        for seen, _ in done:
            torch.testing.assert_close(-seen[step][0] + kept, wanted, rtol=1e-5, atol=1e-5)
    assert min(was_held[6:14]) > 0.1, "there was something to lose"
    assert was_held[15] == 0 == was_held[0]


def test_what_step_codecs_hold_back_survives_and_optimizers_become_equal_again(script):
    """Adam's steps with each worker's own gradients, known from a loop without any exchange."""
    script.update({2: "one_bit", 6: "top_k", 10: "none", 15: "int8", 18: "one_bit"})

    def work(group):
        module = Sums()
        optimizer = make_adam(module)
        sync = AUTO.model_copy(update={"step_length": "own"})
        replica = Replica(module, optimizer, group=group, sync=sync, bucket_bytes=64, hash_interval=1)
        seen = []
        for step in range(22):
            if replica._reduction.rule.codec_of == "step":
                alone = Sums()
                mine = make_adam(alone)
                mine.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                alone(inputs_of(group.rank, step)).backward()
                mine.step()
                taken = -flatten(alone)
            else:
                taken = None
            step_with(replica, step)
            seen.append((flatten(module), held_back(replica), taken, replica.state.keeps_optimizers_equal))
        state = torch.cat([v.flatten() for s in optimizer.state.values() for v in s.values()])
        replica.close()
        return seen, state

    done = LocalGroup.run(SIZE, work)
    kinds = ["step" if seen[2] is not None else "gradient" for seen in done[0][0]]
    assert kinds == ["gradient"] * 3 + ["step"] * 9 + ["gradient"] * 8 + ["step"] * 2, "steps 11 and 19 send the rest"
    first = done[0][0][2][0]  # parameters when steps began to be coded
    wanted = torch.zeros(58, dtype=torch.float64)
    for step in range(3, 12):
        wanted += sum(share * done[rank][0][step][2] for rank, share in enumerate(weights()))
        kept = sum(seen[step][1] for seen, _ in done)
        assert (kept.norm() > 0.01) == (step < 11)
        torch.testing.assert_close(first - done[0][0][step][0] + kept, wanted, rtol=1e-5, atol=1e-5)
    assert all(seen[11][3] for seen, _ in done)
    assert not torch.equal(done[0][1], done[1][1]), "steps are coded at the end: each worker has a state of its own"


def test_a_parameter_that_nobody_uses_any_more_gets_what_was_held_back_of_it(script):
    script.update({0: "int8", 3: "none"})

    def work(group):
        module = Sums()
        replica = Replica(module, make_sgd(module), group=group, sync=AUTO, bucket_bytes=64, hash_interval=1)
        for step in range(5):
            inputs = inputs_of(group.rank, step)
            loss = replica(inputs) if step < 4 else (replica.module.first * inputs[:48].view(8, 6)).sum()
            replica.backward(loss, weight=1.0 + group.rank)
            if step == 4:
                assert held_back(replica)[48:].norm() > 0
            replica.update()
        assert not held_back(replica).any()
        replica.close()
        return flatten(module)

    done = LocalGroup.run(SIZE, work)
    wanted = [sum(share * inputs_of(r, step).double() for r, share in enumerate(weights())) for step in range(5)]
    wanted[4][48:] = 0
    torch.testing.assert_close(-done[0], sum(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make_optimizer", [make_sgd, make_adam])
def test_a_resume_at_any_step_is_bit_for_bit(script, make_optimizer):
    script.update({1: "int8", 3: "one_bit", 6: "top_k", 8: "none", 11: "power_sgd"})
    num_steps = 13

    def start(group):
        module = Sums()
        optimizer = make_optimizer(module)
        return Replica(module, optimizer, group=group, sync=AUTO, bucket_bytes=64, hash_interval=1)

    def work(group):
        replica, saved = start(group), []
        for step in range(num_steps):
            parts = (replica.module, replica.optimizer, replica)
            saved.append(copy.deepcopy([part.state_dict() for part in parts]))
            step_with(replica, step)
        wanted = flatten(replica.module)
        replica.close()
        for begin in range(2, num_steps):
            replica = start(group)
            replica._reduction.chooser.began = begin
            for part, state in zip((replica.module, replica.optimizer, replica), saved[begin], strict=True):
                part.load_state_dict(copy.deepcopy(state))
            for step in range(begin, num_steps):
                step_with(replica, step)
            assert torch.equal(flatten(replica.module), wanted), begin
            replica.close()

    LocalGroup.run(SIZE, work)


@pytest.mark.parametrize("num_steps", [3, 5, 8])
@pytest.mark.parametrize("num_after", [2, 3])
def test_a_checkpoint_holds_the_choice_and_what_is_held_back(script, tmp_path, num_steps, num_after):
    """Saved with residuals to be carried from one_bit to top_k, as top_k, and on the way from steps to gradients."""
    script.update({1: "one_bit", 4: "top_k", 7: "none"})

    def start(group):
        module = Sums()
        return Replica(module, make_adam(module), group=group, sync=AUTO, bucket_bytes=64, hash_interval=1)

    def begin(group):
        replica = start(group)
        for step in range(num_steps):
            step_with(replica, step)
        with CheckpointStore(tmp_path) as store:
            tensors, document = capture(replica)
            if group.rank == 0:
                store.save(tensors, document, num_steps)
            group.barrier()
        kept, rule = held_back(replica), replica._reduction.rule
        replica._reduction.chooser.heard, replica._reduction.chooser.began = -1, num_steps
        step_with(replica, num_steps)
        replica.close()
        return kept, rule, flatten(replica.module)

    def go_on(group):
        replica = start(group)
        with CheckpointStore(tmp_path) as store:
            restore(store.find_newest_valid(lambda *_: None) if group.rank == 0 else None, replica)
        kept, rule = held_back(replica), replica._reduction.rule
        replica._reduction.chooser.began = num_steps
        step_with(replica, num_steps)
        replica.close()
        return kept, rule, flatten(replica.module)

    saved, loaded = LocalGroup.run(SIZE, begin), LocalGroup.run(num_after, go_on)
    assert sum(kept for kept, _, _ in saved).norm() > 0.01
    torch.testing.assert_close(sum(kept for kept, _, _ in loaded), sum(kept for kept, _, _ in saved))
    assert {rule for _, rule, _ in loaded} == {rule for _, rule, _ in saved}
    if num_after == SIZE:
        assert all(torch.equal(after, before) for (_, _, after), (_, _, before) in zip(loaded, saved, strict=True))


@pytest.fixture
def one_host(monkeypatch):
    """Return a function after which all workers of a `LocalGroup` are on one host."""
    return lambda: monkeypatch.setattr(LocalGroup, "host_ranks", property(lambda group: list(range(group.size))))


@pytest.mark.parametrize("num_after", [2, 3])
@pytest.mark.parametrize("make_optimizer", [make_sgd, make_adam])
def test_workers_of_one_host_send_what_a_codec_between_hosts_held_back(
    script, tmp_path, one_host, make_optimizer, num_after
):
    script.update({1: "one_bit"})

    def work(group, first, num_steps, *, leaves=False):
        module = Sums()
        optimizer = make_optimizer(module)
        replica = Replica(module, optimizer, group=group, sync=AUTO, bucket_bytes=64, hash_interval=1)
        with CheckpointStore(tmp_path) as store:
            if first:
                restore(store.find_newest_valid(lambda *_: None) if group.rank == 0 else None, replica)
                replica._reduction.chooser.began = first
                if leaves:
                    chooser = replica._reduction.chooser
                    chooser._queue = chooser._plan(chooser._prices["none"])
            kept = held_back(replica)
            for step in range(first, num_steps):
                step_with(replica, step)
            if not first:
                kept = held_back(replica)
                tensors, document = capture(replica)
                if group.rank == 0:
                    store.save(tensors, document, num_steps)
                group.barrier()
        changes = [(change.step, change.codec) for change in replica.state.take_codec_changes()]
        seen = kept, flatten(module), replica._reduction.rule, changes
        replica.close()
        return seen

    saved = LocalGroup.run(SIZE, lambda group: work(group, 0, 5))
    several = LocalGroup.run(num_after, lambda group: work(group, 5, 8, leaves=True))
    one_host()
    one = LocalGroup.run(num_after, lambda group: work(group, 5, 8))
    total = sum(kept for kept, _, _, _ in saved)
    assert total.norm() > 0.1
    torch.testing.assert_close(sum(kept for kept, _, _, _ in one), total)
    for (_, here, rule, changes), (_, there, _, _) in zip(one, several, strict=True):
        assert torch.equal(here, there)
        assert (rule.codec.name, rule.codec_of) == ("none", "gradient")
        assert changes == [(7 if make_optimizer is make_adam else 6, "none")]


def test_a_loop_goes_on_with_its_own_state_on_one_host(one_host, script):
    script.update({1: "int8"})

    def begin(group):
        module = Sums()
        replica = Replica(module, make_sgd(module), group=group, sync=AUTO, bucket_bytes=64)
        for step in range(4):
            step_with(replica, step)
        saved = copy.deepcopy([part.state_dict() for part in (module, replica.optimizer, replica)])
        replica.close()
        return saved

    saved = LocalGroup.run(SIZE, begin)
    one_host()

    def go_on(group):
        module = Sums()
        replica = Replica(module, make_sgd(module), group=group, sync=AUTO, bucket_bytes=64)
        assert replica._reduction.chooser is None
        for part, state in zip((module, replica.optimizer, replica), saved[group.rank], strict=True):
            part.load_state_dict(state)
        for step in range(4, 8):
            step_with(replica, step)
        reason = replica.state.take_codec_changes()[0].reason
        replica.close()
        return flatten(module), reason

    script.clear()  # all that was held back is sent, and nothing later
    done = LocalGroup.run(SIZE, go_on)
    wanted = sum(share * inputs_of(r, step).double() for step in range(8) for r, share in enumerate(weights()))
    for seen, reason in done:
        torch.testing.assert_close(-seen, wanted, rtol=1e-5, atol=1e-5)
        assert reason == "since all workers share the memory of one host"


def test_the_choice_follows_a_link_that_gets_slow_in_training(monkeypatch):
    """Times are made up from the bytes that were really sent: whatever the machine does, the link decides."""
    compute_s, bytes_per_s = 0.1, {"now": 1e9}

    def measure(times, timed, copy_s):
        wire_s = sum(bucket.wire_bytes for bucket in times.buckets) / bytes_per_s["now"]
        latency_s = 0.0 if timed else -1.0
        return StepMeasurement(compute_s + wire_s, wire_s, 0.05, wire_s, 0.0, latency_s, 1e-12)

    monkeypatch.setattr(reduction, "measure_step", measure)

    def work(group):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        replica = Replica(module, optimizer, group=group, sync=EveryStep(codec="auto"), hash_interval=1)
        codecs, sent = [], []
        for step in range(60):
            if step in (15, 40):
                group.barrier()
                bytes_per_s["now"] = 1e4 if step == 15 else 1e9
            replica.backward(replica(torch.ones(1, 64)).square().mean(), weight=1.0)
            sent.append(replica.update().wire_bytes)
            codecs.append(replica._reduction.chooser.codec.name)
        changes = replica.state.take_codec_changes()
        replica.close()
        return codecs, sent, changes

    done = LocalGroup.run(2, work)
    codecs, sent, changes = done[0]
    assert codecs == done[1][0]
    assert set(codecs[:15]) == {"none"} == set(codecs[50:])
    assert codecs[20] in ("one_bit", "top_k")
    assert sent[25] < 0.2 * sent[5] == 0.2 * sent[55]
    assert [change.codec for change in changes] == [codecs[20], "none"]
    assert changes[0].step <= 20


def test_a_step_that_fails_after_a_change_loses_nothing(script):
    script.update({1: "int8", 3: "top_k"})

    def work(group):
        module = Sums()
        replica = Replica(module, make_sgd(module), group=group, sync=AUTO, bucket_bytes=64, hash_interval=1)
        for step in range(4):
            step_with(replica, step)
        before = held_back(replica)
        assert before.norm() > 0
        assert replica.state.codec == "int8", "a checkpoint here must have what int8 holds back"
        replica.backward(replica(inputs_of(group.rank, 4) * float("inf")).nan_to_num(), weight=1.0)
        with pytest.raises(NonFiniteError):
            replica.update()
        assert torch.equal(held_back(replica), before)
        replica._reduction.chooser.heard -= 1
        for step in range(4, 6):
            step_with(replica, step)
        seen = flatten(module), held_back(replica), replica.state.codec
        replica.close()
        return seen

    done = LocalGroup.run(SIZE, work)
    wanted = sum(share * inputs_of(r, step).double() for step in range(6) for r, share in enumerate(weights()))
    torch.testing.assert_close(-done[0][0] + sum(kept for _, kept, _ in done), wanted, rtol=1e-5, atol=1e-5)
    assert done[0][2] == "top_k"


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: DiLoCo(codec="auto"), "codec must be one that serves here, but got 'auto'; known: bf16"),
        (lambda: EveryStep(codec="auto", codec_of="step"), "codec_of must be left out with codec auto, but got step"),
        (lambda: EveryStep(codec="auto", dense_steps=5), "dense_steps must be left out with codec auto, but got 5"),
        (lambda: EveryStep(codec="auto", program="ring"), "program must be left out with codec auto, but got ring"),
        (lambda: EveryStep(codec={"name": "auto", "candidates": []}), "at least one codec.*none at all"),
        (lambda: EveryStep(codec={"name": "auto", "candidates": ["int8", "int8"]}), "each once, but got int8, int8"),
        (lambda: EveryStep(codec={"name": "auto", "candidates": ["dgc"]}), "that carry no momentum, but got dgc"),
        (lambda: EveryStep(codec={"name": "auto", "candidates": ["none"]}), "other than none .*, but got none"),
        (lambda: EveryStep(codec={"name": "auto", "max_loss": 0.9}), "max_loss"),
    ],
)
def test_what_auto_cannot_do_is_refused(make, match):
    with pytest.raises((ValidationError, SettingsError), match=match):
        make()


def test_auto_needs_the_landing_at_the_update():
    module = Sums()
    with pytest.raises(SettingsError, match="landing must be update with codec auto, but got arrival"):
        Replica(module, make_sgd(module), group=LocalGroup(), sync=EveryStep(codec="auto"), landing="arrival")


def test_auto_refuses_complex_parameters_before_it_takes_a_codec_that_cannot_encode_them():
    module = torch.nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(SettingsError, match="parameters must be real for codec auto, but weight is torch"):
        Replica(module, make_sgd(module), group=LocalGroup(), sync=EveryStep(codec="auto"))


def test_alone_auto_is_every_step():
    module = Sums()
    replica = Replica(module, make_sgd(module), group=LocalGroup(), sync=EveryStep(codec="auto"))
    step_with(replica, 0)
    assert torch.equal(-flatten(module), inputs_of(0, 0).double())
    assert replica.state.take_codec_changes() == []
    replica.close()
