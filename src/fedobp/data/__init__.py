"""Data: datasets by name, partitions over clients, and client data as tensors."""

from fedobp.data.bring import bring
from fedobp.data.datasets import Dataset, Info, catalogue, data_dir, describe, load, names, store
from fedobp.data.federated import FederatedData, Split
from fedobp.data.fetch import fetch
from fedobp.data.known import KNOWN
from fedobp.data.partition import PARTITIONS, Shard, partition
from fedobp.data.scaling import way_of

__all__ = [
    "KNOWN", "PARTITIONS", "Dataset", "FederatedData", "Info", "Shard", "Split", "bring", "catalogue", "data_dir",
    "describe", "fetch", "load", "names", "partition", "store", "way_of",
]  # fmt: skip
