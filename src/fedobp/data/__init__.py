"""Data: datasets by name, partitions over clients, and client data as tensors."""

from fedobp.data.bring import bring
from fedobp.data.datasets import Dataset, Info, catalogue, data_dir, describe, load, names, store
from fedobp.data.federated import FederatedData, Split
from fedobp.data.known import KNOWN
from fedobp.data.partition import PARTITIONS, Shard, partition

__all__ = [
    "KNOWN", "PARTITIONS", "Dataset", "FederatedData", "Info", "Shard", "Split", "bring", "catalogue", "data_dir",
    "describe", "load", "names", "partition", "store",
]  # fmt: skip
