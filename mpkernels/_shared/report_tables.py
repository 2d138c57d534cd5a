"""Tables for people: text when printed, HTML in a notebook."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple


class Table(NamedTuple):
    """A head and rows of cells. Columns of numbers are aligned to the right, except the first column."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    holds_numbers: bool = False

    def lines(self) -> list[str]:
        cells = [self.head, *self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        justify = [str.ljust, *[str.rjust if self.holds_numbers else str.ljust] * (len(widths) - 1)]
        return [
            "  ".join(place(cell, width) for place, cell, width in zip(justify, row, widths, strict=True)).rstrip()
            for row in cells
        ]

    def html(self) -> str:
        rows = [("th", self.head), *(("td", row) for row in self.rows)]
        return f"<table>{''.join(map(_html_row, rows))}</table>"


def _html_row(row: tuple[str, Sequence[str]]) -> str:
    tag, cells = row
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


class Report:
    """A report that ``print`` shows as text and a notebook as HTML tables."""

    def _parts(self) -> Iterable[str | Table]:
        """Return the report's sentences and tables, from top to bottom."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(
            line for part in self._parts() for line in (part.lines() if isinstance(part, Table) else [part])
        )

    def _repr_html_(self) -> str:
        return "".join(
            part.html() if isinstance(part, Table) else f"<p>{escape(part)}</p>" for part in self._parts() if part
        )
