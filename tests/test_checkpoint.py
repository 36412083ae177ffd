"""Checkpoints: interrupted runs go on to the same bytes, whatever happens to them."""

import errno
import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from lanes_cases import normed

from fedobp import Config, Federation, FedobpError, resume_sweep, sweep
from fedobp.algorithms import METHODS
from fedobp.checkpoint import Interval, PastRun, note_failure
from fedobp.files import unwritable
from fedobp.launch import StopTraining, simulate
from fedobp.saved_runs import read_run
from fedobp.storage.tensor_file import read_tensors, write_tensors

SMALL = {"clients": 6, "rounds": 6, "epochs": 1, "participation": 0.5, "model": "mlp", "eval_every": 2}
NAMES = ("config.toml", "metrics.jsonl", "clients.csv", "models/global.safetensors", "models/clients.safetensors")


def contents(*folders: Path) -> dict[str, bytes]:
    """The files that must be the same, interrupted or not."""
    return {f"{at}/{name}": (folder / name).read_bytes() for at, folder in enumerate(folders) for name in NAMES}


def stop_at(*rounds: int):
    def progress(at):
        if at.round in rounds:
            raise StopTraining

    return progress


def begin(config: Config, folder: Path, stop: int = 3, every: int = 2) -> None:
    """Start a run, and stop it after a round."""
    with pytest.raises(StopTraining):
        Federation(config).run(out=folder, progress=stop_at(stop), checkpoint_every=every)


def go_on(config: Config, folder: Path, **more) -> list[int]:
    """Go on with a run; return the rounds that it trained."""
    seen = []
    Federation(config).run(out=folder, resume=True, progress=lambda at: seen.append(at.round), **more)
    return seen


def cases():
    """Every method, in each of its modes."""
    for name, method in METHODS.items():
        modes = [spec.metadata["choices"] for spec in method.options() if spec.name == "mode"]
        yield from ((name, {"mode": mode}) for mode in modes[0]) if modes else [(name, {})]


@pytest.mark.parametrize(("method", "options"), list(cases()), ids=str)
def test_every_method_goes_on_to_the_same_bytes(method, options, tmp_path):
    model = normed if method == "fedbn" else "mlp"  # with BatchNorm
    settings = {**SMALL, "model": model, "finetune_epochs": 1, "sampling": "published", "val_ratio": 0.2}
    config = Config(**settings, method=method, options=options)
    Federation(config).run(out=tmp_path / "whole", checkpoint_every=0)
    begin(config, tmp_path / "cut")
    assert go_on(config, tmp_path / "cut") == [4, 5, 6]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert not (tmp_path / "cut" / "checkpoint").exists()


def test_a_method_goes_on_whose_server_holds_more_after_some_rounds(tmp_path):
    """pFedSim holds all clients' models after its warm-up of three rounds."""
    config = Config(**SMALL, method="pfedsim")
    Federation(config).run(out=tmp_path / "whole", checkpoint_every=0)
    begin(config, tmp_path / "cut", stop=5, every=1)
    assert go_on(config, tmp_path / "cut") == [6]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_messages_of_several_fields_keep_their_order(tmp_path):
    """The length of a compressed message depends on it, and a file of tensors is sorted by name."""
    config = Config(**SMALL, method="pfedfda", compress_down="4bit")
    Federation(config).run(out=tmp_path / "whole", checkpoint_every=0)
    begin(config, tmp_path / "cut")
    go_on(config, tmp_path / "cut")
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_a_launch_goes_on_as_a_whole(engine, tmp_path):
    """Runs of different lengths, one of which ends before the interruption."""
    common = {**SMALL, "engine": engine}
    changes = [{"rounds": 2}, {"seed": 7}, {"method": "fedper"}, {"method": "pfedme"}, {"momentum": 0.9}]
    configs = [Config(**{**common, **change}) for change in changes]
    whole, cut = ([tmp_path / f"{name}{at}" for at in range(len(configs))] for name in ("whole", "cut"))
    sweep(configs, out=whole)
    with pytest.raises(StopTraining):
        sweep(configs, out=cut, progress=stop_at(4), interval=Interval(1))
    assert (cut[0] / "result.json").exists()
    seen = []
    sweep(configs, out=cut, progress=lambda at: seen.append((at.run, at.round)), interval=Interval(1), resume=True)
    others = [(3, number) for number in range(1, 7)]  # of another kind, so of a launch that had not begun
    assert seen == [(run, number) for number in (5, 6) for run in (1, 2, 4)] + others
    assert contents(*cut) == contents(*whole)


def test_only_the_newest_two_are_kept_with_the_clients_that_they_name(tmp_path):
    """A client that was sampled long ago keeps its file."""
    config = Config(**{**SMALL, "rounds": 30, "participation": 0.2, "eval_every": 30})
    begin(config, tmp_path / "run", stop=25, every=1)
    folder = tmp_path / "run" / "checkpoint"
    kept = sorted(int(path.stem.partition("-")[2]) for path in folder.glob("server-*"))
    assert kept == [24, 25]
    cohorts = [json.loads(line)["cohort"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = {
        number: {max(at for at in range(1, number + 1) if c in cohorts[at - 1]) for c in range(6)} for number in kept
    }
    files = {int(path.stem.partition("-")[2]) for path in folder.glob("clients-*")}
    assert files == last[24] | last[25]
    assert min(files) < 24


def test_what_a_client_holds_twice_is_written_once(tmp_path):
    """The server's record of FedOBP is the client's last model."""
    begin(Config(**SMALL, method="fedobp"), tmp_path / "run", every=1)
    tensors, about = read_tensors(tmp_path / "run" / "checkpoint" / "clients-1.safetensors")
    assert sorted(about["members"]["records"]) == sorted(about["members"]["last"])
    whole = [name for name in tensors if tensors[name].numel() == 9610]
    assert len(whole) == len(about["members"]["last"]) == 3
    assert len(about["same"]) >= 3


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


def test_before_the_first_checkpoint_a_run_starts_anew(tmp_path):
    config = Config(**SMALL)
    Federation(config).run(out=tmp_path / "whole")
    begin(config, tmp_path / "cut", every=0)
    assert go_on(config, tmp_path / "cut") == [1, 2, 3, 4, 5, 6]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert go_on(config, tmp_path / "new") == [1, 2, 3, 4, 5, 6]


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


def test_what_a_killed_process_has_half_written_is_removed(tmp_path):
    config, folder = Config(**SMALL), tmp_path / "run"
    begin(config, folder)
    (folder / ".result.json.1.1.part").touch()
    (folder / "checkpoint" / ".clients-4.safetensors.1.1.part").touch()
    left = []
    Federation(config).run(out=folder, resume=True, progress=lambda at: left.extend(folder.rglob("*.part")))
    assert not left


def test_a_run_whose_checkpoints_are_elsewhere_starts_anew(tmp_path):
    """Its folder `checkpoint` is a link to another one."""
    config, folder = Config(**SMALL), tmp_path / "run" / "checkpoint"
    begin(config, tmp_path / "run", every=0)
    (tmp_path / "large").mkdir()
    folder.symlink_to(tmp_path / "large")
    assert go_on(config, tmp_path / "run") == [1, 2, 3, 4, 5, 6]


def test_a_run_that_another_process_has_just_finished_is_left_alone(tmp_path, monkeypatch):
    """It ends after this process has read its checkpoints."""
    config, folder = Config(**SMALL), tmp_path / "run"
    begin(config, folder)

    def late(plan, *given):
        if others:
            others.pop().run(out=folder, resume=True)
        return simulate(plan, *given)

    others = [Federation(config)]
    monkeypatch.setattr("fedobp.launch.simulate", late)
    with pytest.raises(FedobpError, match=r"another process has finished the run in .*: nothing was changed"):
        Federation(config).run(out=folder, resume=True)
    assert read_run(folder).result["history"]
    assert {path.name for path in folder.iterdir()} == {*NAMES[:3], "models", "result.json", "timings.jsonl"}


def test_a_run_that_failed_stays_out_when_the_others_go_on(tmp_path):
    """It diverges in round 1, so nothing of it is in the checkpoints of the others."""
    runs = {"calm": Config(**SMALL), "wild": Config(**SMALL, lr=1e9), "other": Config(**SMALL, seed=7)}
    resume_sweep(tmp_path / "whole", runs)
    stopped = resume_sweep(tmp_path / "cut", runs, progress=stop_at(4), checkpoint_every=1)
    assert stopped.missing == list(runs)
    outcome = resume_sweep(tmp_path / "cut", runs)
    assert list(outcome.runs) == ["calm", "other"]
    assert "no longer finite" in outcome.failed["wild"].error
    names = ("calm", "other")
    assert contents(*(tmp_path / "cut" / name for name in names)) == contents(
        *(tmp_path / "whole" / name for name in names)
    )


@pytest.mark.parametrize("every", [1, None])
def test_two_processes_do_not_train_in_one_folder(every, tmp_path):
    """Also before the first checkpoint, when the second one would start anew: all files stay."""
    config = Config(**SMALL)
    Federation(config).run(out=tmp_path / "whole")
    said = []

    def again(at):
        if at.round == 3:
            with pytest.raises(FedobpError) as error:
                Federation(config).run(out=tmp_path / "run", resume=True)
            said.append(str(error.value))

    Federation(config).run(out=tmp_path / "run", progress=again, checkpoint_every=every)
    [sentence] = said
    assert "trains in" in sentence
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_run_goes_on_from_its_checkpoint_and_takes_no_more(tmp_path):
    config = Config(**SMALL)
    Federation(config).run(out=tmp_path / "whole")
    begin(config, tmp_path / "cut")
    assert go_on(config, tmp_path / "cut", checkpoint_every=0) == [4, 5, 6]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def aggregate_in_place(self, ctx, server, records, update):
    server["theta"].copy_(update.mean("theta"))
    return server, records


@pytest.mark.parametrize("in_place", [False, True])
def test_a_checkpoint_is_written_while_the_next_round_trains(in_place, tmp_path, monkeypatch):
    """The one of round 2 is written after round 3 has trained, and holds round 2, whatever a method writes to."""
    config, trained = Config(**SMALL, method="fedavg" if in_place else "fedobp"), threading.Event()
    if in_place:
        monkeypatch.setattr(METHODS["fedavg"], "aggregate", aggregate_in_place)
    Federation(config).run(out=tmp_path / "whole")

    def late(path, *content):
        assert path.name.endswith("-4.safetensors") or trained.wait(60)
        return write_tensors(path, *content)

    def progress(at):
        if at.round == 3:
            trained.set()
        if at.round == 4:
            raise StopTraining

    with monkeypatch.context() as patch:
        patch.setattr("fedobp.checkpoint.write_tensors", late)
        with pytest.raises(StopTraining):
            Federation(config).run(out=tmp_path / "cut", progress=progress, checkpoint_every=2)
    for name in ("server-4", "clients-4"):
        (tmp_path / "cut" / "checkpoint" / f"{name}.safetensors").unlink()
    assert go_on(config, tmp_path / "cut") == [3, 4, 5, 6]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_checkpoint_without_a_history_is_of_an_older_version(tmp_path):
    """It holds all reports instead."""
    config = Config(**SMALL)
    Federation(config).run(out=tmp_path / "whole")
    begin(config, tmp_path / "cut", stop=2, every=1)
    path = tmp_path / "cut" / "checkpoint" / "server-2.safetensors"
    tensors, about = read_tensors(path)
    del about["run"]["history"], about["sha256"]
    write_tensors(path, tensors, about)
    assert go_on(config, tmp_path / "cut") == [3, 4, 5, 6]
    histories = [read_run(tmp_path / name).history for name in ("whole", "cut")]
    assert histories[0] == histories[1]


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


def test_a_finished_run_that_trains_again_beside_others_keeps_no_later_checkpoints(tmp_path):
    """They would push out those of the rounds that the launch trains now."""
    runs = {"short": Config(**{**SMALL, "rounds": 4}), "long": Config(**SMALL)}
    resume_sweep(tmp_path, runs, progress=stop_at(5), checkpoint_every=1)
    assert (tmp_path / "short" / "result.json").exists()
    shutil.rmtree(tmp_path / "long" / "checkpoint")
    resume_sweep(tmp_path, runs, progress=stop_at(2), checkpoint_every=1)
    seen = []
    resume_sweep(tmp_path, runs, progress=lambda at: seen.append(at.round))
    assert seen == [3, 3, 4, 4, 5, 6]


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


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
