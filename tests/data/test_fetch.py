"""Fetching official files from a local server, with all kinds of failed downloads."""

import hashlib
import io
import logging
import os
import stat
import sys
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pooch
import pytest
from download_server import (
    Server,
    answer,
    body,
    cut,
    declare_gzip,
    ignore_range,
    omit_length,
    redirect,
    refuse_range,
    send_other_range,
    serve,
    stall,
    status,
)
from official_files import official

from fedobp.data import REGISTRY, fetch, load
from fedobp.data.sources import SOURCES
from fedobp.errors import FedobpError

NAMES = [name for name in REGISTRY if name != "digits"]
CONTENT = official("organamnist").files["organamnist.npz"]


@pytest.fixture
def server(monkeypatch):
    """A server with small versions of all registered datasets, and retries without a pause."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    module = sys.modules[fetch.__module__]
    monkeypatch.setattr(module, "RETRY_PAUSE", 0.0)
    monkeypatch.setattr(module, "CHUNK_SIZE", 50)
    server = Server()
    for name in NAMES:
        contents = official(name).files
        files = []
        for file in SOURCES[name].files:
            content = contents[file.name]
            server.files[f"/{name}/{file.name}"] = content
            algorithm = file.checksum.split(":")[0]
            checksum = f"{algorithm}:{hashlib.new(algorithm, content).hexdigest()}"
            size = None if file.size is None else len(content)
            files.append(replace(file, url=f"{server.url}/{name}/{file.name}", checksum=checksum, size=size))
        monkeypatch.setitem(SOURCES, name, replace(SOURCES[name], files=tuple(files), installed=None))
    yield server
    server.close()


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def part(folder, content, name="organamnist"):
    """Write the partial file of an interrupted download."""
    path = folder / "downloads" / name / f"{name}.npz.part"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)


def organs(server, folder, *answers):
    """Fetch OrganAMNIST with scripted answers, and return the requested ranges."""
    server.answers = list(answers)
    fetch(["organamnist"], folder)
    np.testing.assert_array_equal(load("organamnist", folder).x, official("organamnist").x)
    assert tree(folder) == ["organamnist.npz"]
    return [requested for _, requested in server.requested]


# Successful downloads.


@pytest.mark.parametrize("name", NAMES)
def test_every_registered_dataset_is_fetched(server, folder, name):
    calls = []
    (info,) = fetch([name], folder, lambda what, share: calls.append((what, share)))
    _, x, y, n_train = official(name)
    dataset = load(name, folder)
    np.testing.assert_array_equal(dataset.x, x)
    np.testing.assert_array_equal(dataset.y, y)
    assert dataset.n_train == n_train
    assert dataset.info == info
    assert (info.samples, info.shape, info.classes) == (len(y), REGISTRY[name].shape, REGISTRY[name].classes)
    assert tree(folder) == [f"{name}.npz"]  # downloaded files are removed
    assert all(0 <= share <= 1 and what.startswith(f"{name}: ") for what, share in calls)
    assert calls[-1] == (f"{name}: unpacking", 1.0)
    assert {what.split(",")[0] for what, _ in calls[:-1]} >= {f"{name}: {file.name}" for file in SOURCES[name].files}


def test_nothing_is_logged_beside_the_progress(server, folder, monkeypatch):
    logged = io.StringIO()
    monkeypatch.setattr(pooch.get_logger(), "handlers", [logging.StreamHandler(logged)])
    fetch(["mnist"], folder)
    assert logged.getvalue() == ""


def test_what_is_there_is_left_alone(server, folder):
    folder.mkdir()
    np.savez(folder / "mnist.npz", x=np.zeros((3, 28, 28), np.uint8), y=[0, 1, 2])
    before = (folder / "mnist.npz").read_bytes()
    (info,) = fetch(["mnist"], folder)
    assert info.samples == 3
    assert (folder / "mnist.npz").read_bytes() == before
    assert server.requested == []


def test_the_embedded_digits_need_no_fetching(folder):
    (info,) = fetch(["digits"], folder)
    assert info.samples == 1797
    assert not folder.exists()


def test_an_unknown_name_is_refused_before_anything_is_downloaded(server, folder):
    with pytest.raises(FedobpError, match=r"unknown dataset to fetch 'cifar11': did you mean 'cifar10'\?"):
        fetch(["mnist", "cifar11"], folder)
    assert server.requested == []


# Interrupted downloads.


def test_an_interrupted_download_resumes(server, folder):
    assert organs(server, folder, cut(100), cut(50)) == [None, "bytes=100-", "bytes=150-"]


def test_a_file_that_ends_early_resumes_if_its_size_is_known(server, folder):
    def short(handler, server, content, start):
        answer(handler, 200, content[:100], length=False)

    assert organs(server, folder, short) == [None, "bytes=100-"]


def test_a_stalled_download_resumes(server, folder, monkeypatch):
    module = sys.modules[fetch.__module__]
    timeout = module.READ_TIMEOUT

    def stalled(*given):
        monkeypatch.setattr(module, "READ_TIMEOUT", timeout)  # for the next try
        stall(120)(*given)

    for seconds in (0.2, 1.0, 5.0, 25.0):  # until the machine is fast enough
        monkeypatch.setattr(module, "READ_TIMEOUT", seconds)
        server.requested.clear()
        with suppress(FedobpError):
            assert organs(server, folder, stalled) == [None, "bytes=100-"]
            return
    pytest.fail("the download did not resume")


def test_an_interrupted_download_resumes_at_the_next_call(server, folder):
    server.answers = [cut(100), status(503)]
    with pytest.raises(FedobpError, match=r"\(status 503, Service Unavailable\): run .* again to resume"):
        fetch(["organamnist"], folder)
    assert tree(folder) == ["downloads/organamnist/organamnist.npz.part"]
    assert organs(server, folder)[2:] == ["bytes=100-"]


@pytest.mark.parametrize("answer", [ignore_range, refuse_range, send_other_range])
def test_if_a_server_cannot_resume_the_download_starts_over(server, folder, answer):
    part(folder, CONTENT[:100])
    requested = organs(server, folder, answer)
    assert requested == ["bytes=100-"] if answer is ignore_range else ["bytes=100-", None]


def test_a_part_that_is_too_long_is_dropped(server, folder):
    part(folder, CONTENT + b"more")
    assert organs(server, folder) == [f"bytes={len(CONTENT) + 4}-", None]


def test_a_part_that_is_complete_is_not_asked_for_again(server, folder):
    part(folder, CONTENT)
    assert organs(server, folder) == []


def test_a_part_of_another_file_is_detected_and_the_next_call_starts_over(server, folder):
    part(folder, b"x" * 100)
    with pytest.raises(FedobpError, match="the downloaded file is not the official one"):
        fetch(["organamnist"], folder)
    assert tree(folder) == []
    assert organs(server, folder)[1:] == [None]


def test_a_server_that_always_disconnects_is_given_up(server, folder):
    def short(handler, server, content, start):
        answer(handler, 200, content[:100], length=len(content))

    server.answers = [short] * 99
    with pytest.raises(
        FedobpError,
        match=r"\(the connection broke.*\): run `fedobp data fetch organamnist --data-dir .*` again to resume",
    ):
        fetch(["organamnist"], folder)
    assert len(server.requested) == 5


def test_a_connection_without_data_is_given_up_at_once(server, folder, monkeypatch):
    monkeypatch.setattr(sys.modules[fetch.__module__], "READ_TIMEOUT", 0.2)
    server.answers = [stall(0)] * 99
    with pytest.raises(
        FedobpError, match=r"\(no data for 0\.2 s\): run `fedobp data fetch organamnist --data-dir .*` again, or"
    ):
        fetch(["organamnist"], folder)
    assert len(server.requested) < 2  # the request may not even have been read


# Other answers.


@pytest.mark.parametrize("answer", [redirect, declare_gzip, omit_length])
def test_other_good_answers(server, folder, answer):
    organs(server, folder, answer)


def test_a_redirected_download_resumes_too(server, folder):
    assert organs(server, folder, cut(100), redirect) == [None, "bytes=100-", "bytes=100-"]


def test_a_gzipped_file_stays_gzipped_whatever_the_server_declares(server, folder):
    server.answers = [declare_gzip] * 4
    fetch(["mnist"], folder)
    np.testing.assert_array_equal(load("mnist", folder).x, official("mnist").x)


@pytest.mark.parametrize("code", [404, 403, 500])
def test_a_refusal_names_the_status_the_file_and_its_folder(server, folder, code):
    server.answers = [serve, status(code)]
    with pytest.raises(FedobpError) as caught:
        fetch(["svhn"], folder)
    downloads, url = folder / "downloads" / "svhn", f"{server.url}/svhn/test_32x32.mat"
    sentence = str(caught.value)
    assert f"'svhn' cannot be downloaded from {url} (status {code}, " in sentence
    assert sentence.endswith(
        f"run `fedobp data fetch svhn --data-dir {folder}` again, or first put into {downloads} by hand: "
        f"test_32x32.mat ({url})"
    )
    assert "\n" not in sentence
    assert tree(folder) == ["downloads/svhn/train_32x32.mat"]  # kept for the next call
    assert len(server.requested) == 2


def test_without_network_all_missing_files_are_named(server, folder):
    server.close()
    with pytest.raises(FedobpError, match=r"\(no connection\)") as caught:
        fetch(["mnist"], folder)
    for file in SOURCES["mnist"].files:
        assert f"{file.name} ({file.url})" in str(caught.value)
    assert tree(folder) == []


@pytest.mark.parametrize("name", ["organamnist", "organcmnist"])
def test_another_file_of_the_same_size_is_detected(server, folder, name):
    content = server.files[f"/{name}/{name}.npz"]
    server.answers = [body(content[:-1] + bytes([content[-1] ^ 1]))]
    digest = hashlib.md5(content).hexdigest()
    with pytest.raises(
        FedobpError, match=rf"the downloaded file is not the official one, which has .*MD5 {digest}\): run .*again, or"
    ):
        fetch([name], folder)
    assert tree(folder) == []


def test_a_file_of_another_size_is_not_even_downloaded(server, folder):
    server.answers = [body(b"Please log in to this network.")]
    with pytest.raises(FedobpError, match=rf"\(the server's file has 30 bytes, the official one {len(CONTENT):,}\)"):
        fetch(["organamnist"], folder)
    assert tree(folder) == []


def test_without_a_published_size_the_checksum_decides(server, folder):
    assert SOURCES["organcmnist"].files[0].size is None
    server.answers = [body(b"Please log in to this network.")]
    with pytest.raises(FedobpError, match=r"the downloaded file is not the official one, which has MD5 [0-9a-f]{32}"):
        fetch(["organcmnist"], folder)
    assert tree(folder) == []


def test_a_folder_that_cannot_be_written_is_named(server, tmp_path):
    (tmp_path / "data").write_text("a file, not a folder")
    with pytest.raises(FedobpError, match=r"cannot write .*data/downloads/mnist .*: choose another place"):
        fetch(["mnist"], tmp_path / "data")


# The user's own files.


def by_hand(folder, name, **changed):
    downloads = folder / "downloads" / name
    downloads.mkdir(parents=True)
    for file, content in (official(name).files | changed).items():
        (downloads / file).write_bytes(content)


def test_files_put_there_by_hand_are_used_and_stay(server, folder):
    by_hand(folder, "mnist")
    fetch(["mnist"], folder)
    np.testing.assert_array_equal(load("mnist", folder).x, official("mnist").x)
    assert server.requested == []
    assert len(tree(folder / "downloads")) == 4


def test_only_what_is_missing_is_downloaded(server, folder):
    by_hand(folder, "mnist")
    missing = "t10k-labels-idx1-ubyte.gz"
    (folder / "downloads" / "mnist" / missing).unlink()
    fetch(["mnist"], folder)
    assert server.requested == [(f"/mnist/{missing}", None)]
    assert len(tree(folder / "downloads")) == 3


@pytest.mark.parametrize(
    "content", [CONTENT[:-1], CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])], ids=["a byte short", "a bit changed"]
)
def test_a_wrong_file_put_there_by_hand_is_refused_and_stays(server, folder, content):
    by_hand(folder, "organamnist", **{"organamnist.npz": content})
    path = folder / "downloads" / "organamnist" / "organamnist.npz"
    digest = hashlib.md5(CONTENT).hexdigest()
    sentence = (
        f"{path} is not the official file, which has {len(CONTENT):,} bytes and MD5 {digest}: remove it to have it "
        f"downloaded, or replace it by {server.url}/organamnist/organamnist.npz"
    )
    with pytest.raises(FedobpError) as caught:
        fetch(["organamnist"], folder)
    assert str(caught.value) == sentence
    assert path.read_bytes() == content
    assert server.requested == []


# Debian's dataset-fashion-mnist.


@pytest.fixture
def debian(server, monkeypatch, tmp_path):
    downloads = tmp_path / "debian"
    downloads.mkdir()
    for file, content in official("fmnist").files.items():
        (downloads / file).write_bytes(content[:4] + b"\1\2\3\4" + content[8:])  # gzipped at another time
    monkeypatch.setitem(SOURCES, "fmnist", replace(SOURCES["fmnist"], installed=downloads))
    return downloads


def test_the_installed_fashion_mnist_is_found_without_fetching(debian, server, folder, command):
    np.testing.assert_array_equal(load("fmnist", folder).x, official("fmnist").x)
    listed = command("data", "list", "--json").json["datasets"]
    assert [row["name"] for row in listed if row["available"]] == ["digits", "fmnist"]
    assert server.requested == []
    assert not folder.exists()


def test_fetching_takes_the_installed_fashion_mnist(debian, server, folder):
    fetch(["fmnist"], folder)
    assert tree(folder) == ["fmnist.npz"]
    assert server.requested == []
    assert len(tree(debian)) == 4
    np.testing.assert_array_equal(load("fmnist", folder).x, official("fmnist").x)


def test_half_an_installation_counts_as_none(debian, server, folder):
    (debian / "train-images-idx3-ubyte.gz").unlink()
    with pytest.raises(FedobpError, match=r"'fmnist' is not in .*: run `fedobp data fetch fmnist --data-dir .*`"):
        load("fmnist", folder)
    fetch(["fmnist"], folder)
    assert len(server.requested) == 4


# On the command line.


def test_the_command_fetches_and_lists_the_datasets(server, command, tmp_path):
    said = command("data", "fetch", "organamnist", "svhn", "--json")
    assert said.code == 0
    assert [(row["name"], row["samples"]) for row in said.json["datasets"]] == [("organamnist", 12), ("svhn", 10)]
    assert said.err == ""
    said = command("data", "fetch", "organamnist", "--data-dir", tmp_path / "other")
    assert "organamnist" in said.out
    assert f"Next: fedobp run --dataset organamnist --data-dir {tmp_path / 'other'}" in said.out
    assert said.err == ""


def test_the_command_fails_with_one_sentence(server, command):
    server.files.clear()
    said = command("data", "fetch", "mnist")
    assert said.code == 2
    assert said.out == ""
    assert said.err.startswith("error: dataset 'mnist' cannot be downloaded from ")
    assert said.err.count("\n") == 1


def test_downloads_have_the_permissions_of_new_files(server, folder, monkeypatch):
    """Also those that pooch first writes to a temporary file, which others may not read."""
    module, found = sys.modules[fetch.__module__], []
    read = module.read

    def noted(name, paths, *more):
        found.extend(stat.S_IMODE(path.stat().st_mode) for path in [*paths, *paths[0].parents[:2]])
        return read(name, paths, *more)

    monkeypatch.setattr(module, "read", noted)
    before = os.umask(0o027)
    try:
        fetch(["organamnist"], folder)
    finally:
        os.umask(before)
    assert [*map(oct, found), oct(stat.S_IMODE((folder / "organamnist.npz").stat().st_mode))] == [
        "0o640", "0o750", "0o750", "0o640",
    ]  # fmt: skip
