"""Sweeps on Ray: two nodes on this machine with token authentication, and a worker that is killed in the middle."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from children import children

from fedobp import Config, FedobpError
from fedobp.on_ray import train_launch, train_on_ray, write_runs
from fedobp.sweep_folder import resume_sweep
from fedobp.sweep_plan import plan_folder

METHODS = "fedavg,seqfededt"
FLAGS = ("--clients", "6", "--epochs", "1", "--participation", "0.5", "--model", "mlp", "--rounds", "100",
         "--eval-every", "50", "--save-models", "all", "--grid", "batch_size=8,16", "--methods", METHODS)  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    names = ("config.toml", "metrics.jsonl", "clients.csv", "models/global.safetensors", "models/clients.safetensors")
    return {f"{run.name}/{name}": (run / name).read_bytes() for run in folder.glob("*-seed*") for name in names}


def workers() -> list[int]:
    """The processes that train a launch."""
    lines = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [int(line.split()[0]) for line in lines if "ray::train_launch" in line]


def node(start, env, *given):
    """Start a node, wait until it has, and return the process."""
    common = ("--block", "--num-cpus=1", "--num-gpus=0", "--object-store-memory=100000000", "--disable-usage-stats")
    process = start("-m", "ray.scripts.scripts", "start", *given, *common, env=env, stderr=subprocess.STDOUT)
    said = []
    for line in process.stdout:
        said.append(line)
        if "--block" in line:  # the last thing that it says
            return process
    raise AssertionError("".join(said))


@pytest.fixture(scope="module")
def cluster():
    """Two nodes with a processor each; yields the environment of who may use them."""
    pytest.importorskip("ray")
    with (
        tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as place,
        children() as start,
    ):  # sockets need short paths
        env = {
            **os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_TMPDIR": place,
            "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        address = f"127.0.0.1:{port}"
        nodes = [node(start, env, "--head", f"--port={port}", "--include-dashboard=false")]
        nodes.append(node(start, env, f"--address={address}"))
        yield {**env, "ADDRESS": address}
        for one in reversed(nodes):  # with all that they have started
            one.terminate()
            one.wait(60)


def test_two_nodes_give_the_same_bytes_although_a_worker_is_killed(cluster, tmp_path):
    sweep = [sys.executable, "-m", "fedobp", "sweep", *FLAGS]
    subprocess.run([*sweep, "--out", "alone"], cwd=tmp_path, env=cluster, check=True, capture_output=True)
    command = [*sweep, "--out", "far", "--on", f"ray:{cluster['ADDRESS']}"]
    with subprocess.Popen(command, cwd=tmp_path, env=cluster, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:
        deadline = time.monotonic() + 120
        while not (found := workers()) and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1.5)
        os.kill(found[0], signal.SIGKILL)
        said = job.communicate(timeout=300)[0].decode()
    assert job.returncode == 0, said
    assert len(contents(tmp_path / "alone")) == 5 * 4
    assert contents(tmp_path / "far") == contents(tmp_path / "alone")
    wrong = {**cluster, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    command[command.index("far")] = "other"
    refused = subprocess.run(command, cwd=tmp_path, env=wrong, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2, refused.stderr
    assert "check the address and $RAY_AUTH_TOKEN" in refused.stderr


@pytest.mark.skipif(os.cpu_count() == 1, reason="needs a launch that is too large for nodes of one processor")
@pytest.mark.parametrize(("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (15, 143, "terminated")])
def test_a_launch_that_fits_no_node_is_named_and_a_signal_ends_the_command(cluster, tmp_path, number, code, word):
    env = {**cluster, "OMP_NUM_THREADS": "2", "PYTHONWARNINGS": "default::UserWarning"}
    address = f"ray:{cluster['ADDRESS']}"
    with children() as start:
        job = start("-m", "fedobp", "sweep", *FLAGS, "--out", "far", "--on", address, cwd=tmp_path, env=env)
        too_long = threading.Timer(120, job.kill)
        too_long.start()
        assert "no node of the Ray cluster has 2 processors" in job.stderr.readline()
        time.sleep(1)
        job.send_signal(number)
        assert job.stderr.read() == f"{word}\n"
        assert job.wait(60) == code
        too_long.cancel()
    assert not (tmp_path / "far").exists()


def test_no_cluster_and_no_token_are_user_errors(tmp_path):
    """In a process of its own: Ray reads its environment once."""
    pytest.importorskip("ray")
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}
    env.pop("RAY_AUTH_TOKEN", None)
    command = [sys.executable, "-m", "fedobp", "sweep", *FLAGS, "--out", "far", "--on"]
    with socket.socket() as here:
        here.bind(("127.0.0.1", 0))
        address = f"ray:127.0.0.1:{here.getsockname()[1]}"
        for problem in ("ConnectionRefusedError", "AuthenticationError"):
            said = subprocess.run(
                [*command, address], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
            )
            assert said.returncode == 2, said.stderr
            assert said.stderr.startswith(f"error: cannot use the Ray cluster at {address[4:]} ({problem}")
            assert said.stderr.count("\n") == 1
            here.listen()
    assert not (tmp_path / "far").exists()


def test_a_worker_says_why_runs_could_not_start(tmp_path, monkeypatch):
    """Its data may be missing on that node."""
    runs = {f"run{seed}": Config(clients=5, rounds=1, model="mlp", seed=seed) for seed in (1, 2)}
    plan, _, _ = plan_folder(tmp_path / "sweep.toml", runs)
    monkeypatch.setattr("fedobp.data.datasets.EMBEDDED", "none")
    files, errors = train_launch(plan.to_toml(), "sweep.toml", ["run1", "run2"], torch.get_num_threads())
    assert files == {}
    assert list(errors) == ["run1", "run2"]
    assert "digits" in errors["run1"]


def test_files_that_come_back_are_written_whole_and_inside_the_folder(tmp_path):
    runs = {f"run{seed}": Config(clients=5, rounds=1, model="mlp", seed=seed) for seed in (1, 2)}
    plan, _, _ = plan_folder(tmp_path / "sweep" / "sweep.toml", runs)
    plan.record()
    files = {
        "run1/config.toml": b"a",
        "run1/models/global.safetensors": b"b",
        "run2/../../outside": b"c",
        f"run2/{tmp_path / 'absolute'}": b"c",
        "other/config.toml": b"d",
    }
    write_runs(plan, ["run1", "run2"], files)
    found = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    del found["sweep/sweep.toml"]
    assert found == {"sweep/run1/config.toml": b"a", "sweep/run1/models/global.safetensors": b"b"}


def test_trackers_need_this_process(tmp_path):
    plan, _, _ = plan_folder(tmp_path / "sweep.toml", {"run": Config(clients=5, rounds=1, model="mlp")})
    with pytest.raises(FedobpError, match="leave out one of them"):
        train_on_ray(plan, plan.launches, callbacks=[object()])


def test_without_ray_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FedobpError, match=r"--on ray needs Ray: pip install 'fedobp\[ray\]'"):
        resume_sweep(tmp_path / "a", {"run": Config(clients=5, rounds=1, model="mlp")}, train=train_on_ray)
    assert not (tmp_path / "a").exists()
