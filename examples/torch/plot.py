"""Draws the figures from bench.py: a bar for each way, split into computing and communicating.

    python examples/torch/plot.py "100 Mbit/s=bench-100.json" "1 Gbit/s=bench-1000.json" > steps.svg
"""

import json
import sys
from xml.sax.saxutils import escape

WIDTH, LEFT, BAR, GAP = 720, 150, 16, 8


def panel(title, figures, top):
    """One network: its bars, and the top of the next panel."""
    base = figures["nothing"][0]
    longest = max(step for step, *_ in figures.values())
    scale = (WIDTH - LEFT - 90) / longest
    parts = [f'<text x="0" y="{top + 14}" font-weight="bold">{escape(title)}</text>']
    y = top + 26
    for way, (step, *_rest) in figures.items():
        computing = min(step, base)
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(way)}</text>',
            f'<rect x="{LEFT}" y="{y}" '
            f'width="{computing * scale:.1f}" height="{BAR}" fill="#9aa5b1"/>',
            f'<rect x="{LEFT + computing * scale:.1f}" y="{y}" '
            f'width="{(step - computing) * scale:.1f}" height="{BAR}" fill="#d1603d"/>',
            f'<text x="{LEFT + step * scale + 6:.1f}" y="{y + 12}">{step:.2f} s</text>',
        ]
        y += BAR + GAP
    return parts, y + 16


def main():
    parts, top = [], 30
    for argument in sys.argv[1:]:
        title, _, path = argument.partition("=")
        with open(path) as file:
            drawn, top = panel(title, json.load(file)["ways"], top)
        parts += drawn
    legend = (
        '<rect x="0" y="4" width="12" height="12" fill="#9aa5b1"/>'
        '<text x="18" y="14">computing</text>'
        '<rect x="110" y="4" width="12" height="12" fill="#d1603d"/>'
        '<text x="128" y="14">waiting for gradients</text>'
    )
    style = 'font-family="sans-serif" font-size="12"'
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" {style}>')
    print(f'<rect width="{WIDTH}" height="{top}" fill="white"/>{legend}')
    print("\n".join(parts))
    print("</svg>")


if __name__ == "__main__":
    main()
