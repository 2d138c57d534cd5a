"""A chart as SVG text, the same on every machine: rows of dots along an axis."""

from collections.abc import Mapping, Sequence
from html import escape
from math import log2
from typing import NamedTuple

from mpkernels.bench.results import Result
from mpkernels.bench.show import verdict

LABELS, PLOT, ROW, TOP, LINE = 400, 460, 22, 34, 16
RATIOS = (0.25, 0.5, 1, 2, 4, 8, 16)
STYLE = """<style>
text { font: 12px sans-serif; fill: #57606a } line { stroke: #8c959f; stroke-width: 1 } .one { stroke-dasharray: 4 3 }
.faster, .first { fill: #1a7f37; stroke: #1a7f37 } .even { fill: #8c959f } .slower { fill: #cf222e }
.second { fill: #0969da; stroke: #0969da } circle { fill-opacity: 0.65; stroke-opacity: 0 } .head { font-weight: bold }
circle.hollow { fill-opacity: 0; stroke-opacity: 1 }
@media (prefers-color-scheme: dark) { text { fill: #adbac7 } line { stroke: #768390 } .even { fill: #768390 }
.faster, .first { fill: #57ab5a; stroke: #57ab5a } .slower { fill: #f47067 }
.second { fill: #539bf5; stroke: #539bf5 } }
</style>"""


class Axis(NamedTuple):
    ticks: Sequence[float]  # from least to most; a dot beyond them is drawn at the edge
    unit: str = ""
    is_logarithmic: bool = False

    def across(self, value: float) -> float:
        measure = log2 if self.is_logarithmic else float
        least, most = measure(self.ticks[0]), measure(self.ticks[-1])
        clipped = min(self.ticks[-1], max(self.ticks[0], value))
        return LABELS + PLOT * (measure(clipped) - least) / (most - least)


class Dot(NamedTuple):
    value: float
    kind: str  # the dot's classes in STYLE
    name: str
    reach: tuple[float, float] | None = None  # the ends of a line through the dot


Row = tuple[str, Sequence[Dot]]  # label and dots; a row without dots is a heading
TIMES = Axis(RATIOS, "x", is_logarithmic=True)


def draw(groups: Mapping[str, Sequence[Result]]) -> str:
    """Draw each comparison as a row, and each of its cases as a dot."""
    rows = [(name, [_of_case(result) for result in results]) for name, results in groups.items()]
    note = "times torch's speed, a dot for each list of tensors and dtype; right of 1 ours is faster"
    return chart(rows, TIMES, note, {})


def _of_case(result: Result) -> Dot:
    return Dot(result.ratio.median, verdict(result), result.name)


def chart(rows: Sequence[Row], axis: Axis, note: str, legend: Mapping[str, str]) -> str:
    """Draw rows of dots. ``legend`` says what each kind of dot means."""
    bottom = TOP + ROW * len(rows)
    width, height = LABELS + PLOT + 20, bottom + 8 + LINE * (1 + len(legend))
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">', STYLE]
    for tick in axis.ticks:
        x, kind = axis.across(tick), ' class="one"' * (tick == 1)
        parts.append(f'<line{kind} x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 10}" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{TOP - 16}" text-anchor="middle">{tick:g}{axis.unit}</text>')
    for number, (name, dots) in enumerate(rows):
        y = TOP + ROW * number + ROW / 2
        kind = "" if dots else ' class="head"'
        parts.append(f'<text{kind} x="{LABELS - 14}" y="{y + 4:.0f}" text-anchor="end">{escape(name)}</text>')
        for dot in dots:
            parts += _drawn(dot, axis, y)
    for number, (kind, meaning) in enumerate(legend.items()):
        y = bottom + LINE * (number + 1)
        parts.append(f'<circle class="{kind}" cx="{LABELS + 5}" cy="{y - 4}" r="4"/>')
        parts.append(f'<text x="{LABELS + 16}" y="{y}">{escape(meaning)}</text>')
    parts.append(f'<text x="{LABELS}" y="{height - 6}">{escape(note)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _drawn(dot: Dot, axis: Axis, y: float) -> list[str]:
    parts = []
    if dot.reach:
        low, high = map(axis.across, dot.reach)
        parts.append(f'<line class="{dot.kind}" x1="{low:.1f}" x2="{high:.1f}" y1="{y:.0f}" y2="{y:.0f}"/>')
    if not axis.ticks[0] <= dot.value <= axis.ticks[-1]:  # it stands at the edge
        parts.append(
            f'<text x="{axis.across(dot.value) - 8:.1f}" y="{y + 4:.0f}" text-anchor="end">{dot.value:.3g}</text>'
        )
    title = escape(f"{dot.name}: {dot.value:.2f}")
    circle = f'class="{dot.kind}" cx="{axis.across(dot.value):.1f}" cy="{y:.0f}" r="4"'
    return [*parts, f"<circle {circle}><title>{title}</title></circle>"]
