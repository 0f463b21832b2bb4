"""Decoding of image files, with Pillow or, of JPEG files, with simplejpeg.

Shapes: S pixels of a side after resizing.
"""

import io
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from paceline.errors import BadSample, missing_extra

Pixels = np.ndarray[tuple[Any, ...], np.dtype[np.uint8]]

Decoder = Literal["pillow", "simplejpeg"]

_JPEG = b"\xff\xd8\xff"
"""First bytes of a JPEG file."""


def check_pillow() -> None:
    """Refuse image files where Pillow is not installed.

    Raises:
        MissingExtraError: The package is not installed.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise missing_extra("pillow", "vision", "reading image files") from error


def open_simplejpeg() -> Callable[..., Pixels]:
    """Return simplejpeg's decoder.

    Raises:
        MissingExtraError: The package is not installed.
    """
    try:
        from simplejpeg import decode_jpeg
    except ImportError as error:
        raise missing_extra("simplejpeg", "jpeg", "decoder simplejpeg") from error
    found: Callable[..., Pixels] = decode_jpeg
    return found


def decode_image(file: bytes, size: int | None = None, *, name: str, decoder: Decoder = "pillow") -> Pixels:
    """Return an image as RGB, uint8 of shape (height, width, 3), or resized to a square (S, S, 3).

    Args:
        file: Content of the file.
        size: Pixels of a side, whatever the proportions; by default the image has its own.
        name: Name of the file, for errors.
        decoder: Decoder of JPEG files; Pillow decodes all others.

    Raises:
        BadSample: The file is no image, or is damaged.
        MissingExtraError: The decoder is not installed.
    """
    check_pillow()
    from PIL import Image, UnidentifiedImageError

    if decoder == "simplejpeg" and file.startswith(_JPEG):
        decode_jpeg = open_simplejpeg()
        try:
            least = {} if size is None else {"min_height": size, "min_width": size, "min_factor": 1}
            pixels = decode_jpeg(file, colorspace="RGB", **least)
        except ValueError as error:
            raise _refuse(name, error) from error
        if size is None or pixels.shape[:2] == (size, size):
            return pixels
        return np.asarray(Image.fromarray(pixels).resize((size, size), Image.Resampling.BILINEAR))
    try:
        with Image.open(io.BytesIO(file)) as opened:
            if size is not None:
                opened.draft("RGB", (size, size))  # a large JPEG is decoded at a fraction of its size
            image: Image.Image = opened
            if opened.mode.startswith("I"):  # 16 bits, which convert() would clip at 255
                image = Image.fromarray((np.asarray(opened) >> 8).astype(np.uint8))
            image = image.convert("RGB")
            return np.asarray(image if size is None else image.resize((size, size), Image.Resampling.BILINEAR))
    except UnidentifiedImageError as error:
        raise _refuse(name, ValueError("it begins like no image that Pillow knows")) from error
    except Exception as error:  # Pillow raises whatever each format's decoder happens to raise
        raise _refuse(name, error) from error


def _refuse(name: str, error: Exception) -> BadSample:
    return BadSample(
        f"{name} must be a whole image, but got: {error}; replace or remove it", path=name, reason=str(error)
    )
