"""The hook with CUDA tensors, if there is a card: two ranks may share it."""

import json

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture(scope="module")
def ranks(module_run):
    """What each rank has found, by line."""
    outputs = module_run(2, "on_gpu.py", "cpu,cuda,mixed")
    return [[json.loads(line) for line in output.splitlines()] for output in outputs]


def trained(runs):
    return [run for run in runs if run[1] != "nan"]


def test_on_the_card_losses_are_those_of_the_cpu(ranks):
    for runs in ranks:
        expected = {codec: losses for where, codec, losses, *_ in trained(runs) if where == "cpu"}
        for where, codec, losses, in_sync, *_ in trained(runs):
            assert in_sync or where == "mixed", "ranks on one kind of device have the same bits"
            worst = max(abs(a - b) for a, b in zip(losses, expected[codec]))
            assert worst < (1e-4 if codec == "none" else 0.05), (where, codec)


def test_only_messages_and_what_is_dense_cross_the_bus(ranks):
    for rank, runs in enumerate(ranks):
        for where, codec, _, _, crossed, model, owed in trained(runs):
            if where == "cpu" or (where == "mixed" and rank > 0):
                assert crossed == [0, 0]
            elif codec == "none":
                assert crossed == [model, model]
            else:
                assert 0 < max(crossed) < model / 4, "5 % of the gradients, and the biases"
                assert owed > model, "residuals come to the host for a checkpoint"


def test_a_nan_on_a_card_makes_the_step_one_that_does_not_count(ranks):
    for runs in ranks:
        for where, _, steps in (run for run in runs if run[1] == "nan"):
            before, spoilt, after = steps
            assert before[0] and after[0], where
            assert not spoilt[0], "the result is not finite on any rank"
            assert spoilt[2], "what is owed is as it was before the step"
