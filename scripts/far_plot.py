#!/usr/bin/env python3
"""Draws the traces of the congestion controller's tests, as in docs/far.md.

    cargo test -p farwire --lib traces_for_the_docs -- --ignored --nocapture | scripts/far_plot.py docs/far-traces.svg

Each panel is one scene in virtual time: the rate in Mbit/s (filled) and the round trip in ms (line), every 100 ms.
"""

import re
import sys

WIDTH, HEIGHT, COLUMNS, LEFT, TOP, GAP = 330, 150, 2, 46, 34, 62
FONT = 'font-family="system-ui, sans-serif"'
RATE, RTT, GREY = "#3b7dd8", "#c8542b", "#6a737d"


def scenes(text):
    """Titles, and for each a list of (second, Mbit/s, ms)."""
    found = []
    for line in text:
        if title := re.match(r"(.+): lost (\d+) of (\d+)$", line):
            lost = 100 * int(title[2]) / max(1, int(title[3]))
            found.append((title[1], lost, []))
        elif point := re.match(r"\s+([\d.]+) s\s+([\d.]+) Mbit/s\s+([\d.]+) ms", line):
            found[-1][2].append(tuple(float(value) for value in point.groups()))
    return found


def ticks(most):
    step = next(step for step in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500) if most / step <= 4)
    return range(0, int(most) + 1, step)


def panel(x, y, title, lost, points):
    seconds = points[-1][0]
    most_rate = 1.1 * max(rate for _, rate, _ in points)
    most_rtt = 1.1 * max(rtt for _, _, rtt in points)
    at = lambda second: x + LEFT + (WIDTH - 2 * LEFT) * second / seconds
    up = lambda value, most: y + TOP + HEIGHT * (1 - value / most)
    yield f'<text x="{x + LEFT}" y="{y + 14}" {FONT} font-size="13" font-weight="600">{title}</text>'
    yield f'<text x="{x + LEFT}" y="{y + 28}" {FONT} font-size="11" fill="{GREY}">{lost:.1f} % lost</text>'
    for tick in ticks(most_rate):
        height = up(tick, most_rate)
        yield f'<path d="M{x + LEFT} {height:.1f}H{x + WIDTH - LEFT}" stroke="#d8dee4"/>'
        yield text(x + LEFT - 6, height + 4, tick, "end", RATE)
    for tick in ticks(most_rtt):
        yield text(x + WIDTH - LEFT + 6, up(tick, most_rtt) + 4, tick, "start", RTT)
    for tick in ticks(seconds):
        yield text(at(tick), y + TOP + HEIGHT + 15, f"{tick} s", "middle", GREY)
    line = " ".join(f"{at(second):.1f},{up(rate, most_rate):.1f}" for second, rate, _ in points)
    floor = y + TOP + HEIGHT
    yield f'<polygon points="{at(points[0][0]):.1f},{floor} {line} {at(seconds):.1f},{floor}" fill="{RATE}" fill-opacity="0.35"/>'
    yield f'<polyline points="{line}" fill="none" stroke="{RATE}"/>'
    line = " ".join(f"{at(second):.1f},{up(rtt, most_rtt):.1f}" for second, _, rtt in points)
    yield f'<polyline points="{line}" fill="none" stroke="{RTT}" stroke-width="1.5"/>'


def text(x, y, what, anchor, colour):
    return f'<text x="{x:.1f}" y="{y:.1f}" {FONT} font-size="11" text-anchor="{anchor}" fill="{colour}">{what}</text>'


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    panels = scenes(sys.stdin)
    if not panels:
        sys.exit("far_plot.py: no traces on standard input; see its first lines for the command")
    rows = -(-len(panels) // COLUMNS)
    width, height = COLUMNS * WIDTH, rows * (HEIGHT + GAP) + 26
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        text(LEFT, 16, "Mbit/s", "start", RATE),
        text(LEFT + 60, 16, "round trip, ms", "start", RTT),
    ]
    for number, (title, lost, points) in enumerate(panels):
        x, y = number % COLUMNS * WIDTH, number // COLUMNS * (HEIGHT + GAP) + 26
        svg += panel(x, y, title, lost, points)
    with open(sys.argv[1], "w") as file:
        file.write("\n".join(svg) + "\n</svg>\n")


if __name__ == "__main__":
    main()
