"""The hook between sites, for FSDP2."""

import json

import pytest

pytest.importorskip("torch.distributed.fsdp")


def test_between_sites_dense_is_fsdp_over_all_and_a_codec_sends_less(run):
    dense, sparse = (
        [json.loads(output) for output in run(4, "fsdp.py", codec)] for codec in ("none", "topk:0.02")
    )
    for rank in range(4):
        assert dense[rank][0] < 1e-5, "the weights of FSDP2 over all ranks"
        assert sparse[rank][1] < 2 and sparse[rank][3] > 10_000, "loss, and bytes owed"
        assert sparse[rank][2] < dense[rank][2] / 5, "bytes sent"
