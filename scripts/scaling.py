#!/usr/bin/env python3
"""How the time of an all-reduce grows with the number of ranks: `farwire sim` with costs measured on this machine.

    python3 scripts/scaling.py speeds FILE             measures the costs, on an idle machine (as root)
    python3 scripts/scaling.py check FILE              simulates four shaped hosts, and measures them (as root)
    python3 scripts/scaling.py curves FILE OUT         simulates hosts of 8 ranks: OUT.json
    python3 scripts/scaling.py plot OUT                OUT.svg from OUT.json, and a table, in ms
    python3 scripts/scaling.py memory                  what a rank needs for each peer, over QUIC and TCP

`--farwire PATH` is the program. `speeds` and `check` take a few minutes, `curves` about 20 minutes of CPU time, and up to 3 GB
for each simulation that runs at the same time (`--jobs`).
"""

import argparse
import concurrent.futures
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile

CODECS = ["none", "int8", "topk:0.01"]
WAYS = ["two-phase", "two-level"]  # flat, and host by host
RATES = ["1gbit", "10gbit", "25gbit"]
RANKS = [16, 64, 256, 1024]
PER_HOST, HOST_CORES = 8, 16
LAB = "--hosts 4 --queue 20ms --delay 0.1ms"
LATENCY = "100us"
# The cost of a byte depends on the link, so every run names it: TCP, which is meant for hosts less than 5 ms apart.
LINK = "tcp"


def rows(output):
    """The JSON objects in an output; netlab puts `[rank] ` in front."""
    return [json.loads(line[line.find("{"):]) for line in output.splitlines() if "{" in line]


def farwire(options, arguments):
    done = subprocess.run([options.farwire, *arguments.split()], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"farwire {arguments}: exit code {done.returncode}")
    return done.stdout


def measured(options, rate, arguments, relay=None):
    """The result of `bench` between the hosts of a laboratory."""
    to = f" --json {relay}" if relay else ""
    bench = f"{options.farwire} bench all_reduce --link {LINK} --json {arguments}"
    return rows(farwire(options, f"netlab {LAB} --rate {rate}{to} -- {bench}"))[0]


def speeds(options, path):
    """Measures the costs of codecs, frames, network bytes and the laboratory's relay, and the share of a line that flows fill."""
    out = farwire(options, "bench codec --size 64MiB --codec int8 --codec topk:0.01 --codec randk:0.01 --iters 20 --json")
    out += farwire(options, f"bench barrier --ranks 8 --link {LINK} --size 4 --json")
    with tempfile.NamedTemporaryFile("r") as relay:
        # CPU time counts here, not elapsed time.
        row = measured(options, "1gbit", "--size 100MB --iters 3 --warmup 1", relay.name)
        out += json.dumps(row) + "\n" + relay.read()
    # Here only the line counts: 20 MB at a tenth of the rate, one and a half times as many bytes on each line. A relay with one
    # thread cannot fill a faster line.
    row = measured(options, "100mbit", "--size 20MB --iters 3 --warmup 1")
    share = 1.5 * 20e6 / 12.5e6 / (row["p50_us"] / 1e6)
    out += json.dumps({"line_share": share, "bandwidth": 12.5e6}) + "\n"
    with open(path, "w") as file:
        file.write(out)


def simulated(options, path, arguments):
    return rows(farwire(options, f"sim all_reduce --size 100MB --speeds {path} --unchecked --json {arguments}"))[0]


def check(options, path):
    """Four hosts on this machine's cores, simulated and measured."""
    print("| 100 MB, 4 hosts | simulated, ms | measured, ms | least–most | simulated / measured |")
    print("|---|---|---|---|---|")
    for rate in ("1gbit", "100mbit"):
        for codec in CODECS:
            cores = os.cpu_count()
            foretold = simulated(options, path, f"-n 4 --bandwidth {rate} --latency {LATENCY} --cores {cores} --codec {codec}")["virtual_ms"]
            iterations = {"none": 3, "int8": 5}.get(codec, 20)
            bench = f"--size 100MB --codec {codec} --iters {iterations} --warmup 2"
            times = [measured(options, rate, bench)["p50_us"] / 1e3 for _ in range(options.rounds)]
            median = statistics.median(times)
            spread = f"{min(times):,.0f}–{max(times):,.0f}"
            print(f"| {rate}, {codec} | {foretold:,.0f} | {median:,.0f} | {spread} | {foretold / median:.2f} |", flush=True)


def curves(options, path, out):
    """Simulates hosts with cores of their own, and without a relay. Goes on where an earlier run has stopped."""
    found = json.load(open(f"{out}.json")) if os.path.exists(f"{out}.json") else []
    known = {(point["ranks"], point["rate"], point["codec"], point["way"]) for point in found}
    todo = [case for case in itertools.product(RANKS, RATES, CODECS, WAYS) if case not in known]
    with tempfile.NamedTemporaryFile("w") as speeds, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        with open(path) as file:
            speeds.writelines(line for line in file if "relay_cpu_s" not in line and "line_share" not in line)
        speeds.flush()

        def point(case):
            ranks, rate, codec, way = case
            hosts = f"-n {ranks} --hosts {ranks // PER_HOST} --host-cores {HOST_CORES} --algorithm {way}"
            network = f"--bandwidth {rate} --latency {LATENCY} --codec {codec}"
            run = simulated(options, speeds.name, f"{hosts} {network}")
            done = {"ranks": ranks, "rate": rate, "codec": codec, "way": way}
            return done | {"ms": run["virtual_ms"], "segment": run["segment"]}

        # The largest first, so that no core still has a large one when the others are done.
        for done in concurrent.futures.as_completed([pool.submit(point, case) for case in reversed(todo)]):
            print(*done.result().values(), flush=True)
            found.append(done.result())
            found.sort(key=lambda point: point["ranks"])
            with open(f"{out}.json", "w") as file:
                json.dump(found, file, indent=1)


WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 260, 50, 60, 44
FONT = 'font-family="system-ui, sans-serif"'
COLOURS = {"none": "#6a737d", "int8": "#3b7dd8", "topk:0.01": "#c8542b"}


def text(x, y, what, anchor="middle", colour="#24292f", size=11):
    return f'<text x="{x:.1f}" y="{y:.1f}" {FONT} font-size="{size}" text-anchor="{anchor}" fill="{colour}">{what}</text>'


def plot(out):
    from math import log

    with open(f"{out}.json") as file:
        found = json.load(file)
    ranks = sorted({point["ranks"] for point in found})
    least, most = 10, 10 ** len(str(int(max(point["ms"] for point in found))))
    width, height = len(RATES) * (WIDTH + GAP) + LEFT, HEIGHT + TOP + 44
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">']
    svg.append(f'<rect width="{width}" height="{height}" fill="#ffffff"/>')
    at = LEFT
    for codec, colour in COLOURS.items():
        name = "dense" if codec == "none" else codec
        svg += [f'<path d="M{at} 16h24" stroke="{colour}" stroke-width="2"/>', text(at + 30, 20, name, "start")]
        at += 110
    svg += [f'<path d="M{at} 16h24" stroke="#24292f" stroke-width="2"/>', text(at + 30, 20, "host by host", "start")]
    svg += [f'<path d="M{at + 120} 16h24" stroke="#24292f" stroke-width="2" stroke-dasharray="5 4"/>', text(at + 150, 20, "flat", "start")]
    for number, rate in enumerate(RATES):
        x, floor = LEFT + number * (WIDTH + GAP), TOP + HEIGHT
        across = lambda n: x + WIDTH * log(n / ranks[0]) / log(ranks[-1] / ranks[0])
        up = lambda ms: floor - HEIGHT * log(max(ms, least) / least) / log(most / least)
        svg.append(text(x + WIDTH / 2, TOP - 12, f"{rate[:-4]} Gbit/s for each host", size=13))
        tick = least
        while tick <= most:
            svg.append(f'<path d="M{x} {up(tick):.1f}h{WIDTH}" stroke="#d8dee4"/>')
            if number == 0:
                svg.append(text(x - 6, up(tick) + 4, f"{tick} ms" if tick < 1000 else f"{tick // 1000} s", "end"))
            tick *= 10
        svg += [text(across(n), floor + 16, n) for n in ranks]
        svg.append(text(x + WIDTH / 2, floor + 34, "ranks, 8 on each host"))
        for codec, colour in COLOURS.items():
            for way, dashes in zip(WAYS, ('stroke-dasharray="5 4"', "")):
                points = [p for p in found if (p["rate"], p["codec"], p["way"]) == (rate, codec, way)]
                line = " ".join(f"{across(p['ranks']):.1f},{up(p['ms']):.1f}" for p in points)
                svg.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2" {dashes}/>')
    print("| Gbit/s | ranks | " + " | ".join(f"{name}, {way}" for name in ("dense", *CODECS[1:]) for way in ("flat", "by host")) + " |")
    print("|---" * (2 + len(CODECS) * len(WAYS)) + "|")
    times = {(p["rate"], p["ranks"], p["codec"], p["way"]): f"{p['ms']:,.0f}" for p in found}
    for rate, n in itertools.product(RATES, ranks):
        cells = [times.get((rate, n, codec, way), "") for codec in CODECS for way in WAYS]
        print(f"| {rate[:-4]} | {n} | " + " | ".join(cells) + " |")
    with open(f"{out}.svg", "w") as file:
        file.write("\n".join(svg) + "\n</svg>\n")


def memory(options):
    """The largest rank's memory, by the number of ranks."""
    print("| ranks on one host | over | resident memory of a rank, at most | for each further peer |")
    print("|---|---|---|---|")
    for link in ("quic", "tcp"):
        before = None
        for ranks in (2, 8, 16, 32):
            command = [options.farwire, "bench", "all_reduce", f"-n{ranks}", f"--link={link}", "--size=1MiB", "--iters=5"]
            one = {**os.environ, "FARWIRE_CONNECTIONS": "1"}  # each way, as between hosts
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=one)
            _, status, used = os.wait4(process.pid, 0)  # the largest of the launcher and its ranks
            process.returncode = status
            if status != 0:
                print(f"{' '.join(command)}: {status}", file=sys.stderr)
                continue
            kib = used.ru_maxrss
            each = f"{(kib - before[1]) / (ranks - before[0]):,.0f} KiB" if before else ""
            before = (ranks, kib)
            print(f"| {ranks} | {link} | {kib / 1024:.1f} MiB | {each} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speeds", "check", "curves", "plot", "memory"])
    parser.add_argument("files", nargs="*")
    parser.add_argument("--farwire", default="target/release/farwire", help="the program")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="simulations at once, for `curves`")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, for `check`")
    options = parser.parse_args()
    options.farwire = os.path.abspath(options.farwire)
    if len(options.files) != {"curves": 2, "memory": 0}.get(options.what, 1):
        parser.error(f"`{options.what}` takes other files; see --help")
    if options.what == "plot":
        return plot(*options.files)
    {"speeds": speeds, "check": check, "curves": curves, "memory": memory}[options.what](options, *options.files)


if __name__ == "__main__":
    main()
