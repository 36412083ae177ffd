"""Federations on nodes for tests: settings and data files of a simulation, and a grid in this process."""

import json
from pathlib import Path

import numpy as np
import torch
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedobp import Config, Federation
from fedobp.flower.messages import pack, unpack
from fedobp.flower.node import make_node
from fedobp.flower.project import node_arrays
from fedobp.flower.server import serve
from fedobp.flower.task import Inputs, Rules, make_settings, write_settings
from fedobp.sampling import Sampler

SMALL = {
    "clients": 5, "rounds": 3, "epochs": 1, "participation": 0.6, "model": "mlp", "engine": "serial", "device": "cpu",
    "eval_every": 2,
}  # fmt: skip


def prepared(folder: Path, config: Config, **rules):
    """Write federation.toml and each client's data; return the settings and the simulated federation."""
    federation = Federation(config)
    inputs = Inputs.of(federation.source, federation.data)
    settings = make_settings(federation.config, inputs, Rules(**{"wait": 5.0, "deadline": 5.0, **rules}))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "federation.toml").write_text(write_settings(settings))
    for client, arrays in enumerate(node_arrays(federation)):
        np.savez(folder / f"node-{client}.npz", **arrays)
    return settings, federation


class LocalGrid(Grid):
    """Nodes in this process: every message is answered when it is pushed.

    `answers` may replace what a client answers, by client: it gets the message and what makes the node's own answer.
    """

    def __init__(self, folder: Path, clients: int, answers=None) -> None:
        self._folder, self.answers, self._made = folder, answers or {}, {}
        self.nodes = {100 + client: client for client in range(clients)}
        self.data = {client: str(folder / f"node-{client}.npz") for client in range(100)}
        self._replies, self._sent = {}, 0
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # as Flower sets them in a server app

    def set_run(self, run) -> None: ...

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *_, **__):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        found = []
        for message in messages:
            self._sent += 1
            client, identity = self.nodes.get(message.metadata.dst_node_id), f"message {self._sent}"
            message.metadata.__dict__["_message_id"] = identity
            message.metadata.__dict__["_src_node_id"] = 1
            found.append(identity)
            reply = self._answer(message, client)
            if reply is not None:
                self._replies[identity] = reply
        return found

    def _answer(self, message, client):
        if client not in self._made:
            file = self._folder / "federation.toml"
            self._made[client] = make_node(file, client, self.data[client], self._folder)

        def own():
            answer = self._made[client].answer(message.metadata.message_type, *unpack(message.content))
            return Message(pack(*answer), reply_to=message)

        return self.answers[client](message, own) if client in self.answers else own()

    def pull_messages(self, message_ids):
        return [self._replies.pop(one) for one in list(message_ids) if one in self._replies]


# Five rounds of four of five clients.
CONFIG = Config(**{**SMALL, "rounds": 5, "participation": 0.8}, method="fedobp", options={"q": 0.9})


FILES = ("metrics.jsonl", "clients.csv", "models/global.safetensors")


def without(monkeypatch, left_out):
    """Let cohorts leave out clients: a mapping of a round to those that are."""
    draw = Sampler.cohort

    def cohort(self, number):
        drawn = draw(self, number)
        return torch.tensor([client for client in drawn.tolist() if client not in left_out.get(number, ())])

    monkeypatch.setattr(Sampler, "cohort", cohort)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "messages.jsonl").read_text().splitlines()]


def statuses(folder: Path, *, kind: str = "train") -> set[tuple[int, int, str]]:
    """The round, client and status of messages that were not accepted."""
    found = [line for line in lines(folder) if line["kind"] == kind and line["status"] != "accepted"]
    return {(line["round"], line["client"], line["status"]) for line in found}


def sampled(number: int) -> list[int]:
    return Sampler(Federation(CONFIG).config).cohort(number).tolist()


def served(folder: Path, settings, answers=None, **more) -> list[str]:
    said = []
    serve(LocalGrid(folder, settings.config.clients, answers, **more), settings, folder / "run", said.append)
    return said


def equal_runs(one: Path, other: Path) -> None:
    for name in FILES[:2]:
        assert (one / name).read_text() == (other / name).read_text()
    assert all((one / name).exists() for name in FILES)


def forge(change):
    """Return what answers a train message of round 3 with a changed payload or values."""

    def answer(message, own):
        reply = own()
        if message.metadata.message_type != "train" or unpack(message.content)[0]["visit"][0] != 3:
            return reply
        return change(message, *unpack(reply.content))

    return answer


def no_answer(message, values, payload):
    """Change an answer into none: for `forge`."""
