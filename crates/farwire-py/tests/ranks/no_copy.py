"""How much memory an all-reduce of 256 MiB takes besides its array, in Python and in total."""

import json
import tracemalloc

import numpy as np

import farwire

BYTES = 256 << 20


def peak():
    """The peak memory of this process since the last call of `forget`, in bytes."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["VmHWM"].split()[0]) << 10


def forget():
    """Resets the kernel's peak to the memory in use now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def grown_by(call):
    """How much memory grows during a call: the whole process, and Python's allocations."""
    tracemalloc.start()
    forget()
    before = peak()
    call()
    grown, traced = peak() - before, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return grown, traced


comm = farwire.init()
# Links and threads allocate their memory now.
comm.all_reduce(np.zeros(16 << 20, np.uint8))
array = np.ones(BYTES // 4, np.float32)
address = array.ctypes.data
result = []
in_place = grown_by(lambda: result.append(comm.all_reduce(array)))
same = result[0] is array and array.ctypes.data == address
# A scan has a separate result, so the measurement must notice it.
apart = grown_by(lambda: comm.scan(array))
right = float(array[0]) == float(array[-1]) == 2.0 * (comm.rank + 1)
print(json.dumps({"in_place": in_place, "apart": apart, "same": same, "right": right}))
comm.shutdown()
