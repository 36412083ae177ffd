"""What a server does about nodes that are late, lost or away, and after it died itself.

The oracle is a simulation whose cohorts leave out the clients whose answers were not taken.
"""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Error, Message

from fedobp import Config, FedobpError
from fedobp.data import read_own
from fedobp.flower.messages import unpack
from fedobp.flower.server import serve
from fedobp.flower.task import read_settings
from fedobp.storage.tensor_file import read_tensors
from flower.cases import (
    CONFIG,
    SMALL,
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


def test_a_node_that_fails_is_asked_again(tmp_path):
    """Once, and its second answer counts."""
    bad, tries = sampled(3)[0], []

    def answer(message, own):
        if message.metadata.message_type == "train" and unpack(message.content)[0]["visit"][0] == 3:
            tries.append(1)
            if len(tries) == 1:
                return Message(Error(5, "the node has gone"), reply_to=message)
        return own()

    settings, federation = prepared(tmp_path, CONFIG)
    served(tmp_path, settings, {bad: answer})
    federation.run(out=tmp_path / "simulated")
    equal_runs(tmp_path / "run", tmp_path / "simulated")
    assert statuses(tmp_path / "run") == {(3, bad, "failed")}
    assert len(tries) == 2


def test_a_node_that_is_away_is_left_out_and_comes_back(tmp_path, monkeypatch):
    away = sampled(2)[0]
    settings, federation = prepared(tmp_path, CONFIG)
    grid = LocalGrid(tmp_path, 5)
    nodes = dict(grid.nodes)

    def say(text):
        grid.nodes = {node: c for node, c in nodes.items() if c != away or not text.startswith("round 1:")}

    serve(grid, settings, tmp_path / "run", say)
    assert statuses(tmp_path / "run") == {(2, away, "offline")}
    without(monkeypatch, {2: [away]})
    federation.run(out=tmp_path / "simulated")
    assert (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[2:] == (
        (tmp_path / "simulated" / "metrics.jsonl").read_text().splitlines()[2:]
    )


def test_too_few_answers_skip_the_round(tmp_path):
    """Neither the server nor any client has changed after it."""
    cohort = sampled(3)
    settings, _ = prepared(tmp_path, CONFIG, deadline=1e-9, min_replies=0.75)
    models = []

    def say(text):
        if text.startswith("round 4:"):  # checkpoints of rounds 2 and 3 are the newest
            while not (newest := tmp_path / "run" / "checkpoint" / "server-3.safetensors").exists():
                time.sleep(0.01)
            models.extend(read_tensors(newest.with_name(f"server-{number}.safetensors"))[0] for number in (2, 3))

    answers = dict.fromkeys(cohort[:2], forge(no_answer))
    serve(LocalGrid(tmp_path, 5, answers), settings, tmp_path / "run", say)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[2])
    assert (line["cohort"], line["loss"], line["bytes_up"]) == ([], None, 0)
    before, after = models
    assert before["theta"].equal(after["theta"])
    trained = [json.loads(line)["cohort"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for client in range(5):
        last = max((number for number, ids in enumerate(trained, 1) if client in ids), default=0)
        _, about = read_tensors(tmp_path / settings.id / f"client-{client}.state")
        assert about["visit"][0] == last != 3


@pytest.mark.parametrize("damage", ["removed", "cut"])
def test_a_client_that_lost_its_state_gets_the_whole_model_in_that_round(damage, tmp_path):
    settings, _ = prepared(tmp_path, CONFIG)
    lost = next(client for client in sampled(3) if client in sampled(1) and client in sampled(2))

    def say(text):
        if text.startswith("round 2:"):
            for path in (tmp_path / settings.id).glob(f"client-{lost}.*"):
                path.unlink() if damage == "removed" else path.write_bytes(path.read_bytes()[:-1])

    serve(LocalGrid(tmp_path, 5), settings, tmp_path / "run", say)
    assert (3, lost, "lost") in statuses(tmp_path / "run")
    own = [line for line in lines(tmp_path / "run") if line["client"] == lost and line["kind"] == "train"]
    first, second = [line for line in own if line["round"] == 3]
    assert (first["status"], first["up"], second["status"]) == ("lost", 0, "accepted")
    whole = next(line for line in own if line["round"] == 1)["down"]
    assert first["down"] < second["down"] == whole  # personal entries were not sent the first time
    assert second["up"] > 0
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[2])
    assert line["cohort"] == sampled(3)


@pytest.mark.parametrize("method", ["fedobp", "floco", "seqfededt"])
def test_a_server_that_died_goes_on_after_its_checkpoint(method, tmp_path):
    """Nodes had trained in the round that was lost: that training is dropped and done again."""
    config = Config(**{**SMALL, "rounds": 5}, method=method)
    settings, federation = prepared(tmp_path, config)
    federation.run(out=tmp_path / "simulated")
    for number in (2, 4):
        grid, seen = LocalGrid(tmp_path, 5), []
        pull = grid.pull_messages

        def crash(ids, pull=pull, number=number, seen=seen):
            if len(seen) >= number:
                raise KeyboardInterrupt
            return pull(ids)

        grid.pull_messages = crash
        with pytest.raises(KeyboardInterrupt):
            serve(
                grid, settings, tmp_path / "run", lambda text, seen=seen: seen.append(text) if "round" in text else None
            )
    served(tmp_path, settings)
    equal_runs(tmp_path / "run", tmp_path / "simulated")
    with pytest.raises(FedobpError, match="has finished"):
        served(tmp_path, settings)


@pytest.mark.parametrize(("method", "number"), [("fedper", 2), ("floco", 4)])
def test_a_server_that_died_in_an_evaluation_or_between_cohorts_goes_on(method, number, tmp_path):
    """Nodes have heard that their training was taken, and the checkpoint of that round was not written."""
    config = Config(**{**SMALL, "rounds": 5}, method=method)
    settings, federation = prepared(tmp_path, config)
    federation.run(out=tmp_path / "simulated")
    grid, died = LocalGrid(tmp_path, 5), []
    push = grid.push_messages

    def crash(messages):
        for message in messages:
            values, _ = unpack(message.content)
            turn = values.get("visit", [0, 0])
            if turn == [number, 0] or (turn[0] == number and turn[1] == 2):
                push(messages)  # the node has the message
                died.append(turn)
                raise KeyboardInterrupt
        return push(messages)

    grid.push_messages = crash
    with pytest.raises(KeyboardInterrupt):
        serve(grid, settings, tmp_path / "run", lambda text: None)
    assert died
    served(tmp_path, settings)
    assert not [line for line in lines(tmp_path / "run") if line["status"] == "lost"]
    equal_runs(tmp_path / "run", tmp_path / "simulated")


def test_a_server_that_died_after_its_last_round_goes_on(tmp_path, monkeypatch):
    settings, federation = prepared(tmp_path, CONFIG)
    with monkeypatch.context() as patch:
        patch.setattr("fedobp.run.Run.result", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            served(tmp_path, settings)
    served(tmp_path, settings)
    federation.run(out=tmp_path / "simulated")
    equal_runs(tmp_path / "run", tmp_path / "simulated")


def _interrupt(*_):
    raise KeyboardInterrupt


def test_a_folder_of_something_else_is_refused_and_kept(tmp_path):
    settings, federation = prepared(tmp_path, CONFIG)
    federation.run(out=tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(FedobpError, match="holds a run of something else: name another folder"):
        served(tmp_path, settings)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_all_that_a_job_asks_shares_one_deadline(tmp_path):
    """A client that never answers is not asked again because another one has lost its state."""
    settings, _ = prepared(tmp_path, CONFIG, deadline=1e-9)
    dead, lost = sampled(3)[0], next(c for c in sampled(3)[1:] if c in sampled(1))

    def say(text):
        if text.startswith("round 2:"):
            for path in (tmp_path / settings.id).glob(f"client-{lost}.*"):
                path.unlink()

    serve(LocalGrid(tmp_path, 5, {dead: forge(no_answer)}), settings, tmp_path / "run", say)
    own = [line["status"] for line in lines(tmp_path / "run") if (line["round"], line["client"]) == (3, dead)]
    assert own == ["late"]
    found = [line["status"] for line in lines(tmp_path / "run") if (line["round"], line["client"]) == (3, lost)]
    assert found == ["lost", "accepted"]


@pytest.mark.parametrize("pushed", ["none", "raises"])
def test_a_message_that_cannot_be_sent_is_noted_and_leaves_the_others_alone(pushed, tmp_path, monkeypatch):
    settings, federation = prepared(tmp_path, CONFIG)
    bad, grid = sampled(3)[0], LocalGrid(tmp_path, 5)
    push = grid.push_messages

    def broken(messages):
        values, _ = unpack(messages[0].content)
        if values.get("visit") == [3, 1] and grid.nodes[messages[0].metadata.dst_node_id] == bad:
            if pushed == "raises":
                raise ConnectionError("the superlink is gone")
            return []
        return push(messages)

    grid.push_messages = broken
    serve(grid, settings, tmp_path / "run", lambda text: None)
    assert statuses(tmp_path / "run") == {(3, bad, "failed")}
    without(monkeypatch, {3: [bad]})
    federation.run(out=tmp_path / "simulated")
    equal_runs(tmp_path / "run", tmp_path / "simulated")


def test_a_node_with_one_label_takes_part(tmp_path):
    """As most nodes with few samples: the others have the other labels."""
    settings, _ = prepared(tmp_path, CONFIG)
    arrays = dict(np.load(tmp_path / "node-1.npz", allow_pickle=False))
    arrays["y"][:] = 7
    np.savez(tmp_path / "node-1.npz", **arrays)
    served(tmp_path, settings)
    assert not statuses(tmp_path / "run")


def test_texts_in_a_table_of_a_node_are_refused(tmp_path):
    """Each node would number its own categories."""
    path = tmp_path / "table.csv"
    path.write_text("site,age,label\nx,1,0\ny,2,1\n")
    with pytest.raises(FedobpError, match="has texts in the column 'site', which every node would number its own way"):
        read_own(path, (0, 1))
    path.write_text("age,label\n1,0\n2,0\n")
    assert read_own(path, (0, 1)).y.tolist() == [0, 0]
    path.write_text("age,label\n1,0\n2,5\n")
    with pytest.raises(FedobpError, match="has the label '5', which the federation has not"):
        read_own(path, (0, 1))


@pytest.mark.parametrize("data", ["", "an empty file"])
def test_a_node_without_data_takes_part(data, tmp_path, monkeypatch):
    """As a client without samples does in a simulation; it has no accuracy."""
    settings, _ = prepared(tmp_path, CONFIG)
    arrays = dict(np.load(tmp_path / "node-1.npz", allow_pickle=False))
    np.savez(tmp_path / "node-1.npz", **{name: value[:0] for name, value in arrays.items()})
    grid = LocalGrid(tmp_path, 5)
    grid.data[1] = grid.data[1] if data else ""
    serve(grid, settings, tmp_path / "run", lambda text: None)
    rows = (tmp_path / "run" / "clients.csv").read_text().splitlines()
    assert rows[2].startswith("1,0,0,")
    assert not statuses(tmp_path / "run")


def test_too_few_nodes_are_one_sentence(tmp_path):
    settings, _ = prepared(tmp_path, CONFIG, wait=0.0)
    with pytest.raises(FedobpError, match="3 of 5 nodes were there after 0 s: start the others"):
        serve(LocalGrid(tmp_path, 3), settings, tmp_path / "run", lambda text: None)


def test_nodes_may_join_late(tmp_path):
    settings, _ = prepared(tmp_path, CONFIG, start_nodes=3, min_replies=0.1)
    grid = LocalGrid(tmp_path, 3)

    def say(text):
        if text.startswith("round 2:"):
            grid.nodes |= {103: 3, 104: 4}

    serve(grid, settings, tmp_path / "run", say)
    assert {
        line["round"] for line in lines(tmp_path / "run") if line["status"] == "offline" and line["kind"] == "train"
    } <= {1, 2}
    trained = {
        client
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        for client in json.loads(line)["cohort"]
    }
    assert trained == {0, 1, 2, 3, 4}


def test_a_method_that_needs_all_data_says_so(tmp_path):
    config = Config(**SMALL, method="decoupled", options={"score": "taylor"})
    with pytest.raises(FedobpError, match="score=taylor needs the data of all clients, which only a simulation has"):
        prepared(tmp_path, config)


def test_other_settings_are_refused(tmp_path):
    settings, _ = prepared(tmp_path, CONFIG)
    other, _ = prepared(tmp_path / "other", Config(**SMALL, method="fedavg"))
    grid = LocalGrid(tmp_path, 5)
    with pytest.raises(FedobpError, match="0 of 5 nodes"):
        serve(grid, replace(other, rules=replace(settings.rules, wait=0.0)), tmp_path / "run", lambda _: None)
    assert "has another federation.toml" in lines(tmp_path / "run")[0]["reason"]


def test_the_settings_survive_their_file(tmp_path):
    settings, _ = prepared(tmp_path, CONFIG)
    assert read_settings(tmp_path / "federation.toml") == settings
