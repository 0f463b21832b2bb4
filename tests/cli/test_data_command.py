"""`paceline data` and runs on files of each format."""

import json

import numpy as np
import pytest
from PIL import Image

from paceline.cli.data import parse_bytes
from paceline.data import FileSource, NoIndexWarning
from paceline.errors import SettingsError


@pytest.fixture
def images(tmp_path):
    for label in range(3):
        (tmp_path / f"images/{label:05d}").mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (10, 10), (80 * label, number * 10, 0)).save(
                tmp_path / f"images/{label:05d}/{number:02d}.png"
            )
    return tmp_path / "images"


def test_data_is_indexed_checked_prepared_and_trained_on(images, tmp_path, run_here):
    indexed = run_here("data", "index", images)
    assert "36 samples in 36 files of format folder" in indexed.stdout
    fingerprint = indexed.stdout.split()[-1]
    assert fingerprint.startswith("b3-")
    checked = run_here("data", "check", images, "--processes", 1)
    assert checked.returncode == 0
    assert "samples by label: 0: 12, 1: 12, 2: 12\nexact duplicates: 0\nunreadable samples: 0" in checked.stdout
    (tmp_path / "filters.py").write_text("def keep(sample):\n    return not sample['__key__'].endswith('00/11')\n")
    prepared = run_here(
        *("data", "prepare", images, tmp_path / "tar", "--shard_bytes", "1KB", "--processes", 1),
        *("--keep", f"{tmp_path / 'filters.py'}:keep"),
    )
    assert "35 samples of 36 in" in prepared.stdout, prepared.stderr
    trained = run_here(
        *("train", "resnet", "--workers", 1, "--out", tmp_path / "run", "--data", "files"),
        *(
            "--data.path",
            tmp_path / "tar",
            "--data.size",
            8,
            "--model.width",
            4,
            "--num_steps",
            2,
            "--global_batch",
            4,
            "--evaluate_samples",
            2,
        ),
        *("--data.snapshot", prepared.stdout.split()[-1]),
    )
    assert trained.returncode == 0, trained.stderr
    refused = run_here(
        *("train", "resnet", "--workers", 1, "--out", tmp_path / "other", "--data", "files"),
        *("--data.path", tmp_path / "tar", "--data.snapshot", fingerprint),
    )
    assert refused.returncode
    assert "must hold the data of snapshot b3-" in refused.stderr


def test_damage_is_an_exit_code(images, run_here):
    (images / "00001/05.png").write_bytes(b"\x89PNG\r\n\x1a\nno image")
    with pytest.warns(NoIndexWarning, match="has no index"):
        checked = run_here("data", "check", images, "--processes", 1)
    assert checked.returncode == 1
    assert "fingerprint size-" in checked.stdout
    assert "unreadable samples: 1\n  sample 17: 00001/05: image must be a whole image, but got" in checked.stdout


def test_files_of_the_format_that_the_index_does_not_name_are_an_exit_code(images, run_here):
    run_here("data", "index", images)
    (images / "notes.jsonl").write_text("{}\n")
    with pytest.warns(UserWarning, match=r"are no part of its folder data; .*: notes\.jsonl$"):
        checked = run_here("data", "check", images, "--processes", 1)
    assert (checked.returncode, "changed" in checked.stdout) == (0, False), "it is of another format"
    (images / "00001/late.png").write_bytes((images / "00001/05.png").read_bytes())
    with pytest.warns(UserWarning, match="are no part of its folder data"):
        checked = run_here("data", "check", images, "--processes", 1)
    assert checked.returncode == 1
    assert "changed since the index was made: 00001/late.png, which it does not name\n" in checked.stdout


def test_text_in_lines_trains_a_language_model(tmp_path, run_here):
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"text": f"line {number} of a short story"}) for number in range(30)]
    (tmp_path / "data/a.jsonl").write_text("\n".join(lines))
    run_here("data", "index", tmp_path / "data")
    trained = run_here(
        *("train", "transformer_lm", "--workers", 1, "--out", tmp_path / "run", "--data", "files"),
        *("--data.path", tmp_path / "data", "--data.sequence_length", 16, "--model.width", 16),
        *(
            "--model.num_layers",
            1,
            "--model.num_heads",
            1,
            "--num_steps",
            2,
            "--global_batch",
            4,
            "--loss.sample_tokens",
            0,
        ),
    )
    assert trained.returncode == 0, trained.stderr


def test_text_becomes_tokens_of_a_tokenizer(tmp_path, run_here):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"a": 0, "short": 1, "story": 2, "line": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_text('{"text": "a short story"}\n{"text": "line line"}\n')
    options = ("--processes", 1, "--tokenizer", tmp_path / "tokenizer.json")
    prepared = run_here("data", "prepare", tmp_path / "data", tmp_path / "tar", *options)
    assert prepared.returncode == 0, prepared.stderr
    found = FileSource(tmp_path / "tar").read_leaves(np.arange(2))
    assert sorted(sample["tokens"].tolist() for sample in found) == [[0, 1, 2], [3, 3]]
    assert all("text" not in sample for sample in found)


def test_documents_that_are_joined_are_called_so_and_the_output_is_of_this_machine(tmp_path, run_here):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_text('{"text": "a short story"}\n{"text": "line line"}\n')
    prepared = run_here("data", "prepare", tmp_path / "data", tmp_path / "out", "--format", "text", "--processes", 1)
    assert "2 joined documents of 2 in 1 files of format text" in prepared.stdout, prepared.stderr
    refused = run_here("data", "prepare", tmp_path / "data", "s3://bucket/out")
    assert refused.returncode != 0
    assert "OUT must be a folder of this machine, but got s3://bucket/out" in refused.stderr


def test_sizes_have_units():
    assert [parse_bytes(text) for text in ("64MB", "1.5 KiB", "10", "2gb")] == [64 * 10**6, 1536, 10, 2 * 10**9]
    with pytest.raises(
        SettingsError, match="shard_bytes must be a number of bytes such as 64MB or 1GiB, but got 'many'"
    ):
        parse_bytes("many")
