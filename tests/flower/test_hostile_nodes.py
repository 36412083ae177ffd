"""Nodes that send what is wrong: it is refused, counted and logged, and the round goes on without them.

The oracle is a simulation whose cohorts leave out the clients whose answers were not taken.
"""

import json
from dataclasses import replace

import pytest
import torch
from flwr.app import Message

from fedobp import load_results
from fedobp.csv_rows import read_rows
from fedobp.flower.messages import pack, unpack
from fedobp.flower.server import serve
from fedobp.wire import decode, encode
from flower.cases import (
    CONFIG,
    LocalGrid,
    equal_runs,
    forge,
    lines,
    no_answer,
    prepared,
    sampled,
    served,
    statuses,
    without,
)


def with_upload(change):
    """Return what changes the uploaded model."""

    def forged(message, values, payload):
        theta = decode(payload, {"theta": (9610,)})["theta"]
        return Message(pack(values, encode({"theta": change(theta.clone())})), reply_to=message)

    return forged


def with_nan(theta):
    theta[7] = torch.nan
    return theta


HOSTILE = {
    "late": no_answer,
    "NaN": with_upload(with_nan),
    "infinite": with_upload(lambda theta: theta * torch.inf),
    "another shape": with_upload(lambda theta: theta[:-1]),
    "another type": with_upload(lambda theta: theta.double()),
    "noise": lambda message, values, payload: Message(pack(values, bytes(range(256)) * 100), reply_to=message),
    "20 MB": lambda message, values, payload: Message(pack(values, bytes(20 << 20)), reply_to=message),
    "cut short": lambda message, values, payload: Message(pack(values, payload[:-3]), reply_to=message),
    "no payload": lambda message, values, payload: Message(pack(values), reply_to=message),
    "another number of samples": lambda message, values, payload: Message(
        pack({**values, "n": 10**9}, payload), reply_to=message
    ),
    "numbers that are none": lambda message, values, payload: Message(
        pack({**values, "processed": -1}, payload), reply_to=message
    ),
    "lost, again and again": lambda message, values, payload: Message(pack({"lost": True}), reply_to=message),
    "a weight that ends all training": with_upload(lambda theta: theta * 1e30),
    "a huge loss": lambda message, values, payload: Message(
        pack({**values, "loss": 1.7e308}, payload), reply_to=message
    ),
    "huge numbers": lambda message, values, payload: Message(
        pack({**values, "processed": 10**400}, payload), reply_to=message
    ),
    "no values": lambda message, values, payload: Message(pack({}, payload), reply_to=message),
    "a list": lambda message, values, payload: Message(pack([1, 2], payload), reply_to=message),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_an_answer_that_is_wrong_or_late_is_left_out(change, tmp_path, monkeypatch):
    """The client trained, and its state is still that which the server knows: it goes on as if it had not."""
    bad = sampled(3)[1]
    settings, federation = prepared(tmp_path, CONFIG, deadline=1e-9)
    said = served(tmp_path, settings, {bad: forge(change)})
    is_late = change is HOSTILE["late"]
    if change is HOSTILE["lost, again and again"]:  # the first time it may be true
        assert statuses(tmp_path / "run") == {(3, bad, "lost"), (3, bad, "refused")}
        return
    assert statuses(tmp_path / "run") == {(3, bad, "late" if is_late else "refused")}
    if not is_late:
        [refused] = [line for line in lines(tmp_path / "run") if line["status"] == "refused"]
        assert len(refused["reason"]) > 10
    words = f"round 3: cohort of 4, 3 accepted, 1 {'late' if is_late else 'refused'};"
    assert any(line.startswith(words) for line in said)
    without(monkeypatch, {3: [bad]})
    federation.run(out=tmp_path / "simulated")
    equal_runs(tmp_path / "run", tmp_path / "simulated")


def test_a_whole_number_that_ends_all_training_is_refused(tmp_path):
    """The number of steps of `counterdrift`, which the server multiplies with."""

    def change(message, values, payload):
        sent = decode(payload, {"theta": (9610,), "steps": ()})
        return Message(pack(values, encode({**sent, "steps": torch.tensor(10**12)})), reply_to=message)

    bad = sampled(3)[1]
    settings, _ = prepared(tmp_path, replace(CONFIG, method="counterdrift", options={}))
    served(tmp_path, settings, {bad: forge(change)})
    assert statuses(tmp_path / "run") == {(3, bad, "refused")}
    [refused] = [line for line in lines(tmp_path / "run") if line["status"] == "refused"]
    assert "sent values above 1e+06" in refused["reason"]


def counted(change):
    """Return what answers evaluations with changed counts."""

    def answer(message, own):
        values, payload = unpack(own().content)
        if message.metadata.message_type == "evaluate":
            change(values["counts"])
        return Message(pack(values, payload), reply_to=message)

    return answer


FORGED = {
    "no client": lambda counts: counts["columns"]["served"].clear(),
    "two clients": lambda counts: counts["columns"]["served"].append(counts["columns"]["served"][0]),
    "more right than asked": lambda counts: counts["columns"]["served"][0].update(correct=[99] * 10),
    "other labels": lambda counts: counts["columns"]["served"][0].update(correct=[0], tested=[0]),
    "huge": lambda counts: counts["columns"]["served"][0].update(tested=[10**30] * 10),
    "another metric": lambda counts: counts["columns"]["served"][0]["metrics"].update(loss=1.0),
    "other tensors": lambda counts: counts.update(personal=[[1, 2]]),
    "more than there is": lambda counts: counts.update(personal=[[10**9, 0, 0, 0]]),
    "no columns": lambda counts: counts.pop("columns"),
    "below 0": lambda counts: counts.update(samples=-5),
    "more samples than it has": lambda counts: counts["columns"]["served"][0].update(tested=[10**6] * 10),
    "huge numbers": lambda counts: counts.update(processed=10**400),
    "a column that was not asked for": lambda counts: counts["columns"].update(finetuned=counts["columns"]["served"]),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_forged_counts_are_refused_and_the_others_are_taken(change, tmp_path):
    settings, _ = prepared(tmp_path, CONFIG)
    served(tmp_path, settings, {1: counted(change)})
    assert statuses(tmp_path / "run", kind="evaluate") == {(number, 1, "refused") for number in (2, 4, 5)}
    rows = read_rows(tmp_path / "run" / "clients.csv")
    assert [row["served"] is None for row in rows] == [False, True, False, False, False]


@pytest.mark.parametrize(
    "change",
    [
        {"client": True}, {"client": 7}, {"train": -1}, {"train": 10**400}, {"train": 1.5}, {"entropy": float("inf")},
        {"entropy": None}, {"federation": "other"},
    ],
    ids=str,
)  # fmt: skip
def test_a_forged_introduction_is_refused(change, tmp_path):
    def answer(message, own):
        values, payload = unpack(own().content)
        if message.metadata.message_type == "query":
            text = json.dumps({**values, **change})
            content = pack({}, payload)
            content["fedobp"]["json"] = text
            return Message(content, reply_to=message)
        return Message(pack(values, payload), reply_to=message)

    settings, _ = prepared(tmp_path, CONFIG, start_nodes=4, min_replies=0.1)
    serve(LocalGrid(tmp_path, 5, {1: answer}), settings, tmp_path / "run", lambda text: None)
    [refused] = [line for line in lines(tmp_path / "run") if line["kind"] == "query"]
    assert refused["status"] == "refused"
    assert load_results(tmp_path / "run")


def test_who_claims_another_client_is_refused(tmp_path):
    settings, federation = prepared(tmp_path, CONFIG)
    grid = LocalGrid(tmp_path, 5)
    grid.nodes[999] = 2  # a second node that says it is client 2
    serve(grid, settings, tmp_path / "run", lambda text: None)
    [refused] = [line for line in lines(tmp_path / "run") if line["status"] == "refused"]
    assert (refused["kind"], refused["node"]) == ("query", 999)
    assert refused["reason"] == "node 999 says it is client 2, which is another node in nodes.json"
    federation.run(out=tmp_path / "simulated")
    equal_runs(tmp_path / "run", tmp_path / "simulated")
