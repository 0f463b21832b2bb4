"""Sizes of micro-batches are known before they are read."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from paceline.comm import LocalGroup
from paceline.data import Loader
from paceline.sync.sample_dispatcher import ClaimAnswer, SampleAssignments

always = settings(deadline=None, derandomize=True, max_examples=150)
tails = st.sampled_from([{}, {"drop_last": True}, {"join_epochs": True}])


@st.composite
def loader_settings(draw, *, is_asynchronous=False):
    num_workers = draw(st.integers(1, 4))
    num_samples = draw(st.integers(6, 30))
    batches = st.integers(num_workers, 6)
    options = {"global_batch": draw(batches), "num_micro_batches": draw(st.integers(1, 3)), **draw(tails)}
    if not is_asynchronous:
        options["shares"] = draw(st.none() | st.permutations([1.0, 0.0, 2.0, 3.0][:num_workers]))
        changes = st.lists(st.tuples(st.integers(1, 9), batches), max_size=2, unique_by=lambda pair: pair[0])
        options["changes"] = sorted(draw(changes))
        options["adds_micro_batches"] = draw(st.booleans())
    return num_workers, num_samples, options


def make_loaders(num_workers, num_samples, options):
    dataset = TensorDataset(torch.arange(num_samples))
    return [Loader(dataset, group=group, **options) for group in LocalGroup.create(num_workers)]


@always
@example(given_settings=(1, 6, {"global_batch": 4, "drop_last": True, "changes": [(1, 1)]}), num_steps=2, resumed=0)
@given(given_settings=loader_settings(), num_steps=st.integers(1, 16), resumed=st.integers(0, 12))
def test_sizes_are_those_that_are_read(given_settings, num_steps, resumed):
    num_workers, num_samples, options = given_settings
    loaders = make_loaders(num_workers, num_samples, options | {"num_steps": num_steps})
    own, joint = set(), set()
    expected = loaders[0].list_sizes([num_steps])
    state = None
    for batches in zip(*loaders, strict=True):
        own.update(batch.num_samples for batch in batches)
        joint.add(sum(batch.num_samples for batch in batches))
        if batches[0].last and loaders[0]._batches.step_of(batches[0].interval.start) + 1 == resumed:
            loaders[0].ack(batches[0])
            state, own_before, joint_before = loaders[0].state_dict(), own, joint
            own, joint = set(), set()
    if state is None:
        assert expected == (own - {0}, joint - {0})
        return
    assert expected == ((own | own_before) - {0}, (joint | joint_before) - {0})
    if resumed < num_steps:
        late = make_loaders(num_workers, num_samples, options)[0]
        late.load_state_dict(state)
        late.load_batches(state)
        assert late.list_sizes([num_steps]) == (own - {0}, joint - {0})


class Alone:
    """A dispatcher that one worker claims from, who acknowledges at once."""

    def __init__(self, loader):
        self.assignments = SampleAssignments()
        self.assignments.claim_next, self.assignments.mark_used = loader.claim_next, loader.mark_used

    def walk(self, loader, boundary, claim_size):
        self.assignments.set_boundary(boundary)
        while (claimed := self.assignments.claim(0, claim_size, boundary))[0] == ClaimAnswer.TAKE:
            yield claimed[1][1] - claimed[1][0]
            self.assignments.ack(0, claimed[1], is_used=True)
        loader.set_used([(0, loader.position)])


@always
@example(given_settings=(2, 20, {"global_batch": 7, "drop_last": True}), boundaries=[1])
@given(
    given_settings=loader_settings(is_asynchronous=True),
    boundaries=st.lists(st.integers(1, 16), min_size=1, max_size=4, unique=True).map(sorted),
)
def test_sizes_at_ones_own_pace_are_those_that_are_claimed(given_settings, boundaries):
    num_workers, num_samples, options = given_settings
    loader = make_loaders(num_workers, num_samples, options)[0]
    expected = loader.list_sizes(boundaries, is_asynchronous=True)
    dispatcher, sizes = Alone(loader), set()
    for step in boundaries:
        boundary = loader.order.position_of(step, options["global_batch"])
        for share in dispatcher.walk(loader, boundary, loader._reader.claim_size):
            sizes.update(loader._micro_batches.divide(share, 0))
    assert expected == (sizes - {0}, sizes - {0})


def test_a_claim_before_another_boundary_than_the_dispatchers_waits():
    assignments = SampleAssignments()
    assignments.set_boundary(8)
    assert assignments.claim(0, 4, 8) == (ClaimAnswer.WAIT, (0, 0)), "it has no source yet"
    assignments.claim_next = lambda number: (0, number)
    assert assignments.claim(0, 4, 16) == (ClaimAnswer.WAIT, (0, 0))
    assert assignments.claim(0, 4, 8) == (ClaimAnswer.TAKE, (0, 4))
