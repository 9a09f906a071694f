"""Tests run real processes: each script under `ranks/` is what one rank does."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks"
#: Nothing here takes longer, even on a busy machine; whatever does hangs.
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
                )  # fmt: skip
            )

    def line(self, rank, text):
        """Waits until a rank has printed a line that begins so, and returns the rest of it."""
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
        outputs = []
        for rank, process in enumerate(self.processes):
            out, err = process.communicate(timeout=LIMIT)
            expected = 0 if codes is None else codes[rank]
            if expected is not None:
                assert process.returncode == expected, f"rank {rank}:\n{out}\n{err}"
            outputs.append(out)
        return outputs

    def stop(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def job():
    """Starts jobs, and leaves no process behind."""
    started = []

    def start(size, script, *args, **options):
        started.append(Job(size, script, *args, **options))
        return started[-1]

    # A test that waits for a line of a rank that hangs is ended, too.
    def too_long(*_):
        for one in started:
            one.stop()
        raise TimeoutError(f"the job has not ended within {LIMIT} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LIMIT)
    yield start
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    for one in started:
        one.stop()


@pytest.fixture
def run(job):
    """Runs a job to its end, and returns what each rank has printed."""
    return lambda *args, codes=None, **options: job(*args, **options).end(codes=codes)
