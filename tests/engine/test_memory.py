from pathlib import Path

import torch

from fedobp.engine import memory_of


def test_memory_is_at_most_the_containers_limit(monkeypatch):
    whole = memory_of(torch.device("cpu"))
    assert 2**28 < whole < 2**50
    monkeypatch.setattr(Path, "read_text", lambda path: "1000000\n")
    assert memory_of(torch.device("cpu")) == 1e6
    monkeypatch.setattr(Path, "read_text", lambda path: "max\n")
    assert memory_of(torch.device("cpu")) >= whole
