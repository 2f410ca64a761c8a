"""Makes screenshots small enough for a repository: PNGs with a palette of 256 of their colours."""

import struct
import zlib
from collections import Counter
from collections.abc import Iterator

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {2: 3, 6: 4}  # colour type -> bytes per pixel, of eight bits each
_PALETTE = 256
_APART = 8**2  # least squared distance of two colours of the palette; nobody sees less


def shrink(png: bytes) -> bytes:
    """Reduce a picture to 256 colours; it must be opaque with eight bits per channel, as browsers make it."""
    width, height, channels, data = _read(png)
    rows = _unfiltered(data, width * channels, height, channels)
    pixels = [
        list(zip(row[0::channels], row[1::channels], row[2::channels], strict=True)) for row in rows
    ]  # fmt: skip
    palette, index = _palette(Counter(pixel for row in pixels for pixel in row))
    body = b"".join(b"\0" + bytes(map(index.__getitem__, row)) for row in pixels)
    return (
        SIGNATURE
        + _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0))
        + _chunk(b"PLTE", b"".join(map(bytes, palette)))
        + _chunk(b"IDAT", zlib.compress(body, 9))
        + _chunk(b"IEND", b"")
    )


def _read(png: bytes) -> tuple[int, int, int, bytes]:
    assert png.startswith(SIGNATURE), "wanted a PNG"
    at, data, header = len(SIGNATURE), b"", b""
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        kind, content = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        header = content if kind == b"IHDR" else header
        data += content if kind == b"IDAT" else b""
        at += 12 + length
    width, height, bits, colour = struct.unpack_from(">IIBB", header)
    assert bits == 8, f"wanted eight bits per channel, got {bits}"
    assert colour in _CHANNELS, f"wanted colours, got type {colour}"
    return width, height, _CHANNELS[colour], zlib.decompress(data)


def _unfiltered(data: bytes, stride: int, height: int, step: int) -> Iterator[bytes]:
    """Undo PNG's five filters; returns the rows."""
    above = bytearray(stride)
    for number in range(height):
        start = number * (stride + 1)
        row = bytearray(data[start + 1 : start + 1 + stride])
        _undo(data[start], row, above, step)
        above = row
        yield bytes(row)


def _undo(kind: int, row: bytearray, above: bytearray, step: int) -> None:
    if kind == 2:
        row[:] = bytes([(one + up) & 255 for one, up in zip(row, above, strict=True)])
    elif kind:
        guess = {1: _left, 3: _mean, 4: _paeth}[kind]
        for at in range(len(row)):
            left, corner = (row[at - step], above[at - step]) if at >= step else (0, 0)
            row[at] = (row[at] + guess(left, above[at], corner)) & 255


def _left(left: int, _up: int, _corner: int) -> int:
    return left


def _mean(left: int, up: int, _corner: int) -> int:
    return (left + up) // 2


def _paeth(left: int, up: int, corner: int) -> int:
    """Return the neighbour nearest to their plane; the first of equals, as the format requires."""
    to_left, to_up, to_corner = abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)
    if to_left <= to_up and to_left <= to_corner:
        return left
    return up if to_up <= to_corner else corner


def _palette(colours: Counter) -> tuple[list, dict]:
    """Return the most frequent colours that clearly differ, and for every colour the nearest of them.

    Edges of letters have hundreds of greys; similar ones make room for a single blue line.
    """
    palette: list = []
    for colour, _ in colours.most_common():
        if all(_distance(one, colour) >= _APART for one in palette):
            palette.append(colour)
        if len(palette) == _PALETTE:
            break
    index = {
        colour: min(range(len(palette)), key=lambda number: _distance(palette[number], colour))
        for colour in colours
    }
    return palette, index


def _distance(one: tuple, other: tuple) -> int:
    red, green, blue = one[0] - other[0], one[1] - other[1], one[2] - other[2]
    return red * red + green * green + blue * blue


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
