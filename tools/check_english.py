"""Fail when the line that documents a value does not begin with its noun: "Random seed.", not "Of what is drawn."."""

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("src", "tools", "tests", "examples")
RIDDLES = re.compile(
    r"""(Of|What|Whose|Who|Whom|Where|How|When|Which|Why|Those|These|Theirs|Them|They|Its|Their|It)\b
    |(That|Whether)\ (of|it|they|those)\b
    |(As|By|Among|At|On|Over|From|With|Without|Between)\b
    |(Says|Has|Makes|Lets|Gets|Hands|Asked|Called|Given|Names(?!\ of|,))\b""",
    re.VERBOSE,
)
ENTRY = re.compile(r" {4}(\w+): (\S.*)")


def find_riddles(root: Path) -> list[str]:
    """Return one line for each argument, error or field below `root` whose text does not begin with its noun."""
    found = []
    for path in (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))):
        for line, name, text in _list_documented(ast.parse(path.read_text())):
            if RIDDLES.match(text):
                found.append(f"{path.relative_to(root)}:{line} {name}: {text.splitlines()[0]!r}")
    return found


def _list_documented(module: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield line, name and text of each documented field, argument and error."""
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _list_fields(node.body)
            yield from _list_entries(ast.get_docstring(node) or "", node.body[0].lineno if node.body else 1)


def _list_fields(body: list[ast.stmt]) -> Iterator[tuple[int, str, str]]:
    """Yield each assignment that a string follows."""
    for before, after in itertools.pairwise(body):
        if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
            text = after.value.value if isinstance(after.value, ast.Constant) else None
            if isinstance(text, str):
                yield after.lineno, ast.unparse(getattr(before, "target", None) or before.targets[0]), text.lstrip()


def _list_entries(docstring: str, first: int) -> Iterator[tuple[int, str, str]]:
    """Yield the entries of the sections of arguments, attributes and errors."""
    is_inside = False
    for number, line in enumerate(docstring.splitlines()):
        if line and not line.startswith(" "):
            is_inside = line in ("Args:", "Attributes:", "Raises:")
        elif is_inside and (entry := ENTRY.match(line)):
            yield first + number, entry[1], entry[2]


if __name__ == "__main__":
    problems = find_riddles(Path(__file__).parent.parent)
    print("\n".join(problems) or "each documented value begins with its noun")
    sys.exit(bool(problems))
