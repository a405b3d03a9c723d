"""Draws a window's timeline as an SVG picture."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tplr.planner.timeline import Phase, Timeline

WIDTH, LEFT, ROW = 960, 80, 34
COLOURS = {"train": "#2a7f3f", "idle": "#bbbbbb", "upload": "#1f5fa8", "download": "#5b8fd0"}
OTHER = "#c8772b"
SMALL = 60  # pixels; narrower bars have their name only in the legend


def draw(line: Timeline, title: str) -> str:
    """Return an SVG document: a row for devices that train, one for each direction of the link, and a legend."""
    rows = {"devices": line.phases} if line.phases else {}
    rows |= {phase.name: (phase,) for phase in line.links}
    # Downloads may take longer than the window.
    end = max([line.window, *(phase.stop for phase in line.links)])
    legend = [(phase, COLOURS.get(phase.name, OTHER)) for phases in rows.values() for phase in phases]
    height = 60 + ROW * (len(rows) + 1) + 20 * len(legend)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="16">{escape(title)}</text>',
    ]
    for index, (name, phases) in enumerate(rows.items()):
        top = 40 + ROW * index
        parts.append(f'<text x="8" y="{top + 18}">{name}</text>')
        parts += _bars(phases, top, end)
    below = 40 + ROW * len(rows)
    parts += [f'<text x="{_x(at, end)}" y="{below + 12}">{at:.0f} s</text>' for at in (0.0, end / 2, end * 0.97)]
    for index, (phase, colour) in enumerate(legend):
        top = below + 30 + 20 * index
        parts.append(f'<rect x="{LEFT}" y="{top}" width="12" height="12" fill="{colour}"/>')
        share = f"{phase.name}: {phase.seconds:.1f} s, {phase.seconds / line.window:.1%} of the window"
        parts.append(f'<text x="{LEFT + 20}" y="{top + 11}">{escape(share)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _bars(phases: Sequence[Phase], top: int, end: float) -> list[str]:
    found = []
    for phase in phases:
        left, right = _x(phase.start, end), _x(phase.stop, end)
        colour = COLOURS.get(phase.name, OTHER)
        found.append(f'<rect x="{left}" y="{top}" width="{max(1.0, right - left):.1f}" height="26" fill="{colour}"/>')
        if right - left > SMALL:
            found.append(f'<text x="{left + 6:.1f}" y="{top + 18}" fill="white">{escape(phase.name)}</text>')
    return found


def _x(seconds: float, end: float) -> float:
    return round(LEFT + (WIDTH - LEFT - 20) * seconds / end, 1)
