import torch

from fedobp.transfer import AsyncCopy, Deferred, to_device

CPU = torch.device("cpu")


def test_numbers_keep_their_values_and_have_the_type_asked_for():
    assert to_device([1, 2], CPU).tolist() == [1, 2]
    assert to_device([1, 2], CPU).dtype == torch.int64
    assert to_device([0.5], CPU).dtype == torch.float32
    assert to_device([0.1], CPU, torch.float64).tolist() == [0.1]
    assert to_device([0.1], CPU, torch.float64).dtype == torch.float64
    assert to_device([], CPU, torch.int64).shape == (0,)


def test_a_tensor_on_its_device_is_the_same_tensor():
    tensor = torch.arange(3)
    assert to_device(tensor, CPU) is tensor


def test_a_copy_of_a_tensor_on_the_cpu_is_that_tensor():
    tensor = torch.arange(3)
    assert AsyncCopy(tensor).value() is tensor


def test_a_deferred_value_is_computed_when_it_is_asked_for():
    tensor = torch.arange(3)
    value = Deferred(lambda given: int(given.sum()), tensor)
    tensor += 1
    assert value.value() == 6
