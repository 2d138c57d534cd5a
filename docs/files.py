"""A Sphinx extension: a link to a file of the repository opens a page with the file's text, and downloads nothing."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexers import get_lexer_for_filename
from sphinx.addnodes import download_reference
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
BEFORE_SPHINX = 100  # which copies what the links name, at 500


def link_to_pages(app: Sphinx, page: nodes.document) -> None:
    for link in list(page.findall(download_reference)):
        name = os.path.normpath(Path("docs", link["reftarget"]))
        if (ROOT / name).is_file():  # what doesn't exist is left to Sphinx, which warns
            link.replace_self(nodes.reference("", "", *link.children, internal=True, refuri=f"files/{name}.html"))
            app.env.metadata[app.env.docname].setdefault("files", []).append(name)


def pages_of_files(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    names = {name for it in app.env.metadata.values() for name in it.get("files", [])}
    for name in sorted(names):
        text = (ROOT / name).read_text()
        body = app.builder.highlighter.highlight_block(text, get_lexer_for_filename(name).aliases[0], linenos=False)
        yield f"files/{name}", {"title": name, "body": f"<h1>{name}</h1>{body}"}, "page.html"


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", link_to_pages, priority=BEFORE_SPHINX)
    app.connect("html-collect-pages", pages_of_files)
    return {"parallel_read_safe": True}
