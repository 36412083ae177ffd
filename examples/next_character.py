"""Next-character prediction over the source of Python's standard library: one module is one client.

    python examples/next_character.py --rounds 100

Every Python installation has this text, and modules differ as users do: in words, style and length. Tokens are
characters; a sample is a window of 65 of them, whose every next character is predicted.
"""

import argparse
import sys
import sysconfig
from pathlib import Path

import numpy as np

import fedobp

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # token 0 is any other one
SETTINGS = {"participation": 0.2, "lr": 1.0, "batch_size": 16}
METHODS = ("fedavg", "fedavg-last", "fedper", "fedobp")


def windows(text: str, length: int, most: int) -> np.ndarray:
    """Return a text as windows of tokens that do not overlap, [windows, length + 1]."""
    tokens = np.array([CHARACTERS.find(one) + 1 for one in text], dtype=np.uint8)
    count = min(most, len(tokens) // (length + 1))
    return tokens[: count * (length + 1)].reshape(count, length + 1)


def modules(clients: int, length: int, most: int) -> dict[str, np.ndarray]:
    """Return the windows of the standard library's longest modules, by name."""
    files = Path(sysconfig.get_paths()["stdlib"]).glob("*.py")
    texts = {file.stem: file.read_text(encoding="utf-8", errors="replace") for file in files}
    longest = sorted(texts, key=lambda name: (-len(texts[name]), name))[:clients]
    return {name: windows(texts[name], length, most) for name in longest}


def main() -> None:
    """Train four methods side by side, and print their accuracy and perplexity."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--windows", type=int, default=200, help="at most, of one module")
    parser.add_argument("--length", type=int, default=64, help="characters of a window")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--model", default="lstm")
    parser.add_argument("--seed", type=int, default=42)
    given = parser.parse_args()
    dataset = fedobp.Dataset.from_data(
        modules(given.clients, given.length, given.windows),
        tokens=True,
        vocabulary=len(CHARACTERS) + 1,
        name="standard-library",
    )
    print(f"{dataset}; Python {sys.version.split()[0]}")
    configs = [
        fedobp.Config(method=method, model=given.model, rounds=given.rounds, seed=given.seed, **SETTINGS)
        for method in METHODS
    ]
    for result in fedobp.sweep(configs, dataset=dataset, keep_models=False):
        perplexity = result.accuracy.metrics["perplexity"].pooled
        line = f"{result.config.method:12} accuracy {result.accuracy.pooled:.2f}, perplexity {perplexity:.3f}"
        print(f"{line}, own last model {result.last.pooled:.2f}, {result.personal.mean:,.0f} personal parameters")


if __name__ == "__main__":
    main()
