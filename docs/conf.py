"""Sphinx, with MyST for Markdown: python -m sphinx -W --keep-going docs build/docs"""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import mpkernels

project = "mpkernels"
author = "the mpkernels authors"
version = release = mpkernels.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "linked_files"]
html_theme = "alabaster"
html_theme_options = {"description": "Mixed-precision training for PyTorch", "page_width": "1000px"}
html_show_sourcelink = False
myst_heading_anchors = 2  # links to a heading are checked, too

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = False  # a name is listed with its own text, or not at all
autodoc_mock_imports = [name for name in ("accelerate", "lightning", "transformers") if find_spec(name) is None]
exclude_patterns: list[str] = []
