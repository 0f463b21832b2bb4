"""Conversion of data: balanced shards, equal bytes at any number of processes, and going on after a kill."""

import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from file_samples import KINDS, draw_image, make_images, write_shards
from hypothesis import given
from hypothesis import strategies as st

from paceline.data import FileSource
from paceline.data.formats import FORMATS
from paceline.data.formats import prepare as prepare_module
from paceline.data.formats.check import check_data
from paceline.data.formats.prepare import plan_shards, prepare
from paceline.data.formats.source import NoIndexWarning
from paceline.data.storage import LocalStorage
from paceline.errors import DataError, SettingsError

WRITTEN = sorted(FORMATS.keys() - {"tokens", "text"})


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "PART_SAMPLES", 16)
    return write_shards(tmp_path / "in", "tar", make_images(60), num_shards=3)


def test_one_shard_of_one_sample(tmp_path):
    write_shards(tmp_path / "in", "tar", make_images(1, 1), num_shards=1)
    done = prepare(FileSource(tmp_path / "in"), tmp_path / "out", "tar", 1)
    assert (done.num_samples, done.balance) == (1, (1.0, 1.0))
    assert FileSource(tmp_path / "out").read_trees(np.arange(1)) == make_images(1, 1)


@pytest.mark.parametrize("name", WRITTEN)
def test_any_format_becomes_any_other_with_the_same_samples(folder, tmp_path, name):
    source = FileSource(folder)
    prepare(source, tmp_path / "there", name, 6000)
    there = FileSource(tmp_path / "there")
    assert there.manifest.format == name
    assert len(there.manifest.files) > 1
    prepare(there, tmp_path / "back", "tar", 10**9)
    trees = [
        [{leaf: tree[leaf] for leaf in ("image", "label")} for tree in data.read_trees(np.arange(60))]
        for data in (source, there, FileSource(tmp_path / "back"))
    ]
    assert trees[0] == trees[1] == trees[2]


@pytest.mark.parametrize("name", ["tar", "parquet", "mds"])
def test_the_bytes_are_the_same_at_any_number_of_processes(folder, tmp_path, name):
    source = FileSource(folder)
    for num_processes in (1, 2, 3):
        prepare(source, tmp_path / str(num_processes), name, 6000, num_processes=num_processes)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2") == files_of(tmp_path / "3")
    assert len(files_of(tmp_path / "1")) > 5


@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=300),
    st.integers(1, 40),
    st.booleans(),
)
def test_a_plan_has_each_sample_once_and_as_many_in_each_shard(sizes, num_shards, is_sorted):
    sizes = np.array(sorted(sizes) if is_sorted else sizes)
    shards = plan_shards(sizes, max(1, int(sizes.sum()) // num_shards))
    assert sorted(np.concatenate(shards).tolist()) == list(range(len(sizes)))
    assert all((np.diff(shard) > 0).all() for shard in shards)
    counts = [len(shard) for shard in shards]
    assert max(counts) <= min(counts) * 1.1 or max(counts) - min(counts) == 0


@pytest.mark.parametrize("kind", ["equal", "sorted", "heavy"])
def test_shards_are_balanced_by_bytes_and_samples(kind):
    rng = np.random.default_rng(0)
    sizes = {
        "equal": np.full(5000, 20_000),
        "sorted": np.arange(1, 5001) * 10,
        "heavy": (rng.pareto(2.5, 5000) * 1000 + 100).astype(np.int64),
    }[kind]
    shards = plan_shards(sizes, int(sizes.sum() // 20))
    weights = [int(sizes[shard].sum()) for shard in shards]
    assert max(weights) <= 1.1 * min(weights)
    assert len(shards) == 20
    if kind == "equal":
        assert [shard[0] for shard in shards] == list(range(0, 5000, 250)), "in their order where that balances"


@pytest.mark.parametrize(("name", "shard_bytes"), [("tar", 120_000), ("parquet", 40_000), ("jsonl_gz", 40_000)])
def test_the_size_of_a_shard_is_that_of_its_file(tmp_path, name, shard_bytes):
    """Leaves are a tenth of a tar, and twice of what is left of them once they are packed."""
    rng = np.random.default_rng(0)
    texts = ["x"] * 600 if name == "tar" else [rng.bytes(200).hex() for _ in range(600)]
    samples = [{"text": text, "label": number} for number, text in enumerate(texts)]
    write_shards(tmp_path / "in", "jsonl", samples)
    done = prepare(FileSource(tmp_path / "in"), tmp_path / "out", name, shard_bytes)
    sizes = [file.num_bytes for file in done.manifest.files]
    assert len(sizes) > 1
    assert 0.75 * shard_bytes < sum(sizes) / len(sizes) < 1.33 * shard_bytes
    assert done.balance[0] == max(sizes) / min(sizes)


def test_leaves_that_a_format_does_not_hold_are_named(tmp_path, run_here):
    samples = [sample | {"caption": "a dog", "score": 0.5} for sample in make_images(6)]
    write_shards(tmp_path / "in", "tar", samples)
    source = FileSource(tmp_path / "in")
    assert prepare(source, tmp_path / "folder", "folder", 1000).left_out == ["caption", "score"]
    assert prepare(source, tmp_path / "text", "text", 1000).left_out == ["image", "label", "score"]
    assert prepare(source, tmp_path / "tar", "tar", 1000).left_out == []
    done = run_here("data", "prepare", tmp_path / "in", tmp_path / "out", "--format", "folder", "--processes", 1)
    assert "left out, as format folder does not hold them: caption, score; tar holds" in done.stdout


def test_an_image_folder_returns_all_kinds_of_images_and_their_labels(tmp_path):
    samples = [{"image": draw_image(number, kind=kind), "label": number} for number, kind in enumerate(KINDS)]
    write_shards(tmp_path / "in", "tar", samples)
    assert prepare(FileSource(tmp_path / "in"), tmp_path / "out", "folder", 1000).num_samples == len(KINDS)
    trees = FileSource(tmp_path / "out").read_trees(np.arange(len(KINDS)))
    assert [(tree["image"], tree["label"]) for tree in trees] == [(one["image"], one["label"]) for one in samples]


@pytest.mark.parametrize("labels", [[0, 2], [1, 2], [-1, 0, 1], [3, 3], [99999, 100000]])
def test_labels_that_an_image_folder_would_change_are_refused(tmp_path, labels):
    samples = [{"image": draw_image(number), "label": label} for number, label in enumerate(labels)]
    write_shards(tmp_path / "in", "tar", samples)
    with pytest.raises(DataError, match=r"labels must be 0, 1 and so on, .*but got the folders .*take tar"):
        prepare(FileSource(tmp_path / "in"), tmp_path / "out", "folder", 1000)


def test_a_label_that_some_images_lack_is_refused(tmp_path):
    samples = [{"image": draw_image(number), **({"label": number - 1} if number else {})} for number in range(3)]
    write_shards(tmp_path / "in", "tar", samples)
    with pytest.raises(DataError, match=r"but got the folders \., 00000, 00001"):
        prepare(FileSource(tmp_path / "in"), tmp_path / "out", "folder", 1000)


def test_samples_of_a_tar_shard_stay_apart_and_those_it_cannot_hold_are_refused(tmp_path):
    keys = ["a.b", "a_b", "a_b-000000001", "a_b", "a_b-000000003"]
    write_shards(tmp_path / "in", "jsonl", [{"__key__": key, "x": place} for place, key in enumerate(keys)])
    prepare(FileSource(tmp_path / "in"), tmp_path / "out", "tar", 10**6)
    assert [tree["x"] for tree in FileSource(tmp_path / "out").read_trees(np.arange(5))] == list(range(5))
    for sample, message in (({}, "must have leaves to be stored"), ({"a/b": 1}, "must have no / for format tar")):
        write_shards(tmp_path / "next", "jsonl", [{"x": 1}, sample])
        with pytest.raises(DataError, match=message):
            prepare(FileSource(tmp_path / "next"), tmp_path / "refused", "tar", 10**6)
        shutil.rmtree(tmp_path / "refused")


def test_an_output_of_which_fewer_samples_are_read_is_refused(folder, tmp_path, monkeypatch):
    encode = FORMATS["jsonl"].encode
    monkeypatch.setattr(FORMATS["jsonl"], "encode", lambda form, samples: encode(form, samples[1:]))
    with pytest.raises(DataError, match=r"out must hold the 60 samples that were written, but 59 are read of it"):
        prepare(FileSource(folder), tmp_path / "out", "jsonl", 10**9)


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"folder", "tokens", "text"}))
def test_arrays_of_the_other_byte_order_keep_their_values(tmp_path, name):
    rows = [np.arange(4, dtype=">f4"), np.arange(6, dtype=">i2").reshape(2, 3)]
    write_shards(tmp_path, name, [{"row": rows[0], "matrix": rows[1]}] * 2, num_shards=1)
    (tree,) = FileSource(tmp_path).read_trees(np.arange(1))
    for leaf, row in zip(("row", "matrix"), rows, strict=True):
        np.testing.assert_array_equal(tree[leaf], row)
        assert tree[leaf].dtype == row.dtype.newbyteorder("=")
    assert FileSource(tmp_path).read(np.arange(2))["row"].tolist() == [[0, 1, 2, 3]] * 2


def test_a_format_that_cannot_hold_the_samples_says_so_before_all_is_read(folder, tmp_path):
    read = []

    def hook(samples):
        read.extend(samples)
        return samples

    with pytest.raises(DataError, match="a sample must have tokens for format tokens"):
        prepare(FileSource(folder), tmp_path / "out", "tokens", 1000, hook=hook)
    assert len(read) == 16


def test_functions_filter_and_make_samples(folder, tmp_path):
    def hook(samples):
        for sample in samples:
            if sample["label"]:
                yield {"tokens": np.arange(sample["label"] * 3)}

    done = prepare(FileSource(folder), tmp_path / "out", "tokens", 100, hook=hook, num_processes=2)
    assert (done.num_read, done.num_samples) == (60, 40)
    source = FileSource(tmp_path / "out", sequence_length=2)
    assert source.manifest.format == "tokens"
    with pytest.raises(DataError, match=r"samples must be left for .*, but the hook has left none of 60"):
        prepare(FileSource(folder), tmp_path / "none", "tar", 100, hook=lambda samples: [])


def test_a_folder_that_holds_something_else_is_refused(folder, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").touch()
    with pytest.raises(
        SettingsError, match=r"the folder for prepared data must be empty, but .*out is not; give another"
    ):
        prepare(FileSource(folder), tmp_path / "out", "tar", 1000)


def test_an_unknown_format_is_refused_before_anything_is_read_or_made(folder, tmp_path, run_here):
    with pytest.raises(SettingsError, match=r"nonsense.*known: "):
        prepare(FileSource(folder), tmp_path / "out", "nonsense", 1000)
    assert not (tmp_path / "out").exists()
    refused = run_here("data", "prepare", tmp_path / "nowhere", tmp_path / "out", "--format", "nonsense")
    assert refused.returncode != 0
    assert "nonsense" in refused.stderr
    assert "nowhere" not in refused.stderr, "the format is looked at before the data"


def test_it_goes_on_where_it_was_and_only_with_the_same_settings(folder, tmp_path):
    source, calls = FileSource(folder), []

    def fail_at_third(samples):
        calls.append(len(samples))
        if len(calls) == 3:
            raise RuntimeError("the power is gone")
        return samples

    with pytest.raises(RuntimeError, match="the power is gone"):
        prepare(source, tmp_path / "out", "tar", 6000, hook=fail_at_third)
    with pytest.raises(SettingsError, match="must hold an unfinished conversion with these settings to go on"):
        prepare(source, tmp_path / "out", "mds", 6000, hook=fail_at_third)
    prepare(source, tmp_path / "out", "tar", 6000, hook=fail_at_third)
    assert calls == [16, 16, 16, 16, 12], "parts that were done are not done again"
    prepare(source, tmp_path / "whole", "tar", 6000)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_it_goes_on_with_the_same_data_only(tmp_path, monkeypatch):
    """Without an index the size alone would tell it from other data."""
    path = tmp_path / "a.jsonl"
    monkeypatch.setattr(prepare_module, "PART_SAMPLES", 16)

    def prepare_part(number, hook):
        path.write_text(f'{{"x": {number}}}\n' * 40)
        os.utime(path, (number, number))
        with pytest.warns(NoIndexWarning):
            return prepare(FileSource(path), tmp_path / "out", "tar", 6000, hook=hook)

    calls = []

    def fail_at_second(samples):
        calls.append(1)
        assert len(calls) < 2, "the power is gone"
        return samples

    with pytest.raises(AssertionError, match="the power is gone"):
        prepare_part(1, fail_at_second)
    with pytest.raises(SettingsError, match="must hold an unfinished conversion with these settings to go on"):
        prepare_part(2, None)
    assert prepare_part(1, None).num_samples == 40


@pytest.mark.parametrize("num_removed", [0, 1, 5, 9])
def test_a_conversion_that_is_killed_while_it_tidies_up_is_finished_by_the_next_call(
    folder, tmp_path, monkeypatch, num_removed
):
    source, remove = FileSource(folder), LocalStorage.remove

    def remove_some(storage, paths):
        remove(storage, paths[:num_removed])
        raise KeyboardInterrupt

    whole = prepare(source, tmp_path / "whole", "tar", 6000)
    monkeypatch.setattr(LocalStorage, "remove", remove_some)
    with pytest.raises(KeyboardInterrupt):
        prepare(source, tmp_path / "out", "tar", 6000)
    monkeypatch.setattr(LocalStorage, "remove", remove)
    with pytest.raises(SettingsError, match="must hold an unfinished conversion with these settings to go on"):
        prepare(source, tmp_path / "out", "tar", 7000)
    assert prepare(source, tmp_path / "out", "tar", 6000) == whole
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_files_that_kills_have_torn_are_no_hindrance_and_go(folder, tmp_path):
    source, torn = FileSource(folder), tmp_path / "out/.paceline/prepare/.settings.json.7.part"
    torn.parent.mkdir(parents=True)
    torn.write_text("{")
    (tmp_path / "out/.shard-000000.tar.7.part").write_text("x")
    prepare(source, tmp_path / "out", "tar", 6000)
    prepare(source, tmp_path / "whole", "tar", 6000)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_an_edited_function_does_not_go_on_with_what_the_old_one_has_made(folder, tmp_path, run_here):
    mine = tmp_path / "mine.py"
    command = ("data", "prepare", folder, tmp_path / "out", "--change", f"{mine}:change", "--processes", 1)
    begun = "import os\nseen = []\ndef change(samples):\n    seen.append(1)\n"
    mine.write_text(begun + "    raise ValueError('the power is gone')\n")
    assert run_here(*command).returncode != 0
    mine.write_text(begun + "    return samples\n")
    refused = run_here(*command)
    assert "must hold an unfinished conversion with these settings to go on" in refused.stderr


SCRIPT = """
import sys, pathlib
from paceline.data import FileSource
from paceline.data.formats import prepare as module
module.PART_SAMPLES = 16
def hook(samples):
    folder = pathlib.Path(sys.argv[2] + ".seen")
    if len(list(folder.glob("*"))) >= 2 and sys.argv[3] == "stop":
        (folder / "stopped").touch()
        import time
        time.sleep(100)
    (folder / samples[0]["__key__"]).touch()
    return samples
if __name__ == "__main__":
    module.prepare(FileSource(sys.argv[1]), pathlib.Path(sys.argv[2]), "tar", 6000, hook=hook, num_processes=2)
"""


@pytest.mark.slow
def test_a_kill_leaves_nothing_torn_and_no_process(folder, tmp_path):
    (tmp_path / "out.seen").mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "script.py", folder, tmp_path / "out"]
    process = subprocess.Popen([*command, "stop"])
    while not (tmp_path / "out.seen/stopped").exists():
        assert process.poll() is None
        time.sleep(0.02)
    children = subprocess.run(["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    pids = [int(pid) for pid in children.stdout.split()]
    assert pids
    while any(is_running(pid) for pid in pids):
        time.sleep(0.02)
    subprocess.run([*command, "go"], check=True)
    prepare(FileSource(folder), tmp_path / "whole", "tar", 6000)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_check_names_files_that_are_images_by_their_names_alone(tmp_path):
    for number, sample in enumerate(make_images(4)):
        path = tmp_path / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(sample["image"] if number != 2 else b"no image")
    with pytest.warns(NoIndexWarning):
        (found,) = check_data(FileSource(tmp_path)).unreadable
    assert found[1].startswith("class0/2: image must be a whole image, but got: it begins like no image")


def test_check_finds_what_is_there_and_what_is_wrong(tmp_path):
    samples = make_images(20)
    samples[7] |= {"image": samples[3]["image"], "label": samples[3]["label"]}
    samples[9]["image"] = samples[9]["image"][:40]
    for number, sample in enumerate(samples):
        sample["caption"] = "x" * (number + 1)
    samples[7]["caption"] = samples[3]["caption"]
    write_shards(tmp_path, "tar", samples)
    for num_processes in (1, 2):
        found = check_data(FileSource(tmp_path), num_processes)
        assert found.num_samples == 20
        assert found.list_classes() == {"label": {0: 8, 1: 6, 2: 6}}
        assert found.list_duplicates() == [[3, 7]]
        assert (min(found.lengths["caption"]), max(found.lengths["caption"])) == (1, 20)
        assert [index for index, _ in found.unreadable] == [9]
        assert not found.changed
    with open(tmp_path / "shard-01.tar", "r+b") as file:
        file.seek(600)
        file.write(b"\xff")
    found = check_data(FileSource(tmp_path))
    assert found.changed == [f"shard-01.tar, bytes 0 to {os.path.getsize(tmp_path / 'shard-01.tar')}"]
    assert not found.is_sound
