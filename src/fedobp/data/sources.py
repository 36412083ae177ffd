"""Sources of the registered datasets: addresses, checksums and sizes of the official files, as in common loaders.

- mnist, fmnist, emnist, svhn: addresses and MD5 as in torchvision 0.30.0a0 (commit e6f0400,
  torchvision/datasets/mnist.py and svhn.py); sizes as in tensorflow-datasets 4.9.10 (commit 470d259,
  tensorflow_datasets/url_checksums/NAME.txt and datasets/svhn_cropped/checksums.tsv), which lists the same addresses,
  but for mnist a mirror with files of the same names.
- cifar10, cifar100: the binary versions, with address, size and SHA-256 as in tensorflow-datasets 4.9.10
  (tensorflow_datasets/url_checksums/cifar10.txt and cifar100.txt).
- organamnist, organcmnist: address and MD5 as in medmnist 3.0.2 (commit 805b742, medmnist/info.py), which gives no
  sizes. The size of organamnist.npz was measured on a file with that MD5; the size of organcmnist.npz is not known, so
  only its checksum is compared.

Checked against a real file: organamnist.npz and the two label files of fmnist. The other checksums are as published.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedobp.data import formats
from fedobp.errors import FedobpError, first_line, short
from fedobp.files import regular


@dataclass(frozen=True)
class File:
    """An official file: name, address, checksum and size."""

    name: str
    url: str
    checksum: str  # ALGORITHM:DIGEST
    size: int | None  # in bytes; None: not published


@dataclass(frozen=True)
class Source:
    """A dataset's official files and their reader."""

    files: tuple[File, ...]
    read: formats.Reader
    installed: Path | None = None  # folder in which a Debian package installs files of the same names


_IDX = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def _idx(folder: str, md5_to_size: Mapping[str, int]) -> tuple[File, ...]:
    """Return the four idx files under a base address, with MD5 and size in the order of `_IDX`."""
    return tuple(
        File(name, folder + name, f"md5:{md5}", size)
        for name, (md5, size) in zip(_IDX, md5_to_size.items(), strict=True)
    )


def _medmnist(name: str, md5: str, size: int | None) -> Source:
    url = f"https://zenodo.org/records/10519652/files/{name}.npz?download=1"
    return Source((File(f"{name}.npz", url, f"md5:{md5}", size),), formats.medmnist)


SOURCES: dict[str, Source] = {
    "mnist": Source(
        _idx(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            {
                "f68b3c2dcbeaaa9fbdd348bbdeb94873": 9_912_422,
                "d53e105ee54ea40749a09fcbcd1e9432": 28_881,
                "9fb629c4189551a2d022fa330f9573f3": 1_648_877,
                "ec29112dd5afa0611ce80d1b7f02629c": 4_542,
            },
        ),
        formats.idx,
    ),
    "fmnist": Source(
        _idx(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            {
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d": 26_421_880,
                "25c81989df183df01b3e8a0aad5dffbe": 29_515,
                "bef4ecab320f06d8554ea6380940ec79": 4_422_102,
                "bb300cfdad3c16e7a12a480ee83cd310": 5_148,
            },
        ),
        formats.idx,
        # The package dataset-fashion-mnist: the same content, compressed differently, so with other checksums.
        installed=Path("/usr/share/datasets/fashion-mnist"),
    ),
    "emnist": Source(
        (
            File(
                "gzip.zip",
                "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
                "md5:58c8d27c78d21e728a6bc7b3cc06412e",
                561_753_746,
            ),
        ),
        formats.emnist,
    ),
    "cifar10": Source(
        (
            File(
                "cifar-10-binary.tar.gz",
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                170_052_171,
            ),
        ),
        formats.cifar10,
    ),
    "cifar100": Source(
        (
            File(
                "cifar-100-binary.tar.gz",
                "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
                "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
                168_513_733,
            ),
        ),
        formats.cifar100,
    ),
    "svhn": Source(
        (
            File(
                "train_32x32.mat",
                "http://ufldl.stanford.edu/housenumbers/train_32x32.mat",
                "md5:e26dedcc434d2e4c54c9b2d4a06d8373",
                182_040_794,
            ),
            File(
                "test_32x32.mat",
                "http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
                "md5:eb5a983be6a315427106f1b164d9cef3",
                64_275_384,
            ),
        ),
        formats.svhn,
    ),
    "organamnist": _medmnist("organamnist", "68e3f8846a6bd62f0c9bf841c0d9eacc", 38_247_708),
    "organcmnist": _medmnist("organcmnist", "b9ceb9546e10131b32923c5bbeaea2b1", None),
}


def installed(name: str) -> list[Path]:
    """Return the files of a dataset that a system package installed; empty if there is none."""
    source = SOURCES.get(name)
    if source is None or source.installed is None:
        return []
    paths = [source.installed / file.name for file in source.files]
    return paths if all(path.is_file() for path in paths) else []


def read(name: str, paths: Sequence[Path], on_progress: formats.OnProgress = lambda share: None) -> formats.Arrays:
    """Read a dataset's arrays from its official files."""
    try:
        return SOURCES[name].read([regular(path) for path in paths], on_progress)
    except (FedobpError, MemoryError):
        raise
    except Exception as error:  # a damaged file can make gzip, tarfile and SciPy raise nearly anything
        raise FedobpError(
            f"the files of dataset '{name}' in {short(paths[0].parent, 200)} cannot be read ({first_line(error)}): get "
            "them anew"
        ) from error
