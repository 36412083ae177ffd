"""What the scores cost a client."""

import pytest
import torch

from fedobp.errors import FedobpError
from fedobp.importance import squared
from fedobp.paper.experiment import Work, setting_for
from fedobp.paper.overhead import PeakMemory, measure, operations
from fedobp.paper.registry import EXPERIMENTS
from paper.cases import setting


def test_operations_are_counted():
    # 10 entries, 64 samples (two batches, ten steps), 100 operations a sample
    assert operations(10, 64, 100.0) == {
        "training": 5 * 64 * 100 + 2 * 10 * 10,
        "obp": 20,
        "product": 30,
        "gradient": 20,
        "fisher": 64 * 120,
        "fisher-batch": 6410,
    }


def test_peak_memory_is_of_tensors_that_live_at_one_time():
    a, b = torch.ones(1000), torch.zeros(1000)
    with PeakMemory() as memory:
        squared(a, b)  # the difference, and its square
    assert memory.peak == 2 * 4000
    with PeakMemory() as memory:
        for _ in range(5):
            squared(a, b)
    assert memory.peak == 2 * 4000
    with PeakMemory() as memory:
        a.view(10, 100).add_(1)  # nothing new
    assert memory.peak == 0


def test_a_dataset_is_measured_once(tmp_path, monkeypatch):
    def measured(config, model, samples, seconds):
        return [{"dataset": config.dataset, "seconds": 0.5}]

    monkeypatch.setattr("fedobp.paper.overhead.measure_client", measured)
    digits = setting_for(EXPERIMENTS["overhead"], scale="smoke")
    first = measure(digits, Work(tmp_path))
    assert first == {"results": [{"dataset": "digits", "seconds": 0.5}]}
    assert measure(digits, Work(tmp_path, until=0.0)) == first


def test_a_dataset_of_unknown_size_is_a_user_error(tmp_path):
    with pytest.raises(FedobpError, match="and own is none of them: choose from digits"):
        measure(setting(datasets=("own",)), Work(tmp_path))
