"""Rounds whose clients train one after the other: all start from one model, and uploads are added to the mean."""

import pytest
import torch
from by_hand import context, vector

from fedobp.algorithms.sequential import after_client, round_start, server_before
from fedobp.method import average

UPLOADS, SAMPLES = [vector(1, 5), vector(3, -1), vector(7, 9), vector(-4, 2)], [2, 0, 5, 1]


def play_round(server, uploads, weights, round):
    for at, (upload, weight) in enumerate(zip(uploads, weights, strict=True)):
        ctx = context(at, round=round)
        assert round_start(server, ctx).equal(server["theta"] if at == 0 else server["start"])
        server = after_client(server, ctx, upload, torch.tensor(weight))
    return server


def test_two_rounds_end_at_the_means_of_their_uploads():
    theta = vector(10, 20)
    server = play_round(server_before(theta, torch.tensor(0)), UPLOADS, SAMPLES, round=1)
    mean = average(torch.stack(UPLOADS), torch.tensor(SAMPLES))
    torch.testing.assert_close(server["theta"], mean)
    assert server["start"].equal(theta)  # all four clients start from it
    first = server["theta"]
    server = play_round(server, [vector(8, 8), vector(0, 4)], [1, 3], round=2)
    torch.testing.assert_close(server["theta"], vector(2, 5))
    assert server["start"].equal(first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_can_differ_between_entries(dtype):
    server = server_before(torch.tensor([1, 1, 1], dtype=dtype), torch.zeros(3, dtype=torch.int64))
    uploads = [torch.tensor([4, 8, 9], dtype=dtype), torch.tensor([6, 9, 9], dtype=dtype)]
    server = play_round(server, uploads, [[1, 1, 0], [1, 0, 0]], round=1)
    assert server["theta"].tolist() == [5, 8, 1]  # the mean of both, the first alone, and none
    assert server["theta"].dtype == dtype


def test_a_round_without_samples_leaves_the_model():
    server = play_round(server_before(vector(1, 2), torch.tensor(0)), UPLOADS[:2], [0, 0], round=1)
    assert server["theta"].tolist() == [1, 2]
