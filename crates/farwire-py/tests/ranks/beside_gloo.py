"""farwire first, and then torch with its own store, which needs rank 0's TCP port."""

import numpy
import torch
import torch.distributed as dist

import farwire

comm = farwire.init()
dist.init_process_group("gloo")
theirs = torch.ones(3)
dist.all_reduce(theirs)
ours = numpy.ones(3, dtype=numpy.float32)
comm.all_reduce(ours)
print(theirs.tolist(), ours.tolist())
dist.destroy_process_group()
