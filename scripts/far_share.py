#!/usr/bin/env python3
"""How farwire shares a long line, with TCP or with another job of its own, in `farwire netlab`. Needs root on Linux.

    python3 scripts/far_share.py [--farwire PATH] [--beside cubic|bbr|farwire] [--seconds 30]
                                 [--rate 100mbit] [--delay 25ms] [--queue 50ms] [--loss 0]

Two hosts. One job of farwire makes all-reduces of 8 MB without end; beside it, a TCP connection of the kernel sends
from the first host to the second as fast as it can, or another such job runs. After ten seconds, what both have sent
from the first host is counted. Prints the share of farwire's first job.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request

PORT = 29700
WARM_UP = 10


def job(farwire, number):
    """Starts this rank of one of farwire's jobs."""
    names = {
        "MASTER_PORT": str(29500 + 100 * number),
        "FARWIRE_JOB": f"share-{number}",
        "FARWIRE_METRICS": f"127.0.0.1:{9464 + 100 * number}",
        "FARWIRE_FLIGHT_DIR": "",
    }
    command = [farwire, "bench", "all_reduce", "--size=8MB", "--iters=100000"]
    return subprocess.Popen(command, env={**os.environ, **names}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def sent(number):
    """Bytes that this rank of a job has sent."""
    with urllib.request.urlopen(f"http://127.0.0.1:{9464 + 100 * number}/metrics", timeout=5) as page:
        lines = page.read().decode().splitlines()
    return sum(int(line.split()[-1]) for line in lines if line.startswith("farwire_sent_bytes_total{"))


class Tcp:
    """A connection that sends as fast as it can; the kernel knows how much has arrived."""

    def __init__(self, congestion):
        self.socket = socket.socket()
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        for _ in range(50):
            try:
                self.socket.connect(("10.77.0.2", PORT))
                break
            except OSError:
                time.sleep(0.1)
        threading.Thread(target=self.send, daemon=True).start()

    def send(self):
        while True:
            self.socket.sendall(bytes(1 << 16))

    def acknowledged(self):
        # tcpi_bytes_acked, a u64 at offset 120 of struct tcp_info
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        return int.from_bytes(info[120:128], sys.byteorder)


def rank(options):
    jobs = [job(options.farwire, 0)]
    if options.beside == "farwire":
        jobs.append(job(options.farwire, 1))
        count = lambda: sent(1)
    elif os.environ["RANK"] == "0":
        count = Tcp(options.beside).acknowledged
    else:
        listener = socket.create_server(("10.77.0.2", PORT))
        connection, _ = listener.accept()
        threading.Thread(target=lambda: [None for _ in iter(lambda: connection.recv(1 << 20), b"")], daemon=True).start()
    try:
        time.sleep(WARM_UP)
        if os.environ["RANK"] == "0":
            before = sent(0), count()
            time.sleep(options.seconds)
            first, second = sent(0) - before[0], count() - before[1]
            print(json.dumps({"first": first, "second": second}), flush=True)
        else:
            time.sleep(options.seconds + 1)
    finally:
        for running in jobs:
            running.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--farwire", default="target/release/farwire", help="the program")
    parser.add_argument("--beside", default="cubic", choices=["cubic", "bbr", "farwire"])
    parser.add_argument("--seconds", type=int, default=30)
    for name, default in [("rate", "100mbit"), ("delay", "25ms"), ("queue", "50ms"), ("loss", "0")]:
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.farwire = os.path.abspath(options.farwire)
    if options.rank:
        return rank(options)
    network = [f"--{name}={getattr(options, name)}" for name in ("rate", "delay", "queue", "loss")]
    inner = [sys.executable, os.path.abspath(__file__), "--rank", *sys.argv[1:]]
    done = subprocess.run(
        [options.farwire, "netlab", *network, "--", *inner],
        capture_output=True, text=True, timeout=options.seconds + 60,
    )
    start = done.stdout.find("{")
    if start < 0:
        sys.exit(f"nothing was measured: {done.stdout}{done.stderr}")
    result = json.loads(done.stdout[start:].splitlines()[0])
    first, second = (result[name] * 8e-6 / options.seconds for name in ("first", "second"))
    print(f"farwire {first:.1f} Mbit/s, {options.beside} {second:.1f} Mbit/s: share {first / (first + second):.2f}")


if __name__ == "__main__":
    main()
