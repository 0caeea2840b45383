"""Reading .zst files; needs the optional package zstandard."""

import io

import zstandard

_CHUNK = 2**17  # compressed bytes read at a time


class ZstReader(io.RawIOBase):
    """Bytes of a .zst file of one or more frames.

    zstandard's own reader takes a file that was cut off for one that ends there; this one raises EOFError. Damaged
    bytes raise EOFError too.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 closed in close()
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._inside = False  # between the first and the last byte of a frame
        self._compressed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See `io.RawIOBase`."""
        while not self._ready:
            self._compressed = self._compressed or self._file.read(_CHUNK)
            if not self._compressed:
                if self._inside:
                    raise EOFError("the last frame has no end")
                return 0
            self._ready = memoryview(self._unpack())
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def close(self) -> None:
        """See `io.IOBase`."""
        self._file.close()
        super().close()

    def _unpack(self) -> bytes:
        try:
            data = self._frame.decompress(self._compressed)
        except zstandard.ZstdError as error:
            raise EOFError(str(error)) from error
        self._inside, self._compressed = not self._frame.eof, self._frame.unused_data
        if self._frame.eof:
            self._frame = zstandard.ZstdDecompressor().decompressobj()
        return data
