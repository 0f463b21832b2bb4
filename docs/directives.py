"""Directives that take their text from the code, so that these pages cannot go stale."""

import inspect
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from typer.testing import CliRunner


class CommandHelp(Directive):
    """What ``paceline COMMAND --help`` prints."""

    required_arguments = 0
    optional_arguments = 2

    def run(self) -> list[nodes.Node]:
        from paceline.cli.main import app

        command = [*self.arguments, "--help"]
        result = CliRunner().invoke(app, command, env={"COLUMNS": "100", "TERMINAL_WIDTH": "100", "TERM": "dumb"})
        if result.exit_code:
            raise self.error(f"paceline {' '.join(command)} failed: {result.output}")
        text = "\n".join(line.rstrip() for line in result.output.strip("\n").splitlines())
        return [nodes.literal_block(text, text, language="text")]


class RecipeSettings(Directive):
    """A table of every setting of a recipe, with its value there."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        from paceline.cli.describe import describe_settings
        from paceline.cli.prepare import make_run

        rows = describe_settings(make_run(self.arguments[0], []))
        cells: list[tuple[object, ...]] = [(f"--{row.path}", *row[1:]) for row in rows]
        return [_table(("override", "type", "value", "meaning"), cells)]


class EventFields(Directive):
    """A section for each kind of event: what it means, and its fields."""

    option_spec: ClassVar[dict[str, object]] = {}

    def run(self) -> list[nodes.Node]:
        from paceline.cli.describe import describe_type
        from paceline.monitor import list_kinds
        from paceline.monitor.events import list_fields

        modules = {cls.__module__ for cls in list_kinds().values()}
        meanings = {
            key: doc for name in modules for key, doc in ModuleAnalyzer.for_module(name).find_attr_docs().items()
        }
        sections: list[nodes.Node] = []
        for kind, cls in list_kinds().items():
            section = nodes.section(ids=[kind.replace("_", "-")], names=[kind])
            section += nodes.title(kind, kind)
            summary = (inspect.getdoc(cls) or "").splitlines()[0]
            section += nodes.paragraph(summary, summary)
            rows = [
                (name, describe_type(annotation), " ".join(meanings.get((cls.__name__, name), [])).strip())
                for name, annotation in list_fields(cls).items()
            ]
            section += _table(("field", "holds", "meaning"), rows)
            sections.append(section)
        return sections


def _table(titles: tuple[str, ...], rows: list[tuple[object, ...]]) -> nodes.table:
    """Return a table; its first column is set as code, and so are words in backticks."""
    group = nodes.tgroup(cols=len(titles))
    group += [nodes.colspec(colwidth=1) for _ in titles]
    head, body = nodes.thead(), nodes.tbody()
    head += _row([nodes.paragraph(title, title) for title in titles])
    for first, *rest in rows:
        code = nodes.paragraph("", "", nodes.literal(str(first), str(first)))
        body += _row([code, *(_prose(str(cell)) for cell in rest)])
    group += [head, body]
    return nodes.table("", group, classes=["colwidths-auto"])


def _row(cells: list[nodes.paragraph]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", cell) for cell in cells))


def _prose(text: str) -> nodes.paragraph:
    paragraph = nodes.paragraph()
    for number, part in enumerate(text.replace("``", "`").split("`")):
        paragraph += nodes.literal(part, part) if number % 2 else nodes.Text(part)
    return paragraph


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("command-help", CommandHelp)
    app.add_directive("recipe-settings", RecipeSettings)
    app.add_directive("event-fields", EventFields)
    return {"parallel_read_safe": True}
