"""A chart as SVG text, the same on every machine: a dot for each case, a row for each comparison."""

from html import escape
from math import log2

from mpkernels.bench.results import Result
from mpkernels.bench.show import verdict

LABELS, PLOT, ROW, TOP = 400, 460, 22, 34
LEAST, MOST = 0.25, 16.0
STYLE = """<style>
text { font: 12px sans-serif; fill: #57606a } line { stroke: #8c959f; stroke-width: 1 } .one { stroke-dasharray: 4 3 }
.faster { fill: #1a7f37 } .even { fill: #8c959f } .slower { fill: #cf222e } circle { fill-opacity: 0.65 }
@media (prefers-color-scheme: dark) { text { fill: #adbac7 } line { stroke: #768390 } .faster { fill: #57ab5a }
.even { fill: #768390 } .slower { fill: #f47067 } }
</style>"""


def across(ratio: float) -> float:
    """Logarithmic; what lies outside is drawn at the edge."""
    clipped = min(MOST, max(LEAST, ratio))
    return LABELS + PLOT * log2(clipped / LEAST) / log2(MOST / LEAST)


def draw(groups: dict[str, list[Result]]) -> str:
    width, height = LABELS + PLOT + 20, TOP + ROW * len(groups) + 24
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">', STYLE]
    ratio = LEAST
    while ratio <= MOST:
        x, kind = across(ratio), ' class="one"' * (ratio == 1)
        parts.append(f'<line{kind} x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 10}" y2="{height - 24}"/>')
        parts.append(f'<text x="{x:.1f}" y="{TOP - 16}" text-anchor="middle">{ratio:g}x</text>')
        ratio *= 2
    for row, (name, results) in enumerate(groups.items()):
        y = TOP + ROW * row + ROW / 2
        parts.append(f'<text x="{LABELS - 14}" y="{y + 4:.0f}" text-anchor="end">{escape(name)}</text>')
        for result in results:
            x, title = across(result.ratio.median), escape(f"{result.name}: {result.ratio.median:.2f}")
            dot = f'cx="{x:.1f}" cy="{y:.0f}" r="4"'
            parts.append(f'<circle class="{verdict(result)}" {dot}><title>{title}</title></circle>')
    note = "times torch's speed, a dot for each list of tensors and dtype; right of 1 ours is faster"
    parts.append(f'<text x="{LABELS}" y="{height - 6}">{note}</text>')
    return "\n".join([*parts, "</svg>\n"])
