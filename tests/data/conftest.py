import pytest


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def source(tmp_path):
    """A function that writes a text to a CSV file and returns its path."""

    def save(text, encoding="utf-8"):
        path = tmp_path / "table.csv"
        path.write_bytes(text.encode(encoding))
        return path

    return save
