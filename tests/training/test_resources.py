"""Warnings of memory and disk space, before they run out."""

from pathlib import Path

import pytest

from paceline.training.resources import ResourceWatch, find_memory

GIB = 2**30


class Host:
    """A host whose clock, memory and disk a test sets."""

    def __init__(self):
        self.now_s, self.memory, self.disk = 0.0, (8 * GIB, 16 * GIB), 100 * GIB
        self.watch = ResourceWatch(Path("runs/x"), lambda: self.now_s, lambda: self.memory, lambda _: self.disk)

    def look(self, checkpoint_bytes=GIB):
        self.now_s += 11
        return self.watch.look(checkpoint_bytes)


def test_plenty_is_not_worth_a_word():
    host = Host()
    assert host.look() == []
    host.disk = 2 * GIB
    assert host.look() == [], "room for two checkpoints is enough"


def test_a_disk_without_room_for_two_checkpoints_is_told_once_with_figures():
    host = Host()
    host.disk = 2 * GIB - 1
    (event,) = host.look()
    assert (event.resource, event.available_bytes, event.needed_bytes) == ("disk", 2 * GIB - 1, 2 * GIB)
    assert "runs/x has 2,048 MiB free, less than the 2,048 MiB for 2 checkpoints of 1,024 MiB" in event.message
    assert host.look() == [], "it has been said"
    host.disk = 3 * GIB - 1
    assert host.look() == []
    host.disk = 2 * GIB - 1
    assert host.look() == [], "it was never enough in between"
    host.disk = 3 * GIB
    assert host.look() == []
    host.disk = GIB
    assert len(host.look()) == 1


def test_memory_is_told_when_a_twentieth_is_left():
    host = Host()
    host.memory = (GIB, 16 * GIB)
    assert host.look() == []
    host.memory = (GIB // 2, 16 * GIB)
    (event,) = host.look()
    assert event.resource == "memory"
    assert "512 MiB of 16,384 MiB of memory are available" in event.message


def test_looks_are_rare():
    host = Host()
    host.disk = 0
    host.watch.look(0)
    host.memory = (0, GIB)
    assert host.watch.look(0) == []


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux says")
def test_this_host_has_memory():
    available, total = find_memory()
    assert 0 < available <= total
