"""Read plain files, gzip and zstandard as one stream of bytes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..checksum import Checksum


def decompressed(
    path: Path, checksum: Checksum | None = None, piece_bytes: int = 1 << 20
) -> Iterator[tuple[bytes, int]]:
    """Yield (decompressed bytes, position in the file after them); the suffix selects the compression.

    Several gzip members or zstd frames are one stream.

    checksum: gets the bytes of the file. piece_bytes: bytes that are read at a time, a quarter of it if they are compressed.
    Raises ValueError that names file and position if the file is damaged or cut short.
    """
    suffix = path.suffix.lower()
    with open(path, "rb") as file:
        if suffix not in (".gz", ".zst"):
            while chunk := file.read(piece_bytes):
                if checksum is not None:
                    checksum.update(chunk)
                yield chunk, file.tell()
            return
        stream = _decompressor(suffix)
        fed = True  # an empty file is cut short, too
        done = 0
        while chunk := file.read(piece_bytes // 4):
            if checksum is not None:
                checksum.update(chunk)
            while chunk:
                if stream.eof:
                    # gzip files may be padded with zeros after the last member.
                    chunk = chunk.lstrip(b"\0")
                    if not chunk:
                        break
                    stream, fed = _decompressor(suffix), False
                try:
                    out = stream.decompress(chunk)
                except Exception as error:
                    raise ValueError(
                        f"{path} is damaged: no {'gzip' if suffix == '.gz' else 'zstd'} data from byte"
                        f" {file.tell() - len(chunk):,} on ({error}), after {done:,} bytes of text. Copy or download it"
                        " again."
                    ) from error
                fed = True
                chunk = stream.unused_data if stream.eof else b""
                done += len(out)
                if out:
                    yield out, file.tell()
        if fed and not stream.eof:
            raise ValueError(
                f"{path} is cut short: it ends at byte {file.tell():,} in the middle of its compressed data,"
                f" after {done:,} bytes of text. Copy or download it again."
            )


def _decompressor(suffix: str) -> Any:
    if suffix == ".gz":
        return zlib.decompressobj(wbits=31)
    import zstandard

    # Files made with zstd --long need a window beyond the library's default limit.
    return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
