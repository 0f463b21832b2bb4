"""The blocks of code on the pages, and the commands in them."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name != "LOG.md"),
]


@dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    page: str
    number: int
    language: str
    text: str

    @property
    def file(self) -> str:
        """The file that its first line names; empty without one."""
        found = re.match(r"# (\w+\.py)\n", self.text)
        return found[1] if found else ""

    def __str__(self) -> str:
        return f"{self.page}:{self.file or self.number}"


def list_blocks(language: str) -> list[Block]:
    """Return the blocks of all pages."""
    return [
        Block(page.name, number, language, text)
        for page in PAGES
        for number, text in enumerate(
            re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        )
    ]


def list_commands() -> dict[tuple[str, ...], str]:
    """Return the words of each command, with the first page that has it."""
    commands: dict[tuple[str, ...], str] = {}
    for block in list_blocks("sh"):
        for line in block.text.replace("\\\n", "").splitlines():
            if words := tuple(shlex.split(line, comments=True)):
                commands.setdefault(words, block.page)
    return commands


def write_files(directory: Path) -> None:
    """Write the files that pages show, and the examples, as a reader has them."""
    for block in list_blocks("python"):
        if block.file:
            (directory / block.file).write_text(block.text)
    (directory / "examples").symlink_to(ROOT / "examples")
    (directory / "my").mkdir()
    (directory / "my" / "texts").mkdir()
    for number in range(20):
        (directory / "my" / "texts" / f"{number}.txt").write_text("All happy families are alike. " * 40)
