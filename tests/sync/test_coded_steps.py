"""Coded steps: local SGD with a period of 1, with the same bits on every worker."""

import math
from functools import partial
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from stepping import ForeignAdamW, flatten, make_linear, make_samples, make_sgd, run_step, train
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.comm import LocalGroup
from paceline.errors import GradientError, NonFiniteError, SettingsError
from paceline.optim.adam_change import replace_by_changes
from paceline.replica import coded_steps
from paceline.replica.replica import Replica
from paceline.replica.step_length import StepLength
from paceline.sync import EveryStep, LocalSGD
from paceline.sync.reducer import FlatBucket
from paceline.testing.rule_contract import check_rule

CODECS = {
    "none": {"name": "none"},
    "one_bit": {"name": "one_bit", "dense_below": 0},
    "top_k": {"name": "top_k", "density": 0.3, "dense_below": 0},
    "power_sgd": {"name": "power_sgd", "low_rank": 1, "dense_below": 0},
}


def uneven(rank, step):
    return float((3 * rank + step) % 4)


def make_adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=0.05, betas=(0.9, 0.95), fused=True)


def make_wrapped_adamw(module):
    """Return an optimizer whose step somebody wrapped, so that each is made and taken back."""
    optimizer = make_adamw(module)
    step = optimizer.step
    optimizer.step = MethodType(lambda self: step(), optimizer)
    return optimizer


def make_rmsprop(module):
    return torch.optim.RMSprop(module.parameters(), lr=0.05)


def make_adagrad(module):
    return torch.optim.Adagrad(module.parameters(), lr=0.05)


def make_adadelta(module):
    return torch.optim.Adadelta(module.parameters(), lr=0.05)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("make_optimizer", [make_adamw, partial(make_sgd, momentum=0.9)])
def test_it_is_local_sgd_with_a_period_of_one(codec, make_optimizer):
    ours = train(
        3,
        EveryStep(codec=CODECS[codec], codec_of="step", step_beta1=None, step_length="own"),
        8,
        uneven,
        make_optimizer,
    )
    reference = train(
        3, LocalSGD(codec=CODECS[codec], period=1, local_beta1=None, scale_rate=False), 8, uneven, make_optimizer
    )
    assert torch.equal(ours[0], ours[1])
    torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_steps_of_adam_are_computed_without_changing_parameters_with_the_same_results(clip_norm, monkeypatch):
    """Also beside a scheduler of torch, which wraps `step`."""
    done = []

    def replace_and_note(*args):
        done.append(replace_by_changes(*args))
        return done[-1]

    monkeypatch.setattr(coded_steps, "replace_by_changes", replace_and_note)

    def work(group, make_optimizer):
        module = make_linear(dtype=torch.float32)
        optimizer = make_optimizer(module)
        sync = EveryStep(codec=CODECS["one_bit"], codec_of="step")
        replica = Replica(module, optimizer, group=group, sync=sync, clip_norm=clip_norm)
        run_step(replica, 0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        for step in range(1, 6):
            run_step(replica, step, weight=1.0 + group.rank)
            scheduler.step()
        replica.close()
        return flatten(module)

    ours = LocalGroup.run(2, partial(work, make_optimizer=make_adamw))
    assert done == [False] * 2 + [True] * 10, "the first steps make the moments"
    assert torch.equal(*ours)
    reference = LocalGroup.run(2, partial(work, make_optimizer=make_wrapped_adamw))
    assert not any(done[12:])
    torch.testing.assert_close(ours[0], reference[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_a_codec_and_with_sgd_it_is_every_step(momentum):
    def weigh(rank, step):
        return 1.0 + rank

    ours = train(3, EveryStep(codec_of="step"), 8, weigh, partial(make_sgd, momentum=momentum))
    reference = train(3, EveryStep(), 8, weigh, partial(make_sgd, momentum=momentum))
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)


class AdamWOfSomebodyElse(torch.optim.AdamW):
    """It is not known to step with each parameter separately."""


class TwoBranches(torch.nn.Module):
    """A tied weight, and a branch that only odd ranks use, in odd steps."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second, self.tail = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)
        self.second.weight = self.first.weight
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, inputs, uses_tail):
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs))))
        return self.tail(hidden) if uses_tail else hidden[:, :2]


def train_branches(sync, optimizer_class, clip_norm, bucket_bytes=8):
    """Return each worker's parameters after some steps of two micro-batches each."""

    def work(group):
        module = TwoBranches()
        optimizer = optimizer_class(module.parameters(), lr=0.05)
        replica = Replica(
            module, optimizer, group=group, sync=sync, clip_norm=clip_norm, bucket_bytes=bucket_bytes, hash_interval=1
        )
        norms = []
        for step in range(6):
            uses_tail = (group.rank + step) % 2 == 1
            for last in (False, True):
                inputs, targets = make_samples(group.rank, 2 * step + last, torch.float32)
                replica.backward(F.mse_loss(replica(inputs, uses_tail), targets), weight=1.0 + group.rank, last=last)
            norms.append(replica.update().gradient_norm)
        replica.close()
        return flatten(module), norms

    return LocalGroup.run(2, work)


@pytest.mark.filterwarnings("ignore::paceline.replica.step_result.UnusedParametersWarning")
@pytest.mark.parametrize("clip_norm", [None, 0.3])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, AdamWOfSomebodyElse])
def test_micro_batches_branches_ties_and_clipping_are_those_of_local_sgd(optimizer, clip_norm):
    codec = {"name": "one_bit", "dense_below": 0}
    ours = train_branches(
        EveryStep(codec=codec, codec_of="step", step_beta1=None, step_length="own"), optimizer, clip_norm
    )
    reference = train_branches(
        LocalSGD(codec=codec, period=1, local_beta1=None, scale_rate=False), optimizer, clip_norm
    )
    for (mine, norms), (theirs, their_norms) in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        assert norms == pytest.approx(their_norms) if clip_norm else norms == [None] * 6


def test_steps_are_made_while_backward_runs_unless_gradients_are_clipped():
    def work(group, clip_norm):
        module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
        sync = EveryStep(codec_of="step")
        replica = Replica(module, optimizer, group=group, sync=sync, clip_norm=clip_norm, bucket_bytes=1)
        stepped = []
        step_once = optimizer.step

        def step_and_note():
            step_once()
            stepped.append(module[0].bias.grad is not None)

        optimizer.step = step_and_note  # a hook would make it one step after backward
        for step in range(3):
            stepped.clear()
            run_step(replica, step)
        replica.close()
        return stepped

    assert False in LocalGroup.run(2, partial(work, clip_norm=None))[0], "the last layer is first"
    assert all(LocalGroup.run(2, partial(work, clip_norm=1.0))[0])


@pytest.mark.parametrize("is_global", [False, True])
def test_hooks_of_the_optimizer_run_once_a_step_and_may_change_parameters(is_global):
    """One that changed parameters failed in backward, which it ran in the midst of."""

    def work(group):
        module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        calls = []

        @torch.no_grad()
        def clamp(stepped, *_):
            if stepped is optimizer:
                calls.append(1)
                for parameter in module.parameters():
                    parameter.clamp_(-0.05, 0.05)

        register = register_optimizer_step_post_hook if is_global else optimizer.register_step_post_hook
        hook = register(clamp)
        replica = Replica(module, optimizer, group=group, sync=EveryStep(codec_of="step"), bucket_bytes=1)
        for step in range(3):
            run_step(replica, step)
        hook.remove()
        replica.close()
        return len(calls), float(flatten(module).abs().max())

    for num_calls, largest in LocalGroup.run(2, work):
        assert num_calls == 3
        assert largest == pytest.approx(0.05)


def test_beta1_is_bounded_where_steps_are_coded_and_left_alone_else():
    bounded, as_given = (
        train(2, EveryStep(codec_of="step", step_beta1=bound), 4, make_optimizer=make_adamw) for bound in (0.5, None)
    )

    def make_slower(module):
        return torch.optim.AdamW(module.parameters(), lr=0.05, betas=(0.5, 0.95), fused=True)

    assert torch.equal(bounded, train(2, EveryStep(codec_of="step", step_beta1=None), 4, make_optimizer=make_slower))
    assert not torch.equal(bounded, as_given)
    alone = train(1, EveryStep(codec_of="step"), 4, make_optimizer=make_adamw)
    assert torch.equal(alone, train(1, EveryStep(), 4, make_optimizer=make_adamw))


@pytest.mark.parametrize(
    ("codec", "dense_steps"),
    [
        *(("none", 0), ("one_bit", 5), ("top_k", 0), ("power_sgd", 5)),
        *(
            pytest.param(codec, dense_steps, marks=[pytest.mark.slow, pytest.mark.campaign])
            for codec, dense_steps in (("none", 5), ("one_bit", 0), ("top_k", 5), ("power_sgd", 0))
        ),
    ],
)
def test_it_keeps_the_contract_of_rules(codec, dense_steps):
    """Also that a run killed before its codec begins, or after, goes on bit for bit."""
    check_rule(EveryStep(codec=CODECS[codec], codec_of="step", dense_steps=dense_steps))


@pytest.mark.parametrize(
    ("codec", "make_optimizer", "chosen"),
    [
        ("one_bit", make_adamw, "step"),
        ("top_k", make_adamw, "step"),
        ("power_sgd", make_adamw, "step"),
        ("random_k", make_adamw, "step"),
        ("one_bit", make_rmsprop, "step"),
        ("top_k", make_adagrad, "step"),
        ("top_k", make_adadelta, "step"),
        ("int8", make_rmsprop, "gradient"),
        ("one_bit", make_sgd, "gradient"),
        ("int8", make_adamw, "gradient"),
        ("bf16", make_adamw, "gradient"),
        ("none", make_adamw, "gradient"),
    ],
)
def test_what_is_coded_follows_codec_and_optimizer(codec, make_optimizer, chosen):
    module = make_linear()
    replica = Replica(module, make_optimizer(module), group=LocalGroup(), sync=EveryStep(codec=codec))
    assert replica.sync.codec_of == chosen


@pytest.mark.parametrize(
    ("settings", "dtype", "message"),
    [
        ({"precision": "fp16"}, torch.float32, "codec_of must be gradient, but got step with fp16"),
        ({"landing": "arrival"}, torch.float32, "codec_of must be gradient, but got step with landing arrival"),
        ({}, torch.bfloat16, "codec_of must be gradient, but got step with parameters of less than 32 bits"),
    ],
)
def test_what_cannot_step_before_the_exchange_is_refused_or_codes_gradients(settings, dtype, message):
    module = make_linear(dtype=dtype)
    with pytest.raises(SettingsError, match=message):
        Replica(module, make_adamw(module), group=LocalGroup(), sync=EveryStep(codec_of="step"), **settings)
    replica = Replica(module, make_adamw(module), group=LocalGroup(), sync=EveryStep(codec="one_bit"), **settings)
    assert replica.sync.codec_of == "gradient"


def test_a_codec_that_carries_momentum_is_refused():
    with pytest.raises(ValidationError, match="codec_of must be gradient with a codec that carries momentum"):
        EveryStep(codec="dgc", codec_of="step")


@pytest.mark.parametrize("make_optimizer", [make_adamw, make_rmsprop, lambda m: AdamWOfSomebodyElse(m.parameters())])
@pytest.mark.parametrize(("clip_norm", "factor"), [(None, math.nan), (1.0, math.nan), (1.0, 1e30)])
def test_what_is_not_finite_leaves_parameters_and_optimizer_as_they_are(make_optimizer, clip_norm, factor):
    """All workers are told at the update, also where the norm of one is too large, and the next step can be made."""

    def work(group):
        module = make_linear(dtype=torch.float32)
        before = flatten(module)
        sync = EveryStep(codec="one_bit")
        replica = Replica(module, make_optimizer(module), group=group, sync=sync, clip_norm=clip_norm)
        hook = module.bias.register_hook(lambda gradient: gradient * factor if group.rank else gradient)
        with pytest.raises(NonFiniteError, match=r"at step 0 .* on 1 of 2 ranks"):
            run_step(replica, 0)
        assert torch.equal(flatten(module), before)
        kept = [torch.as_tensor(value) for state in replica.optimizer.state.values() for value in state.values()]
        assert all(bool(value.isfinite().all()) for value in kept)
        hook.remove()
        run_step(replica, 0)
        replica.close()
        assert flatten(module).isfinite().all()
        assert not torch.equal(flatten(module), before)

    LocalGroup.run(2, work)


def test_the_optimizer_must_be_stepped_by_nothing_else():
    def work(group):
        module = make_linear(dtype=torch.float32)
        replica = Replica(module, make_adamw(module), group=group, sync=EveryStep(codec="one_bit"))
        run_step(replica, 0)
        with pytest.raises(GradientError, match=r"optimizer.step\(\) must be left to replica.update"):
            replica.optimizer.step()
        replica.close()

    LocalGroup.run(2, work)


class OneElementEach(torch.nn.Module):
    """Gradient 1 of one element, another on each of two workers: the mean gradient is shorter by sqrt(2)."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def forward(self, rank):
        return self.weight[rank]


def train_elements(codec, make_optimizer, seen, *, clip_norm=None, num_steps=6, stop=0, add_hook=False):
    """Return the changes of the parameters, step by step, of two workers; `seen` maps a rank to its element.

    After `stop` steps workers are made anew and loaded with what was saved.
    """

    def work(group):
        module = OneElementEach()
        optimizer = make_optimizer(module)
        if add_hook:
            optimizer.register_step_post_hook(lambda *_: None)
        make = partial(Replica, group=group, sync=EveryStep(codec=codec, codec_of="step"), clip_norm=clip_norm)
        replica = make(module, optimizer)
        held = [flatten(module)]
        for step in range(num_steps):
            if stop and step == stop:
                saved = module.state_dict(), optimizer.state_dict(), replica.state_dict()
                replica.close()
                module = OneElementEach()
                optimizer = make_optimizer(module)
                replica = make(module, optimizer)
                for part, state in zip((module, optimizer, replica), saved, strict=True):
                    part.load_state_dict(state)
            replica.backward(replica(seen[group.rank]), weight=1.0)
            replica.update()
            held.append(flatten(module))
        replica.close()
        return -torch.stack(held).diff(dim=0)

    return torch.stack(LocalGroup.run(2, work))


def make_adam(module):
    return torch.optim.Adam(module.parameters(), lr=0.01)


@pytest.mark.parametrize("clip_norm", [None, 2.0])
@pytest.mark.parametrize("codec", ["none", "one_bit"])
def test_steps_of_workers_that_see_noise_are_as_long_as_synchronous_ones(codec, clip_norm):
    """Both factors are exact: each draw sees the ratio 2, and without noise it is 1. No gradient is clipped."""
    apart = train_elements(codec, make_adam, [0, 1], clip_norm=clip_norm)
    assert torch.equal(apart[0], apart[1])
    torch.testing.assert_close(apart[0, 0], torch.full((2,), 0.005), msg="nothing is measured before the first step")
    torch.testing.assert_close(apart[0, 1:], torch.full((5, 2), 0.005 * 2**0.5))
    alike = train_elements(codec, make_adam, [0, 0], clip_norm=clip_norm)
    torch.testing.assert_close(alike[0, :, 0], torch.full((6,), 0.01))


@pytest.mark.parametrize(
    ("make_optimizer", "add_hook", "length"),
    [(make_adam, True, 0.005), (partial(make_sgd, momentum=0.0), False, 0.025)],
)
def test_steps_keep_their_length_where_hooks_may_bound_parameters_and_without_adaptivity(
    make_optimizer, add_hook, length
):
    changes = train_elements("none", make_optimizer, [0, 1], add_hook=add_hook)
    torch.testing.assert_close(changes, torch.full((2, 6, 2), length))


@pytest.mark.parametrize(
    ("flags", "factor", "num_told"),
    [({}, 1.0, 1), ({"decoupled_weight_decay": True}, 2**0.5, 0)],
    ids=["unknown", "told"],
)
def test_steps_of_an_optimizer_of_somebody_else_are_lengthened_only_where_its_decay_is_known(
    flags, factor, num_told, recwarn
):
    changes = train_elements("none", lambda m: ForeignAdamW(m.parameters(), 0.01, **flags), [0, 1])
    torch.testing.assert_close(changes[0, 1:], torch.full((5, 2), 0.005 * factor))
    assert ["ForeignAdamW keep their own length" in str(each.message) for each in recwarn] == [True] * num_told


def test_the_length_of_steps_goes_on_from_a_saved_state():
    whole = train_elements("one_bit", make_adam, [0, 1])
    assert torch.equal(whole, train_elements("one_bit", make_adam, [0, 1], stop=3))


def test_the_length_of_steps_is_that_of_signal_and_noise_and_is_counted_in_bytes():
    """Gradients are 1 with noise of variance 9: own ones have the mean square 10, means of three 1 + 9 / 3."""
    parameters = {"matrix": torch.zeros(300, 400), "bias": torch.zeros(300)}

    def work(group):
        length = StepLength(group, parameters, seed=1)
        generator = torch.Generator().manual_seed(group.rank)
        for step in range(200):
            buffer = 1 + 3 * torch.randn(300 * 401 + 2, generator=generator)
            blocks = dict(zip(parameters, buffer[:-2].split([300 * 400, 300]), strict=True))
            length.begin(step)
            length.read(FlatBucket("all", buffer, blocks))
            length.send(1.0)
            length.receive(3.0)
            length.commit()
        return length.factor, length.wire_bytes

    for factor, wire_bytes in LocalGroup.run(3, work):
        assert factor == pytest.approx((10 / 4) ** 0.5, rel=0.05)  # 1,300 elements weigh in the mean: 4% of a square
        assert wire_bytes == round(2 * 2 / 3 * 4 * (64 + 1 + 1))


def test_a_step_that_fails_is_not_measured():
    """Most draws miss the one element that is not finite."""

    def work(group):
        module = make_linear(dtype=torch.float32)
        replica = Replica(module, make_adam(module), group=group, sync=EveryStep(codec="one_bit"))
        run_step(replica, 0)
        before = replica.state_dict()["document"]["landing"]
        spoiled = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, float("inf")]])
        hook = module.weight.register_hook(lambda gradient: gradient * spoiled)
        with pytest.raises(NonFiniteError):
            run_step(replica, 1)
        hook.remove()
        assert before["mean"] > 0
        assert replica.state_dict()["document"]["landing"] == before
        replica.close()

    LocalGroup.run(2, work)


def test_a_worker_clips_its_own_gradient_at_a_bound_that_allows_for_its_noise():
    """The optimizer sees gradients of 1 clipped at 0.5, and at 0.5 sqrt(2) once noise has been measured."""
    seen = []

    class Seeing(torch.optim.Adam):
        def step(self, closure=None):
            seen.append(max(float(p.grad.abs().max()) for group in self.param_groups for p in group["params"]))
            return super().step(closure)

    train_elements("none", lambda m: Seeing(m.parameters(), lr=0.01), [0, 1], clip_norm=0.5, num_steps=3)
    assert sorted(seen) == pytest.approx([0.5] * 2 + [0.5 * 2**0.5] * 4, rel=1e-5)


def test_the_length_of_steps_is_measured_on_gradients_that_have_been_clipped():
    """As docs/communication.md says: gradients of 1 are 0.5 for each optimizer, and of the mean each has half."""

    def work(group):
        module = OneElementEach()
        replica = Replica(
            module, make_adam(module), group=group, sync=EveryStep(codec="none", codec_of="step"), clip_norm=0.5
        )
        replica.backward(replica(group.rank), weight=1.0)
        replica.update()
        measured = replica.state_dict()["document"]["landing"]
        replica.close()
        return measured

    for measured in LocalGroup.run(2, work):
        assert (measured["noisy"] / measured["mean"], measured["noisy"]) == pytest.approx((2.0, 0.25), rel=1e-5)
