#!/usr/bin/env python3
"""Trains the GPT of `farwire train` in PyTorch, from the same weights on the same batches, and compares the losses.

    python3 scripts/torch_parity.py [--farwire PATH] [flags for farwire train, for example --ranks 2 --tp 2]

Makes the weights, saves them as one safetensors file, runs `farwire train --init` on that file, and trains the same model here.
Exits with 1 if any step's loss differs by more than 1e-3 (relative), and with 0 and a message if torch is not installed.
"""

import argparse
import json
import math
import os
import struct
import subprocess
import sys
import tempfile

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    print("skipped: torch is not installed")
    sys.exit(0)

LAYERS, HEADS, WIDTH, CONTEXT, BATCH, STEPS, RATE, SEED = 4, 4, 64, 32, 8, 20, 0.003, 7
WARM_UP, DECAY, CLIP, BETAS = 20, 0.1, 1.0, (0.9, 0.95)
TOLERANCE = 1e-3


def weights():
    """The model's parameters, by the names that farwire gives them."""
    torch.manual_seed(SEED)

    def normal(*shape, deviation=0.02):
        return torch.randn(*shape) * deviation

    table = {"embedding.token.weight": normal(256, WIDTH), "embedding.position.weight": normal(CONTEXT, WIDTH)}

    def norm(name):
        table[f"{name}.weight"] = 1 + normal(WIDTH)
        table[f"{name}.bias"] = normal(WIDTH)

    def linear(name, rows, columns):
        table[f"{name}.weight"] = normal(rows, columns)
        table[f"{name}.bias"] = normal(rows)

    for layer in range(LAYERS):
        block = f"blocks.{layer}"
        norm(f"{block}.attention_norm")
        linear(f"{block}.attention.qkv", 3 * WIDTH, WIDTH)
        linear(f"{block}.attention.out", WIDTH, WIDTH)
        norm(f"{block}.mlp_norm")
        linear(f"{block}.mlp.up", 4 * WIDTH, WIDTH)
        linear(f"{block}.mlp.down", WIDTH, 4 * WIDTH)
    norm("head.norm")
    linear("head.linear", 256, WIDTH)
    return table


def save(table, path):
    """The safetensors format: the length of a JSON header, the header, the data."""
    header, data = {}, b""
    for name, tensor in table.items():
        raw = struct.pack(f"<{tensor.numel()}f", *tensor.flatten().tolist())
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def logits(table, ids):
    def norm(x, name):
        return F.layer_norm(x, (WIDTH,), table[f"{name}.weight"], table[f"{name}.bias"], eps=1e-5)

    def linear(x, name):
        return F.linear(x, table[f"{name}.weight"], table[f"{name}.bias"])

    def heads(x):
        return x.view(*x.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2)

    x = table["embedding.token.weight"][ids] + table["embedding.position.weight"][: ids.shape[1]]
    for layer in range(LAYERS):
        block = f"blocks.{layer}"
        q, k, v = linear(norm(x, f"{block}.attention_norm"), f"{block}.attention.qkv").split(WIDTH, dim=2)
        seen = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True)
        x = x + linear(seen.transpose(1, 2).flatten(2), f"{block}.attention.out")
        x = x + linear(F.relu(linear(norm(x, f"{block}.mlp_norm"), f"{block}.mlp.up")), f"{block}.mlp.down")
    return linear(norm(x, "head.norm"), "head.linear")


def mix(state):
    """SplitMix64's output function, by which farwire orders its data."""
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def batch(text, step):
    starts = [mix((mix(SEED) + step * BATCH + i) % 2**64) % (len(text) - CONTEXT) for i in range(BATCH)]
    window = lambda shift: torch.tensor([list(text[s + shift : s + shift + CONTEXT]) for s in starts])
    return window(0), window(1)


def rate(step):
    if step < WARM_UP:
        return RATE * (step + 1) / WARM_UP
    done = min((step - WARM_UP) / max(STEPS - WARM_UP, 1), 1.0)
    return RATE * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def train(table, text):
    table = {name: tensor.clone().requires_grad_() for name, tensor in table.items()}
    decayed = lambda name: not (name.endswith(".bias") or "norm" in name or name.startswith("embedding."))
    groups = [
        {"params": [tensor for name, tensor in table.items() if decayed(name) == wanted], "weight_decay": decay}
        for wanted, decay in [(True, DECAY), (False, 0.0)]
    ]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=1e-8)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(text, step)
        loss = F.cross_entropy(logits(table, inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(table.values(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    parser = argparse.ArgumentParser(description="farwire train beside PyTorch")
    parser.add_argument("--farwire", default="target/release/farwire", help="the program")
    options, flags = parser.parse_known_args()
    program = os.path.abspath(options.farwire)
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "..", "README.md"), "rb") as file:
        text = file.read()
    table = weights()
    with tempfile.TemporaryDirectory() as folder:
        save(table, os.path.join(folder, "weights.safetensors"))
        with open(os.path.join(folder, "text"), "wb") as file:
            file.write(text)
        command = [program, "train", "--json", "--init", "weights.safetensors", "--data", "text"]
        for flag, value in [("layers", LAYERS), ("heads", HEADS), ("width", WIDTH), ("context", CONTEXT)]:
            command += [f"--{flag}", str(value)]
        for flag, value in [("batch", BATCH), ("steps", STEPS), ("lr", RATE), ("seed", SEED)]:
            command += [f"--{flag}", str(value)]
        output = subprocess.run(command + flags, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout
    lines = [json.loads(line) for line in output.splitlines()]
    theirs = [line["loss"] for line in lines if line["event"] == "step"]
    mine = train(table, text)
    worst = 0.0
    for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        worst = max(worst, abs(a - b) / a)
        print(f"step {step + 1:2}  torch {a:.6f}  farwire {b:.6f}")
    print(f"largest relative difference: {worst:.2e} (allowed: {TOLERANCE:.0e})")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
