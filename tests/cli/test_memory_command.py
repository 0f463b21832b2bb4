"""`paceline memory`, and the refusal of a run that does not fit."""

import sys

import pytest

from paceline.cli.main import main


def run_command(monkeypatch, capsys, tmp_path, *arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return exit_.value.code, capsys.readouterr()


SMALL = ["--model.width", "32", "--model.num_layers", "2", "--model.num_heads", "2"]


def test_it_lists_what_a_rank_needs(monkeypatch, capsys, tmp_path):
    code, said = run_command(monkeypatch, capsys, tmp_path, "memory", "transformer_lm", *SMALL)
    assert not code
    lines = {line.split()[0]: line for line in said.out.splitlines() if line.startswith("  ")}
    assert "134 kB" in lines["parameters"]
    assert "268 kB" in lines["optimizer"]
    assert "it fits" in said.out


def test_it_says_what_copies_in_the_memory_of_peers_take(monkeypatch, capsys, tmp_path):
    peers = ["--workers", "3", "--peer_memory.interval", "5", "--peer_memory.num_data", "2"]
    code, said = run_command(monkeypatch, capsys, tmp_path, "memory", "transformer_lm", *SMALL, *peers)
    assert not code
    assert f"take {2 * 1.5 * (134 + 268) / 1000:.1f}" in said.out  # kB of parameters and optimizer
    assert "MB of the host's for each rank, in /dev/shm" in said.out
    code, said = run_command(monkeypatch, capsys, tmp_path, "memory", "transformer_lm", *SMALL, *peers[2:])
    assert code == 2
    assert "num_data(2) + num_parity(1) = 3 ranks, but there are 2" in said.err


@pytest.mark.parametrize(("axis", "num_ranks"), [("pipeline", 2), ("sharded", 4), ("data", 3)])
def test_it_estimates_the_ranks_that_train_would_start(monkeypatch, capsys, tmp_path, axis, num_ranks):
    layout = [f"--layout.{axis}", str(num_ranks)]
    code, said = run_command(monkeypatch, capsys, tmp_path, "memory", "transformer_lm", *SMALL, *layout)
    assert not code
    assert f"tensors of each of {num_ranks} ranks" in said.out


def test_a_run_that_cannot_fit_is_refused_before_anything_is_made(monkeypatch, capsys, tmp_path):
    huge = [*SMALL, "--global_batch", str(2**24)]
    code, said = run_command(monkeypatch, capsys, tmp_path, "train", "transformer_lm", *huge)
    assert code == 2
    assert "a rank's memory must hold a step" in said.err
    assert "--num_micro_batches" in said.err
    assert not list(tmp_path.iterdir())
