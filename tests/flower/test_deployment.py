"""Real superlinks and supernodes as processes on loopback, with TLS and registered keys."""

import json
import signal
import time
from pathlib import Path

import pytest

from fedobp import Config
from fedobp.flower.keys import make_keys
from fedobp.flower.local import LocalDeployment
from fedobp.flower.project import write_app
from flower.cases import SMALL, equal_runs, lines, prepared, without

# Puts NaN into every upload of a node: imported by each of its processes when it starts.
HOSTILE = """
import sys
if "clientapp" in sys.argv[0]:
    from fedobp.flower import worker
    ask = worker.ask_worker

    def with_nan(arguments, kind, values, payload):
        answer, upload = ask(arguments, kind, values, payload)
        return answer, upload[:-4] + b"\\xff\\xff\\xff\\x7f" if kind == "train" else upload

    worker.ask_worker = with_nan
"""


class Deployment(LocalDeployment):
    """A federation of a test: settings, data and keys of nodes 0, 1, ..."""

    def __init__(self, folder: Path, config: Config, tls: bool = True, **rules) -> None:
        super().__init__(folder, folder / "keys" if tls else None)
        self.settings, self.federation = prepared(folder, config, **{"deadline": 120.0, "wait": 300.0, **rules})
        self.clients, self.run_folder = config.clients, folder / "run"
        write_app(folder / "app", self.settings)
        if tls:
            make_keys(folder / "keys", ["localhost", "127.0.0.1"], config.clients)

    def start_client(self, client: int, name: str = "", **more) -> None:
        about = {"client": client, "data": str(self.folder / f"node-{client}.npz"), "state": str(self.folder / "state")}
        self.start_node(name or f"node-{client}", about, **more)

    def start_all(self, **more) -> None:
        self.start_superlink()
        for client in range(self.clients):
            if self._keys:
                self.register(f"node-{client}")
            self.start_client(client, **more.get(f"node_{client}", {}))
        self.start_rounds()

    def start_rounds(self) -> None:
        self.start_run(self.folder / "app", f'folder="{self.run_folder}"')

    def wait_for_rounds(self, count: int) -> None:
        """Wait until so many rounds are logged; a run that ends before is a failure."""
        while self.rounds() < count:
            assert self.running("run"), self.log("run").read_text()[-3000:]
            time.sleep(0.1)

    def rounds(self) -> int:
        path = self.run_folder / "timings.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def wait_for_end(self) -> None:
        while self.running("run"):
            time.sleep(0.1)
        assert (self.run_folder / "result.json").exists(), self.log("run").read_text()[-3000:]


def test_a_tls_federation_equals_the_simulation_and_refuses_who_does_not_belong(tmp_path, monkeypatch):
    """Client 3 sends NaN; three nodes have an unregistered key, another authority, and no TLS."""
    config = Config(**{**SMALL, "clients": 4, "rounds": 3, "participation": 1.0}, method="fedobp", options={"q": 0.9})
    (tmp_path / "hostile").mkdir()
    (tmp_path / "hostile" / "sitecustomize.py").write_text(HOSTILE)
    make_keys(tmp_path / "others", ["localhost"], 1)
    for name in ("node-0", "node-0.pub"):
        (tmp_path / "others" / name).rename(tmp_path / "others" / name.replace("0", "other"))
    with Deployment(tmp_path, config) as one:
        for name in ("node-other", "node-other.pub"):
            (tmp_path / "keys" / name).write_bytes((tmp_path / "others" / name).read_bytes())
        hostile = {"PYTHONPATH": str(tmp_path / "hostile")}
        one.start_superlink()
        one.start_client(0, "node-other")  # its key is not registered
        (tmp_path / "others" / "node-else").write_bytes((tmp_path / "keys" / "node-0").read_bytes())
        one.start_client(0, "node-else", keys=tmp_path / "others")  # registered, but it trusts another authority
        one.start(
            "node-bare", "flower-supernode", ["--insecure", "--superlink", one.address, "--node-config", "client=0"]
        )
        for client in range(4):
            one.register(f"node-{client}")
            one.start_client(client, **(hostile if client == 3 else {}))
        one.start_rounds()
        one.wait_for_end()
        listed = json.loads(one.flwr("supernode", "list", "fedobp", "--format", "json").stdout)
    assert len(listed["nodes"]) == 4
    found = lines(one.run_folder)
    assert len({line["node"] for line in found}) == 4
    refused = [(line["round"], line["client"]) for line in found if line["status"] == "refused"]
    assert refused == [(1, 3), (2, 3), (3, 3)]
    assert all("NaN or infinite" in line["reason"] for line in found if line["status"] == "refused")
    said = one.log("run").read_text()
    assert "round 1: cohort of 4, 3 accepted, 1 refused; " in said
    without(monkeypatch, {number: [3] for number in range(1, 4)})
    one.federation.run(out=tmp_path / "simulated")
    equal_runs(one.run_folder, tmp_path / "simulated")


def test_a_node_that_is_killed_is_left_out_until_it_is_back(tmp_path):
    config = Config(**{**SMALL, "clients": 3, "rounds": 40, "participation": 1.0, "eval_every": 40}, method="fedper")
    with Deployment(tmp_path, config, deadline=8.0) as one:
        one.start_all()
        one.wait_for_rounds(1)
        one.end("node-1", signal.SIGKILL)
        before = one.rounds()
        one.wait_for_rounds(before + 2)  # the round that it was in has ended, and so has another one without it
        away = [
            line
            for line in lines(one.run_folder)
            if line["client"] == 1 and line["status"] in ("late", "failed", "offline")
        ]
        assert away
        while True:  # the superlink refuses the key until it knows that the node is gone: a supervisor starts it again
            one.start_client(1)
            came = one.rounds()
            while one.running("node-1") and not _trained(one, 1, came):
                assert one.running("run"), "it did not come back in 40 rounds"
                time.sleep(0.1)
            if one.running("node-1"):
                break
            one.end("node-1")
            time.sleep(1)
        one.end("run")
    lost = [line for line in lines(one.run_folder) if line["status"] == "lost"]
    assert not lost  # its state was still valid


def _trained(one: Deployment, client: int, after: int) -> bool:
    found = [line for line in lines(one.run_folder) if line["client"] == client and line["kind"] == "train"]
    return any(line["status"] == "accepted" and line["round"] > after for line in found)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedper", "local", "fedala", "fedobp"])
def test_nodes_equal_the_simulation(method, tmp_path):
    config = Config(**{**SMALL, "clients": 3, "rounds": 3, "participation": 0.67}, method=method)
    with Deployment(tmp_path, config) as one:
        one.start_all()
        one.wait_for_end()
    one.federation.run(out=tmp_path / "simulated")
    equal_runs(one.run_folder, tmp_path / "simulated")


@pytest.mark.slow
def test_a_superlink_that_was_killed_goes_on_with_nothing_lost(tmp_path):
    config = Config(**{**SMALL, "clients": 3, "rounds": 6, "participation": 0.67}, method="fedobp", options={"q": 0.9})
    with Deployment(tmp_path, config) as one:
        one.start_all()
        one.wait_for_rounds(2)
        one.end("superlink", signal.SIGKILL)
        one.end("run")
        one.start_superlink()
        one.start_rounds()
        one.wait_for_end()
    one.federation.run(out=tmp_path / "simulated")
    equal_runs(one.run_folder, tmp_path / "simulated")
    assert not [line for line in lines(one.run_folder) if line["status"] == "lost"]
