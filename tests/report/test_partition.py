"""Label skew, and the title of a partition."""

import numpy as np
import pytest
from resolved import resolved

from fedobp.report.partition import label_skew, partition_title


def test_label_skew_by_hand():
    # Of eight samples, labels are 4, 2, 2: shares 1/2, 1/4, 1/4, an entropy of 1.5 bits.
    found = label_skew(np.array([[2, 0, 0], [0, 2, 0], [1, 0, 1], [1, 0, 1]]))
    assert found.entropy_of_all == pytest.approx(1.5)
    assert found.entropy == pytest.approx([0, 0, 1, 1])
    # |1 - 1/2| + 1/4 + 1/4; 1/2 + 3/4 + 1/4; 0 + 1/4 + 1/4.
    assert found.emd == pytest.approx([1.0, 1.5, 0.5, 0.5])
    assert not np.signbit(found.entropy).any()


def test_clients_like_all_are_at_distance_0_and_those_unlike_all_near_2():
    assert label_skew(np.array([[3, 6], [1, 2]])).emd == pytest.approx([0, 0])
    assert label_skew(np.array([[1, 0], [0, 999]])).emd == pytest.approx([1.998, 0.002])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"alpha": 0.5}, "digits, dirichlet(0.5), 20 clients, seed 42"),
        ({"partition": "dirichlet-equal"}, "digits, dirichlet-equal(0.1), 20 clients, seed 42"),
        ({"partition": "iid", "clients": 1000, "seed": 7}, "digits, iid, 1,000 clients, seed 7"),
        ({"partition": "classes"}, "digits, classes (k 2), 20 clients, seed 42"),
        ({"partition": "feature"}, "digits, feature (rotation), 20 clients, seed 42"),
        (
            {"partition": "concept", "alpha": 0.5, "partition_options": {"labels": "dirichlet"}},
            "digits, concept (permute and dirichlet(0.5)), 20 clients, seed 42",
        ),
    ],
)
def test_a_title_says_what_it_is(given, words):
    assert partition_title(resolved(**given)) == words
