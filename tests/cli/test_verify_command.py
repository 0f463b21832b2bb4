import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from paceline import registry
from paceline.cli.overrides_command import OverridesCommand
from paceline.cli.verify import verify
from paceline.errors import ProgramError, SettingsError, UnknownNameError
from paceline.programs import Ring, list_algorithms


@pytest.fixture(autouse=True)
def forgotten_algorithms(monkeypatch):
    """Forget the algorithms that files register, which other tests would find among all."""
    monkeypatch.setattr(registry, "_VARIANTS", {family: dict(known) for family, known in registry._VARIANTS.items()})


def run(*arguments):
    app = typer.Typer()
    app.command(cls=OverridesCommand)(verify)
    return CliRunner().invoke(app, arguments, catch_exceptions=True)


def rows(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.exception
    lines = result.stdout.splitlines()
    assert lines[-1].startswith("All proven.")
    return [line.split() for line in lines[1:-1]]


def test_a_program_is_proven_and_what_it_moves_is_told():
    (row,) = rows("ring", "--ranks", "17", "--collective", "all-reduce")
    assert row == ["ring", "all_reduce", "17", "32", "544", "1.8824", "1.8824", "0.0588"]


def test_without_a_collective_all_are_proven_for_all_numbers_of_ranks():
    table = rows("direct", "--ranks", "2:4")
    assert len(table) == 5 * 3
    assert {row[2] for row in table} == {"2", "3", "4"}


def test_all_means_every_algorithm_that_can():
    assert {row[0] for row in rows("all", "--ranks", "4")} == set(list_algorithms())
    able = {name for name, algorithm in list_algorithms().items() if "all_to_all" in algorithm.collectives}
    assert {row[0] for row in rows("all", "--ranks", "4", "--collective", "all_to_all")} == able


def test_settings_of_the_algorithm_can_be_overridden():
    flat = rows("hierarchical", "--ranks", "8", "--collective", "all-reduce", "--ranks_per_host", "1")
    deep = rows("hierarchical", "--ranks", "8", "--collective", "all-reduce", "--ranks-per-host=4")
    assert [int(row[3]) for row in (*flat, *deep)] == [14, 8]
    table = rows("ring", "--ranks", "3", "--num_chunks", "7")
    assert "all_to_all" not in {row[1] for row in table}, "its chunks are not free"
    assert [row[3] for row in table if row[1] == "broadcast"] == ["8"]


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (["rings"], UnknownNameError, "did you mean 'ring'?"),
        (["ring", "--collective", "reduce"], UnknownNameError, "--collective must be a known name"),
        (["torus", "--collective", "broadcast"], SettingsError, "a torus program must be one of"),
        (["ring", "--ranks", "5:2"], SettingsError, "--ranks must be a number from 1 on, or two as in 2:17"),
        (["ring", "--ranks", "2:"], SettingsError, "or two as in 2:17, the smaller first, but got '2:'"),
        (["ring", "--ranks", "0"], SettingsError, "but got '0'"),
        (["ring", "--ranks", "many"], SettingsError, "but got 'many'"),
        (["ring", "--ranks_per_host", "2"], UnknownNameError, "--ranks_per_host must be the path of a setting"),
    ],
)
def test_what_cannot_be_is_refused(arguments, kind, words):
    error = run(*arguments).exception
    assert isinstance(error, kind)
    assert words in str(error)


def test_a_wrong_program_is_refused(monkeypatch):
    right = Ring.build

    def build(self, collective, num_ranks, *, root=0):
        program = right(self, collective, num_ranks, root=root)
        program.num_rounds -= 1
        return program

    monkeypatch.setattr(Ring, "build", build)
    error = run("ring", "--ranks", "4", "--collective", "all-reduce").exception
    assert isinstance(error, ProgramError)
    assert "does not reach it" in str(error)


CHAIN = """
import paceline
from paceline.programs import Algorithm, Collective, Program
from paceline.programs.base import make_round

@paceline.register("{name}")
class Broken(Algorithm):
    collectives = frozenset({{Collective.ALL_REDUCE}})

    def _build(self, collective, num_ranks, root):
        make = lambda index: make_round(index, index + 1, 0, 1, adds=True)
        return Program(collective, self.name, num_ranks, 1, num_ranks - 1, make)

def run():
    pass
"""


def test_a_program_of_the_users_is_proven_from_its_file(tmp_path):
    file = tmp_path / "mine_of_programs.py"
    file.write_text(CHAIN.format(name="broken_chain"))
    error = run(f"{file}:Broken", "--ranks", "2").exception
    assert isinstance(error, ProgramError)
    assert "rank 0 must end with the right chunk 0" in str(error)
    assert rows(f"{file}:Broken", "--ranks", "1") == [
        ["broken_chain", "all_reduce", "1", "0", "0", "0.0000", "0.0000", "0.0000"]
    ]
    assert "must be a class derived from paceline.programs.Algorithm" in str(run(f"{file}:run").exception)


FAILING = (
    CHAIN
    + """
@paceline.register("{name}_of_k")
class OfK(Broken):
    k: int

    def _build(self, collective, num_ranks, root):
        return Program(collective, self.name, num_ranks, 1, 0, None) if num_ranks == 1 else self.k / 0

class Unfinished(Algorithm):
    pass
"""
)


def test_what_fails_in_an_algorithm_of_the_users_is_named(tmp_path):
    file = tmp_path / "failing_programs.py"
    file.write_text(FAILING.format(name="failing"))
    assert str(run(f"{file}:Broken", "--ranks", "1:2").exception).startswith("failing all_reduce for 2 ranks: ")
    assert str(run(f"{file}:OfK", "--ranks", "2").exception) == (f"k of {file}:OfK must be given; add --k VALUE")
    assert len(rows(f"{file}:OfK", "--ranks", "1", "--k", "3")) == 1
    error = run(f"{file}:OfK", "--ranks", "1:2", "--k", "3").exception
    assert isinstance(error, ProgramError)
    assert str(error).startswith("failing_of_k all_reduce for 2 ranks: its code must not fail, but raised ZeroDivision")
    assert "must define _build" in str(run(f"{file}:Unfinished").exception)


ODD = """
import paceline
from paceline.programs import Algorithm, Collective, Program
from paceline.programs.base import make_round

@paceline.register("odd")
class Odd(Algorithm):
    collectives = {collectives}

    def _build(self, collective, num_ranks, root):
        return Program(collective, "odd", num_ranks, 1, {num_rounds}, lambda index: make_round(0, 1, 0, 1, adds=True))
"""


@pytest.mark.parametrize(
    ("collectives", "num_rounds", "kind", "words"),
    [
        ("frozenset()", 1, SettingsError, "collectives of Odd must be a set such as .*but got frozenset"),
        ("'all_reduce'", 1, SettingsError, "collectives of Odd must be .* got 'all_reduce'; correct it"),
        ("{'all_reduces'}", 1, SettingsError, "collectives of Odd must be .*, of some of all_gather, "),
        ("{Collective.ALL_REDUCE}", -1, ProgramError, "num_rounds must be a whole number .*, but odd has -1"),
        ("{Collective.ALL_REDUCE}", 1.0, ProgramError, "num_rounds must be a whole number .*, but odd has 1.0"),
    ],
)
def test_what_a_program_of_the_users_says_of_itself_is_checked(tmp_path, collectives, num_rounds, kind, words):
    file = tmp_path / "odd_programs.py"
    file.write_text(ODD.format(collectives=collectives, num_rounds=num_rounds))
    error = run(f"{file}:Odd", "--ranks", "2").exception
    assert isinstance(error, kind)
    assert re.search(words, str(error)), error
    assert len(str(error).splitlines()) == 1


def test_nothing_to_prove_is_refused(tmp_path):
    file = tmp_path / "odd_programs.py"
    file.write_text(ODD.format(collectives="{Collective.ALL_TO_ALL}", num_rounds=1))
    error = run(f"{file}:Odd", "--ranks", "2", "--num_chunks", "4").exception
    assert "num_chunks must be left out" in str(error)


def test_proofs_need_no_torch():
    code = "import sys, paceline.programs.verify; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
