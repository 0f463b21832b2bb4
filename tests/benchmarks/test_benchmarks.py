import json
import os
import types

import pytest
import torch
from pydantic import ValidationError
from typer.testing import CliRunner

from paceline.benchmarks import (
    BenchmarkRow,
    BucketsBenchmark,
    CodecsBenchmark,
    CollectivesBenchmark,
    ExposedBenchmark,
    ReplicaBenchmark,
    Workers,
    list_benchmarks,
    print_table,
    write_files,
)
from paceline.benchmarks import codecs as codecs_module
from paceline.benchmarks.collectives import _slowest
from paceline.cli.main import app
from paceline.errors import SettingsError
from paceline.testing import Netlab, netlab_missing

needs_netlab = pytest.mark.skipif(bool(netlab_missing()), reason=netlab_missing() or "a netlab can be made")


def row(**changes):
    return BenchmarkRow(
        **{
            "bench": "b",
            "case": "small",
            "metric": "time",
            "unit": "s",
            "ours": 1.0,
            "reference": 2.0,
            "reference_name": "gloo",
            "ratio": 0.5,
            **changes,
        }
    )


def test_a_row_of_pairs_compares_what_was_measured_together():
    """Both sides grow tenfold half-way, so that their medians say nothing, and pairs are all of one ratio."""
    reference = [1.0] * 10 + [10.0] * 11
    found = BenchmarkRow.of_pairs("b", "c", "time", "s", [2 * time for time in reference], reference, "gloo")
    assert (found.ours, found.reference) == (20.0, 10.0)
    assert (found.ratio_lower, found.ratio, found.ratio_upper) == (2.0, 2.0, 2.0)


def test_bounds_hold_the_ratio_between_them():
    reference = [1.0] * 30
    ours = [1 + 0.01 * (index % 10) for index in range(30)]
    found = BenchmarkRow.of_pairs("b", "c", "time", "s", ours, reference, "gloo")
    assert 1.02 < found.ratio_lower < found.ratio < found.ratio_upper < 1.08


def test_rows_are_written_once(tmp_path):
    rows = [row(), row(case="large", ratio_lower=0.4, ratio_upper=0.61)]
    json_path, markdown_path = tmp_path / "rows.json", tmp_path / "rows.md"
    write_files(rows, json_path, markdown_path)
    assert [BenchmarkRow(**document) for document in json.loads(json_path.read_text())] == rows
    lines = markdown_path.read_text().splitlines()
    assert lines[0] == "| case | metric | Paceline | reference | ratio | 95% above | 95% below |"
    assert lines[1] == "| --- | --- | --- | --- | --- | --- | --- |"
    assert lines[2] == "| small | time | 1 s | 2 s (gloo) | 0.500 |  |  |"
    assert lines[3] == "| large | time | 1 s | 2 s (gloo) | 0.500 | 0.400 | 0.610 |"
    with pytest.raises(SettingsError, match="--json must be a new file"):
        write_files([], json_path, None)
    with pytest.raises(SettingsError, match="--markdown must be a new file"):
        write_files([], tmp_path / "other.json", markdown_path)
    assert len(markdown_path.read_text().splitlines()) == 4
    assert not (tmp_path / "other.json").exists()
    write_files(rows, None, None)


def test_no_rows_are_an_empty_table(tmp_path, capsys):
    print_table([])
    write_files([], tmp_path / "rows.json", tmp_path / "rows.md")
    assert json.loads((tmp_path / "rows.json").read_text()) == []


def test_a_table_for_no_terminal_is_not_cut(capsys):
    print_table([row(case="a case with a name as long as this one is", metric="a metric of many words too")])
    assert "a case with a name as long as this one is  a metric of many words too" in capsys.readouterr().out


def call_cli(*arguments):
    """Return the output of `paceline bench`; what it refuses is raised."""
    result = CliRunner().invoke(app, ["bench", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_the_command_lists_benchmarks():
    listed = call_cli()
    assert all(name in listed for name in list_benchmarks())


def test_the_command_places_workers_on_hosts(monkeypatch, tmp_path):
    seen = []

    def measure(self):
        seen.append(self)
        return [row()]

    monkeypatch.setattr(ReplicaBenchmark, "measure", measure)
    files = "--json", str(tmp_path / "a.json"), "--markdown", str(tmp_path / "a.md")
    call_cli("replica", "--hosts", "4", "--bandwidth", "100mbit", "--num_pairs", "7", *files)
    assert seen[0].workers == Workers(num_workers=4, num_hosts=4, bandwidth=12.5e6)
    assert seen[0].num_pairs == 7
    assert (tmp_path / "a.json").exists()
    assert (tmp_path / "a.md").exists()
    call_cli("replica", "--hosts", "2", "--bandwidth", "1gbit", "--workers.num_workers", "6")
    assert seen[1].workers == Workers(num_workers=6, num_hosts=2, bandwidth=125e6)
    call_cli("replica")
    assert seen[2].workers == Workers(num_workers=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["replica", "--hosts", "4"], "--hosts and --bandwidth must be given together, but got 4 and None"),
        (["replica", "--bandwidth", "1gbit"], "must be given together, but got None and 1gbit"),
        (
            ["replica", "--hosts", "4", "--bandwidth", "fast"],
            "^--workers.bandwidth: a speed must be like 50mbit.*but got 'fast'",
        ),
        (["replica", "--hosts", "1", "--bandwidth", "1gbit"], "bandwidth must be given for several hosts"),
        (
            ["codecs", "--hosts", "4", "--bandwidth", "1gbit"],
            "--workers.num_hosts must be the path of a setting.*--num_elements",
        ),
        (["nothing"], "known: buckets, checkpoints, codec_choice, codecs, collectives"),
    ],
    ids=["no bandwidth", "no hosts", "no number", "one host", "no workers", "no benchmark"],
)
def test_the_command_refuses_what_cannot_be(arguments, words):
    with pytest.raises(SettingsError, match=words):
        call_cli(*arguments)


@pytest.mark.parametrize("option", ["--json", "--markdown"])
def test_an_old_file_is_refused_before_anything_is_measured(option, tmp_path, monkeypatch):
    monkeypatch.setattr(ReplicaBenchmark, "measure", lambda self: pytest.fail("measured in vain"))
    old = tmp_path / "old"
    old.touch()
    with pytest.raises(SettingsError, match=f"{option} must be a new file"):
        call_cli("replica", option, str(old))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_workers": 3, "num_hosts": 2, "bandwidth": "1gbit"}, "num_workers must be a multiple of num_hosts"),
        ({"num_workers": 2, "num_hosts": 2}, "bandwidth must be given for several hosts"),
        ({"num_workers": 2, "bandwidth": "1gbit"}, "bandwidth must be given for several hosts and no others"),
        ({"num_workers": 0}, "greater than or equal to 1"),
    ],
    ids=["uneven", "no bandwidth", "no hosts", "nobody"],
)
def test_workers_that_cannot_be_placed_are_refused(settings, words):
    with pytest.raises(ValidationError, match=words):
        Workers(**settings)


def name_place(greeting, number):
    rank = int(os.environ["RANK"])
    if greeting == "fail" and rank == 1:
        raise ValueError("rank 1 cannot")
    return [greeting, number, rank, os.environ["LOCAL_RANK"], os.environ.get("GLOO_SOCKET_IFNAME")]


@pytest.mark.slow
@needs_netlab
def test_workers_run_on_hosts():
    workers = Workers(num_workers=4, num_hosts=2, bandwidth="1gbit")
    assert workers.start(name_place, "hello", 7) == {
        rank: ["hello", 7, rank, str(rank % 2), "eth0"] for rank in range(4)
    }
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 must end well, but got 1:.*ValueError: rank 1 cannot"):
        workers.start(name_place, "fail", 7)


def test_the_slowest_worker_counts():
    results = {0: [{"a": [1.0, 5.0], "b": [2.0, 2.0]}], 1: [{"a": [3.0, 4.0], "b": [1.0, 3.0]}]}
    assert _slowest(results) == [{"a": [3.0, 5.0], "b": [2.0, 3.0]}]


@pytest.mark.slow
def test_shared_memory_is_timed_beside_gloo():
    rows = CollectivesBenchmark(sizes=("4KiB", "256KiB"), local_workers=(2,), num_pairs=2).measure()
    assert [(row.case, row.reference_name) for row in rows] == [
        ("2 workers, 4KiB", "gloo"),
        ("2 workers, 256KiB", "gloo"),
    ]
    assert all(row.ours > 0 and row.reference > 0 and row.ratio_lower <= row.ratio_upper for row in rows)


def test_sizes_of_half_numbers_are_refused():
    with pytest.raises(SettingsError, match="whole floats, multiples of 4 bytes, but got 6B"):
        CollectivesBenchmark(sizes=("6B",)).measure()


@needs_netlab
def test_programs_are_timed_beside_their_bound():
    rows = CollectivesBenchmark(
        sizes=("256KiB",),
        algorithms=("ring",),
        num_pairs=2,
        workers=Workers(num_workers=2, num_hosts=2, bandwidth="50mbit"),
    ).measure()
    assert [(row.case, row.metric, row.reference_name) for row in rows] == [
        ("2 hosts, 50 Mbit/s, 256KiB", "ring all-reduce", "bandwidth bound"),
        ("2 hosts, 50 Mbit/s, 256KiB", "ring all-reduce", "gloo"),
    ]
    assert rows[0].reference == pytest.approx(2**18 * 8 / 50e6)
    assert rows[0].ratio_lower > 0.85, "nobody is faster than the wire, but for what its bucket holds"


@pytest.mark.slow
@needs_netlab
def test_programs_are_not_lowered_to_the_native_collective():
    """All data pass the naive program's root, twice what gloo's ring takes to each host."""
    num_bytes, num_calls = 2**18, 1 + 2 + 2  # one to check, two to warm up
    with Netlab(3, 200e6) as lab:
        results = lab.run(
            "paceline.benchmarks.collectives:_time_programs",
            {"algorithms": ["naive"], "sizes_bytes": [num_bytes], "num_pairs": 2},
        )
        received_bytes = lab.counters()[0].received_bytes
    assert [result.exit_code for result in results] == [0, 0, 0], results[0].output
    naive_bytes, gloo_bytes = 2 * num_bytes, 2 * 2 / 3 * num_bytes
    assert received_bytes > num_calls * (naive_bytes + gloo_bytes)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and here is none")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])])
def test_codecs_are_timed_beside_a_copy_and_plain_torch(device):
    threads = torch.get_num_threads()
    rows = CodecsBenchmark(num_elements=20_000, num_pairs=4, device=device).measure()
    assert [(row.case, row.reference_name) for row in rows] == [
        (case, name) for case in ("one_bit", "int8", "top_k 0.01") for name in ("copy", "plain torch")
    ]
    assert all(row.unit == "GB/s" and row.ours > 0 and row.reference > 0 for row in rows)
    assert torch.get_num_threads() == threads


def test_throughput_counts_the_least_traffic():
    num_elements = 4096
    expected = {"one_bit": 12 + 1 / 8 + 4 / 2048, "int8": 12 + 1 + 4 / 512, "top_k": 12 + 8 * 41 / 4096}
    for codec, bytes_per_element in expected.items():
        problem = codecs_module._Problem.make(codec, num_elements, 0.01, torch.device("cpu"))
        assert problem.least_bytes == pytest.approx(bytes_per_element * num_elements)


def test_a_kernel_that_encodes_otherwise_than_its_reference_is_not_timed(monkeypatch):
    find_kernels = codecs_module.kernels.find_kernels

    def find_broken(codec, device):
        def encode(value, residual, rows, payload, new_residual):
            find_kernels(codec, device).encode(value, residual, rows, payload, new_residual)
            payload[0, -1] ^= 1
            return True

        return types.SimpleNamespace(encode=encode)

    monkeypatch.setattr(codecs_module.kernels, "find_kernels", find_broken)
    with pytest.raises(AssertionError, match="one_bit must encode as its reference"):
        CodecsBenchmark(codecs=("one_bit",), num_elements=5000, num_pairs=2).measure()


def test_the_chosen_bucket_size_is_compared_with_each_fixed_one_and_the_best(monkeypatch):
    times = {"chosen": [1.1] * 4, "1 MiB": [2.2] * 4, "4 MiB": [1.0] * 4}
    monkeypatch.setattr(Workers, "start", lambda *arguments: {0: (times, "the reason")})
    rows = BucketsBenchmark(sizes=(1, 4)).measure()
    assert [(row.reference_name, round(row.ratio, 6)) for row in rows] == [
        ("1 MiB", 0.5),
        ("4 MiB", 1.1),
        ("the best: 4 MiB", 1.1),
    ]
    assert rows[0].case == "lm, batch 1, 2 workers on one host: the reason"


def test_coded_steps_are_compared_with_coded_gradients(monkeypatch):
    times = {"floor": [1.0] * 3, "ddp": [3.0] * 3, "one_bit": [1.2] * 3, "one_bit of gradients": [1.1] * 3}
    monkeypatch.setattr(Workers, "start", lambda *arguments: {0: times})
    rows = ExposedBenchmark(sides=("one_bit", "one_bit of gradients"), num_rounds=3).measure()
    assert [(row.case.partition(":")[0], row.reference_name, round(row.ratio, 6)) for row in rows] == [
        ("one_bit", "DDP", 0.1),
        ("one_bit of gradients", "DDP", 0.05),
        ("one_bit", "one_bit of gradients", 2.0),
    ]
