"""A worker's connection to the coordinator, where what it does in two threads meets."""

import json
from dataclasses import asdict

import torch.distributed as dist

from paceline.elastic import StoreMember
from paceline.elastic.facts import View


class BeatsMeanwhile(StoreMember):
    """A member whose beat looks for changes just before it has entered an epoch."""

    def _say(self, **changes):
        if changes.get("phase") == "opening":
            self._look_for_change()
        super()._say(**changes)


def test_a_change_of_the_epoch_before_is_none_of_the_next_one():
    store = dist.HashStore()
    control, member = dist.PrefixStore("control", store), BeatsMeanwhile(lambda: store, "w0")
    for epoch in (0, 1):
        view = View(epoch, 0, 1, ("w0",), (None,), 3, "")
        control.set("view", json.dumps(asdict(view)))
        assert member.next_view(5).epoch == epoch
        assert not member.change_is_pending()
        control.set("change", json.dumps({"epoch": epoch, "is_broken": True}))
    member._look_for_change()
    assert member.change_is_pending()
    member.close()
