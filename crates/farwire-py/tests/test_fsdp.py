"""The hook between sites, for FSDP2."""

import json

import pytest

pytest.importorskip("torch.distributed.fsdp")


def test_between_sites_dense_is_fsdp_over_all_and_a_codec_sends_less(run):
    for output in run(4, "fsdp.py", "none", "topk:0.02"):
        dense, sparse = map(json.loads, output.splitlines())
        assert dense[0] < 1e-5, "the weights of FSDP2 over all ranks"
        assert sparse[1] < 2 and sparse[3] > 10_000, "loss, and bytes owed"
        assert sparse[2] < dense[2] / 5, "bytes sent"
