import os
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.data.base import Data, Spec, Splits
from paceline.data.text import Text, TokenSource
from paceline.errors import DataError

SHAKESPEARE = Path(__file__).resolve().parents[2].parent / "shared/data/tinyshakespeare/input.txt"


def all_tokens(source: TokenSource) -> torch.Tensor:
    inputs, targets = source.read(np.arange(len(source)))
    return torch.cat([inputs.flatten(), targets[-1, -1:]])


def both_sides(splits: Splits) -> list[list[int]]:
    return [all_tokens(side).tolist() for side in (splits.train, splits.held_out)]


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def lines(count: int, start: int = 0) -> bytes:
    return b"".join(b"%07d\n" % number for number in range(start, start + count))


def test_a_file_is_cut_into_windows_that_share_no_token(tmp_path: Path) -> None:
    data = lines(100)
    splits = Text(path=write(tmp_path / "a.txt", data), sequence_length=16, held_out_fraction=0.25).open()
    assert splits.train.spec == splits.held_out.spec == Spec(num_classes=256, input_shape=(16,))
    train, held_out = both_sides(splits)
    assert bytes(train) == data[: len(train)]
    assert len(train) == (600 - 1) // 16 * 16 + 1
    assert bytes(held_out) == data[600 : 600 + len(held_out)]
    assert len(held_out) == (200 - 1) // 16 * 16 + 1


def test_targets_are_the_next_tokens_in_the_order_asked_for(tmp_path: Path) -> None:
    data = lines(100)
    source = Text(path=write(tmp_path / "a.txt", data), sequence_length=10).open().train
    inputs, targets = source.read(np.array([3, 0, 3]))
    assert inputs.dtype == targets.dtype == torch.int64
    assert bytes(inputs[0].tolist()) == data[30:40]
    assert bytes(targets[0].tolist()) == data[31:41]
    assert bytes(inputs[1].tolist()) == data[:10]
    assert torch.equal(inputs[0], inputs[2])
    one_input, one_target = source[3]
    assert torch.equal(one_input, inputs[0])
    assert torch.equal(one_target, targets[0])
    assert source.read(np.zeros(0, dtype=np.int64))[0].shape == (0, 10)


def test_bytes_need_not_be_utf8(tmp_path: Path) -> None:
    data = bytes(range(256)) * 8
    train, _ = both_sides(Text(path=write(tmp_path / "latin", data), sequence_length=8).open())
    assert bytes(train) == data[: len(train)]


def test_the_largest_held_out_fraction_leaves_a_window_to_train_on(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", lines(100))
    for fraction in (0.0001, 0.9999):
        splits = Text(path=path, sequence_length=100, held_out_fraction=fraction).open()
        assert min(len(splits.train), len(splits.held_out)) == 1


@pytest.mark.parametrize("dtype", ["uint8", "uint16", ">u2", "uint32", "int32", "int64"])
def test_token_files_of_numpy(tmp_path: Path, dtype: str) -> None:
    tokens = (np.arange(1000) * 7 % 250).astype(dtype)
    np.save(tmp_path / "tokens.npy", tokens)
    splits = Text(path=tmp_path / "tokens.npy", sequence_length=10, held_out_fraction=0.2).open()
    train, held_out = both_sides(splits)
    assert train == tokens[:791].tolist()
    assert held_out == tokens[800:991].tolist()


def test_token_files_of_uint16_with_a_large_vocabulary(tmp_path: Path) -> None:
    tokens = (np.arange(1000) * 61 % 50257).astype("<u2")
    path = write(tmp_path / "train.bin", tokens.tobytes())
    source = Text(path=path, sequence_length=10, vocab_size=50257).open().train
    assert source.spec.num_classes == 50257
    assert all_tokens(source).tolist() == tokens[:891].tolist()


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.array([1] * 50 + [300] + [1] * 50))
    source = Text(path=path, sequence_length=10).open().train
    source.read(np.array([0]))
    with pytest.raises(DataError, match=r"tokens\.npy must be .*got 300; set data\.vocab_size to 301"):
        source.read(np.array([0, 4]))
    np.save(path, np.array([-3] * 100))
    with pytest.raises(DataError, match="got -3; write the file again"):
        Text(path=path, sequence_length=10).open().train.read(np.array([0]))


def test_a_folder_is_split_by_whole_files(tmp_path: Path) -> None:
    files = [write(tmp_path / f"part{i // 4}" / f"{i}.md", lines(100, start=i * 100)) for i in range(20)]
    splits = Text(path=tmp_path, sequence_length=8, held_out_fraction=0.2).open()
    train, held_out = (bytes(side) for side in both_sides(splits))
    on_side = [[file for file in files if file.read_bytes()[:600] in side] for side in (train, held_out)]
    assert [len(side) for side in on_side] == [16, 4]
    assert sorted(on_side[0] + on_side[1]) == sorted(files)
    assert train[800:801] == held_out[800:801] == b"\n", "files are joined by a newline"
    assert both_sides(Text(path=tmp_path, sequence_length=8, held_out_fraction=0.2).open()) == [
        list(train),
        list(held_out),
    ]


def test_files_are_assigned_by_their_names_below_the_folder(tmp_path: Path) -> None:
    for folder, order in (("a", range(10)), ("b", reversed(range(10)))):
        for i in order:
            write(tmp_path / folder / f"{i}.txt", lines(50, start=i * 50))
    one, other = (both_sides(Text(path=tmp_path / folder, sequence_length=8).open()) for folder in ("a", "b"))
    assert one == other


def test_only_text_of_a_folder_is_used_and_each_file_once(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", b"a" * 500)
    write(tmp_path / "b.txt", b"b" * 500)
    write(tmp_path / "empty.txt", b"")
    write(tmp_path / "image.png", b"\x89PNG\0" + b"i" * 500)
    write(tmp_path / ".hidden", b"h" * 500)
    write(tmp_path / ".git" / "config", b"g" * 500)
    (tmp_path / "again.txt").symlink_to("a.txt")
    (tmp_path / "broken.txt").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    sides = both_sides(Text(path=tmp_path, sequence_length=8).open())
    assert sorted(sorted({*map(chr, side)}) for side in sides) == [["a"], ["b"]]


def test_a_folder_of_one_file_is_split_inside_it(tmp_path: Path) -> None:
    data = lines(100)
    write(tmp_path / "folder" / "only.txt", data)
    write(tmp_path / "file.txt", data)
    folder, file = (Text(path=tmp_path / name, sequence_length=8).open() for name in ("folder", "file.txt"))
    assert both_sides(folder) == both_sides(file)


def test_a_file_too_short_for_a_window_is_not_all_that_is_held_out(tmp_path: Path) -> None:
    write(tmp_path / "long.txt", b"l" * 2000)
    write(tmp_path / "middle.txt", b"m" * 1000)
    write(tmp_path / "short.txt", b"s" * 20)
    splits = Text(path=tmp_path, sequence_length=100).open()
    assert len(splits.held_out) >= 1
    assert set(both_sides(splits)[0]) == {ord("l")}


def test_max_bytes_limits_files_and_folders(tmp_path: Path) -> None:
    path = write(tmp_path / "folder" / "a.txt", lines(100))
    for i in range(10):
        write(tmp_path / "folder" / f"{i}.txt", lines(100))
    np.save(tmp_path / "tokens.npy", np.ones(1000, dtype=np.int32))
    for source in (path, tmp_path / "folder", tmp_path / "tokens.npy"):
        splits = Text(path=source, sequence_length=1, max_bytes=400).open()
        num_tokens = 100 if source.suffix == ".npy" else 400
        assert num_tokens - 2 <= len(splits.train) + len(splits.held_out) < num_tokens


def test_the_default_is_the_standard_library() -> None:
    splits = Text().open()
    sides = [all_tokens(side).to(torch.uint8).numpy().tobytes() for side in (splits.train, splits.held_out)]
    assert 0.09 < len(sides[1]) / sum(map(len, sides)) < 0.1001
    stdlib = Path(sysconfig.get_path("stdlib"))
    modules = [(stdlib / name).read_bytes()[:3000] for name in ("argparse.py", "asyncio/events.py", "json/decoder.py")]
    assert all(any(module in side for side in sides) for module in modules)
    assert not any((stdlib / "encodings/aliases.py").read_bytes()[:3000] in side for side in sides)


def test_the_default_leaves_out_tests_and_packages_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.py", "b.py", "c.txt", "test/d.py", "site-packages/e.py", "x/__pycache__/f.pyc", "x/g.py"):
        write(tmp_path / name, Path(name).stem.encode() * 500)
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    train, held_out = both_sides(Text(sequence_length=8).open())
    assert {*map(chr, train + held_out)} == {"a", "b", "g", "\n"}


def test_a_source_can_be_read_by_threads(tmp_path: Path) -> None:
    source = Text(path=write(tmp_path / "a.txt", lines(10_000)), sequence_length=32).open().train
    expected = source.read(np.arange(len(source)))
    results: list[bool] = []

    def read() -> None:
        results.extend(torch.equal(source.read(np.array([i]))[0][0], expected[0][i]) for i in range(200))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 800


def save(array: np.ndarray) -> Callable[[Path], None]:
    return lambda path: np.save(path, array)


def truncated(path: Path) -> None:
    np.save(path, np.arange(1000))
    path.write_bytes(path.read_bytes()[:1000])


def unclosed(path: Path) -> None:
    np.save(path, np.arange(1000))
    path.write_bytes(path.read_bytes().replace(b"}", b"{"))


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("missing.txt", lambda path: None, "missing.txt must be readable, but got: No such file"),
        (
            "a.txt",
            lambda path: path.write_bytes(b""),
            "a.txt must hold text or tokens, but got an empty file",
        ),
        ("a.txt", lambda path: path.write_bytes(b"x" * 19), r"2 \* .* = 20 tokens.* but got 19"),
        ("folder", lambda path: path.mkdir(), "must hold text files, but got none"),
        ("folder", lambda path: write(path / "a.bin", b"\0" * 99), "must hold text files, but got none"),
        ("a.npy", save(np.ones(99)), "but got 1 dims of float64"),
        ("a.npy", save(np.ones((9, 9), dtype=np.int64)), "but got 2 dims of int64"),
        ("a.npy", save(np.array([{}] * 99)), "must be a whole NumPy array file"),
        ("a.npy", save(np.ones(0, dtype=np.int64)), "a.npy must .* but got"),
        ("a.npy", truncated, "must be a whole NumPy array file"),
        ("a.npy", lambda path: path.write_bytes(b"PK\x03\x04 no array"), "must be a whole NumPy array file"),
        ("a.npy", unclosed, "must be a whole NumPy array file"),
        ("a.bin", lambda path: path.write_bytes(b"x" * 99), "but got 99 bytes, an odd number"),
    ],
)
def test_data_that_cannot_be_used_is_refused_when_opened(
    tmp_path: Path, name: str, make: Callable[[Path], object], message: str
) -> None:
    make(tmp_path / name)
    with pytest.raises(DataError, match=message):
        Text(path=tmp_path / name, sequence_length=9).open()


def test_a_folder_too_short_for_a_window_a_side_says_which(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", b"a" * 500)
    write(tmp_path / "b.txt", b"b" * 20)
    with pytest.raises(
        DataError, match=r"held-out part of .* at least data.sequence_length \+ 1 = 129 bytes, but got 20"
    ):
        Text(path=tmp_path).open()


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.txt", b"a" * 500)
    secret = write(tmp_path / "secret.txt", b"b" * 500)
    original = Path.open

    def refuse(self: Path, *args: object, **kwargs: object) -> object:
        if self == secret:
            raise PermissionError(13, "Permission denied", str(self))
        return original(self, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse)  # root, who may run these tests, reads every file
    with pytest.raises(DataError, match=r"secret\.txt must be readable, but got: Permission denied"):
        Text(path=tmp_path).open()


def test_settings_come_from_a_name_and_fields() -> None:
    text = Data.model_validate({"name": "text", "path": "x.txt", "sequence_length": 5})
    assert text == Text(path=Path("x.txt"), sequence_length=5)
    for bad in ({"sequence_length": 0}, {"held_out_fraction": 1.0}, {"vocab_size": 0}, {"max_bytes": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Text.model_validate(bad)


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason=f"needs {SHAKESPEARE}")
def test_a_real_text() -> None:
    splits = Text(path=SHAKESPEARE).open()
    assert len(splits.train) == (1_115_394 - 111_539 - 1) // 128
    assert bytes(splits.train[0][0].tolist()).startswith(b"First Citizen:")
