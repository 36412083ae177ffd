"""Run two commits on the same settings and compare every file that they write.

    python benchmarks/same_runs.py BEFORE [AFTER] [--renamed cold=new_clients ...]

Every method in every mode runs on both engines, and all of them once more side by side as one sweep. Compared are
`config.toml`, `metrics.jsonl`, `result.json` (without times and paths) and both model files, byte for byte, after the
keys named by `--renamed` have been replaced in the files of BEFORE. AFTER is the working tree unless it is named.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SETTINGS: dict[str, Any] = {
    "clients": 12, "participation": 0.4, "rounds": 12, "epochs": 2, "eval_every": 4, "momentum": 0.5,
    "finetune_epochs": 1, "holdout_clients": 2, "val_ratio": 0.1, "alpha": 0.5, "device": "cpu", "precision": "fp32",
}  # fmt: skip


def methods() -> Iterator[tuple[str, dict[str, str]]]:
    """Return (name, options) of every method in every mode."""
    from fedobp.algorithms import METHODS

    for name, method in METHODS.items():
        modes = [choice for spec in method.options() if spec.name == "mode" for choice in spec.metadata["choices"]]
        for mode in modes or [None]:
            yield name, {} if mode is None else {"mode": mode}


def small_bn(shape: Sequence[int], classes: int) -> Any:
    """Return a network with BatchNorm for the 8x8 digits."""
    from torch import nn

    layers = {
        "conv": nn.Conv2d(shape[0], 6, 3), "bn": nn.BatchNorm2d(6), "relu": nn.ReLU(), "flatten": nn.Flatten(),
        "classifier": nn.Linear(6 * (shape[1] - 2) * (shape[2] - 2), classes),
    }  # fmt: skip
    return nn.Sequential(OrderedDict(layers))


def work(out: Path) -> None:
    """Run everything with the `fedobp` on the path."""
    import torch

    import fedobp
    from fedobp.models import NETS

    torch.set_num_threads(1)
    NETS["small-bn"] = small_bn
    cases = list(methods())
    for engine in ("serial", "lanes"):
        for name, options in cases:
            model = "small-bn" if name in ("fedbn", "fedobp", "fedselect") else "mlp"
            config = fedobp.Config(method=name, options=options, engine=engine, model=model, **SETTINGS)
            target = out / engine / "-".join([name, *options.values()])
            fedobp.Federation(config).run(out=target)
            print(target.relative_to(out), flush=True)
    plain = [case for case in cases if case[0] != "fedbn"]  # which is FedAvg without BatchNorm
    configs = [
        fedobp.Config(method=name, options=options, model="mlp", seed=42 + at % 2, **SETTINGS)
        for at, (name, options) in enumerate(plain)
    ]
    folders = [out / "sweep" / "-".join([name, *options.values()]) for name, options in plain]
    fedobp.sweep(configs, out=folders)
    print("sweep", flush=True)


def run(commit: str | None, folder: Path) -> Path:
    """Run a commit (None: the working tree) in a process of its own; return where its files are."""
    tree, out = ROOT, folder / (commit or "tree") / "out"
    if commit is not None:
        tree = folder / commit / "tree"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--detach", "--quiet", tree, commit], check=True)
    try:
        environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
        subprocess.run([sys.executable, __file__, "--work", out], env=environment, check=True, stdout=sys.stderr)
    finally:
        if commit is not None:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)
    return out


_OF_THE_FILE = ("seconds", "out", "format", "files", "sha256")


def content(path: Path, renamed: dict[str, str]) -> bytes:
    """Return what must be equal of a file: without times, paths, checksums and the line that names versions."""
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        return data
    text = data.decode()
    for old, new in renamed.items():
        text = re.sub(rf'"{re.escape(old)}":', f'"{new}":', text)
    if path.name == "result.json":
        result = json.loads(text)
        return json.dumps({key: value for key, value in result.items() if key not in _OF_THE_FILE}).encode()
    return "\n".join(line for line in text.splitlines() if not line.startswith("# Made by")).encode()


def main() -> None:
    """Compare two commits, and say which files differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", help="a commit, or a folder of files that an earlier call kept")
    parser.add_argument("after", nargs="?")
    parser.add_argument("--renamed", nargs="*", default=[], metavar="OLD=NEW")
    parser.add_argument("--keep", type=Path, help="folder in which the files stay")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work)
        return
    renamed = dict(pair.split("=") for pair in given.renamed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch)
        before = Path(given.before) if Path(given.before).is_dir() else run(given.before, folder)
        after = run(given.after, folder)
        names = [
            {path.relative_to(top) for path in top.rglob("*") if path.is_file() and path.name != "timings.jsonl"}
            for top in (before, after)
        ]
        differ = sorted(map(str, names[0] ^ names[1]))
        for name in sorted(names[0] & names[1]):
            if content(before / name, renamed) != content(after / name, {}):
                differ.append(str(name))
    print(f"{len(names[0] | names[1])} files, {len(differ)} differ", *differ, sep="\n  ")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
