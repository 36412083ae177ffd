"""Import of images of one size, from one folder per class or from bytes."""

import io
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedobp.data.free_memory import memory_guard
from fedobp.errors import FedobpError, first_line, short
from fedobp.files import regular


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


def read_images(folder: Path, progress: Callable[[str, float], None]) -> tuple[NDArray[np.uint8], NDArray[np.str_]]:
    """Return the images in the subfolders of a folder, and for each image its subfolder's name: the class."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise FedobpError(
            f"{short(folder, 200)} holds no folders: put the images of each class into a folder with the class's name"
        )
    files: list[Path] = []
    names: list[str] = []
    for class_folder in classes:
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
        files += paths
        names += [class_folder.name] * len(paths)
    images = ImageArray(len(files))
    for at, file in enumerate(files):
        progress(f"reading {len(files):,} images", at / len(files))
        images.add(short(file, 200), file)
    return images.x, np.array(names)


def _read_pixels(where: str, file: Path | bytes) -> NDArray[np.uint8]:
    """Return an image as [height, width], or as [height, width, 3] if it is in colour; transparency is dropped."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"PIL\.")  # warnings about unusual files that it can read
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # too many pixels
            with Image.open(regular(file) if isinstance(file, Path) else io.BytesIO(file)) as image:
                deep = image.mode.startswith(("I", "F"))
                if not deep:
                    # The decoded and the converted image: four bytes per pixel each.
                    with memory_guard(where, 8 * image.width * image.height):
                        return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))
    except (FedobpError, MemoryError):
        raise
    except Exception as error:  # a damaged image can make Pillow raise nearly anything
        reason = "no image that Pillow knows" if isinstance(error, UnidentifiedImageError) else first_line(error)
        raise FedobpError(f"{where} cannot be read as an image ({reason}): repair it, or remove it") from error
    raise FedobpError(f"{where} has more than 8 bits for a pixel: save it with 8, or import an npz with floats")


def _describe_shape(shape: tuple[int, ...]) -> str:
    return f"{shape[1]} x {shape[0]} pixels, {'colour' if len(shape) == 3 else 'grey'}"
