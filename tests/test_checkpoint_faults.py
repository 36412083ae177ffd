"""Checkpoints that are damaged or of another run, and disks that are full: a sentence, and nothing is lost."""

import errno
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpointed import SMALL, begin, contents, contents_of, go_on, stop_at

from fedobp import Config, Federation, FedobpError, resume_sweep
from fedobp.checkpoint import PastRun, note_failure
from fedobp.files import unwritable
from fedobp.launch import StopTraining
from fedobp.storage.tensor_file import read_tensors, write_tensors


@pytest.mark.parametrize("damage", ["cut", "changed", "removed client file", "part"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(damage, tmp_path):
    config = Config(**SMALL)
    Federation(config).run(out=tmp_path / "whole")
    begin(config, tmp_path / "cut", stop=4, every=1)
    newest = tmp_path / "cut" / "checkpoint" / "server-4.safetensors"
    content = bytearray(newest.read_bytes())
    if damage == "cut":
        newest.write_bytes(content[:-9])
    elif damage == "changed":
        content[-9] ^= 1
        newest.write_bytes(content)
    elif damage == "removed client file":
        newest.with_name("clients-4.safetensors").unlink()
    else:
        newest.unlink()
        newest.with_name(".server-4.safetensors.1.1.part").write_bytes(content[:50])
    if damage == "part":
        assert go_on(config, tmp_path / "cut") == [4, 5, 6]
    else:
        with pytest.warns(UserWarning, match="the checkpoint of round 4 is not used: .*(damaged|cannot read)"):
            assert go_on(config, tmp_path / "cut") == [4, 5, 6]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def _without(key):
    return lambda tensors, about: about.pop(key)


def _another_form(tensors, about):
    name = next(iter(tensors))
    tensors[name] = tensors[name].double()


FORGED = {
    "no list of files": ("server", _without("files")),
    "no sums": ("server", lambda tensors, about: about["run"].pop("accounting")),
    "no state": ("server", lambda tensors, about: tensors.clear()),
    "a state of another form": ("server", _another_form),
    "no list of clients": ("clients", _without("members")),
    "a record of another form": ("clients", _another_form),
    "names of clients without dots": ("clients", lambda tensors, about: tensors.update(odd=torch.zeros(1))),
}


@pytest.mark.parametrize(("file", "change"), FORGED.values(), ids=FORGED)
def test_a_checkpoint_with_a_right_checksum_and_wrong_content_is_refused(tmp_path, file, change):
    config = Config(**SMALL, method="fedobp")
    begin(config, tmp_path / "run", stop=1, every=1)
    server = tmp_path / "run" / "checkpoint" / "server-1.safetensors"
    path = server.with_name(f"{file}-1.safetensors")
    tensors, about = read_tensors(path)
    del about["sha256"]
    change(tensors, about)
    checksum = write_tensors(path, tensors, about)
    if file == "clients":
        tensors, about = read_tensors(server)
        del about["sha256"]
        write_tensors(server, tensors, {**about, "files": {"1": checksum}})
    elif "files" not in about:
        with pytest.warns(UserWarning, match="of round 1 is not used: .* is no checkpoint of this run"):
            assert go_on(config, tmp_path / "run") == [1, 2, 3, 4, 5, 6]
        return
    with pytest.raises(FedobpError, match=r"server-1\.safetensors is no checkpoint of this run \(.*\): remove it"):
        go_on(config, tmp_path / "run")


def test_a_note_of_a_failure_is_read_as_one_line_or_not_at_all(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    for content in ("", "3", "[" * 100_000, '{"round": 1e999, "error": ""}', '{"round": [], "error": ""}'):
        (tmp_path / "checkpoint" / "failed.json").write_text(content)
        assert not PastRun(tmp_path, Config(), "", []).is_over(9)
    note_failure(tmp_path, 3, FedobpError("two\nlines"))
    past = PastRun(tmp_path, Config(), "", [])
    assert past.is_over(3)
    assert str(past.outcome()) == "two\\nlines"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lr": 0.5}, "was trained with the settings"),
        ({"alpha": 5.0}, "was trained with the settings"),
    ],
)
def test_other_settings_are_refused_and_nothing_changes(change, said, tmp_path):
    begin(Config(**SMALL), tmp_path / "run")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(FedobpError, match=said):
        Federation(Config(**{**SMALL, **change})).run(out=tmp_path / "run", resume=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_another_version_is_refused(tmp_path, monkeypatch):
    begin(Config(**SMALL), tmp_path / "run")
    monkeypatch.setattr("fedobp.storage.run_folder.__version__", "9.9")
    with pytest.raises(
        FedobpError, match=r"was trained with fedobp .*, and now it is 9\.9: use what it was trained with"
    ):
        Federation(Config(**SMALL)).run(out=tmp_path / "run", resume=True)


def test_other_inputs_are_refused_although_labels_and_partition_are_the_same(tmp_path):
    def federation(scale):
        y = np.arange(120) % 3
        x = np.random.default_rng(0).standard_normal((120, 5)).astype(np.float32) + y[:, None]
        return Federation.from_data(scale * x, y, client=np.arange(120) % 6, config=Config(rounds=4))

    with pytest.raises(StopTraining):
        federation(1).run(out=tmp_path / "run", progress=stop_at(2), checkpoint_every=1)
    before = contents_of(tmp_path)
    with pytest.raises(FedobpError, match=r"was trained with the data .*, and now it is .*: use what it was trained"):
        federation(2).run(out=tmp_path / "run", resume=True)
    assert contents_of(tmp_path) == before
    federation(1).run(out=tmp_path / "run", resume=True)


@pytest.mark.parametrize("damage", ["removed", "cut", "changed"])
def test_metrics_that_are_not_those_of_the_rounds_before_are_refused(damage, tmp_path):
    """The result would have their checksum."""
    config, path = Config(**SMALL), tmp_path / "cut" / "metrics.jsonl"
    Federation(config).run(out=tmp_path / "whole")
    begin(config, tmp_path / "cut")
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) if damage == "cut" else content.replace(b"0.", b"1.", 1))
    if damage == "removed":
        path.unlink()
    with pytest.raises(FedobpError, match=r"cut/metrics\.jsonl is damaged: its lines are not those of the rounds"):
        go_on(config, tmp_path / "cut")
    assert not (tmp_path / "cut" / "result.json").exists()
    path.write_bytes(content)
    assert go_on(config, tmp_path / "cut") == [4, 5, 6]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_launch_of_which_a_run_cannot_go_on_stays_as_it_was(tmp_path):
    """Without that run, the last bits of the others would be other ones."""
    runs = {"one": Config(**SMALL), "other": Config(**SMALL, seed=7)}
    resume_sweep(tmp_path / "whole", runs)
    resume_sweep(tmp_path / "cut", runs, progress=stop_at(3), checkpoint_every=1)
    path = tmp_path / "cut" / "other" / "metrics.jsonl"
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(FedobpError, match=r"other/metrics\.jsonl is damaged"):
        resume_sweep(tmp_path / "cut", runs)
    assert not list(tmp_path.rglob("failed.json"))
    path.write_bytes(content)
    assert list(resume_sweep(tmp_path / "cut", runs).runs) == list(runs)
    assert contents(*(tmp_path / "cut" / name for name in runs)) == contents(
        *(tmp_path / "whole" / name for name in runs)
    )


def test_a_disk_that_is_full_ends_the_run_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    config = Config(**{**SMALL, "rounds": 8})
    Federation(config).run(out=tmp_path / "whole")

    def write(path, *content):
        if path.name == "server-4.safetensors":
            raise unwritable(path, OSError(errno.ENOSPC, "No space left on device"))
        return write_tensors(path, *content)

    with monkeypatch.context() as patch:
        patch.setattr("fedobp.checkpoint.write_tensors", write)
        with pytest.raises(FedobpError, match=r"cannot write .*server-4.safetensors \(No space left on device\): "):
            Federation(config).run(out=tmp_path / "cut", checkpoint_every=2)
    found = {path.name for path in (tmp_path / "cut" / "checkpoint").glob("*r-*")}
    assert found == {"server-2.safetensors"}
    assert go_on(config, tmp_path / "cut") == [3, 4, 5, 6, 7, 8]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_sweep_that_a_full_disk_has_ended_goes_on_when_it_is_called_again(tmp_path, monkeypatch):
    """No run is noted as failed, and none ends without the others: the last bits depend on all of them."""
    runs = {"one": Config(**SMALL), "other": Config(**SMALL, seed=7)}
    resume_sweep(tmp_path / "whole", runs)

    def write(path, *content):
        if path.parts[-3:] == ("one", "checkpoint", "server-3.safetensors"):
            raise unwritable(path, OSError(errno.ENOSPC, "No space left on device"))
        return write_tensors(path, *content)

    with monkeypatch.context() as patch:
        patch.setattr("fedobp.checkpoint.write_tensors", write)
        with pytest.raises(FedobpError, match="No space left on device"):
            resume_sweep(tmp_path / "cut", runs, checkpoint_every=1)
    assert not list(tmp_path.rglob("failed.json"))
    seen = []
    outcome = resume_sweep(tmp_path / "cut", runs, progress=lambda at: seen.append(at.round))
    assert list(outcome.runs) == list(runs)
    assert seen == [3, 3, 4, 4, 5, 5, 6, 6]
    assert contents(*(tmp_path / "cut" / name for name in runs)) == contents(
        *(tmp_path / "whole" / name for name in runs)
    )


def test_a_folder_that_vanishes_is_one_sentence(tmp_path):
    def progress(at):
        if at.round == 2:
            shutil.rmtree(tmp_path / "run")

    with pytest.raises(FedobpError, match=r"cannot write .*run/metrics.jsonl \(No such file or directory\): "):
        Federation(Config(**SMALL)).run(out=tmp_path / "run", progress=progress, checkpoint_every=4)


def test_data_that_has_vanished_is_named_when_a_run_goes_on(command, wards):
    flags = ("--dataset", "wards", "--partition", "natural", "--rounds", 4)
    assert command("run", *flags, "--out", "run").code == 0
    (Path("run") / "result.json").unlink()
    before = contents_of(Path("run"))
    (Path("data") / "wards.npz").unlink()
    said = command("run", "--resume", "run")
    assert said.code == 2
    assert "unknown dataset 'wards'" in said.err
    assert said.err.count("\n") == 1
    assert contents_of(Path("run")) == before
