"""Things that go wrong, and things that must not."""

import os
import sys
import threading

import numpy as np

import farwire

what = sys.argv[1]

if what == "alone":
    try:
        print("joining")
        farwire.init()
    except KeyboardInterrupt:
        print("interrupted")
        os._exit(0)  # the thread that joins ends by itself, when its time is up

comm = farwire.init()
one = np.ones(1)

if what == "desync":
    try:
        comm.all_reduce(np.zeros(3 + comm.rank))
    except farwire.Desync as error:
        print(type(error).__name__, error.rank, error.advice)

elif what == "wait":
    print("in a loop")
    try:
        while True:
            comm.all_reduce(np.ones(100_000))
    except farwire.LostRank as error:
        print(f"{type(error).__name__} of rank {error.rank}: {error.advice}")

elif what == "interrupted":
    if comm.rank == 0:
        operation = comm.all_reduce(one, async_=True)
        try:
            print("waiting")
            operation.wait()
            raise SystemExit("rank 1 has not called yet")
        except KeyboardInterrupt:
            comm.send(np.zeros(1), to=1)
            print(f"interrupted, then {operation.wait()[0]}")
    else:
        comm.recv(np.zeros(1), source=0)
        comm.all_reduce(one)
    comm.shutdown()

elif what == "fork":
    started = comm.all_reduce(np.ones(1), async_=True)
    child = os.fork()
    if child == 0:
        try:
            comm.all_reduce(one)
        except farwire.Forked as error:
            print("the child was told:", error)
        try:
            started.wait()
            raise SystemExit("an operation of the parent's was waited for")
        except farwire.Forked:
            pass
        del started, comm
        sys.exit(0)  # through the interpreter's own end, with everything dropped
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    started.wait()
    comm.all_reduce(one)
    print("the parent goes on:", one[0])
    comm.shutdown()

elif what == "join_in_a_child":

    def in_a_child(what):
        child = os.fork()
        if child == 0:
            what()
            sys.exit(0)
        return child

    def join_beside_the_parent():
        try:
            farwire.init(join_timeout=5)
        except farwire.Error as error:
            print(f"beside its parent, a child got {type(error).__name__}: {error}")

    def join_after_the_parent():
        comm = farwire.init()
        comm.all_reduce(one)
        print("after its parent, a child has joined:", one[0])
        comm.shutdown()

    _, status = os.waitpid(in_a_child(join_beside_the_parent), 0)
    assert status == 0, status
    comm.barrier()
    comm.shutdown()
    _, status = os.waitpid(in_a_child(join_after_the_parent), 0)
    assert status == 0, status

elif what == "threads":
    if comm.rank == 0:
        counted, ended = 0, threading.Event()

        def wait():
            comm.recv(np.empty(1), source=1)
            ended.set()

        thread = threading.Thread(target=wait)
        thread.start()
        comm.send(one, to=1)  # rank 1 answers only to this
        thread.join()
        assert ended.is_set()
        print("counted while waiting")
    else:
        comm.recv(np.empty(1), source=0)
        comm.send(one, to=0)
    comm.shutdown()

elif what == "exit":
    called = []
    operation = comm.all_reduce(np.ones(1 << 20), async_=True)
    operation.add_done_callback(called.append)
    if comm.rank == 0:
        comm.recv(np.empty(1 << 20), source=1, async_=True)  # will never come
