"""What the pages say of names and messages is what there is."""

import ast
import re

from pages import ROOT

import paceline
from paceline.training import Run

CONCEPTS = (ROOT / "docs" / "concepts.md").read_text()
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()
NOT_OURS = {"--shm-size 2g", "--ipc host", "#SBATCH --requeue --signal=TERM@120", "pip install"}


def list_messages() -> str:
    """Return every text in the source, a line each, with NUL in place of what is filled in."""
    lines = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                lines.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                lines.append(node.value)
    return "\n".join(lines)


def test_messages_are_quoted_as_they_are():
    messages = list_messages()
    first_cells = "".join(re.findall(r"^\| (.*?) \|", TROUBLES, flags=re.MULTILINE))
    paragraphs = "".join(re.findall(r"^`.*?`[:,]", TROUBLES, flags=re.MULTILINE))
    quoted = {words for words in re.findall(r"`([^`]+)`", first_cells + paragraphs) if " " in words}
    assert len(quoted) > 30
    pattern = {words: ".*".join(re.escape(part.strip()) for part in words.split("...")) for words in quoted}
    assert [words for words in quoted - NOT_OURS if not re.search(pattern[words], messages)] == []


def test_the_glossary_holds_every_public_name():
    public = [name for name in paceline.__all__ if getattr(getattr(paceline, name), "__path__", None) is None]
    names = [name for name in public if name != "__version__"]
    assert len(names) > 15
    assert [name for name in names if f"`paceline.{name}`" not in CONCEPTS] == []


def test_the_glossary_holds_every_setting_of_a_run():
    table = CONCEPTS[CONCEPTS.index("## Settings of a run") : CONCEPTS.index("## The global order")]
    named = [name for row in re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE) for name in row.split(", ")]
    assert sorted(named) == sorted(f"`{name}`" for name in Run.model_fields if name != "name")


def test_the_page_on_the_api_names_what_is_public():
    page = (ROOT / "docs" / "api.md").read_text().partition("```{eval-rst}")[0]
    named = set(re.findall(r"`(\w+)`", page))
    assert set(paceline.__all__) - {"__version__"} <= named


def test_each_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    listed = set(re.findall(r"^([\w-]+)$", index, flags=re.MULTILINE))
    assert listed == {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index", "LOG"}
