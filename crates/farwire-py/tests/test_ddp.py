"""The hook for DistributedDataParallel, in real processes."""

import json
import signal

import pytest

torch = pytest.importorskip("torch")


def results(outputs):
    return [json.loads(output.split("result ", 1)[1]) for output in outputs]


def test_dense_on_two_ranks_has_the_bits_of_gloo(run):
    gloo = results(run(2, "ddp.py", "train", "gloo"))
    ours = results(run(2, "ddp.py", "train", "none"))
    assert [digest for digest, *_ in gloo] == [digest for digest, *_ in ours]
    assert gloo[0][0] == gloo[1][0]


def test_dense_on_four_ranks_is_close_to_gloo(run, tmp_path):
    for name in ("gloo", "none"):
        ranks = results(run(4, "ddp.py", "train", name, "{}", tmp_path / name))
        assert len({digest for digest, *_ in ranks}) == 1
    gloo, ours = (torch.load(tmp_path / name) for name in ("gloo", "none"))
    assert (gloo - ours).abs().max() < 1e-5


@pytest.mark.parametrize("codec", ["int8", "topk:0.05", "powersgd:2", "randk:0.1", "sign"])
def test_through_a_codec_all_ranks_have_the_same_bits(run, codec):
    ranks = results(run(2, "ddp.py", "train", codec))
    assert ranks[0][0] == ranks[1][0]
    dense = 20 * 4 * (24 * 96 + 2 * 96 * 96 + 96 * 4)
    assert ranks[0][2] < dense / 2, "fewer bytes than dense"


def test_a_codec_by_name_wins_over_the_codec_for_all(run):
    sparse, ruled = (
        results(run(2, "ddp.py", "train", "topk:0.01", json.dumps({"rules": rules})))[0][2]
        for rules in ({}, {"inner.*.weight": "none"})
    )
    assert ruled > 3 * sparse


def test_phase_in_starts_dense(run):
    at_once, gently = (
        results(run(2, "ddp.py", "train", "topk:0.01", json.dumps({"phase_in": phase_in})))[0][2]
        for phase_in in ([0, 0], [10, 5])
    )
    assert gently > 5 * at_once


@pytest.mark.parametrize("size", [2, 4])
def test_nothing_is_lost_over_rebuilt_buckets_accumulation_and_a_checkpoint(run, size):
    for output in run(size, "ddp.py", "books", "topk:0.02"):
        assert float(output.split("owed ")[1]) > 0


def test_a_resumed_run_goes_on_bit_for_bit(run):
    assert "resumed" in run(2, "ddp.py", "resume", "topk:0.02")[0]


@pytest.mark.parametrize("codec", ["topk:0.02", "none"])
def test_parameters_that_are_not_used_lose_nothing(run, codec):
    for output in run(2, "ddp.py", "unused", codec):
        assert "balanced" in output


@pytest.mark.parametrize("codec", ["topk:0.02", "none"])
def test_a_step_with_an_infinity_is_skipped_on_all_ranks(run, codec):
    for output in run(2, "ddp.py", "nan", codec, "skip"):
        assert "skipped, and went on" in output


@pytest.mark.parametrize("codec", ["topk:0.02", "none"])
def test_an_infinity_is_raised_on_all_ranks_on_request(run, codec):
    for output in run(2, "ddp.py", "nan", codec, "raise"):
        assert "raised" in output


@pytest.mark.parametrize("codec", ["topk:0.02", "none"])
def test_a_rank_killed_in_mid_backward_raises_on_the_others(run, codec):
    outputs = run(3, "ddp.py", "killed", codec, codes=[0, -signal.SIGKILL, 0])
    for rank in (0, 2):
        assert "LostRank" in outputs[rank] and "restart it" in outputs[rank]


def test_data_loaders_may_fork_their_workers(run):
    ranks = results(run(2, "ddp.py", "loader", "topk:0.05"))
    assert ranks[0][0] == ranks[1][0]
