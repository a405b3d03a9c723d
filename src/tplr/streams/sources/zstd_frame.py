"""Decompresses one zstd frame with bounded output."""

import zstandard

MAX_BLOCK = 2**17  # bytes that a block can hold, by the format
# Bytes; the largest window of ``zstd --long``. The library's own limit is 128 MiB.
_MAX_WINDOW = 2**31

_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPABLE_MAGIC = range(0x184D2A50, 0x184D2A60)
_RLE = 1  # type of a block that repeats one byte


class ZstdFrame:
    """Has the interface of ``bz2.BZ2Decompressor``.

    The library's ``decompressobj`` has no ``max_length``, and a block of four bytes can hold 128 KiB. Here it gets a
    few blocks at a time, which their headers delimit.
    """

    def __init__(self) -> None:
        self._frame = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()
        self._input = memoryview(b"")  # not given to the library yet; a view, because a copy would take measurable time
        self._known = 0  # bytes of the input before the next header
        self._begun = False  # the frame's header was read
        self._last = False  # the header of the last block was read: all further bytes can be given

    @property
    def eof(self) -> bool:
        return self._frame.eof

    @property
    def unused_data(self) -> bytes:
        return self._frame.unused_data

    def decompress(self, data: bytes | memoryview, max_length: int) -> bytes:
        """Return the next output: less than ``max_length`` bytes if it needs more input, and at most two blocks more.

        Raises ZstdError.
        """
        self._input = memoryview(bytes(self._input) + data if self._input else data)
        out, size = [], 0
        while size < max_length and not self.eof and (end := self._next_blocks((max_length - size) // MAX_BLOCK or 1)):
            if part := self._frame.decompress(self._input[:end]):
                out.append(part)
                size += len(part)
            self._input = self._input[end:]
        return b"".join(out)  # no copy of a single part

    def _next_blocks(self, count: int) -> int:
        """Return how many bytes of the input hold at most the rest of a block, and ``count`` blocks."""
        while count and self._known < len(self._input) and not self._last and (length := self._block_length()):
            self._known += length
            count -= 1
        end = len(self._input) if self._last else min(self._known, len(self._input))
        self._known -= end
        return end

    def _block_length(self) -> int:
        """Return the length of the next block, or of the frame's header; 0 if the input does not tell it yet."""
        header = bytes(self._input[self._known : self._known + 5])
        if self._begun:
            if len(header) < 3:
                return 0
            fields = int.from_bytes(header[:3], "little")
            self._last = bool(fields & 1)
            return 3 + (1 if fields >> 1 & 3 == _RLE else fields >> 3)
        if len(header) < 5:
            return 0
        self._begun = True
        if header[:4] == _MAGIC:
            return zstandard.frame_header_size(header)
        if int.from_bytes(header[:4], "little") not in _SKIPPABLE_MAGIC:
            raise zstandard.ZstdError("unknown frame descriptor")
        self._last = True  # a frame without output
        return 5
