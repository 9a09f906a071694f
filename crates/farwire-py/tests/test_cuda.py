"""The hook with CUDA tensors, where there is a card: two ranks may share it."""

import json

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def test_on_the_card_losses_are_those_of_the_cpu(run):
    ranks = [
        [json.loads(line) for line in output.splitlines()]
        for output in run(2, "on_gpu.py", "cpu,cuda,mixed")
    ]
    for runs in ranks:
        expected = {codec: losses for where, codec, losses, *_ in runs if where == "cpu"}
        for where, codec, losses, in_sync, staged, model in runs:
            assert in_sync or where == "mixed", "ranks on one kind of device have the same bits"
            worst = max(abs(a - b) for a, b in zip(losses, expected[codec]))
            assert worst < (1e-4 if codec == "none" else 0.05), (where, codec)
            # What crosses PCIe, each way, in a step.
            assert staged in (0, model)
