"""Sphinx settings: ``make docs`` builds the pages and fails on any warning."""

import sys
from pathlib import Path

from sphinx.application import Sphinx

import paceline

sys.path.insert(0, str(Path(__file__).parent))

project = "Paceline"
copyright = "The Paceline authors"
release = paceline.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "directives",
]
exclude_patterns = ["_build", "LOG.md", "benchmarks"]
templates_path = ["_templates"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}

html_theme = "furo"
html_title = "Paceline"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_default_options = {"exclude-members": "model_config"}
autosummary_generate = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False


def keep_colons(app: object, what: str, name: str, found: object, options: object, lines: list[str]) -> None:
    """Keep napoleon from taking the first words of a field's docstring, up to a colon, for its type."""
    if what in ("attribute", "data", "property"):
        lines[:0] = [".. An invisible first line, without a colon.", ""]


def setup(app: Sphinx) -> None:
    """Connect what comes before napoleon."""
    app.connect("autodoc-process-docstring", keep_colons, priority=400)
