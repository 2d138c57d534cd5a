"""Reports print as text, and show as HTML in notebooks."""

import math

import pytest
import torch

import mpkernels
from mpkernels._shared.report_tables import Report, Table
from mpkernels.optim import AdamW
from tests.networks import network


class Example(Report):
    def _parts(self):
        return ["Two rows & a sentence.", Table(["", "bytes"], [["weights", "8"], ["<all>", "16"]], holds_numbers=True)]


def test_a_report_prints_in_columns():
    assert str(Example()).splitlines() == [
        "Two rows & a sentence.",
        "         bytes",
        "weights      8",
        "<all>       16",
    ]


def test_a_report_shows_escaped_html():
    assert Example()._repr_html_() == (
        "<p>Two rows &amp; a sentence.</p><table><tr><th></th><th>bytes</th></tr>"
        "<tr><td>weights</td><td>8</td></tr><tr><td>&lt;all&gt;</td><td>16</td></tr></table>"
    )


def a_skip(model):
    optimizer = AdamW(model.parameters(), guard=True)
    model(torch.full((2, 20), math.nan)).sum().backward()
    optimizer.step()
    return optimizer.overflow_report(model)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda model: mpkernels.memory_report(model), ["predicted", "parameters", "MiB"]),
        (lambda model: mpkernels.compare_memory(model, lambda it: it(torch.ones(2, 20)).sum()), ["mpkernels", "total"]),
        (lambda model: mpkernels.nn.fuse(model, dry_run=True), ["fused", "computed by", "left", "why"]),
        (a_skip, ["The newest skipped step", "parameter", "3.weight", "nan"]),
    ],
    ids=["memory", "comparison", "fuse", "overflow"],
)
def test_every_report_shows_as_text_and_as_html(make, words):
    report = make(network())
    html = report._repr_html_()
    assert html.count("<table>") == html.count("</table>") >= 1
    for word in words:
        assert word in str(report)
        assert word in html
