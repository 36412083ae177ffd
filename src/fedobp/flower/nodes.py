"""The nodes of a federation, as its server sees them: who they are, and messages to them.

A node is one client. Which one it says itself when it is greeted first; from then on that client is bound to the node's
id, which Flower binds to the node's registered key. What became of each message is a line in `messages.jsonl`.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedobp.errors import FedobpError, described, short
from fedobp.files import read_checked_json, write_checked_json
from fedobp.flower.messages import pack, unpack
from fedobp.flower.task import FederationSettings

# What a forged answer can raise where it is read.
_WRONG = (FedobpError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError)
_MOST_SAMPLES = 10**9  # of a client
_PAUSE = 30.0  # seconds after which a node is asked again that was no client of this federation
_POLL = 0.5  # seconds between two looks for answers
Say = Callable[[str], None]


class Request(NamedTuple):
    """What a client is asked. Its payload is made when it is sent: those of all clients would take much memory."""

    values: Mapping[str, Any]
    payload: Callable[[], bytes] = bytes


@dataclass
class Asked:
    """A message that a node has not answered yet."""

    client: int
    node: int
    tries: int
    began: float
    size: int


Read = Callable[[int, dict[str, Any], bytes], Any]  # makes an answer of a client's values and payload, or refuses them


class Nodes:
    """The nodes of a federation: who they are, and messages to them, each of which is logged."""

    def __init__(self, grid: Grid, settings: FederationSettings, folder: Path, longest: int, say: Say) -> None:
        self._say = say
        self._grid, self._settings, self._folder, self._longest = grid, settings, folder, longest
        self._bound, self.about = self._read_bound(), dict[int, dict[str, Any]]()
        self._asked_again = dict[int, float]()  # when nodes that are no client of this federation are asked again
        self._reasons = list[str]()  # why they are none
        self._greeted = dict[str, Asked]()  # nodes that were asked who they are
        self.session, self.statuses = uuid4().hex, Counter[tuple[str, str]]()  # by kind and status

    def _read_bound(self) -> dict[int, int]:
        """Return which node is which client, as an earlier server noted."""
        path = self._folder / "nodes.json"
        try:
            return {int(node): int(one) for node, one in read_checked_json(path).items()} if path.exists() else {}
        except (ValueError, TypeError) as error:
            raise FedobpError(f"{short(path, 200)} is damaged: remove it, and nodes say anew who they are") from error

    def greet(self) -> None:
        """Ask nodes that are new here which client they are, and take what has been answered; this does not wait."""
        here, now = list(self._grid.get_node_ids()), time.monotonic()
        asked = {one.node for one in self._greeted.values()} | {n for n, at in self._asked_again.items() if now < at}
        new = [node for node in here if node not in asked and self._bound.get(node) not in self.about]
        end = time.monotonic() + self._settings.rules.wait
        self._greeted |= self._push("query", {node: (-1, Request({})) for node in new}, end, tries=0)
        before = dict(self._bound)
        for message in self._pull(list(self._greeted)) if self._greeted else ():
            one = self._greeted.pop(message.metadata.reply_to_message_id, None)
            if one is None or message.has_error():
                continue  # it is asked again while it is there
            try:
                values, _ = unpack(message.content, self._longest)
                self._bind(one.node, values)
            except FedobpError as error:
                self._asked_again[one.node] = time.monotonic() + _PAUSE
                self.log("query", 0, -1, one.node, "refused", reason=str(error))
                if str(error) not in self._reasons:
                    self._reasons.append(str(error))
                    self._say(str(error))
        if self._bound != before:
            write_checked_json(self._folder / "nodes.json", {str(node): client for node, client in self._bound.items()})

    def _bind(self, node: int, about: dict[str, Any]) -> None:
        client, clients = about.get("client"), self._settings.config.clients
        if "error" in about:
            raise FedobpError(f"node {node} says: {short(about['error'], 300)}")
        if about.get("federation") != self._settings.id:
            raise FedobpError(f"node {node} has another federation.toml: give it this one")
        if type(client) is not int or not 0 <= client < clients:
            raise FedobpError(f"node {node} says it is client {short(client)}, and clients are 0 to {clients - 1}")
        if self._bound.get(node, client) != client:
            known = self._bound[node]
            raise FedobpError(f"node {node} says it is client {client}, and it is client {known} in nodes.json")
        if any(other != node and known == client for other, known in self._bound.items()):
            raise FedobpError(f"node {node} says it is client {client}, which is another node in nodes.json")
        numbers = {name: about.get(name) for name in ("train", "test", "entropy")}
        entropy = numbers["entropy"]
        counts = _is_count(numbers["train"]) and _is_count(numbers["test"])
        if not counts or not isinstance(entropy, float) or not 0 <= entropy < math.inf:
            raise FedobpError(f"node {node} says nothing of its samples: it must run this version of fedobp")
        self._bound[node], self.about[client] = client, {"client": client, **numbers}

    def connected(self) -> dict[int, int]:
        """Return the clients whose nodes are there, with their nodes."""
        here = set(self._grid.get_node_ids())
        return {client: node for node, client in self._bound.items() if node in here and client in self.about}

    def wait_for(self, count: int, seconds: float) -> None:
        """Wait until so many clients are there."""
        end = time.monotonic() + seconds
        while len(self.connected()) < count:
            self.greet()
            if (here := len(self.connected())) >= count:
                break
            if time.monotonic() > end:
                why = f" ({short(self._reasons[-1], 300)})" if self._reasons else ""
                raise FedobpError(
                    f"{here} of {count} nodes were there after {seconds:g} s{why}: start the others, and run this again"
                )
            time.sleep(_POLL)
        self._say(f"{len(self.connected())} nodes are there")

    def ask(
        self, kind: str, requests: Mapping[int, Request], read: Read, number: int, end: float | None = None
    ) -> dict[int, Any]:
        """Ask clients, and return the answers that came before the `end` (by default the deadline) and were right.

        None is the answer of a client that has lost its state.
        """
        end = time.monotonic() + self._settings.rules.deadline if end is None else end
        self.greet()
        here = self.connected()
        for client in requests:
            if client not in here:
                self.log(kind, number, client, None, "offline")
        sent = {here[client]: (client, request) for client, request in requests.items() if client in here}
        answers = self._send(kind, sent, end, read, number)
        return {sent[node][0]: answer for node, answer in answers.items()}

    def _send(
        self,
        kind: str,
        requests: Mapping[int, tuple[int, Request]],
        end: float,
        read: Read,
        number: int = 0,
    ) -> dict[int, Any]:
        """Send messages to nodes, and return their answers by node; errors are retried within the deadline."""
        found = dict[int, Any]()
        waiting = self._push(kind, requests, end, tries=0, number=number)
        while waiting:
            is_last = time.monotonic() >= end  # what has come by then still counts
            again = dict[int, int]()
            for message in self._pull(list(waiting)):
                asked = waiting.pop(message.metadata.reply_to_message_id, None)
                if asked is None:
                    self.log(kind, number, -1, message.metadata.src_node_id, "refused", reason="it was not asked")
                    continue
                try:
                    if message.has_error():
                        raise ConnectionError(short(message.error.reason or message.error.code, 200))
                    values, payload = unpack(message.content, self._longest)
                    if "error" in values:
                        raise ConnectionError(short(values["error"], 200))
                    found[asked.node] = read(asked.client, values, payload)
                    status = "lost" if found[asked.node] is None else "accepted"
                    self.log(kind, number, asked.client, asked.node, status, asked, len(payload), values)
                except ConnectionError as error:
                    self.log(kind, number, asked.client, asked.node, "failed", asked, reason=str(error))
                    if asked.tries < self._settings.rules.retries:
                        again[asked.node] = asked.tries + 1
                except _WRONG as error:
                    reason = str(error) if isinstance(error, FedobpError) else described(error)
                    self.log(kind, number, asked.client, asked.node, "refused", asked, reason=short(reason, 300))
            if is_last:
                break
            for node, tries in again.items():
                waiting |= self._push(kind, {node: requests[node]}, end, tries, number)
            if waiting:
                time.sleep(_POLL)
        for asked in waiting.values():
            self.log(kind, number, asked.client, asked.node, "late", asked)
        return found

    def _push(
        self, kind: str, requests: Mapping[int, tuple[int, Request]], end: float, tries: int, number: int = 0
    ) -> dict[str, Asked]:
        """Push messages one by one: one that cannot be sent leaves the others alone."""
        kinds = {"train": MessageType.TRAIN, "evaluate": MessageType.EVALUATE, "query": MessageType.QUERY}
        pushed = dict[str, Asked]()
        for node, (client, request) in requests.items():
            payload, seconds = request.payload(), max(1.0, end - time.monotonic())
            content = pack(request.values, payload)
            message = Message(content, dst_node_id=node, message_type=kinds[kind], ttl=seconds)
            try:
                identity = next(iter(self._grid.push_messages([message])), None)
                reason = "the superlink did not take the message"
            except Exception as error:  # of Flower, or of the network
                identity, reason = None, described(error)
            if identity:
                pushed[identity] = Asked(client, node, tries, time.monotonic(), len(payload))
            else:
                self.log(kind, number, client, node, "failed", reason=short(reason, 300))
        return pushed

    def _pull(self, identities: Sequence[str]) -> Iterable[Message]:
        """Return answers that have come; if one of them cannot be read, the others still are."""
        try:
            return list(self._grid.pull_messages(identities))
        except Exception:
            found = list[Message]()
            for identity in identities:
                with suppress(Exception):
                    found += self._grid.pull_messages([identity])
            return found

    def log(
        self,
        kind: str,
        number: int,
        client: int,
        node: int | None,
        status: str,
        asked: Asked | None = None,
        up: int = 0,
        values: Mapping[str, Any] | None = None,
        reason: str = "",
    ) -> None:
        """Add a line to `messages.jsonl`: what became of one message."""
        self.statuses[kind, status] += 1
        line: dict[str, Any] = {"round": number, "kind": kind, "client": client, "node": node, "status": status}
        if asked:
            line |= {"down": asked.size, "up": up, "seconds": round(time.monotonic() - asked.began, 3)}
        if isinstance(working := (values or {}).get("seconds"), float) and math.isfinite(working):
            line["working"] = round(working, 3)  # seconds of the node itself; the rest is waiting and transport
        if reason:
            line["reason"] = reason
        with (self._folder / "messages.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST_SAMPLES
