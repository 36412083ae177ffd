"""Import of images of one size, from one folder per class or from bytes."""

import io
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedobp.data.free_memory import memory_guard
from fedobp.errors import FedobpError, first_line, short
from fedobp.files import regular

_TRAINING = ("train", "training", "val", "valid", "validation")  # in this order; validation images count as training
_TEST = ("test", "testing")
# Of the formats that Pillow knows, those of pixels: it has EPS files drawn by Ghostscript, which executes them.
_FORMATS = (
    "AVIF", "BMP", "DDS", "DIB", "GIF", "ICO", "JPEG", "JPEG2000", "MSP", "PCX", "PNG", "PPM", "QOI", "SGI", "TGA",
    "TIFF", "WEBP", "XBM",
)  # fmt: skip


# A header may say anything: a larger image has more than a thousandth of a byte for each pixel.
_MANY_PIXELS, _PIXELS_PER_BYTE = 2**24, 1000


class ImageArray:
    """An array of `count` images, filled one by one: all of one size, and all grey or all in colour."""

    def __init__(self, count: int) -> None:
        self.x: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._count, self._done, self._first = count, 0, ""

    def add(self, where: str, file: Path | bytes) -> None:
        """Read the next image; `where` names it in errors."""
        pixels = _read_pixels(where, file)
        if not self._done:
            with memory_guard(f"{self._count:,} images of {_describe_shape(pixels.shape)}", self._count * pixels.size):
                self.x, self._first = np.empty((self._count, *pixels.shape), np.uint8), where
        if pixels.shape != self.x.shape[1:]:
            raise FedobpError(
                f"{where} is {_describe_shape(pixels.shape)} and {self._first} is {_describe_shape(self.x.shape[1:])}: "
                "images must have one size, and be all grey or all in colour"
            )
        self.x[self._done] = pixels
        self._done += 1

    def of_rows(self, present: NDArray[np.bool_], kept: NDArray[np.bool_]) -> NDArray[np.uint8]:
        """Return the images of the kept rows, of which those that are `present` were added."""
        return self.x if kept.all() else self.x[: self._done][kept[present]]


def read_images(
    folder: Path, progress: Callable[[str, float], None]
) -> tuple[NDArray[np.uint8], NDArray[np.str_], int | None]:
    """Return images, for each its class, and how many of them, which come first, are for training.

    The folder holds one folder per class; or folders `train` and `test`, which do. Without `train`, the number is None.
    """
    parts = _split_folders(folder)
    training, test = [_classes(part) for part in parts[0]], [_classes(part) for part in parts[1]]
    known = {path.name for classes in training for path in classes}
    for path in (path for classes in test for path in classes if path.name not in known):
        raise FedobpError(
            f"{short(path, 200)} holds test images of class '{short(path.name)}', which has no training images: add "
            "some, or remove it"
        )
    files = [[file for classes in split for path in classes for file in _files(path)] for split in (training, test)]
    both = files[0] + files[1]
    images = ImageArray(len(both))
    for at, file in enumerate(both):
        progress(f"reading {len(both):,} images", at / len(both))
        images.add(short(file, 200), file)
    return images.x, np.array([file.parent.name for file in both]), None if parts[0] == [folder] else len(files[0])


def _split_folders(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the folders of training and of test images; a folder without splits is the only one for training."""
    inner = _subfolders(folder)
    found = {path: path.name.lower() for path in inner}
    # A class may be called train: a split holds folders, and a class holds images.
    if not any(name in (*_TRAINING, *_TEST) and _subfolders(path) for path, name in found.items()):
        return [folder], []
    training, test = ([path for path in inner if found[path] in names] for names in (_TRAINING, _TEST))
    if others := [path for path in inner if path not in training + test]:
        raise FedobpError(
            f"{short(others[0], 200)} is beside {short((training + test)[0].name)}: move it into a folder for training "
            "or testing, or remove it"
        )
    _refuse_images(folder, "splits: move it into one of their classes")
    if not training:
        raise FedobpError(f"{short(folder, 200)} has test images only: put the others into a folder train beside them")
    return sorted(training, key=lambda path: _TRAINING.index(found[path])), test


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _classes(folder: Path) -> list[Path]:
    if classes := _subfolders(folder):
        _refuse_images(folder, "classes: move it into one of them")
        return classes
    raise FedobpError(
        f"{short(folder, 200)} holds no folders: put the images of each class into a folder with the class's name"
    )


def _refuse_images(folder: Path, beside: str) -> None:
    """Raise a user error for an image, as its name tells, beside folders; others, such as a README, are ignored."""
    from PIL import Image

    readable = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in readable and not path.name.startswith(".") and not path.is_dir():
            raise FedobpError(f"{short(path, 200)} is beside the folders of {beside}, or remove it")


def _files(class_folder: Path) -> list[Path]:
    paths = sorted(path for path in class_folder.iterdir() if not path.name.startswith("."))
    if not paths:
        raise FedobpError(
            f"{short(class_folder, 200)} is empty: put the images of class '{short(class_folder.name)}' into it, "
            "or remove it"
        )
    if inner := next((path for path in paths if path.is_dir()), None):
        raise FedobpError(
            f"{short(inner, 200)} is a folder: the images of class '{short(class_folder.name)}' must lie in "
            f"{short(class_folder, 200)} itself"
        )
    return paths


def _read_pixels(where: str, file: Path | bytes) -> NDArray[np.uint8]:
    """Return an image as [height, width], or as [height, width, 3] if it is in colour; transparency is dropped."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"PIL\.")  # warnings about unusual files that it can read
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # too many pixels
            with Image.open(regular(file) if isinstance(file, Path) else io.BytesIO(file), formats=_formats()) as image:
                pixels, size = image.width * image.height, file.stat().st_size if isinstance(file, Path) else len(file)
                if pixels > max(_MANY_PIXELS, _PIXELS_PER_BYTE * size):
                    raise FedobpError(f"{where} has {size:,} bytes and says that it has {pixels:,} pixels: repair it")
                deep = image.mode.startswith(("I", "F"))
                if not deep:
                    # The decoded and the converted image: four bytes per pixel each.
                    with memory_guard(where, 8 * pixels):
                        return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))
    except (FedobpError, MemoryError):
        raise
    except Exception as error:  # a damaged image can make Pillow raise nearly anything
        reason = (
            "no image of a known format, such as PNG or JPEG"
            if isinstance(error, UnidentifiedImageError)
            else first_line(error)
        )
        raise FedobpError(f"{where} cannot be read as an image ({reason}): repair it, or remove it") from error
    raise FedobpError(f"{where} has more than 8 bits for a pixel: save it with 8, or import an npz with floats")


@cache
def _formats() -> list[str]:
    from PIL import Image

    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]  # not every build of Pillow has all of them


def _describe_shape(shape: tuple[int, ...]) -> str:
    return f"{shape[1]} x {shape[0]} pixels, {'colour' if len(shape) == 3 else 'grey'}"
