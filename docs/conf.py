"""Sphinx settings: ``make docs`` builds the pages and fails on any warning."""

import sys
from pathlib import Path

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
autodoc_typehints = "signature"
autosummary_generate = True
autosummary_ignore_module_all = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
