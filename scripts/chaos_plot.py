#!/usr/bin/env python3
"""Draws the file that scripts/chaos.py writes with --json, as in docs/chaos.md.

    scripts/chaos_plot.py run.json docs/images/chaos.svg

Each link and fault has a row, with a dot for each time: when a rank noticed, when all surviving ranks had the new
group, and when all ranks were back. Times are seconds after the fault, on a logarithmic scale.
"""

import json
import math
import random
import sys

WIDTH, LEFT, RIGHT, TOP, ROW, BOTTOM = 760, 130, 20, 56, 24, 30
FONT = 'font-family="system-ui, sans-serif"'
GREY = "#6a737d"
SHOWN = {
    "detect": ("a rank notices", "#8a63d2"),
    "group": ("all that are left have the new group", "#3b7dd8"),
    "whole": ("all are there again", "#c8542b"),
}
LEAST, MOST = 0.005, 20


def at(seconds):
    share = math.log(max(LEAST, min(MOST, seconds)) / LEAST) / math.log(MOST / LEAST)
    return LEFT + (WIDTH - LEFT - RIGHT) * share


def text(x, y, what, anchor="start", colour=GREY):
    return f'<text x="{x:.1f}" y="{y:.1f}" {FONT} font-size="11" text-anchor="{anchor}" fill="{colour}">{what}</text>'


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[1]) as file:
        run = json.load(file)
    rows = {}
    for fault in run["faults"]:
        rows.setdefault((fault["link"], fault["kind"]), []).append(fault)
    # Faults that change nothing have nothing to show.
    rows = {row: faults for row, faults in rows.items() if any(fault["change"] for fault in faults)}
    height, chance = TOP + ROW * len(rows) + BOTTOM, random.Random(1)
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    x = LEFT
    for name, colour in SHOWN.values():
        svg += [f'<circle cx="{x}" cy="22" r="4" fill="{colour}"/>', text(x + 9, 26, name, colour=colour)]
        x += 40 + 6.2 * len(name)
    for tick in (0.01, 0.1, 1, 10):
        svg.append(f'<path d="M{at(tick):.1f} {TOP - 10}V{height - BOTTOM + 4}" stroke="#d8dee4"/>')
        svg.append(text(at(tick), height - BOTTOM + 20, f"{tick} s", "middle"))
    for number, ((link, kind), faults) in enumerate(rows.items()):
        middle = TOP + ROW * (number + 0.5)
        if number % 2:
            svg.append(f'<rect x="0" y="{middle - ROW / 2}" width="{WIDTH}" height="{ROW}" fill="#6a737d" fill-opacity="0.06"/>')
        svg.append(text(LEFT - 12, middle + 4, f"{link}: {kind} ({len(faults)})", "end", "#24292f"))
        for name, (_, colour) in SHOWN.items():
            for seconds in (fault[name] for fault in faults if name in fault):
                y = middle + chance.uniform(-0.3, 0.3) * ROW
                svg.append(f'<circle cx="{at(seconds):.1f}" cy="{y:.1f}" r="2.2" fill="{colour}" fill-opacity="0.6"/>')
    with open(sys.argv[2], "w") as file:
        file.write("\n".join(svg) + "\n</svg>\n")


if __name__ == "__main__":
    main()
