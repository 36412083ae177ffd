import torch

from fedobp.transfer import AsyncCopy, to_device


def test_numbers_keep_their_values_and_type():
    assert to_device([1, 2], torch.device("cpu")).tolist() == [1, 2]
    assert to_device([0.5], torch.device("cpu"), torch.float64).dtype == torch.float64


def test_what_is_on_the_cpu_has_arrived():
    tensor = torch.arange(3)
    assert AsyncCopy(tensor).value() is tensor
