"""Runs in plain words: what was trained, and by which protocol it is reported."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fedobp.config import Config
from fedobp.evaluation import make_protocol
from fedobp.plugins import label
from fedobp.report.sections import Section, partition_words

if TYPE_CHECKING:
    from fedobp.saved_runs import SavedRun

GLOSSARY = {
    "Pooled": "Accuracy on the test samples of all evaluated clients together: a client counts by its samples.",
    "Client mean": "Mean of the clients' accuracies: every client counts the same.",
    "Worst tenth": "Mean accuracy of the tenth of clients with the lowest accuracy (at least one).",
    "Smallest quarter": "Mean accuracy of the quarter of clients with the fewest training samples (at least one).",
    "Last": "Pooled accuracy of each client's own last local model; of the global model if it was never selected.",
    "Fine-tuned": "Pooled accuracy of the served models after more local training.",
    "New clients": "Pooled accuracy of clients that are held out from training, with the model that they get at first.",
    "Without labels": "The same with the global model, and a label prior found by EM on a new client's inputs alone.",
    "After one round, two": "The same after a new client has trained once or twice by itself.",
    "Personal": "Parameters of the served model that a client keeps to itself; mean over clients, in the last round.",
    "Down, up": "Payload of all messages of a round's clients, to them and from them; without evaluation.",
    "Time": "Seconds of a whole run. Runs that train side by side get an equal share each.",
    "Mean ± deviation": "Over runs that differ in their seeds only; the standard deviation with n - 1.",
}


def listed(values: Iterable[object], last: str = "and") -> str:
    """Return distinct values in words: a, b and c."""
    words = list(dict.fromkeys(map(str, values)))
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else "".join(words)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where needed."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def statuses(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return what became of messages to nodes, in words: 12 accepted, 1 late."""
    found = Counter(str(one.get("status")) for one in messages)
    return ", ".join(f"{count:,} {status}" for status, count in sorted(found.items()))


def model_size(runs: "Iterable[SavedRun]") -> int | None:
    """Return the number of a model's parameters, if some run has personal ones: their share is known then."""
    found = {round(own["mean"] / own["share"]) for run in runs if (own := run.result["personal"])["share"]}
    return found.pop() if len(found) == 1 else None


def setting_in_words(section: Section) -> list[str]:
    """Return the configuration and the protocol of a section's runs, a sentence each."""
    runs = section.runs
    configs = [run.config for run in runs]
    first = configs[0]

    def either(value: Callable[[Config], Any]) -> str:
        return listed((f"{one:,}" if isinstance(one := value(config), int) else str(one) for config in configs), "or")

    size = model_size(runs)
    validation = f", and {first.val_ratio:.0%} of its training part for validation" if first.val_ratio else ""
    more = [
        *([f"momentum {either(lambda c: f'{c.momentum:g}')}"] if any(c.momentum for c in configs) else []),
        *([f"weight decay {either(lambda c: f'{c.weight_decay:g}')}"] if any(c.weight_decay for c in configs) else []),
    ]
    schedule = {"constant": "constant", "cosine": "falling by a cosine"}
    sentences = [
        f"{first.clients:,} clients, {either(lambda c: c.cohort_size)} in each round, "
        f"{either(lambda c: c.rounds)} rounds.",
        f"The data is {first.dataset}, assigned to clients by {partition_words(first)}; each client has a training and "
        f"a test part{validation}.",
        f"In a round, a client trains {either(lambda c: c.epochs)} local epochs of SGD in batches of "
        f"{either(lambda c: c.batch_size)}, with a {either(lambda c: schedule.get(c.lr_schedule, c.lr_schedule))} "
        f"learning rate of {either(lambda c: f'{c.lr:g}')}{''.join(f', {one}' for one in more)}.",
        f"The network is {either(lambda c: label(c.model))}{f', with {size:,} parameters' if size else ''}.",
        _seeds(configs),
        *dict.fromkeys(map(_protocol, configs)),
    ]
    if any(config.finetune_epochs for config in configs):
        sentences.append(
            f"Fine-tuned models have had {either(lambda c: c.finetune_epochs)} more local epochs on their client."
        )
    if first.holdout_clients:
        sentences.append(
            f"{counted(first.holdout_clients, 'client')} never train; they are new clients, and in no other number."
        )
    guesses = [run.result["accuracy"]["majority_class"] for run in runs]
    sentences.append(
        "Always answering each client's most frequent training label would give a pooled accuracy of "
        f"{sum(guesses) / len(guesses):.2f}."
    )
    return sentences


def _seeds(configs: list[Config]) -> str:
    seeds = sorted({config.seed for config in configs})
    partitions = sorted({config.partition_seed for config in configs})
    noun = "Seed" if len(seeds) == 1 else "Seeds"
    head = f"{noun} {listed(seeds)} of initial weights, sampling and batches"
    if all(config.partition_seed == config.seed for config in configs):
        return f"{head}; the partition has the same seed."
    return f"{head}; partition seed{'s' * (len(partitions) > 1)} {listed(partitions)}."


def _protocol(config: Config) -> str:
    protocol = make_protocol(config.protocol, config.rounds, config.evaluated)
    chosen = (
        " The round is chosen on the test samples, so the numbers are better than those of a model that is chosen "
        "without them."
        if protocol.pick == "best"
        else ""
    )
    whose = "the test parts of all clients" if protocol.clients == "all" else protocol.test_parts
    return (
        f"Reported is {'the ' * (protocol.pick == 'best')}{protocol.reported} (protocol {protocol.name}): accuracy in "
        f"per cent on {whose}, of the models as served, before further local training.{chosen}"
    )
