"""What a server does about nodes that are late, lost, wrong or hostile: the round goes on without them.

The oracle is a simulation whose cohorts leave out the clients whose answers were not taken.
"""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Error, Message

from fedobp import Config, Federation, FedobpError, load_results
from fedobp.data import read_own
from fedobp.flower.messages import pack, unpack
from fedobp.flower.server import serve
from fedobp.flower.task import read_settings
from fedobp.sampling import Sampler
from fedobp.storage.tensor_file import read_tensors
from fedobp.wire import decode, encode
from flower.cases import SMALL, LocalGrid, prepared

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
    "late": lambda message, values, payload: None,
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
    rows = (tmp_path / "run" / "clients.csv").read_text().splitlines()
    assert [row.split(",")[4] == "" for row in rows[1:]] == [False, True, False, False, False]  # served


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

    answers = dict.fromkeys(cohort[:2], forge(HOSTILE["late"]))
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

    serve(LocalGrid(tmp_path, 5, {dead: forge(HOSTILE["late"])}), settings, tmp_path / "run", say)
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
    settings, _ = prepared(tmp_path, config)
    with pytest.raises(FedobpError, match="score=taylor needs the data of all clients, which only a simulation has"):
        served(tmp_path, settings)


def test_other_settings_are_refused(tmp_path):
    settings, _ = prepared(tmp_path, CONFIG)
    other, _ = prepared(tmp_path / "other", Config(**SMALL, method="fedavg"))
    grid = LocalGrid(tmp_path, 5)
    with pytest.raises(FedobpError, match="0 of 5 nodes"):
        serve(
            grid,
            other.__class__(**{**vars(other), "rules": settings.rules.__class__(wait=0.0)}),
            tmp_path / "run",
            lambda _: None,
        )
    assert "has another federation.toml" in lines(tmp_path / "run")[0]["reason"]


def test_the_settings_survive_their_file(tmp_path):
    settings, _ = prepared(tmp_path, CONFIG)
    assert read_settings(tmp_path / "federation.toml") == settings
