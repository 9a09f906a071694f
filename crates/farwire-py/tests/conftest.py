"""Tests run real processes: each script under `ranks/` is the program of a rank."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks"
#: Nothing here takes longer, even on a busy machine. A job that does hangs.
LIMIT = 120


class Job:
    """The processes of one job."""

    def __init__(self, size, script, *args, env=None):
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
        self.processes = []
        for rank in range(size):
            variables = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
                "PYTHONFAULTHANDLER": "1",
                **(env or {}),
            }
            command = [sys.executable, str(RANKS / script), *map(str, args)]
            self.processes.append(
                subprocess.Popen(
                    command, env=variables, text=True, stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    # In tests that a shell started in the background, SIGINT is ignored.
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                )  # fmt: skip
            )

    def line(self, rank, text):
        """Waits until a rank has printed a line that begins with `text`, and returns the rest of
        it."""
        seen = []
        for line in self.processes[rank].stdout:
            seen.append(line)
            if line.startswith(text):
                return line[len(text) :].strip()
        pytest.fail(f"rank {rank} did not print {text!r}\n{''.join(seen)}{self.errors(rank)}")

    def errors(self, rank):
        return self.processes[rank].stderr.read()

    def kill(self, rank, number=signal.SIGKILL):
        self.processes[rank].send_signal(number)

    def end(self, *, codes=None):
        """Waits for all ranks, and returns what each has printed."""
        # All at the same time: a rank whose pipe is full would keep the others waiting.
        with ThreadPoolExecutor(len(self.processes)) as readers:
            ended = list(readers.map(lambda process: process.communicate(), self.processes))
        for rank, (out, err) in enumerate(ended):
            expected = 0 if codes is None else codes[rank]
            code = self.processes[rank].returncode
            assert code == expected, f"rank {rank} ended with {code}:\n{out[-2000:]}\n{err[-4000:]}"
        return [out for out, _ in ended]

    def abort(self):
        """Ends ranks that hang, and returns where they were."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGABRT)
            process.wait()
        return [f"rank {rank}:\n{self.errors(rank)}" for rank in range(len(self.processes))]

    def stop(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()


@contextlib.contextmanager
def jobs():
    """Starts jobs, and leaves no process behind."""
    started = []

    def start(size, script, *args, **options):
        started.append(Job(size, script, *args, **options))
        return started[-1]

    # This also ends a test that waits for a line from a rank that hangs.
    def too_long(*_):
        stacks = [where for one in started for where in one.abort()]
        raise TimeoutError(f"a job has not ended within {LIMIT} s:\n" + "\n".join(stacks))

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LIMIT)
    try:
        yield start
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        for one in started:
            one.stop()


@pytest.fixture
def job():
    """Starts jobs."""
    with jobs() as start:
        yield start


@pytest.fixture
def run(job):
    """Runs a job to its end, and returns what each rank has printed."""
    return lambda *args, codes=None, **options: job(*args, **options).end(codes=codes)


@pytest.fixture(scope="module")
def module_run():
    """The same, for a job whose output several tests check."""

    def run(*args, **options):
        with jobs() as start:
            return start(*args, **options).end()

    return run
