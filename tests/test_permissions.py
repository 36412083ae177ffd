"""Files and folders that fedobp makes have the permissions that the user's umask gives to new ones."""

import os
import stat
from pathlib import Path

import numpy as np
import pytest
from saved import write_run

from fedobp import Config, Federation
from fedobp.data import import_dataset, load, partition, save_partition
from fedobp.engine.kernels import cache
from fedobp.files import write, write_new
from fedobp.launch import StopTraining
from fedobp.report.page import write_report
from fedobp.saved_runs import find_runs
from fedobp.sweep_folder import copy_run


@pytest.fixture(params=[0o022, 0o077, 0o027])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def check(folder: Path, umask: int, least: int) -> None:
    found = {path: (stat.S_IMODE(path.lstat().st_mode), path.is_dir()) for path in folder.rglob("*")}
    assert len(found) >= least
    wrong = {
        str(path): oct(mode) for path, (mode, is_dir) in found.items() if mode != (0o777 if is_dir else 0o666) & ~umask
    }
    assert wrong == {}


def stop(at) -> None:
    if at.round == 2:
        raise StopTraining


def test_a_run_and_its_checkpoints(tmp_path, umask):
    config = Config(clients=4, rounds=3, epochs=1, model="mlp", participation=1.0)
    with pytest.raises(StopTraining):
        Federation(config).run(out=tmp_path / "new" / "run", progress=stop, checkpoint_every=1)
    assert list((tmp_path / "new" / "run" / "checkpoint").glob("server-*"))
    check(tmp_path, umask, 8)
    Federation(config).run(out=tmp_path / "new" / "run", resume=True)
    check(tmp_path, umask, 9)


def test_what_is_written_beside_and_renamed(tmp_path, umask):
    write(tmp_path / "whole", b"")
    write(tmp_path / "whole", b"again")
    write_new(tmp_path / "new", b"")
    check(tmp_path, umask, 2)


def test_datasets_partitions_reports_copies_and_caches(tmp_path, umask, monkeypatch):
    np.savez(tmp_path / "given.npz", x=np.zeros((8, 2)), y=np.arange(8) % 2)
    import_dataset("mine", tmp_path / "given.npz", tmp_path / "data")
    dataset = load("mine", tmp_path / "data")
    save_partition(tmp_path / "parts" / "mine", dataset, partition(dataset.y, 2, kind="iid"), {"clients": 2})
    run = write_run(tmp_path / "runs", "fedavg")
    write_report(tmp_path / "report.html", find_runs([run]))
    copy_run(run, tmp_path / "copy")
    monkeypatch.setattr(cache, "cache_folder", lambda: tmp_path / "cache" / "kernels")
    cache.save("tiles", {"card": "one"}, [1])
    check(tmp_path, umask, 15)
