"""Checkpoints: interrupted runs go on to the same bytes."""

import json
import math
import shutil
import threading

import pytest
import torch
from checkpointed import NAMES, SMALL, begin, contents, go_on, stop_at
from lanes_cases import normed

from fedobp import Config, Federation, FedobpError, resume_sweep, sweep
from fedobp.algorithms import METHODS
from fedobp.checkpoint import Checkpoints, Interval, _is_equal
from fedobp.launch import StopTraining, simulate
from fedobp.saved_runs import read_run
from fedobp.storage.tensor_file import read_tensors, write_tensors


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


def test_equal_tensors_have_the_same_bits():
    """Also views with strides, which `numpy` does not see as bytes."""
    one = torch.tensor([0.0, 1.0, math.nan, 3.0, -0.0, 5.0])
    assert _is_equal(one, one.clone())
    assert _is_equal(one[::2], one[::2].clone())
    assert _is_equal(torch.ones(1).expand(5), torch.ones(5))
    assert not _is_equal(one, one.flip(0))
    assert not _is_equal(one[:1], one[4:5])
    assert not _is_equal(one, one.view(2, 3))
    assert not _is_equal(one, one.double())
    for kind in (torch.bool, torch.bfloat16, torch.int64, torch.complex128):
        assert _is_equal(torch.ones(3, dtype=kind), torch.ones(3, dtype=kind))
        assert not _is_equal(torch.ones(3, dtype=kind), torch.tensor([1, 0, 1], dtype=kind))


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


def test_a_checkpoint_by_time_is_due_when_the_last_one_has_been_idle_for_nine_tenths():
    minute = Interval()
    assert [minute.is_due(3, seconds) for seconds in (59.9, 60.0)] == [False, True]
    assert [minute.is_due(3, seconds, writing=5.0) for seconds in (59.9, 60.0)] == [False, True]
    assert [minute.is_due(3, seconds, writing=7.0) for seconds in (69.9, 70.0)] == [False, True]
    assert not minute.is_due(3, 1e9, writing=math.inf)
    assert [Interval(3).is_due(number, 0.0, writing=math.inf) for number in (2, 3, 4)] == [False, True, False]


@pytest.mark.parametrize("every", ["a", -1, 1.5])
def test_what_is_no_number_of_rounds_is_refused_before_anything_is_written(every, tmp_path):
    config = Config(**SMALL)
    for call in (
        lambda: Federation(config).run(out=tmp_path / "run", checkpoint_every=every),
        lambda: resume_sweep(tmp_path / "sweep", {"one": config}, checkpoint_every=every),
    ):
        with pytest.raises(FedobpError, match=f"`checkpoint_every` must be .* from 0 on, or None, not {every!r}$"):
            call()
    assert not list(tmp_path.iterdir())


def test_a_run_without_a_folder_does_not_go_on():
    with pytest.raises(FedobpError, match="`resume` goes on with a run in its folder: name the folder with `out`"):
        Federation(Config(**SMALL)).run("fedavg", resume=True)


@pytest.mark.parametrize("times", [1e-9, 1e9])
def test_by_time_the_next_checkpoint_waits_ten_times_as_long_as_the_one_before_took(times, tmp_path, monkeypatch):
    """With an interval of 0 s: of two runs side by side, one is written after round 3 only."""
    trained, saved, save = threading.Event(), [], Checkpoints.save

    def noted(self, number):
        saved.append((number, self))
        save(self, number)

    def late(path, *content):
        assert "run0" in str(path) or trained.wait(60)
        return write_tensors(path, *content)

    def progress(at):
        if at.round == 3:
            trained.set()
            for _, one in saved:
                one.wait()

    monkeypatch.setattr("fedobp.checkpoint._SPACING", times)
    monkeypatch.setattr("fedobp.checkpoint.write_tensors", late)
    monkeypatch.setattr(Checkpoints, "save", noted)
    configs = [Config(**SMALL), Config(**SMALL, seed=7)]
    sweep(configs, out=[tmp_path / "run0", tmp_path / "run1"], progress=progress, interval=Interval(seconds=0.0))
    rounds = [number for number, _ in saved]
    assert rounds[:4] == [1, 1, 3, 3] if times < 1 else rounds == [1, 1]


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


def test_before_the_first_checkpoint_a_run_starts_anew(tmp_path):
    config = Config(**SMALL)
    Federation(config).run(out=tmp_path / "whole")
    begin(config, tmp_path / "cut", every=0)
    assert go_on(config, tmp_path / "cut") == [1, 2, 3, 4, 5, 6]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert go_on(config, tmp_path / "new") == [1, 2, 3, 4, 5, 6]


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


@pytest.mark.parametrize("every", [1, 3])
def test_a_run_that_failed_stays_out_when_the_others_go_on(every, tmp_path):
    """It diverges in round 1, so nothing of it is in the checkpoints of the others, and they go on from these."""
    runs = {"calm": Config(**SMALL), "wild": Config(**SMALL, lr=1e9), "other": Config(**SMALL, seed=7)}
    resume_sweep(tmp_path / "whole", runs)
    stopped = resume_sweep(tmp_path / "cut", runs, progress=stop_at(4), checkpoint_every=every)
    assert stopped.missing == list(runs)
    seen = []
    outcome = resume_sweep(tmp_path / "cut", runs, progress=lambda at: seen.append((at.run, at.round)))
    assert seen == [(run, number) for number in (5, 6) for run in (0, 2)]  # stopping takes a checkpoint, too
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
