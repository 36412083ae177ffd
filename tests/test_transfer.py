import torch

from fedobp.transfer import Arriving, send


def test_numbers_keep_their_values_and_type():
    assert send([1, 2], torch.device("cpu")).tolist() == [1, 2]
    assert send([0.5], torch.device("cpu"), torch.float64).dtype == torch.float64


def test_what_is_on_the_cpu_has_arrived():
    tensor = torch.arange(3)
    assert Arriving(tensor).value() is tensor
