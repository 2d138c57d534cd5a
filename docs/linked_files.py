"""A Sphinx extension: a link to a file of the repository opens a page with the file's text, and downloads nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexers import get_lexer_for_filename
from sphinx.addnodes import download_reference, pending_xref
from sphinx.application import Sphinx

DOCS = Path(__file__).parent
BEFORE_SPHINX = 100  # which copies what the links name, at 500


def link_to_pages(app: Sphinx, page: nodes.document) -> None:
    for link in [*page.findall(download_reference), *page.findall(pending_xref)]:
        # MyST takes a Markdown file outside docs/ for a document, and drops its suffix.
        suffix = ".md" if isinstance(link, pending_xref) else ""
        path = (DOCS / (link["reftarget"] + suffix)).resolve()
        if path.is_file() and DOCS not in path.parents:  # others are pages, or don't exist: Sphinx warns
            name = str(path.relative_to(DOCS.parent))
            link.replace_self(nodes.reference("", "", *link.children, internal=True, refuri=f"files/{name}.html"))
            app.env.metadata[app.env.docname].setdefault("files", []).append(name)


def pages_of_files(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    for name in sorted({name for it in app.env.metadata.values() for name in it.get("files", [])}):
        lexer = get_lexer_for_filename(name).aliases[0]
        text = app.builder.highlighter.highlight_block((DOCS.parent / name).read_text(), lexer)
        yield f"files/{name}", {"title": name, "body": f"<h1>{name}</h1>{text}"}, "page.html"


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", link_to_pages, priority=BEFORE_SPHINX)
    app.connect("html-collect-pages", pages_of_files)
    return {"parallel_read_safe": True}
