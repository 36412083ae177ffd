"""`fedobp deploy`: projects, keys, and a federation on processes of this machine."""

import json
import os
import signal
import sys
import time
import tomllib
from pathlib import Path

import pytest
from cryptography import x509

from cli.cases import write_npz
from fedobp.data import read_own
from fedobp.flower.deploy import _failure
from fedobp.flower.local import _parents
from fedobp.flower.task import read_settings

SMALL = ("--nodes", 3, "--model", "mlp", "--epochs", 1, "--rounds", 2)


def project_files(nodes):
    each = [f"{folder}-{node}.{end}" for node in range(nodes) for folder, end in (("nodes/node", "toml"),)]
    return {
        "pyproject.toml", "federation/__init__.py", "federation/server_app.py", "federation/client_app.py",
        "federation/federation.toml", "README.md", "environment.sh", "superlink.sh", "register.sh", "node.sh",
        "run.sh", "start.sh", "compose.yaml", "Dockerfile", ".dockerignore", ".gitignore",
        "systemd/fedobp-superlink.service", "systemd/fedobp-node@.service", *each,
    }  # fmt: skip


def files_in(folder):
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}


def test_a_project_from_a_dataset_has_settings_and_each_nodes_samples(command):
    said = command("deploy", "init", "here", *SMALL, "--method", "fedper", "--alpha", 0.5, "--deadline", 30, "--json")
    assert (said.code, said.err) == (0, "")
    data = {f"data/node-{node}.npz" for node in range(3)}
    assert files_in("here") == set(said.json["files"]) == project_files(3) | data
    settings = read_settings(Path("here/federation/federation.toml"))
    assert said.json["federation"] == settings.id
    config = settings.config
    assert (config.method, config.clients, config.rounds, config.participation) == ("fedper", 3, 2, 1.0)
    assert (settings.rules.deadline, settings.rules.min_replies) == (30, 0.5)
    assert (settings.inputs.shape, settings.inputs.labels, settings.inputs.unit) == ((8, 8), tuple(range(10)), 255)
    samples = [read_own(Path("here") / name, range(10)) for name in sorted(data)]
    assert sum(len(one.y) for one in samples) == 1797
    assert all(one.test.any() for one in samples)
    node = tomllib.loads(Path("here/nodes/node-2.toml").read_text())
    assert node == {"client": 2, "data": "data/node-2.npz", "state": "state", "device": "cpu"}


def test_the_folder_of_datasets_of_this_machine_is_no_part_of_a_project(command, tmp_path):
    (tmp_path / "sets").mkdir()
    write_npz(tmp_path / "sets" / "mine.npz", n=90)
    flags = ("--dataset", "mine", "--data-dir", "sets", "--nodes", 2, "--partition", "iid")
    said = command("deploy", "init", "here", *flags, "--alpha", 1)
    assert (said.code, said.err) == (0, "")
    assert "sets" not in Path("here/federation/federation.toml").read_text()
    assert read_settings(Path("here/federation/federation.toml")).config.dataset == "mine"


@pytest.mark.parametrize(
    ("flags", "shape", "labels", "mean", "std"),
    [
        (("--shape", "28,28", "--labels", "10", "--unit", "255", "--mean", "0.13", "--std", "0.31"),
         (28, 28), tuple(range(10)), (0.13,), (0.31,)),
        (("--shape", "16,16,3", "--labels", "cat,dog", "--mean", "0.1,0.2,0.3"),
         (16, 16, 3), ("cat", "dog"), (0.1, 0.2, 0.3), (1.0,) * 3),
        (("--shape", "4", "--labels", "7,9", "--std", "2"), (4,), (7, 9), (0.0,) * 4, (2.0,) * 4),
    ],
)  # fmt: skip
def test_a_project_for_data_that_is_not_here(flags, shape, labels, mean, std, command):
    assert command("deploy", "init", "here", "--nodes", 2, *flags).code == 0
    assert files_in("here") == project_files(2)
    settings = read_settings(Path("here/federation/federation.toml"))
    inputs = settings.inputs
    assert (inputs.shape, inputs.labels, inputs.mean, inputs.std) == (shape, labels, mean, std)
    assert settings.model.shape[-1] == (shape[1] if len(shape) > 1 else 4)
    assert settings.config.partition == "natural"
    assert "Put each node's data" in Path("here/README.md").read_text()


@pytest.mark.parametrize("taken", ["federation/federation.toml", "nodes/node-1.toml", "data/node-0.npz", ".gitignore"])
def test_nothing_is_overwritten(command, taken):
    path = Path("here") / taken
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    said = command("deploy", "init", "here", "--nodes", 2)
    assert (said.code, said.out) == (2, "")
    assert said.err == f"error: {path} exists: choose another folder, nothing was overwritten\n"
    assert (files_in("here"), path.read_text()) == ({taken}, "mine")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--shape", "28,28"), "--shape needs --labels"),
        (("--labels", "3"), "describe data that is not here: give --shape as well"),
        (("--unit", "255"), "describe data that is not here: give --shape as well"),
        (("--shape", "8,8", "--labels", "3", "--dataset", "digits"), "leave out --shape or --dataset"),
        (("--shape", "8,8", "--labels", "3", "--alpha", "1"), "leave out --shape or --alpha"),
        (("--shape", "8,x", "--labels", "3"), "--shape must be numbers separated by commas, not '8,x'"),
        (("--shape", "8,0", "--labels", "3"), "--shape 8,0 must be features, height,width or height,width,channels"),
        (("--shape", "8", "--labels", "1"), "--labels 1 must be how many there are, at least 2, or their names"),
        (("--shape", "8", "--labels", "a,a"), "--labels a,a must be how many there are"),
        (("--shape", "8", "--labels", "2", "--mean", "1,2"), "--mean has 2 values: give one, or one for each of 8"),
        (("--shape", "8", "--labels", "2", "--std", "0"), "unit, std and deadline must be above 0"),
        (("--shape", "8", "--labels", "2", "--mean", "nan"), "a number is none, or not finite"),
        (("--min-replies", "2"), "min_replies between 0 and 1"),
        (("--deadline", "0"), "deadline must be above 0"),
        (("--precision", "bf16"), "nodes compute in fp32 or fp64, not in bf16"),
        (("--device", "cuda"), "No such option '--device'"),
        (("--method", "fedob"), "did you mean 'fedobp'?"),
        (("--method", "fedobp-auto", "--prior", "train"), "fedobp-auto does not: leave them out"),
        (("--calibrate", "head", "--model", "resnet8-bn", "--method", "fedavg"), "not made for BatchNorm"),
        (("--method", "group-oracle"), "group-oracle needs the groups of clients, which only a simulation knows"),
        (("--method", "decoupled", "--set", "score=taylor"), "needs the data of all clients, which only a simulation"),
    ],
)
def test_wrong_flags_are_one_sentence(command, flags, said):
    found = command("deploy", "init", "here", *flags)
    assert (found.code, found.out, found.err.count("\n")) == (2, "", 1)
    assert said in found.err
    assert not Path("here").exists()


def test_keys_and_a_certificate_for_the_superlinks_machine(command):
    said = command("deploy", "keys", "keys", "--nodes", 2, "--host", "a.example.org", "--host", "192.0.2.7", "--json")
    hosts = ["a.example.org", "192.0.2.7", "localhost", "127.0.0.1"]
    assert said.json == {"out": "keys", "nodes": 2, "hosts": hosts}
    names = {"ca.crt", "server.pem", "server.key", "node-0", "node-0.pub", "node-1", "node-1.pub"}
    assert files_in("keys") == names
    secret = {path.name for path in Path("keys").iterdir() if path.stat().st_mode & 0o077 == 0}
    assert secret == {"server.key", "node-0", "node-1"}
    ca, server = (x509.load_pem_x509_certificate(Path("keys", name).read_bytes()) for name in ("ca.crt", "server.pem"))
    server.verify_directly_issued_by(ca)
    named = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(one.value) for one in named] == hosts
    again = command("deploy", "keys", "keys", "--nodes", 2)
    assert (again.code, again.err) == (2, "error: keys has keys already: remove them, or choose another folder\n")


@pytest.mark.parametrize("host", ["straße.example", "two words", "http://a.example", "a:8000"])
def test_a_host_that_is_no_name_is_refused(command, host):
    said = command("deploy", "keys", "keys", "--host", host)
    assert (said.code, said.out) == (2, "")
    assert f"'{host}' is no name of a machine" in said.err
    assert not Path("keys").exists()


@pytest.mark.parametrize("words", [("init", "here"), ("keys", "here"), ("local",)], ids=lambda words: words[0])
def test_without_flower_it_says_what_to_install(command, words, monkeypatch):
    monkeypatch.setattr("fedobp.cli.deploy.find_spec", lambda name: None)
    said = command("deploy", *words)
    assert (said.code, said.err) == (2, "error: fedobp deploy needs Flower: pip install 'fedobp[flower]'\n")
    assert not list(Path().iterdir())


def test_local_refuses_a_folder_with_files(command):
    Path("here").mkdir()
    Path("here/mine").write_text("mine")
    said = command("deploy", "local", *SMALL, "--out", "here")
    assert (said.code, said.err) == (2, "error: here is not empty: choose another --out, nothing was overwritten\n")
    assert files_in("here") == {"mine"}


def test_the_servers_own_sentence_is_the_error(tmp_path):
    log = tmp_path / "run.log"
    log.write_text("round 1: 2 late\nerror: no node answered: start nodes\nINFO: bye\n")
    assert _failure(log) == "no node answered: start nodes"
    log.write_text("Traceback\n")
    assert _failure(log) == f"the server ended early: {log} says why"


def descendants(pid):
    """Return a process's children, theirs, and so on."""
    parents, found = _parents(), {pid}
    while more := {one for one, (parent, _) in parents.items() if parent in found and one not in found}:
        found |= more
    return found - {pid}


def ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_local_with_tls_equals_the_simulation_and_can_be_reported(start, command, tmp_path):
    flags = (*SMALL, "--nodes", 2, "--eval-every", 2, "--tls", "--out", "here", "--json")
    process = start("-m", "fedobp", "deploy", "local", *flags, cwd=tmp_path)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    found = json.loads(out)
    assert (found["method"], found["rounds"], found["out"]) == ("fedobp", 2, "here/run")
    assert {path.name for path in Path("here").iterdir()} >= {"app", "data", "keys", "logs", "run", "state"}
    messages = [json.loads(line) for line in Path("here/run/messages.jsonl").read_text().splitlines()]
    assert {line["status"] for line in messages} == {"accepted"}
    assert command("run", "--config", "here/run/config.toml", "--out", "simulated").code == 0
    for name in ("metrics.jsonl", "clients.csv"):
        assert Path("here/run", name).read_bytes() == Path("simulated", name).read_bytes()
    assert command("report", "here").code == 0
    assert "run ran on nodes; messages: 6 accepted." in Path("here/report.html").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_every_process(start, number, tmp_path):
    process = start("-m", "fedobp", "deploy", "local", *SMALL, "--nodes", 2, "--out", "here", cwd=tmp_path)
    while process.poll() is None and not (tmp_path / "here" / "run").exists():  # the server app makes it
        time.sleep(0.1)
    pids = descendants(process.pid)
    assert len(pids) >= 6  # superlink, two nodes, what each of them started, and `flwr run`
    for _ in range(2):  # a second signal changes nothing
        os.kill(process.pid, number)
    out, err = process.communicate()
    assert (process.returncode, out) == (128 + number, "")
    assert err == {signal.SIGINT: "interrupted\n", signal.SIGTERM: "terminated\n"}[number]
    while not all(map(ended, pids)):  # killed, but the system has not taken them away yet
        time.sleep(0.1)
