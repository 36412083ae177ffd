"""Helpers shared by the tests of importing tables and images."""

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from fedobp.data import import_dataset, load
from fedobp.errors import FedobpError


def arrow(path, **columns):
    parquet.write_table(pyarrow.table(columns), path)
    return path


def picture(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, np.uint8)).save(path, **options)
    return path


def imported(name, source, folder, **columns):
    """Import and load a dataset, check that both are equal, and return it."""
    returned, loaded = import_dataset(name, source, folder, **columns), load(name, folder)
    np.testing.assert_array_equal(returned.x, loaded.x)
    np.testing.assert_array_equal(returned.y, loaded.y)
    assert (returned.labels, returned.client_names, returned.n_train) == (
        loaded.labels, loaded.client_names, loaded.n_train,
    )  # fmt: skip
    assert returned.info == loaded.info
    if returned.clients is not None:
        np.testing.assert_array_equal(returned.clients, loaded.clients)
    return loaded


def refused(sentence, source, folder, **columns):
    with pytest.raises(FedobpError, match=sentence):
        import_dataset("mine", source, folder, **columns)
    assert not folder.exists()
