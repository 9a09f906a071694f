"""Hugging Face Accelerate, with gradients through farwire: two more lines.

    pip install accelerate
    torchrun --nproc-per-node 2 examples/torch/with_accelerate.py

`accelerator.prepare` wraps the model in DistributedDataParallel, which takes the hook. Everything
else is as without farwire. (Lightning does the same by itself, on GPUs: give its `DDPStrategy`
`ddp_comm_state=farwire.torch.State(…)` and `ddp_comm_hook=farwire.torch.hook`.)
"""

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import farwire
import farwire.torch


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--codec", default="topk:0.05")
    arguments.add_argument("--epochs", type=int, default=10)
    arguments.add_argument("--cpu", action="store_true", help="even if there is a GPU")
    chosen = arguments.parse_args()

    accelerator = Accelerator(cpu=chosen.cpu or not torch.cuda.is_available())
    torch.manual_seed(0)
    x = torch.randn(2048, 64)
    data = DataLoader(TensorDataset(x, x.cumsum(1).tanh()), batch_size=64, shuffle=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    comm = farwire.init()
    steps = chosen.epochs * len(data)
    model.register_comm_hook(
        farwire.torch.State(comm, chosen.codec, steps=steps), farwire.torch.hook
    )

    for epoch in range(chosen.epochs):
        for inputs, targets in data:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"epoch {epoch + 1}  loss {accelerator.reduce(loss, 'mean').item():.4f}")
    comm.shutdown()
    accelerator.end_training()


if __name__ == "__main__":
    main()
