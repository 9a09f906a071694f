"""Every collective, compared with NumPy."""

import array
import asyncio

import numpy as np

import farwire

comm = farwire.init()
rank, size = comm.rank, comm.size
everyone = range(size)


def of(rank, count=7, dtype=np.float32):
    return (np.arange(count) * (rank + 1) + rank).astype(dtype)


for dtype in (np.float16, np.float32, np.float64, np.int8, np.int32, np.int64, np.uint8, np.uint32):
    mine = of(rank, dtype=dtype)
    address = mine.ctypes.data
    assert comm.all_reduce(mine) is mine and mine.ctypes.data == address
    np.testing.assert_array_equal(mine, sum(of(r, dtype=dtype) for r in everyone))
for op, numpy_op in (("mean", np.mean), ("min", np.min), ("max", np.max), ("prod", np.prod)):
    mine = of(rank)
    comm.all_reduce(mine, op=op)
    np.testing.assert_allclose(mine, numpy_op([of(r) for r in everyone], axis=0), rtol=1e-6)

mine = of(rank) + 1j * of(rank)
comm.all_reduce(mine)
np.testing.assert_allclose(mine, sum(of(r) + 1j * of(r) for r in everyone))

mine = of(rank, dtype=np.int16)  # moves, but cannot be added
comm.broadcast(mine, root=size - 1)
np.testing.assert_array_equal(mine, of(size - 1, dtype=np.int16))
try:
    comm.all_reduce(mine)
    raise SystemExit("int16 was added")
except TypeError as error:
    assert "int16" in str(error) and "move" in str(error), error

mine = of(rank)
comm.reduce(mine, root=1)
if rank == 1:
    np.testing.assert_array_equal(mine, sum(of(r) for r in everyone))

gathered = np.empty((size, 7), np.float32)
assert comm.all_gather(of(rank), gathered) is gathered
np.testing.assert_array_equal(gathered, [of(r) for r in everyone])
in_place = np.zeros((size, 7), np.float32)
in_place[rank] = of(rank)
comm.all_gather(in_place)
np.testing.assert_array_equal(in_place, gathered)

whole = of(rank, 3 * size)
total = sum(of(r, 3 * size) for r in everyone)
block = np.empty(3, np.float32)
comm.reduce_scatter(whole, block)
np.testing.assert_array_equal(block, total[3 * rank : 3 * rank + 3])
np.testing.assert_array_equal(whole, of(rank, 3 * size))
comm.reduce_scatter(whole)
np.testing.assert_array_equal(whole[3 * rank : 3 * rank + 3], block)

root = np.empty((size, 7), np.float32) if rank == 0 else None
comm.gather(of(rank), root)
if rank == 0:
    np.testing.assert_array_equal(root, gathered)
back = np.empty(7, np.float32)
comm.scatter(back, root)
np.testing.assert_array_equal(back, of(rank))

sent = np.array([[10 * rank + to] * 2 for to in everyone], np.int16)
got = np.empty_like(sent)
comm.all_to_all(sent, got)
np.testing.assert_array_equal(got, [[10 * source + rank] * 2 for source in everyone])
varied = np.full(sum(r + 1 for r in everyone), rank, np.int16)
lengths = [r + 1 for r in everyone]
got = np.empty((rank + 1) * size, np.int16)
comm.all_to_all(varied, got, send=lengths, recv=[rank + 1] * size)
np.testing.assert_array_equal(got, np.repeat(everyone, rank + 1))

assert comm.scan(np.array([rank + 1]))[0] == sum(range(rank + 2))
assert comm.scan(np.array([rank + 1]), exclusive=True)[0] == sum(range(rank + 1))

to, source = (rank + 1) % size, (rank - 1) % size
outgoing = comm.send(of(rank), to, tag=7, async_=True)
assert (comm.recv(np.empty(7, np.float32), source, tag=7) == of(source)).all()
outgoing.wait()

for plain in (bytearray(b"abcd"), array.array("d", [1.0, 2.0]), memoryview(bytearray(8))):
    before = bytes(plain)
    assert comm.broadcast(plain) is plain and bytes(plain) == before
empty = np.empty(0)
comm.all_reduce(empty)

class OnlyDLPack:
    """An array of some other library."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


behind = of(rank)
comm.all_reduce(OnlyDLPack(behind))
np.testing.assert_array_equal(behind, sum(of(r) for r in everyone))

many = [comm.all_reduce(of(rank), async_=True) for _ in range(20)]
for operation in reversed(many):
    np.testing.assert_array_equal(operation.wait(), total_of := sum(of(r) for r in everyone))
    assert operation.done()


async def several():
    return await asyncio.gather(*(one_of(k) for k in range(5)))


async def one_of(k):
    return await comm.all_reduce(np.full(3, k + rank, np.int64), async_=True)


for k, result in enumerate(asyncio.run(several())):
    assert (result == sum(k + r for r in everyone)).all()

half = comm.split(color=rank % 2)
assert half.size == len(everyone[rank % 2 :: 2])
assert half.all_reduce(np.array([rank]))[0] == sum(everyone[rank % 2 :: 2])
if rank < 2:
    pair = comm.subgroup([1, 0], "pair")
    assert pair.rank == 1 - rank

top = farwire.Compressor("topk:0.25,values=f32")
sent = np.zeros(4)
for step in range(8):
    gradient = np.array([4.0, 3.0, 2.0, 1.0], np.float32)
    sent += comm.all_reduce(gradient, op="mean", codec=top, name="w")
if rank == 0:
    print("sent", sent, "owed", top.owed("w"))
again = farwire.Compressor("topk:0.25,values=f32")
again.load_state_dict(top.state_dict())
assert again.owed("w") == top.owed("w") and again.owed("v") is None

same = np.arange(5)
assert comm.is_in_sync(same) and not comm.is_in_sync(same + rank)

for wrong, kind in (
    (lambda: comm.all_reduce(np.zeros(3).astype(object)), TypeError),
    (lambda: comm.all_reduce(np.zeros((3, 3)).T[1:]), TypeError),
    (lambda: comm.all_reduce(b"bytes"), TypeError),
    (lambda: comm.all_reduce([1.0]), TypeError),
    (lambda: comm.all_reduce(np.zeros(3), op="median"), ValueError),
    (lambda: comm.broadcast(np.zeros(3), root=size), farwire.CallError),
    (lambda: comm.all_reduce(np.zeros(3, np.int64), op="mean"), farwire.CallError),
    (lambda: comm.all_gather(np.zeros(3), np.zeros(3 * size + 1)), farwire.CallError),
    (lambda: comm.all_reduce(np.zeros(3), codec=top), farwire.CallError),
    (lambda: comm.all_reduce(np.zeros(3, np.float32), codec=top, name="w"), farwire.CallError),
    (lambda: comm.all_reduce(np.zeros(3), codec="topk:0.01", name="w"), farwire.CallError),
    (lambda: comm.broadcast(np.array([{}, {}])), TypeError),
    (lambda: comm.broadcast(np.zeros(3, [("one", "f4"), ("other", object)])), TypeError),
    (lambda: comm.broadcast(np.zeros(3), root=-1), farwire.CallError),
    (lambda: comm.send(np.zeros(3), to=0, tag=-1), farwire.CallError),
    (lambda: comm.all_gather(np.zeros(4, np.float32), np.zeros(2 * size)), TypeError),
    (lambda: comm.reduce_scatter(np.zeros(size), np.zeros(1, np.int64)), TypeError),
    (lambda: comm.gather(np.zeros(3), root=rank), farwire.CallError),
    (lambda: comm.scatter(np.zeros(3), root=rank), farwire.CallError),
    (lambda: farwire.init(join_timeout=30), farwire.JoinError),
    (lambda: farwire.Compressor("topk:2"), ValueError),
):
    try:
        wrong()
    except kind as error:
        assert str(error), kind
        assert kind is not farwire.JoinError or "joined already" in str(error), error
    else:
        raise SystemExit(f"{kind} was not raised")

if rank == 0:
    try:
        comm.with_options(deadline=0.1).recv(np.empty(1), source=1, tag=99)
        raise SystemExit("a message came that nobody has sent")
    except farwire.Timeout as error:
        assert isinstance(error, TimeoutError) and error.rank == 1, error
    operation = comm.recv(np.empty(1), source=1, tag=100, async_=True)
    try:
        operation.wait(timeout=0.01)
        raise SystemExit("a message came that nobody has sent")
    except TimeoutError:
        comm.send(np.ones(1), 1, tag=100)
    assert operation.wait() == 5
if rank == 1:
    comm.recv(np.empty(1), 0, tag=100)
    comm.send(np.full(1, 5.0), 0, tag=100)
comm.shutdown()
print("done", flush=True)
