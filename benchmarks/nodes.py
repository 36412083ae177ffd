"""A federation on Flower nodes: seconds of a round and where they go, many nodes, and the memory of the server.

    python benchmarks/nodes.py rounds                   # 3 nodes, 6 rounds, with TLS: about a minute
    python benchmarks/nodes.py rounds --cold            # the same without a worker beside each node
    python benchmarks/nodes.py many                     # 20 registered nodes, 4 in a round, 10 rounds
    python benchmarks/nodes.py memory                   # a server that keeps 100 clients' models, in files or in memory

`rounds` and `many` start a superlink and supernodes here, on the loopback interface. `memory` starts none.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

from fedobp import Config, Federation
from fedobp.flower.deploy import run_on_loopback
from fedobp.flower.project import node_arrays
from fedobp.flower.task import Inputs, Rules, make_settings
from fedobp.saved_runs import read_run

# Answers in the process that Flower starts for a message, as if there were no worker beside the node.
_COLD = """
import sys
if "clientapp" in sys.argv[0]:
    from pathlib import Path
    from fedobp.flower import worker

    def answer(arguments, kind, values, payload):
        from fedobp.flower.node import make_node
        file, client, data, folder, device = arguments
        return make_node(Path(file), int(client), data, Path(folder), device).answer(kind, values, payload)

    worker.ask_worker = answer
"""


def deployed(nodes: int, rounds: int, cohort: int, model: str, cold: bool) -> None:
    """Run a federation on the digits for real, and say where its time went."""
    config = Config(
        method="fedobp", clients=nodes, rounds=rounds, participation=cohort / nodes, model=model, engine="serial",
        device="cpu", alpha=1.0, eval_every=rounds,
    )  # fmt: skip
    federation = Federation(config)
    settings = make_settings(federation.config, Inputs.of(federation.source, federation.data), Rules())
    with tempfile.TemporaryDirectory() as place:
        if cold:
            Path(place, "sitecustomize.py").write_text(_COLD)
            os.environ["PYTHONPATH"] = place  # of all processes that are started here
        began = time.perf_counter()
        saved = read_run(run_on_loopback(Path(place, "federation"), settings, node_arrays(federation), tls=True))
        lines, seconds = saved.messages(), [line["all"] for line in saved.timings()[:-1]]
    trained = [line for line in lines if line["kind"] == "train" and line["status"] == "accepted"]
    print(f"{settings.config.rounds} rounds of {cohort} of {nodes} nodes, {time.perf_counter() - began:.0f} s in all")
    print("messages:", dict(Counter(f"{line['kind']} {line['status']}" for line in lines)))
    print(f"a round without evaluation: median {median(seconds):.1f} s, {min(seconds):.1f} to {max(seconds):.1f}")
    waited = [line["seconds"] - line["working"] for line in trained]
    whole, worked = (median(line[name] for line in trained) for name in ("seconds", "working"))
    print(
        f"a message to train: median {whole:.1f} s; the node worked {worked:.2f} s, {median(waited):.1f} s were others'"
    )
    for what, module in (
        ("the client app", "fedobp.flower.client"),
        ("the client app with torch", "fedobp.flower.node"),
    ):
        times = []
        for _ in range(5):
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
            times.append(time.perf_counter() - started)
        print(f"a process that loads {what}: median {median(times):.2f} s")


_MEMORY = """
import resource, sys
from pathlib import Path
import torch
from fedobp import Config
from fedobp.engine import Budget, Store
from fedobp.models import Model
from fedobp.algorithms import METHODS

model = Model("cnn", (3, 32, 32), 10)
initial = METHODS["fedobp"]().init(model, model.initial(0), 0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store = Store(initial.record, {clients}, Budget({budget}))
for first in range(0, {clients}, 10):
    cohort = list(range(first, min(first + 10, {clients})))
    records = store.gather(cohort)
    records["theta"] = torch.randn(len(cohort), model.layout.size)
    store.scatter(cohort, records)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(model.layout.size, (after - before) / 1024)
"""


def memory(clients: int) -> None:
    """Measure the peak memory of a server's records, in processes of their own."""
    for where, budget in (("in files", "0"), ("in memory", "float('inf')")):
        code = _MEMORY.format(clients=clients, budget=budget)
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        size, grown = done.stdout.split()
        whole = int(size) * 4 * clients / 2**20
        print(f"{clients} models of {int(size):,} parameters ({whole:.0f} MiB) {where}: {float(grown):.0f} MiB more")
    print(f"this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rounds", "many", "memory"))
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--cold", action="store_true", help="without a worker beside each node")
    given = parser.parse_args()
    if given.what == "memory":
        memory(given.nodes or 100)
    elif given.what == "rounds":
        nodes = given.nodes or 3
        deployed(nodes, given.rounds or 6, nodes, given.model, given.cold)
    else:
        deployed(given.nodes or 20, given.rounds or 10, 4, given.model, given.cold)


if __name__ == "__main__":
    main()
