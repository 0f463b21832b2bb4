"""Tensors on their way between ranks: some are under way at once, and each arrives where it is wanted."""

import pytest
import torch

from paceline.comm import LocalGroup
from paceline.replica import gathering
from paceline.replica.gathering import Slice, gather, scatter, trade

TENSORS = {f"t{number:02d}": torch.arange(float(number * 3)).reshape(number, 3) + number for number in range(12)}
SLICES = {name: Slice.of_whole(tensor.shape, tensor.dtype) for name, tensor in TENSORS.items()}


@pytest.mark.parametrize("limit", [1, 200, 1 << 30])
def test_each_tensor_arrives_whatever_is_under_way(monkeypatch, limit):
    monkeypatch.setattr(gathering, "_UNDER_WAY_BYTES", limit)

    def work(group):
        mine = {name: tensor for place, (name, tensor) in enumerate(TENSORS.items()) if place % 3 == group.rank}
        gathered = gather(mine, group)
        wanted = SLICES if group.rank == 1 else {name: SLICES[name] for name in list(SLICES)[group.rank :: 2]}
        scattered = dict(scatter(wanted, TENSORS.__getitem__ if group.rank == 0 else None, group))
        held = {name: (SLICES[name], tensor) for name, tensor in mine.items()}
        traded = {name: (tensor, source) for name, tensor, source in trade(wanted, held, group)}
        return gathered, scattered, traded, list(wanted)

    results = LocalGroup.run(3, work)
    places = list(TENSORS)
    for rank, (gathered, scattered, traded, wanted) in enumerate(results):
        assert sorted(gathered) == (places if rank == 0 else [])
        assert sorted(scattered) == sorted(traded) == sorted(wanted)
        for name in wanted:
            assert torch.equal(scattered[name], TENSORS[name])
            assert torch.equal(traded[name][0], TENSORS[name])
            assert traded[name][1] == places.index(name) % 3
        assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in gathered.items())


def test_messages_are_begun_before_those_before_them_have_ended(monkeypatch):
    begun_and_waited = []

    def work(group):
        if group.rank == 0:
            send, wait_for = group.send, group.wait_for
            monkeypatch.setattr(group, "send", lambda *a, **k: begun_and_waited.append("send") or send(*a, **k))
            monkeypatch.setattr(group, "wait_for", lambda works: begun_and_waited.append("wait") or wait_for(works))
        return dict(scatter(SLICES if group.rank else {}, TENSORS.__getitem__ if group.rank == 0 else None, group))

    assert len(LocalGroup.run(2, work)[1]) == len(TENSORS)
    assert begun_and_waited == ["send"] * 11 + ["wait"], "one without elements is not sent"
