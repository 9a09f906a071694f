"""The hook for DistributedDataParallel, in real processes."""

import json
import signal

import pytest

pytest.importorskip("torch")

CODECS = ["int8", "topk:0.05", "powersgd:2", "randk:0.1", "sign"]
RULES = {"rules": {"inner.*.weight": "none"}}
GENTLY = {"phase_in": [10, 5]}

ON_TWO = [
    ("trained", "gloo", {}),
    ("trained", "none", {}),
    *(("trained", codec, {}) for codec in CODECS),
    ("trained", "topk:0.01", {}),
    ("trained", "topk:0.01", RULES),
    ("trained", "topk:0.01", GENTLY),
    ("books", "topk:0.02", {}),
    ("resume", "topk:0.02", {}),
    ("bad_state", "topk:0.02", {}),
    ("unused", "topk:0.02", {}),
    ("unused", "none", {}),
    ("infinity", "topk:0.02", {"on_nan": "skip"}),
    ("infinity", "none", {"on_nan": "skip"}),
    ("loader", "topk:0.05", {}),
    ("pairs", "topk:1,values=f32", {}),
    ("refused", "topk:0.05", {}),
    ("infinity", "topk:0.02", {"on_nan": "raise"}),
    ("infinity", "none", {"on_nan": "raise"}),
]
ON_FOUR = [("trained", "gloo", {}), ("trained", "none", {}), ("books", "topk:0.02", {})]


def go_through(run_job, size, scenarios):
    """The result of each scenario, on every rank."""
    outputs = run_job(size, "ddp.py", *map(json.dumps, scenarios))
    by_rank = [[json.loads(line) for line in output.splitlines()] for output in outputs]
    keys = [json.dumps(scenario) for scenario in scenarios]
    return {key: list(results) for key, *results in zip(keys, *by_rank)}


@pytest.fixture(scope="module")
def two(module_run):
    results = go_through(module_run, 2, ON_TWO)
    return lambda name, codec, **options: results[json.dumps((name, codec, options))]


@pytest.fixture(scope="module")
def four(module_run):
    results = go_through(module_run, 4, ON_FOUR)
    return lambda name, codec, **options: results[json.dumps((name, codec, options))]


@pytest.mark.parametrize("link", ["auto", "quic", "tcp"])
def test_torch_can_have_the_port_of_rank_0_after_farwire(run, link):
    outputs = run(2, "beside_gloo.py", env={"FARWIRE_LINK": link})
    assert outputs == ["[2.0, 2.0, 2.0] [2.0, 2.0, 2.0]\n"] * 2


def test_dense_on_two_ranks_has_the_bits_of_gloo(two):
    gloo, ours = two("trained", "gloo"), two("trained", "none")
    assert len({digest for digest, *_ in gloo + ours}) == 1


def test_dense_on_four_ranks_is_close_to_gloo(four):
    gloo, ours = four("trained", "gloo"), four("trained", "none")
    assert len({digest for digest, *_ in ours}) == 1
    assert max(abs(a - b) for a, b in zip(gloo[0][3], ours[0][3])) < 1e-5


@pytest.mark.parametrize("codec", CODECS)
def test_through_a_codec_all_ranks_have_the_same_bits(two, codec):
    ranks = two("trained", codec)
    assert ranks[0][0] == ranks[1][0]
    assert ranks[0][2] < two("trained", "none")[0][2] / 2, "bytes"


def test_a_codec_by_name_wins_over_the_codec_for_all(two):
    assert two("trained", "topk:0.01", **RULES)[0][2] > 3 * two("trained", "topk:0.01")[0][2]


def test_phase_in_starts_dense(two):
    assert two("trained", "topk:0.01", **GENTLY)[0][2] > 5 * two("trained", "topk:0.01")[0][2]


def test_nothing_is_lost_over_rebuilt_buckets_accumulation_and_a_checkpoint(two, four):
    assert all(owed > 0 for owed in two("books", "topk:0.02") + four("books", "topk:0.02"))


def test_a_resumed_run_goes_on_bit_for_bit(two):
    for whole, resumed in two("resume", "topk:0.02"):
        assert whole == resumed


def test_a_state_that_is_refused_changes_nothing(two):
    for said in two("bad_state", "topk:0.02"):
        assert all(error.startswith("CallError: step is") for error in said[:-1]), said
        assert said[-1].startswith("CallError: ") and "step" not in said[-1], said


@pytest.mark.parametrize("codec", ["topk:0.02", "none"])
def test_parameters_that_are_not_used_lose_nothing(two, codec):
    ranks = two("unused", codec)
    assert ranks[0] == ranks[1] and (ranks[0][0] > 0) == (codec != "none")


@pytest.mark.parametrize("codec", ["topk:0.02", "none"])
def test_a_step_with_an_infinity_is_skipped_on_all_ranks(two, codec):
    assert two("infinity", codec, on_nan="skip") == ["skipped, and went on"] * 2


@pytest.mark.parametrize("codec", ["topk:0.02", "none"])
def test_an_infinity_is_raised_on_all_ranks_on_request(two, codec):
    first, second = two("infinity", codec, on_nan="raise")
    assert first == second and first.startswith("raised")


def test_data_loaders_may_fork_their_workers(two):
    ranks = two("loader", "topk:0.05")
    assert ranks[0][0] == ranks[1][0]


def test_gradients_of_complex_parameters_are_exchanged_whole(two):
    assert all(apart < 1e-5 for apart in two("pairs", "topk:1,values=f32"))


def test_the_hook_says_what_it_does_not_take(two):
    for another, sparse in two("refused", "topk:0.05"):
        assert "a State for each" in another and "sparse=True" in sparse


@pytest.mark.parametrize("codec", ["topk:0.02", "none"])
def test_a_rank_killed_in_mid_backward_raises_on_the_others(run, codec):
    scenario = json.dumps(("killed", codec, {}))
    outputs = run(3, "ddp.py", scenario, codes=[0, -signal.SIGKILL, 0])
    for rank in (0, 2):
        name, lost, advice, _ = json.loads(outputs[rank])
        assert (name, lost) == ("LostRank", 1) and advice.startswith("restart it")
