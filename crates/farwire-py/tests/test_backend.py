"""The backend for torch.distributed, in real processes, beside Gloo."""

import json
from importlib.metadata import entry_points

import pytest

torch = pytest.importorskip("torch")

IS_OLD = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 14)


def test_an_older_torch_is_told_of_the_hook(monkeypatch):
    import farwire.torch._backend as backend

    monkeypatch.setattr(backend, "CAN_DERIVE", False)
    with pytest.raises(RuntimeError, match="farwire.torch.hook"):
        backend._create(None, None)
    if IS_OLD:
        store = torch.distributed.HashStore()
        with pytest.raises(RuntimeError, match="farwire.torch.hook"):
            torch.distributed.init_process_group("farwire", store=store, rank=0, world_size=1)


@pytest.mark.skipif(IS_OLD, reason="a backend in Python needs torch 2.14")
@pytest.mark.parametrize("size", [2, 4])
def test_every_call_gives_what_gloo_gives(run, tmp_path, size):
    found = entry_points(group="torch.distributed.backends")
    assert any(entry.name == "farwire" for entry in found), "the package is not installed"
    outputs = run(size, "backend.py", tmp_path, "gloo", "farwire")
    gloo, ours = zip(*([json.loads(line) for line in output.splitlines()] for output in outputs))
    for rank in range(size):
        assert ours[rank].keys() == gloo[rank].keys()
        for name, value in gloo[rank].items():
            if isinstance(value, str) or size == 2:
                assert ours[rank][name] == value, name
            else:
                # With four ranks, Gloo adds in another order.
                worst = max(abs(a - b) for a, b in zip(ours[rank][name], value))
                assert worst < 1e-5, name
        assert ours[rank]["ddp"] == ours[0]["ddp"]
        assert ours[rank]["fsdp2"] == ours[0]["fsdp2"]
