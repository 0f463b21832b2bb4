"""The cache on disk against a model: limits, several processes, and kills between any two calls of the file system."""

import os
import signal
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.data.storage import DiskCache

LIMIT = 10_000
KEYS = [f"{tag}{number:04d}" for tag in ("aaaaaaaa", "bbbbbbbb") for number in range(8)]
CALLS = ("open", "write", "rename", "unlink", "ftruncate", "close", "pread", "stat", "mkdir")


def content_of(key: str, size: int) -> bytes:
    return (key * (size // len(key) + 1)).encode()[:size]


def take_oldest(own):
    return next(iter(own), None)


def check(folder, caches):
    """What is there is whole, and no more than is allowed."""
    sizes = [entry.stat().st_size for path in (folder / "blocks").iterdir() for entry in os.scandir(path)]
    assert sum(sizes) <= LIMIT
    for cache in caches:
        for key in KEYS:
            block = cache.get(key)
            assert block is None or block == content_of(key, len(block))


def put_and_die(folder, key, size, num_calls):
    """Put a block in a process that is killed before one of its calls; return whether it was."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        left = [num_calls]

        def counted(call):
            def run(*arguments, **named):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **named)

            return run

        cache = DiskCache(folder, LIMIT, key[:8])
        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        cache.put(key, content_of(key, size), take_oldest)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


operation = st.tuples(
    st.sampled_from(["put", "put", "put", "get", "reopen"]),
    st.integers(0, 1),
    st.sampled_from(KEYS),
    st.integers(1, 4000),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(operation, max_size=40))
def test_two_caches_of_one_folder_keep_the_limit_and_give_what_was_put(tmp_path_factory, operations):
    folder = tmp_path_factory.mktemp("cache")
    tags = ["aaaaaaaa", "bbbbbbbb"]
    caches = [DiskCache(folder, LIMIT, tag) for tag in tags]
    for what, who, key, size in operations:
        if what == "put":
            is_kept = caches[who].put(key, content_of(key, size), take_oldest)
            if is_kept:
                assert caches[1 - who].get(key) is not None
        elif what == "reopen":
            caches[who].close()
            caches[who] = DiskCache(folder, LIMIT, tags[who])
        check(folder, caches)
    for cache in caches:
        assert cache.used_bytes <= LIMIT
        cache.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kills=st.lists(st.tuples(st.sampled_from(KEYS), st.integers(1, 6000), st.integers(0, 40)), min_size=1, max_size=6)
)
def test_killed_writers_leave_nothing_torn_and_no_room_taken(tmp_path_factory, kills):
    folder = tmp_path_factory.mktemp("cache")
    living = DiskCache(folder, LIMIT, "cccccccc")
    for key, size, num_calls in kills:
        put_and_die(folder, key, size, num_calls)
        check(folder, [living])
        assert living.put("cccccccc0", b"x" * 100, take_oldest)
    living.close()
    again = DiskCache(folder, LIMIT, "cccccccc")
    assert not list((folder / "parts").iterdir())
    found = sum(entry.stat().st_size for path in (folder / "blocks").iterdir() for entry in os.scandir(path))
    assert again.used_bytes == found
    again.close()


def test_a_put_is_killed_before_each_of_its_calls(tmp_path):
    """The same, with every call once, for a block that another one has to make room for."""
    num_killed = 0
    while True:
        folder = tmp_path / str(num_killed)
        old = DiskCache(folder, LIMIT, "aaaaaaaa")
        assert old.put(KEYS[0], content_of(KEYS[0], 6000), take_oldest)
        old.close()
        if not put_and_die(folder, KEYS[1], 7000, num_killed):
            break
        num_killed += 1
        again = DiskCache(folder, LIMIT, "aaaaaaaa")
        check(folder, [again])
        assert again.put(KEYS[2], content_of(KEYS[2], 5000), take_oldest)
        assert again.get(KEYS[2]) == content_of(KEYS[2], 5000)
        again.close()
    assert num_killed > 15


def test_a_torn_block_is_as_if_it_were_not_there(tmp_path):
    cache = DiskCache(tmp_path, LIMIT, "aaaaaaaa")
    assert cache.put(KEYS[0], b"x" * 1000, take_oldest)
    path = next((tmp_path / "blocks").rglob(KEYS[0]))
    path.write_bytes(path.read_bytes()[:-40])
    assert cache.get(KEYS[0]) is None
    assert cache.put(KEYS[0], b"x" * 1000, take_oldest)
    assert cache.get(KEYS[0]) == b"x" * 1000
    cache.close()


def test_who_is_gone_makes_room_before_those_who_read(tmp_path):
    gone, here = DiskCache(tmp_path, LIMIT, "aaaaaaaa"), DiskCache(tmp_path, LIMIT, "bbbbbbbb")
    for number in range(4):
        assert gone.put(KEYS[number], b"x" * 2000, take_oldest)
    gone.close()
    for number in range(8, 12):
        assert here.put(KEYS[number], b"y" * 2000, lambda own: None)
    assert [here.get(KEYS[number]) is not None for number in (0, 1, 2, 3, 8, 9, 10, 11)] == [False] * 4 + [True] * 4
    here.close()


def test_two_that_read_share_the_room(tmp_path):
    first, second = DiskCache(tmp_path, LIMIT, "aaaaaaaa"), DiskCache(tmp_path, LIMIT, "bbbbbbbb")
    for number in range(8):
        first.put(KEYS[number], b"x" * 1000, take_oldest)
    for number in range(8, 16):
        second.put(KEYS[number], b"y" * 1000, take_oldest)
    held = [sum(first.get(key) is not None for key in keys) for keys in (KEYS[:8], KEYS[8:])]
    assert held == [4, 5]
    first.close()
    second.close()


def test_a_cache_that_fails_warns_once(tmp_path):
    cache = DiskCache(tmp_path, LIMIT, "aaaaaaaa")
    (tmp_path / "journal").unlink()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not cache.put(KEYS[0], b"x", take_oldest)
        assert not cache.put(KEYS[0], b"x", take_oldest)
    assert len(caught) == 1
    assert cache.problem == "No such file or directory"
    with pytest.raises(AssertionError):
        DiskCache(tmp_path, LIMIT, "short")
    cache.close()
