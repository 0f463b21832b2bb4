"""Mutation testing: change the source in one place, run the tests that execute it, and see whether one fails.

    python tools/mutate.py --num 200 --seed 0 --json mutants.json

Mutants are drawn with a fixed seed from all places below `--below` where an operator of `_Finder` applies. Tests run
once unchanged, under coverage, to record the lines and the time of each. Each mutant is then made alone in a temporary
copy of the work tree, and has `--limit` seconds for the quickest of its tests, as many as took half of that. It is
*killed* if one fails, *hangs* if they do not end, *survived* if all pass; it is *unseen* if only other processes run
the line, whose tests are not known. Texts of errors, docstrings, annotations, assertions and default values are not
mutated. A bench, not a check: people read the survivors; some change no behaviour.
"""

import argparse
import ast
import copy
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import coverage
import pytest

BELOW = ("src/paceline/training", "src/paceline/replica", "src/paceline/sync")
TESTS = ("tests/replica", "tests/sync", "tests/training", "tests/data", "tests/equivalence", "tests/optim")
SEEN = "MUTATE_SEEN"
"""Environment variable with the file that `pytest_runtest_protocol` writes."""

FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OTHER: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: str
    line: int
    end_line: int
    operator: str
    before: str
    after: str
    span: tuple[int, int]
    """Place of the replaced text, in bytes."""


class _Finder(ast.NodeVisitor):
    """Collects the mutants of one file."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.source = text.encode()
        self.mutants: list[Mutant] = []
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line.encode()))

    def add(self, node: ast.AST, operator: str, other: ast.AST | str) -> None:
        """Record that `node` may be replaced."""
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[node.end_lineno - 1] + node.end_col_offset
        before = self.source[start:end].decode()
        after = other if isinstance(other, str) else ast.unparse(other)
        if isinstance(node, ast.expr):
            after = f"({after})"
        self.mutants.append(Mutant(self.path, node.lineno, node.end_lineno, operator, before, after, (start, end)))

    def changed(self, node: ast.AST, **fields: object) -> ast.AST:
        """Return a copy with other fields."""
        other = copy.copy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        return other

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add(node, "drop", "pass")

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        pass

    visit_ImportFrom = visit_Import

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for statement in node.body:  # neither annotations nor defaults nor decorators
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                self.visit(statement)

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.add(node.test, "not", ast.UnaryOp(ast.Not(), node.test))
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.add(node, "swap branches", self.changed(node, body=node.orelse, orelse=node.body))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self.add(node, "drop the sign", node.operand)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        self.add(node, "compare", self.changed(node, ops=[FLIPPED[type(node.ops[0])](), *node.ops[1:]]))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.add(node, "and/or", self.changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And()))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in OTHER:
            self.add(node, "arithmetic", self.changed(node, op=OTHER[type(node.op)]()))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add(node, "drop", "pass")
        if type(node.op) in OTHER:
            self.add(node, "arithmetic", self.changed(node, op=OTHER[type(node.op)]()))
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not isinstance(node.targets[0], ast.Name | ast.Tuple):  # it would only be missed at once
            self.add(node, "drop", "pass")
        self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, "constant", repr(not node.value))
        elif isinstance(node.value, int | float):
            self.add(node, "constant", repr(node.value + 1 if isinstance(node.value, int) else 2 * node.value + 1))

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.add(node, "return None", "return None")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.add(node, "drop", "pass")
            self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue | ast.Break) -> None:
        self.add(node, "drop", "pass")

    visit_Break = visit_Continue

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func)
        if called == "warnings.warn" or called.endswith("Error"):
            return
        if (
            len(node.args) >= 2
            and called not in ("max", "min")
            and not any(isinstance(a, ast.Starred) for a in node.args)
        ):
            first, second, *rest = node.args
            self.add(node, "swap arguments", self.changed(node, args=[second, first, *rest]))
        self.generic_visit(node)


def find_mutants(root: Path, below: list[str]) -> list[Mutant]:
    """Return all mutants of the files below some folders, in a fixed order."""
    found = []
    for path in sorted(path for folder in below for path in (root / folder).rglob("*.py")):
        finder = _Finder(str(path.relative_to(root)), path.read_text(encoding="utf-8"))
        finder.visit(ast.parse(finder.source))
        found += finder.mutants
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Record a test's time, and its name for coverage: this file is pytest's plugin too."""
    running = coverage.Coverage.current()
    assert running is not None
    running.switch_context(item.nodeid)
    began_s = time.monotonic()
    try:
        return (yield)
    finally:
        running.switch_context("")
        with Path(os.environ[SEEN]).open("a", encoding="utf-8") as file:
            file.write(json.dumps([item.nodeid, time.monotonic() - began_s]) + "\n")


@dataclass(frozen=True)
class Seen:
    """Tests that run a line, by file and line, and the time of each."""

    lines: dict[str, dict[int, list[str]]]
    seconds: dict[str, float]

    @classmethod
    def measure(cls, root: Path, below: list[str], tests: list[str]) -> "Seen":
        """Run all tests, unchanged."""
        with tempfile.TemporaryDirectory() as folder:
            data, noted = Path(folder) / "coverage", Path(folder) / "seconds"
            command = ["coverage", "run", f"--data-file={data}", f"--source={','.join(below)}", "-m"]
            with (Path(folder) / "output").open("w+", encoding="utf-8") as output:
                if run(root, [*command, *PYTEST, "-p", "mutate", *tests], None, output, {SEEN: str(noted)}) != 0:
                    output.seek(0)
                    raise SystemExit(f"{output.read()[-4000:]}\ntests must pass before anything is changed")
            found = coverage.CoverageData(str(data))
            found.read()
            lines = {
                str(Path(file).relative_to(root)): {
                    line: [test for test in tests if test] for line, tests in found.contexts_by_lineno(file).items()
                }
                for file in found.measured_files()
            }
            return cls(lines, dict(json.loads(line) for line in noted.read_text(encoding="utf-8").splitlines()))

    def choose(self, mutant: Mutant, limit_s: float) -> list[str]:
        """Return the quickest tests that run a mutant's lines, as many as take `limit_s` together."""
        by_line = self.lines.get(mutant.path, {})
        tests = {test for line in range(mutant.line, mutant.end_line + 1) for test in by_line.get(line, [])}
        chosen: list[str] = []
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            limit_s -= self.seconds[test]
            if chosen and limit_s < 0:
                break
            chosen.append(test)
        return chosen


def judge(root: Path, mutant: Mutant, seen: Seen, limit_s: float) -> str:
    """Return the outcome of a mutant."""
    tests = seen.choose(mutant, limit_s / 2)
    if not tests:
        return "unseen"
    path = root / mutant.path
    source, times = path.read_bytes(), path.stat()
    start, end = mutant.span
    path.write_bytes(source[:start] + mutant.after.encode() + source[end:])
    try:
        return {0: "survived", None: "hangs"}.get(run(root, [*PYTEST, *tests], limit_s), "killed")
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # so that its bytecode is valid again


PYTEST = ["pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]


def run(
    root: Path,
    command: list[str],
    limit_s: float | None,
    output: TextIO | None = None,
    more: dict[str, str] | None = None,
) -> int | None:
    """Return the exit status of ``python -m`` in a tree; None if it did not end in time."""
    paths = f"{root / 'src'}:{root / 'tools'}"
    variables = (
        os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"} | (more or {})
    )
    whole = [sys.executable, "-m", *command]
    written = output or subprocess.DEVNULL
    with subprocess.Popen(
        whole, cwd=root, env=variables, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)


def copy_tree(root: Path, target: Path) -> None:
    """Copy the tracked files, and those that git does not ignore, and make bytecode."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=root, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((root / name).read_bytes())
    subprocess.run([sys.executable, "-m", "compileall", "-q", "src"], cwd=target, check=True)


def main() -> None:
    """Draw mutants, judge each, and print and save the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=200, help="number of mutants to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--below", nargs="+", default=BELOW, help="folders of the source")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="tests to run")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per mutant")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the drawn mutants to judge; all by default")
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    root = Path(__file__).parents[1]
    found = find_mutants(root, options.below)
    drawn = list(enumerate(random.Random(options.seed).sample(found, min(options.num, len(found)))))
    drawn = [(number, mutant) for number, mutant in drawn if not options.only or number in options.only]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder).resolve()
        rows: list[dict[str, Any]] = []
        if not options.list:
            copy_tree(root, tree)
            seen = Seen.measure(tree, options.below, options.tests)
        for number, mutant in drawn:
            began_s = time.monotonic()
            outcome = "listed" if options.list else judge(tree, mutant, seen, options.limit)
            seconds = time.monotonic() - began_s
            before, after = (" ".join(text.split())[:70] for text in (mutant.before, mutant.after))
            print(
                f"{number:4} {outcome:8} {seconds:3.0f} s  {mutant.path.removeprefix('src/paceline/')}:{mutant.line}",
                end="  ",
            )
            print(f"{mutant.operator}: {before} -> {after}", flush=True)
            rows.append({"number": number, "outcome": outcome, "seconds": round(seconds, 1), **asdict(mutant)})
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1) + "\n")
    counts = Counter(str(row["outcome"]) for row in rows)
    print(f"{len(found)} places; {', '.join(f'{number} {outcome}' for outcome, number in sorted(counts.items()))}")
    noticed, passed = counts["killed"] + counts["hangs"], counts["survived"]
    if noticed + passed:
        print(f"score {noticed / (noticed + passed):.1%} of {noticed + passed} judged")


if __name__ == "__main__":
    main()
