"""Fail when a source file passes 500 lines or a function 80, unless it is listed here with a reason."""

import ast
import sys
from pathlib import Path

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
ALLOWED: dict[str, str] = {}  # "path" or "path:function" -> reason


def find_oversized(root: Path) -> list[str]:
    """Return one line for each file or function below `root` that is too long."""
    found = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        num_lines = text.count("\n")
        if num_lines > MAX_FILE_LINES and str(path) not in ALLOWED:
            found.append(f"{path} has {num_lines} lines, more than {MAX_FILE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES and f"{path}:{node.name}" not in ALLOWED:
                    found.append(f"{path}:{node.lineno} {node.name} has {length} lines, more than {MAX_FUNCTION_LINES}")
    return found


if __name__ == "__main__":
    problems = [line for folder in ("src", "tests", "examples", "tools") for line in find_oversized(Path(folder))]
    print("\n".join(problems) or "sizes are fine")
    sys.exit(bool(problems))
