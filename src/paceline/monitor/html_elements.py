"""HTML elements of a report's page. Every text is escaped here, so that none can become markup."""

import base64
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from paceline.monitor.formatting import printable


class Pictures(NamedTuple):
    """The same picture as two PNGs: on a light background, and on a dark one."""

    light: bytes
    dark: bytes


def safe(text: str) -> str:
    """Return `text` escaped as HTML."""
    return escape(printable(text), quote=True)


def section(title: str, content: str, kind: str = "") -> str:
    """Return a section around `content`, which is HTML."""
    return f'<section class="{kind}"><h2>{title}</h2>{content}</section>'


def tiles(content: Sequence[tuple[str, str, str]]) -> str:
    """Return tiles of (name, value, note)."""
    cells = (
        f"<div><dt>{safe(name)}</dt><dd>{safe(value)}<small>{safe(note)}</small></dd></div>"
        for name, value, note in content
    )
    return f"<dl class=tiles>{''.join(cells)}</dl>"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, num_numeric: int = 0, code: bool = False) -> str:
    """Return a table whose first `num_numeric` columns are numbers."""

    def cells(tag: str, values: Sequence[str]) -> str:
        kinds = [" class=n" if column < num_numeric else "" for column in range(len(values))]
        texts = [f"<code>{safe(value)}</code>" if code and tag == "td" else safe(value) for value in values]
        return "".join(f"<{tag}{kind}>{text}</{tag}>" for kind, text in zip(kinds, texts, strict=True))

    head = f"<thead><tr>{cells('th', headings)}</tr></thead>"
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<div class=scroll><table>{head}<tbody>{body}</tbody></table></div>"


def picture(pictures: Pictures, shown: str) -> str:
    """Return the picture that fits the reader's colour scheme; `shown` describes it in words."""
    light_url, dark_url = (f"data:image/png;base64,{base64.b64encode(png).decode()}" for png in pictures)
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark_url}">'
        f'<img src="{light_url}" alt="{safe(shown)}"></picture>'
    )
