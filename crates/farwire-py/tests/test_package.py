"""The package without PyTorch: NumPy arrays and plain buffers between processes."""

import json
import os
import signal
import subprocess
import sys

import pytest


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("link", ["auto", "quic"])
def test_every_collective_does_what_numpy_says(run, size, link):
    outputs = run(size, "collectives.py", env={"FARWIRE_LINK": link})
    assert all(output.endswith("done\n") for output in outputs)


def test_a_rank_that_calls_something_else_is_named(run):
    for output in run(2, "faults.py", "desync"):
        assert "Desync" in output and "make all ranks call the same operations" in output


def test_a_killed_rank_raises_on_the_others(job):
    running = job(3, "faults.py", "wait")
    for rank in range(3):
        running.line(rank, "in a loop")
    running.kill(1)
    outputs = running.end(codes=[0, -signal.SIGKILL, 0])
    for rank in (0, 2):
        assert "LostRank of rank 1: restart it" in outputs[rank]


def test_ctrl_c_ends_a_wait_and_the_rank_can_go_on(job):
    running = job(2, "faults.py", "interrupted")
    running.line(0, "waiting")
    running.kill(0, signal.SIGINT)
    assert "interrupted, then 2.0" in running.end()[0]


def test_ctrl_c_ends_the_wait_for_other_ranks_to_join(job):
    running = job(1, "faults.py", "alone", env={"WORLD_SIZE": "2"})
    running.line(0, "joining")
    running.kill(0, signal.SIGINT)
    assert "interrupted" in running.end()[0]


def test_forked_children_do_no_harm_and_are_told_so(run):
    for output in run(2, "faults.py", "fork"):
        assert "the child was told: farwire cannot be used in process" in output
        assert "the parent goes on: 2.0" in output


def test_a_forked_child_cannot_join_in_its_parents_place(run):
    for output in run(2, "faults.py", "join_in_a_child"):
        assert "beside its parent, a child got Forked: farwire cannot be used in" in output
        assert "after its parent, a child has joined: 2.0" in output


def test_waiting_releases_the_interpreter(run):
    assert "counted while waiting" in run(2, "faults.py", "threads")[0]


def test_an_all_reduce_copies_nothing(run):
    for output in run(2, "no_copy.py", env={"FARWIRE_LINK": "shm"}):
        found = json.loads(output)
        assert found["same"] and found["right"]
        grown, traced = found["in_place"]
        assert grown < 32 << 20, "an array of 256 MiB was copied"
        assert traced < 64 << 10, "the Python layer has allocated"
        assert found["apart"][0] > 200 << 20, "a call that does copy was not seen"


def test_a_process_ends_with_operations_in_flight(run):
    run(2, "faults.py", "exit")


def test_without_a_launcher_the_error_says_what_to_do():
    gone = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in gone}
    code = "import farwire\ntry: farwire.init()\nexcept farwire.JoinError as e: print(e)"
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert "torchrun" in out.stdout, out


def test_errors_survive_pickling():
    import pickle

    import farwire

    error = pickle.loads(pickle.dumps(farwire.LostRank("rank 1 is lost; restart it", 1, 5)))
    assert (type(error), error.rank, error.world_rank) == (farwire.LostRank, 1, 5)
    assert error.advice == "restart it"


def test_the_program_comes_with_the_package():
    import shutil

    program = shutil.which("farwire", path=os.path.dirname(sys.executable))
    if program is None:
        pytest.skip("the package was not installed from its wheel")
    out = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    assert out.returncode == 0 and out.stdout.startswith("farwire"), out
