#!/usr/bin/env python3
"""How farwire shares a long line with TCP or with another farwire job, in `farwire netlab`. Needs root on Linux.

    python3 scripts/far_share.py [--farwire PATH] [--flow farwire|cubic|bbr] [--beside cubic|bbr|farwire]
                                 [--seconds 30] [--rate 100mbit] [--delay 25ms] [--queue 50ms] [--loss 0]

There are two hosts. A farwire job makes all-reduces of 8 MB without end; at the same time, a TCP connection of the
kernel sends from the first host to the second as fast as it can, or another such job runs. After ten seconds, the
bytes that both send from the first host are counted. Prints the share of the first flow. With `--flow`, that can be
a TCP connection, too: the share that TCP leaves to TCP is the yardstick for what it leaves to farwire.
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


class Job:
    """This rank of a farwire job that makes all-reduces without end."""

    def __init__(self, number, farwire):
        self.metrics = f"127.0.0.1:{9464 + 100 * number}"
        names = {
            "MASTER_PORT": str(29500 + 100 * number),
            "FARWIRE_JOB": f"share-{number}",
            "FARWIRE_METRICS": self.metrics,
            "FARWIRE_FLIGHT_DIR": "",
        }
        command = [farwire, "bench", "all_reduce", "--size=8MB", "--iters=100000"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, env={**os.environ, **names}, **quiet)

    def sent(self):
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=5) as page:
            lines = page.read().decode().splitlines()
        return sum(int(line.split()[-1]) for line in lines if line.startswith("farwire_sent_bytes_total{"))

    def end(self):
        self.process.kill()


class Tcp:
    """A connection from the first host to the second that carries as much as it can."""

    def __init__(self, number, congestion):
        address = ("10.77.0.2", PORT + number)
        if os.environ["RANK"] == "1":
            return threading.Thread(target=self.receive, args=[socket.create_server(address)], daemon=True).start()
        self.socket = socket.socket()
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        for _ in range(50):
            try:
                self.socket.connect(address)
                break
            except OSError:
                time.sleep(0.1)
        threading.Thread(target=self.send, daemon=True).start()

    def receive(self, listener):
        connection, _ = listener.accept()
        while connection.recv(1 << 20):
            pass

    def send(self):
        while True:
            self.socket.sendall(bytes(1 << 16))

    def sent(self):
        """Bytes that have arrived, as the kernel counts: tcpi_bytes_acked, a u64 at offset 120 of struct tcp_info."""
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        return int.from_bytes(info[120:128], sys.byteorder)

    def end(self):
        pass


def rank(options):
    kinds = [options.flow, options.beside]
    flows = [Job(number, options.farwire) if kind == "farwire" else Tcp(number, kind) for number, kind in enumerate(kinds)]
    try:
        time.sleep(WARM_UP)
        if os.environ["RANK"] == "0":
            before = [flow.sent() for flow in flows]
            time.sleep(options.seconds)
            print(json.dumps({"sent": [flow.sent() - was for flow, was in zip(flows, before)]}), flush=True)
        else:
            time.sleep(options.seconds + 1)
    finally:
        for flow in flows:
            flow.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--farwire", default="target/release/farwire", help="the program")
    kinds = ["farwire", "cubic", "bbr"]
    parser.add_argument("--flow", default="farwire", choices=kinds, help="the first of the two")
    parser.add_argument("--beside", default="cubic", choices=kinds, help="the second")
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
    first, second = json.loads(done.stdout[start:].splitlines()[0])["sent"]
    mbit = 8e-6 / options.seconds
    print(
        f"{options.flow} {first * mbit:.1f} Mbit/s, {options.beside} {second * mbit:.1f} Mbit/s:"
        f" share {first / (first + second):.2f}"
    )


if __name__ == "__main__":
    main()
