#!/usr/bin/env python3
"""All-reduce beside its peers: farwire, Gloo (through torch), Open MPI and nexar 0.2.0, on one host and on shaped hosts.

    python3 scripts/peers.py [--farwire PATH] [--rounds 5] [--quick] [--only WORDS] [--no-install] [--json FILE]
    python3 scripts/peers.py --sweep --only "one host, " --plot docs/images/peers.svg     (time against size)

Needs Linux; shaped hosts need root, for network namespaces. What a peer lacks is installed: Open MPI by apt, torch by
pip and nexar by cargo, both into `--folder`; a peer that cannot be is left out, and the reason told. All peers have
the same sizes, the same numbers of iterations and f32 sums. Each round runs all of them, one after the other.

A time is the median over rounds of a run's median over iterations, each of them that of the slowest rank. `than Gloo`
and `than Open MPI` say how many times as fast, as the median over rounds of ratios within a round, where both ran at
the same place; through a codec, against dense. `CPU s` is what all ranks together used for one operation (shaped hosts
also share their cores with the kernel's network between them). `MB off a host`: headers of farwire's frames included, and all
that its interface has sent. `wrong` counts elements, over all ranks, in one checked operation.

A round takes about three minutes on two cores. Ctrl-C ends it early, with a table of what there is.
"""

import argparse
import datetime
import itertools
import json
import math
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import time

LIMIT = 300  # seconds for one run
WARMUP = 3

MPI_SOURCE = r"""
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double cpu(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(long bytes, int iterations, int warmup, int rank, int ranks) {
    int n = bytes / sizeof(float);
    float *in = malloc(bytes), *out = malloc(bytes);
    double *times = malloc(iterations * sizeof(double)), *slowest = malloc(iterations * sizeof(double));
    for (int i = 0; i < n; i++) in[i] = (i % 251) * (rank + 1);
    for (int i = 0; i < warmup; i++) MPI_Allreduce(in, out, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    long mine = 0, wrong;
    for (int i = 0; i < n; i++) mine += out[i] != (i % 251) * (ranks * (ranks + 1) / 2);
    MPI_Allreduce(&mine, &wrong, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    double began = cpu(), used, all;
    for (int i = 0; i < iterations; i++) {
        double start = MPI_Wtime();
        MPI_Allreduce(in, out, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        times[i] = MPI_Wtime() - start;
    }
    used = (cpu() - began) / iterations;
    MPI_Reduce(times, slowest, iterations, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    MPI_Reduce(&used, &all, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0) {
        qsort(slowest, iterations, sizeof(double), ascending);
        printf("{\"bytes\": %ld, \"seconds\": %.9f, \"cpu\": %.9f, \"wrong\": %ld}\n",
               bytes, slowest[iterations / 2], all, wrong);
        fflush(stdout);
    }
    free(in), free(out), free(times), free(slowest);
}

/* WARMUP BYTES:ITERATIONS... */
int main(int count, char **arguments) {
    MPI_Init(&count, &arguments);
    int rank, ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (int i = 2; i < count; i++)
        measure(atol(arguments[i]), atoi(strchr(arguments[i], ':') + 1), atoi(arguments[1]), rank, ranks);
    MPI_Finalize();
}
"""

NEXAR_MANIFEST = """
[package]
name = "nexar-peer"
version = "0.0.0"
edition = "2024"

[dependencies]
nexar = "=0.2.0"
tokio = { version = "1", features = ["full"] }

[workspace]
"""

NEXAR_SOURCE = r"""
//! WARMUP BYTES:ITERATIONS... on `RANKS` threads, or as one rank of a job that netlab started.
use std::sync::Arc;
use std::time::{Duration, Instant};

use nexar::{ClusterConfig, CpuAdapter, DataType, NexarClient, ReduceOp};

type Ranks = Vec<(u32, Arc<NexarClient>)>;

fn number(name: &str) -> Option<u32> {
    std::env::var(name).ok()?.parse().ok()
}

async fn join(rank: u32, ranks: u32) -> Ranks {
    let seed = "10.77.0.1:7000".parse().unwrap();
    let here = format!("10.77.0.{}:7001", rank + 1).parse().unwrap();
    let config = ClusterConfig::new(ranks)
        .with_bind_addr(here)
        .with_advertise_addr(here)
        .with_cluster_token("00112233445566778899aabbccddeeff".to_string())
        .with_requested_rank(rank);
    let adapter = Arc::new(CpuAdapter::new());
    let client = if rank == 0 {
        NexarClient::bootstrap_seed(seed, &config, adapter).await
    } else {
        tokio::time::sleep(Duration::from_secs(1)).await;
        NexarClient::bootstrap_join(seed, &config, adapter).await
    };
    vec![(rank, Arc::new(client.expect("a cluster")))]
}

fn input(rank: u32, elements: usize) -> Vec<f32> {
    (0..elements).map(|i| (i % 251) as f32 * (rank + 1) as f32).collect()
}

async fn all_reduce(ranks: &Ranks, vectors: Vec<Vec<f32>>) -> Vec<Vec<f32>> {
    let mut tasks = Vec::new();
    for ((_, client), mut vector) in ranks.iter().cloned().zip(vectors) {
        tasks.push(tokio::spawn(async move {
            let (at, count) = (vector.as_mut_ptr() as u64, vector.len());
            // SAFETY: the vector lives in this task until the call has ended.
            unsafe { client.all_reduce(at, count, DataType::F32, ReduceOp::Sum).await.expect("a sum") };
            vector
        }));
    }
    let mut results = Vec::new();
    for task in tasks {
        results.push(task.await.unwrap());
    }
    results
}

fn cpu() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}

#[tokio::main]
async fn main() {
    let (ranks, size) = match (number("RANKS"), number("RANK"), number("WORLD_SIZE")) {
        (Some(ranks), ..) => {
            let all = NexarClient::bootstrap_local(ranks, Arc::new(CpuAdapter::new())).await.unwrap();
            ((0..).zip(all.into_iter().map(Arc::new)).collect::<Ranks>(), ranks)
        }
        (None, Some(rank), Some(world)) => (join(rank, world).await, world),
        _ => panic!("say RANKS, or RANK and WORLD_SIZE"),
    };
    let mut arguments = std::env::args().skip(1);
    let warmup: usize = arguments.next().unwrap().parse().unwrap();
    for case in arguments {
        let (bytes, iterations) = case.split_once(':').unwrap();
        let (bytes, iterations): (usize, usize) = (bytes.parse().unwrap(), iterations.parse().unwrap());
        let fresh = || ranks.iter().map(|(rank, _)| input(*rank, bytes / 4)).collect::<Vec<_>>();
        let mut vectors = all_reduce(&ranks, fresh()).await;
        let sum = (size * (size + 1) / 2) as f32;
        let right = |(i, value): &(usize, &f32)| **value != (i % 251) as f32 * sum;
        let wrong: usize = vectors.iter().map(|v| v.iter().enumerate().filter(right).count()).sum();
        for _ in 1..warmup {
            vectors = all_reduce(&ranks, vectors).await;
        }
        let (began, mut times) = (cpu(), Vec::new());
        for _ in 0..iterations {
            let start = Instant::now();
            vectors = all_reduce(&ranks, vectors).await;
            times.push(start.elapsed().as_secs_f64());
        }
        let used = (cpu() - began) / iterations as f64;
        times.sort_by(f64::total_cmp);
        println!(
            "{{\"bytes\": {bytes}, \"seconds\": {}, \"cpu\": {used}, \"wrong\": {wrong}}}",
            times[iterations / 2]
        );
    }
    for (_, client) in &ranks {
        client.barrier().await.unwrap();
    }
}
"""


def gloo_rank(warmup, cases):
    """One rank of Gloo: all cases once; and once more for each line that it reads, until there are none."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    while True:
        gloo_cases(torch, dist, warmup, cases)
        if not sys.stdin.readline():
            return dist.barrier()


def gloo_cases(torch, dist, warmup, cases):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for case in cases:
        size, iterations = map(int, case.split(":"))
        pattern = torch.arange(size // 4) % 251
        vector = (pattern * (rank + 1)).float()
        dist.all_reduce(vector)
        wrong = (vector != pattern * (ranks * (ranks + 1) // 2)).sum()
        dist.all_reduce(wrong)
        vector.zero_()  # else sums of sums would overflow
        for _ in range(1, int(warmup)):
            dist.all_reduce(vector)
        times, began = [], time.process_time()
        for _ in range(iterations):
            start = time.perf_counter()
            dist.all_reduce(vector)
            times.append(time.perf_counter() - start)
        cpu, times = torch.tensor((time.process_time() - began) / iterations), torch.tensor(times)
        dist.all_reduce(cpu)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        if rank == 0:
            result = {"bytes": size, "seconds": statistics.median(times.tolist()), "cpu": cpu.item(), "wrong": wrong.item()}
            print(json.dumps(result), flush=True)


class Case:
    """Where it runs, and on what: sizes in bytes, with iterations."""

    def __init__(self, name, sizes, ranks, rate=None, per_host=1):
        self.name, self.sizes, self.ranks, self.rate, self.per_host = name, sizes, ranks, rate, per_host

    def arguments(self):
        return [str(WARMUP), *(f"{size}:{iterations}" for size, iterations in self.sizes.items())]

    def run_on_hosts(self, command, environment, options):
        """Runs a command on every host: the results that its ranks print."""
        hosts = [f"peers-{self.rate}-{number}" for number in range(self.ranks // self.per_host)]
        if not os.path.exists(f"/run/netns/{hosts[0]}"):
            shape(hosts, self.rate, options)
        token = subprocess.run([options.farwire, "token"], check=True, capture_output=True, text=True).stdout.strip()
        job = {"WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}
        job |= {"FARWIRE_TOKEN": token, "GLOO_SOCKET_IFNAME": "eth0"}

        def inside(number, host):
            several = [options.farwire, "launch", f"-n{self.per_host}", f"--nnodes={len(hosts)}", f"--node-rank={number}"]
            several += ["--master=10.77.0.1:29500", "--"]
            return ["ip", "netns", "exec", host, "env", f"FARWIRE_HOST={host}", *several * (self.per_host > 1), *command]

        return run([inside(number, host) for number, host in enumerate(hosts)], {**environment, **job})

    def sent(self):
        """Bytes that the first host's interface has sent so far."""
        file = "/sys/class/net/eth0/statistics/tx_bytes"
        read = subprocess.run(["ip", "netns", "exec", f"peers-{self.rate}-0", "cat", file], capture_output=True, text=True)
        return int(read.stdout or 0)


def shape(hosts, rate, options):
    """Network namespaces on one bridge, whose links the kernel limits both ways, with a queue of 20 ms: a relay like
    netlab's would be slower than the fast ones. They last as long as this program."""
    def system(line):
        subprocess.run(line.split(), check=True, capture_output=True)

    middle = f"peers-{rate}"
    limit = f"root tbf rate {rate} burst 128kb latency 20ms"
    for name in (middle, *hosts):
        options.namespaces.append(name)
        system(f"ip netns add {name}")
        system(f"ip -n {name} link set lo up")
    system(f"ip -n {middle} link add br0 type bridge")
    system(f"ip -n {middle} link set br0 up")
    for number, host in enumerate(hosts):
        system(f"ip link add eth0 netns {host} type veth peer name p{number} netns {middle}")
        system(f"ip -n {middle} link set p{number} master br0 up")
        system(f"ip -n {host} addr add 10.77.0.{number + 1}/24 dev eth0")
        system(f"ip -n {host} link set eth0 up")
        system(f"tc -n {host} qdisc add dev eth0 {limit}")
        system(f"tc -n {middle} qdisc add dev p{number} {limit}")


def on_one_host(ranks, options):
    sizes = {4 << 10: 300, 1 << 20: 100, 64 << 20: 10}
    if options.sweep:
        sizes = {1 << power: max(10, min(300, 1 << 27 - power)) for power in range(10, 27, 2)}
    return Case(f"one host, {ranks} ranks", {1 << 20: 50} if options.quick else sizes, ranks)


def over_loopback(quick):
    sizes = {4 << 10: 300, 64 << 20: 10}
    return Case("one host, 2 ranks, network links", {1 << 20: 20} if quick else sizes, 2)


def on_shaped_hosts(rate, megabytes, quick, per_host=1):
    size = megabytes * 1_000_000 // (10 if quick else 1)
    ranks = f" of {per_host} ranks" if per_host > 1 else ""
    return Case(f"4 hosts{ranks}, {rate[:-4]} {rate[-4].upper()}bit/s", {size: 3}, 4 * per_host, rate, per_host)


class Farwire:
    def __init__(self, link, codec="none", connections=None, order=None):
        self.link, self.codec, self.settings = link, codec, {"FARWIRE_LINK": link}
        self.name = f"farwire, {link}" + ("" if codec == "none" else f", {codec}")
        if connections:
            self.settings["FARWIRE_CONNECTIONS"] = str(connections)
            self.name += f", {connections} connection{'s' * (connections > 1)}"
        if order:
            self.settings["FARWIRE_ORDER"] = order
            self.name += f", {order} order"

    def run(self, case, options):
        # A short operation is repeated more often; a sparse one is shorter.
        more = {"none": 1, "int8": 2}.get(self.codec, 10)
        results, environment = [], {**os.environ, **self.settings}
        # Who checks what went through a codec holds the vectors of all ranks.
        check = options.check and (self.codec == "none" or case.per_host == 1)
        for size, iterations in case.sizes.items():
            bench = [options.farwire, "bench", "all_reduce", f"--size={size}", f"--codec={self.codec}", f"--link={self.link}"]
            bench += [f"--iters={iterations * more}", f"--warmup={WARMUP}", "--json", *["--check"] * check]
            if case.per_host > 1:
                bench.remove(f"--link={self.link}")  # they share memory, too
                environment.pop("FARWIRE_LINK")
            if case.rate:
                before = case.sent()
                rows = case.run_on_hosts(bench, environment, options)
                sent = (case.sent() - before) / (iterations * more + WARMUP + check)
            else:
                rows = run([[*bench, f"--ranks={case.ranks}"]], environment)
            for row in rows:
                cpu = row["cpu_s"] / row["iters"]
                results.append({"bytes": size, "seconds": row["p50_us"] / 1e6, "cpu": cpu, "wrong": row["wrong"] or 0})
                if case.rate:
                    results[-1]["off_host"] = [row["host_bytes"], sent]
        return results


class Gloo:
    """Its ranks on one host stay for the next round, as it takes long to start them. They sleep meanwhile."""

    name = "Gloo"

    def __init__(self, options):
        self.jobs = {}
        self.python = sys.executable
        if succeeds([self.python, "-c", "import torch"]):
            return
        venv = os.path.join(options.folder, "python")
        self.python = os.path.join(venv, "bin", "python")
        if not succeeds([self.python, "-c", "import torch"]):
            install([sys.executable, "-m", "venv", venv], options)
            install([self.python, "-m", "pip", "install", "torch", "numpy"], options)

    def run(self, case, options):
        rank = [self.python, os.path.abspath(__file__), "--gloo-rank", *case.arguments()]
        if case.rate:
            return case.run_on_hosts(rank, os.environ, options)
        if case.name not in self.jobs:
            job = {**os.environ, "WORLD_SIZE": str(case.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
            job["GLOO_SOCKET_IFNAME"] = "lo"
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            self.jobs[case.name] = [subprocess.Popen(rank, env={**job, "RANK": str(number)}, **pipes)
                                    for number in range(case.ranks)]
        else:
            for process in self.jobs[case.name]:
                print(file=process.stdin, flush=True)
        lines = [self.jobs[case.name][0].stdout.readline() for _ in case.sizes]
        if not all(lines):
            raise Missing("a rank has ended")
        return [json.loads(line) for line in lines]

    def close(self):
        processes = list(itertools.chain(*self.jobs.values()))
        for process in processes:
            process.stdin.close()  # of all before any is waited for, since they leave together
        for process in processes:
            process.wait()


class OpenMpi:
    name = "Open MPI"

    def __init__(self, options):
        self.program = os.path.join(options.folder, "mpi_peer")
        is_there = os.path.exists(self.program)  # of an earlier run, or brought along
        if not is_there and not shutil.which("mpicc"):
            install(["apt-get", "install", "-y", "openmpi-bin", "libopenmpi-dev"], options)
        write(self.program + ".c", MPI_SOURCE)
        if not succeeds(["mpicc", "-O3", "-o", self.program, self.program + ".c"]) and not is_there:
            raise Missing("mpicc could not build its test program")

    def run(self, case, options):
        if case.rate:
            return None
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(case.ranks), self.program]
        return run([command + case.arguments()], os.environ)


class Nexar:
    name = "nexar 0.2.0"

    def __init__(self, options):
        project = os.path.join(options.folder, "nexar-peer")
        self.program = os.path.join(project, "target", "release", "nexar-peer")
        if not os.path.exists(self.program):
            write(os.path.join(project, "Cargo.toml"), NEXAR_MANIFEST)
            write(os.path.join(project, "src", "main.rs"), NEXAR_SOURCE)
            build = ["cargo", "build", "--release", "--manifest-path", os.path.join(project, "Cargo.toml")]
            install([*build, "--target-dir", os.path.join(project, "target")], options)

    def run(self, case, options):
        command = [self.program, *case.arguments()]
        if not case.rate:
            return run([command], {**os.environ, "RANKS": str(case.ranks)})
        # Each rank prints what it saw: the slowest counts, and the CPU of all.
        seen, results = case.run_on_hosts(command, os.environ, options), []
        for size in case.sizes:
            ranks = [rank for rank in seen if rank["bytes"] == size]
            if len(ranks) < case.ranks:
                raise Missing("not all ranks came to the end")
            total = {what: sum(rank[what] for rank in ranks) for what in ("cpu", "wrong")}
            results.append({"bytes": size, "seconds": max(rank["seconds"] for rank in ranks), **total})
        return results


class Missing(Exception):
    """Why a peer, or a result, is not there."""


def succeeds(command):
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def install(command, options):
    if options.no_install:
        raise Missing(f"not installed; this would do it: {' '.join(command)}")
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise Missing(str(error))
    if done.returncode != 0:
        raise Missing((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text.lstrip())


def free_port():
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return str(it.getsockname()[1])


def run(commands, environment):
    """Runs commands at once, as ranks 0, 1, … The results that they print."""
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ranks = [subprocess.Popen(command, env={**environment, "RANK": str(rank)} if len(commands) > 1 else environment, **pipes)
             for rank, command in enumerate(commands)]
    try:
        outputs = [rank.communicate(timeout=LIMIT) for rank in ranks]
    except subprocess.TimeoutExpired:
        raise Missing(f"did not end in {LIMIT} s")
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    lines = [line[line.find("{"):] for output, _ in outputs for line in output.splitlines() if "{" in line]
    results = [json.loads(line) for line in lines if line.endswith("}")]
    if not results:
        said = [line for _, errors in outputs for line in errors.splitlines() if line.strip()]
        raise Missing(next((line for line in said if "failed" in line), said[-1] if said else "no result"))
    return results


class Table:
    """All results of a contestant at a size of a case, by round."""

    def __init__(self):
        self.cells = {}

    def add(self, case, name, round, results):
        for result in results:
            self.cells.setdefault((case.name, result["bytes"], name), {})[round] = result

    def times(self, case, size, name):
        return {round: cell["seconds"] for round, cell in self.cells.get((case, size, name), {}).items()}

    def faster(self, case, size, name, than):
        mine, theirs = self.times(case, size, name), self.times(case, size, than)
        ratios = [theirs[round] / mine[round] for round in mine if round in theirs]
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})" if ratios and name != than else ""

    def rows(self):
        cases = list(dict.fromkeys(case for case, *_ in self.cells))
        for (case, size, name), cells in sorted(self.cells.items(), key=lambda item: (cases.index(item[0][0]), item[0][1])):
            times = [cell["seconds"] for cell in cells.values()]
            cpu = statistics.median(cell["cpu"] for cell in cells.values())
            wrong = max(cell["wrong"] for cell in cells.values())
            ratios = [self.faster(case, size, name, peer) for peer in ("Gloo", "Open MPI")]
            spread = f"{milliseconds(min(times))}–{milliseconds(max(times))}"
            left = [cell["off_host"] for cell in cells.values() if cell.get("off_host")]
            off = " / ".join(f"{statistics.median(way) / 1e6:.4g}" for way in zip(*left))
            yield [case, megabytes(size), name, milliseconds(statistics.median(times)), spread, *ratios, f"{cpu:.2g}", off, wrong]


def milliseconds(seconds):
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def megabytes(size):
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size / 1e6:g} MB"


COLOURS = ["#c8542b", "#3b7dd8", "#6a737d", "#8250df"]


def plot(table):
    """Time against size, both by powers of ten, a panel for each number of ranks."""
    cases = {}
    for (case, size, name), cells in table.cells.items():
        if case.startswith("one host") and "links" not in case:
            seconds = statistics.median(cell["seconds"] for cell in cells.values())
            cases.setdefault(case, {}).setdefault(name, []).append((size, seconds * 1e6))
    wide, high, left, top, gap = 340, 280, 56, 60, 56
    sizes = [size for lines in cases.values() for line in lines.values() for size, _ in line]
    times = [time for lines in cases.values() for line in lines.values() for _, time in line]
    floor, ceiling = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    width, height = left + len(cases) * (wide + gap), top + high + 44
    font = 'font-family="system-ui, sans-serif" fill="#24292f"'
    label = lambda x, y, what, anchor="middle": f'<text x="{x:.1f}" y="{y:.1f}" {font} font-size="11" text-anchor="{anchor}">{what}</text>'
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
           f'<rect width="{width}" height="{height}" fill="#ffffff"/>']
    names = list(dict.fromkeys(name for lines in cases.values() for name in lines))
    for number, name in enumerate(names):
        x = left + 120 * number
        svg += [f'<path d="M{x} 16h24" stroke="{COLOURS[number % 4]}" stroke-width="2"/>', label(x + 30, 20, name, "start")]
    for number, (case, lines) in enumerate(cases.items()):
        x, bottom = left + number * (wide + gap), top + high
        across = lambda size: x + wide * math.log(size / min(sizes)) / math.log(max(sizes) / min(sizes))
        up = lambda time: bottom - high * (math.log10(time) - floor) / (ceiling - floor)
        svg.append(label(x + wide / 2, top - 12, case))
        for power in range(floor, ceiling + 1):
            svg.append(f'<path d="M{x} {up(10 ** power):.1f}h{wide}" stroke="#d8dee4"/>')
            if number == 0:
                base, unit = (6, "s") if power >= 6 else (3, "ms") if power >= 3 else (0, "µs")
                svg.append(label(x - 6, up(10 ** power) + 4, f"{10 ** (power - base)} {unit}", "end"))
        svg += [label(across(size), bottom + 16, megabytes(size)) for size in sorted(set(sizes))[::2]]
        for name, line in lines.items():
            points = " ".join(f"{across(size):.1f},{up(time):.1f}" for size, time in sorted(line))
            svg.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[names.index(name) % 4]}" stroke-width="2"/>')
    return "\n".join(svg) + "\n</svg>\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--farwire", default="target/release/farwire", help="the program")
    parser.add_argument("--rounds", type=int, default=5, help="times that everything runs")
    parser.add_argument("--quick", action="store_true", help="one short size of each kind, to see that all works")
    parser.add_argument("--only", default="", help="cases whose name holds this, or one of several: `one host`, `4 hosts|2 ranks`")
    parser.add_argument("--no-install", action="store_true", help="leave out what is not there")
    parser.add_argument("--folder", default="target/peers", help="where peers are built and installed")
    parser.add_argument("--sweep", action="store_true", help="on one host, nine sizes from 1 KiB to 64 MiB")
    parser.add_argument("--json", help="write all results here")
    parser.add_argument("--plot", metavar="SVG", help="draw time against size, for each number of ranks on one host")
    parser.add_argument("--gloo-rank", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gloo_rank:
        return gloo_rank(options.gloo_rank[0], options.gloo_rank[1:])
    options.namespaces = []
    options.farwire, options.folder = os.path.abspath(options.farwire), os.path.abspath(options.folder)
    os.makedirs(options.folder, exist_ok=True)

    peers = []
    for peer in (Gloo, OpenMpi, Nexar):
        try:
            peers.append(peer(options))
        except (Missing, OSError, subprocess.SubprocessError) as why:
            print(f"without {peer.name}: {why}", file=sys.stderr)
    shaped = [Farwire("quic"), Farwire("tcp")] + [Farwire("tcp", codec) for codec in ("int8", "topk:0.01", "randk:0.01")]
    network = [Farwire("tcp"), Farwire("quic"), *(Farwire("quic", connections=count) for count in (1, 2, 4, 8))]
    gloo = [peer for peer in peers if peer.name == Gloo.name]
    plan = [(on_one_host(ranks, options), [Farwire("shm"), *peers]) for ranks in (2, 4, 8, 16) if ranks <= max(4, os.cpu_count())]
    plan += [(over_loopback(options.quick), network + gloo)]
    if os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc"):
        plan += [(on_shaped_hosts(rate, size, options.quick), shaped + peers) for rate, size in (("1gbit", 100), ("100mbit", 20))]
        for rate, codec in (("1gbit", "none"), ("20mbit", "topk:0.01")):
            both = [Farwire("tcp", codec, order=order) for order in (None, "rank")]
            plan += [(on_shaped_hosts(rate, 100, options.quick, per_host=2), both)]
    else:
        print("without shaped hosts: they need root, and `ip` and `tc`, of iproute2", file=sys.stderr)

    table, rounds = Table(), 0
    try:
        for round in range(options.rounds):
            options.check = round == 0  # with a codec, that takes longer than the rest
            for case, contestants in plan:
                for contestant in contestants if any(word in case.name for word in options.only.split("|")) else []:
                    try:
                        table.add(case, contestant.name, round, contestant.run(case, options) or [])
                    except Missing as why:
                        print(f"round {round}, {case.name}, {contestant.name}: {why}", file=sys.stderr)
            rounds += 1
            print(f"round {rounds} of {options.rounds} done", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"stopped in round {rounds + 1}; what was measured so far:", file=sys.stderr)
    finally:
        for peer in gloo:
            peer.close()
        for name in options.namespaces:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    print(f"{datetime.date.today()}, {os.cpu_count()} cores ({platform.machine()}), {rounds} rounds:\n")
    print("| where | size | what | ms, median | least–most | × faster than Gloo | than Open MPI | CPU s | MB off a host | wrong |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in table.rows():
        print("| " + " | ".join(map(str, row)) + " |")
    if options.plot:
        with open(options.plot, "w") as file:
            file.write(plot(table))
    if options.json:
        cells = [{"case": case, "bytes": size, "what": name, "rounds": cells} for (case, size, name), cells in table.cells.items()]
        with open(options.json, "w") as file:
            json.dump({"date": str(datetime.date.today()), "cores": os.cpu_count(), "cells": cells}, file, indent=1)


if __name__ == "__main__":
    main()
