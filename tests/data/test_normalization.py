"""Normalization: constants by hand, mean and deviation against plain formulas, and the authors' mistake."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import fedobp
from fedobp.data import REGISTRY, Dataset, normalization, normalization_for
from fedobp.data.normalization import normalization_constants
from fedobp.errors import FedobpError


def dataset(x, name="mine"):
    return Dataset(name, np.asarray(x), np.arange(len(x)) % 2, (0, 1), 0)


def all_ids(x):
    return np.arange(len(x))


def images(value, dtype=np.uint8, shape=(28, 28)):
    return np.full((4, *shape), value, dtype)


# The choice of the normalization.


@pytest.mark.parametrize("name", ["digits", "mine"])
def test_without_constants_the_default_is_train(name):
    assert normalization_for(name) == "train"
    for normalize in ("dataset", "as-published"):
        with pytest.raises(
            FedobpError, match=f"--normalize {normalize} needs published constants, and '{name}' has none"
        ):
            normalization_for(name, normalize)


@pytest.mark.parametrize("name", [name for name in REGISTRY if name != "digits"])
def test_the_papers_datasets_are_normalized_by_their_constants(name):
    assert normalization_for(name) == "dataset"
    assert [normalization_for(name, normalize) for normalize in ("dataset", "train", "none")] == [
        "dataset",
        "train",
        "none",
    ]


def test_only_the_organ_datasets_have_a_mistake():
    shown = [name for name in REGISTRY if REGISTRY[name].published_factor != 1]
    assert shown == ["organamnist", "organcmnist"]
    assert [normalization_for(name, "as-published") for name in shown] == ["as-published"] * 2
    with pytest.raises(
        FedobpError, match=r"constants of organamnist, organcmnist, and those of 'svhn' are right: use --normalize dat"
    ):
        normalization_for("svhn", "as-published")


def test_an_unknown_normalization_suggests_the_nearest():
    with pytest.raises(FedobpError, match="unknown value of --normalize 'trian': did you mean 'train'"):
        normalization_for("mnist", "trian")


# By hand.


def test_as_published_removes_the_contrast_of_an_organ():
    # On the 0-1 scale black is 0 and white is 1: (0 - 118.7546) / 62.3489 and (1 - 118.7546) / 62.3489.
    unit, mean, std = normalization_constants(dataset(images(0), "organamnist"), np.array([0]), "as-published")
    assert unit == 255
    assert (mean.tolist(), std.tolist()) == ([pytest.approx(118.7546)], [pytest.approx(62.3489)])
    assert (0 / unit - mean[0]) / std[0] == pytest.approx(-1.904678, abs=1e-6)
    assert (255 / unit - mean[0]) / std[0] == pytest.approx(-1.888640, abs=1e-6)


def test_the_corrected_constants_of_the_organs():
    unit, mean, std = normalization_constants(dataset(images(0), "organcmnist"), np.array([0]), "dataset")
    assert (unit, mean[0], std[0]) == (255, pytest.approx(0.48794, abs=1e-5), pytest.approx(0.23062, abs=1e-5))


@pytest.mark.parametrize(
    ("x", "name", "unit", "channels"),
    [
        (images(7), "mnist", 255, 1),
        (images(7.0, np.float32), "mnist", 255, 1),
        (images(0.5, np.float32), "mnist", 1, 1),
        (images(7, shape=(2, 3, 3)), "mine", 255, 3),
        (images(700.0, np.float32, (5,)), "mine", 1, 5),
        (images(7, np.uint8, (5,)), "mine", 255, 5),
    ],
    ids=["bytes", "known floats to 255", "known floats to 1", "colour", "float table", "byte table"],
)
def test_none_only_divides_bytes_by_255(x, name, unit, channels):
    found = normalization_constants(dataset(x, name), all_ids(x), "none")
    assert found.unit == unit
    assert (found.mean.tolist(), found.std.tolist()) == ([0] * channels, [1] * channels)


def test_a_registered_dataset_can_be_normalized_by_its_training_splits():
    x = images(0)
    x[1], x[2], x[3] = 51, 102, 255  # 0, 51 and 102 are training samples: mean 51, variance (51^2 + 51^2) / 3
    unit, mean, std = normalization_constants(dataset(x, "mnist"), np.array([2, 0, 1]), "train")
    assert unit == 255
    assert (mean.tolist(), std.tolist()) == ([pytest.approx(0.2)], [pytest.approx(0.2 * (2 / 3) ** 0.5)])


def test_the_unit_does_not_depend_on_the_normalization():
    for x in (images(7), images(7.0, np.float32), images(0.5, np.float32)):
        normalizations = ("dataset", "train", "none", "as-published")
        assert (
            len(
                {
                    normalization_constants(dataset(x, "organamnist"), all_ids(x), normalize).unit
                    for normalize in normalizations
                }
            )
            == 1
        )


# Mean and deviation, in chunks.

SHAPES = arrays.array_shapes(min_dims=2, max_dims=4, min_side=1, max_side=5)


def plain(x):
    x = x.astype(np.float64)
    x = x[..., None] if x.ndim == 3 else x
    axes = tuple(range(x.ndim - 1))
    return x.mean(axis=axes), x.std(axis=axes)


@settings(deadline=None, derandomize=True)
@given(x=arrays.arrays(np.uint8, SHAPES), values=st.integers(1, 200))
def test_bytes_give_the_plain_mean_and_deviation_for_any_chunks(x, values):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(normalization, "_CHUNK_VALUES", values)
        mean, std = normalization._mean_and_std(x, all_ids(x))
    expected = plain(x)
    np.testing.assert_allclose(mean, expected[0], rtol=1e-13)
    np.testing.assert_allclose(std, expected[1], rtol=1e-12, atol=1e-12)
    assert ((std == 0) == (np.ptp(x.reshape(-1, len(std)), axis=0) == 0)).all()


@settings(deadline=None, derandomize=True)
@given(x=arrays.arrays(np.float32, SHAPES, elements=st.floats(-1000, 1000, width=32)), values=st.integers(1, 200))
def test_floats_give_the_plain_mean_and_deviation_for_any_chunks(x, values):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(normalization, "_CHUNK_VALUES", values)
        mean, std = normalization._mean_and_std(x, all_ids(x))
    np.testing.assert_allclose(mean, plain(x)[0], rtol=1e-12, atol=1e-10)
    np.testing.assert_allclose(std, plain(x)[1], rtol=1e-9, atol=1e-10)


def test_a_small_deviation_far_from_zero_is_not_lost():
    x = np.array([[2.0**20], [2.0**20 + 0.125]], np.float32)
    mean, std = normalization._mean_and_std(x, all_ids(x))
    assert (mean.tolist(), std.tolist()) == ([2.0**20 + 0.0625], [0.0625])


def test_only_the_training_splits_count():
    x = np.array([[1], [9], [3], [200]], np.uint8)
    assert [moment.tolist() for moment in normalization._mean_and_std(x, np.array([0, 2]))] == [[2], [1]]


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_mean_and_deviation_need_no_copy_of_the_data(dtype):
    x = np.ones((4000, 100, 100), dtype)
    x[:2000] = 3
    tracemalloc.start()
    mean, std = normalization._mean_and_std(x, all_ids(x))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (mean.tolist(), std.tolist()) == ([2], [1])
    assert peak < 100e6 < 8 * x.size  # in float64 it would be 320 MB


# Whole runs.


def test_a_run_records_its_normalization(command, tmp_path):
    settings = {"rounds": 1, "epochs": 1, "clients": 4, "normalize": "none"}
    federation = fedobp.Federation(fedobp.Config(**settings))
    result = federation.run(out=tmp_path / "here")
    assert 'normalize = "none"' in (tmp_path / "here/config.toml").read_text()
    assert federation.data.metadata()["scaling"] == {"unit": 255.0, "mean": [0.0], "std": [1.0]}
    again = command("run", "--config", tmp_path / "here/config.toml", "--json")
    assert again.json["accuracy"] == result.to_json()["accuracy"]


def test_runs_that_differ_in_normalization_train_together_as_alone():
    configs = [fedobp.Config(rounds=2, epochs=1, clients=4, normalize=normalize) for normalize in ("train", "none")]
    together = [result.state_dict()["classifier.weight"] for result in fedobp.sweep(configs)]
    alone = [fedobp.Federation(config).run().state_dict()["classifier.weight"] for config in configs]
    torch.testing.assert_close(together, alone)
    assert (together[0] - together[1]).abs().max() > 1e-3


def test_an_impossible_normalization_is_refused_on_the_command_line(command):
    said = command("run", "--normalize", "as-published")
    assert said.code == 2
    assert said.err == (
        "error: --normalize as-published needs published constants, and 'digits' has none: use --normalize train\n"
    )
    assert "did you mean 'train'" in command("run", "--normalize", "trains").err
