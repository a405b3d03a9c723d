"""Frames are decompressed the same in any pieces, with little output at a time."""

import pytest
import zstandard

from tplr.streams.sources.zstd_frame import MAX_BLOCK, ZstdFrame

TEXT = b"".join(b"%d," % (i * i) for i in range(60_000)) + bytes(2 * 10**6)
SKIPPABLE = b"\x5f\x2a\x4d\x18" + (3).to_bytes(4, "little")


def blocks() -> bytes:
    """A frame without its length, of many blocks, also raw ones and ones of a few bytes; with a checksum."""
    packed = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    out = [packed.compress(TEXT), packed.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    for i in range(300):
        out += packed.compress(b"%d" % i), packed.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    return b"".join([*out, packed.flush()])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000, 10**6])
def test_any_pieces_give_the_same_with_bounded_output(size):
    numbers = b"".join(b"%d" % i for i in range(300))
    for packed, text in [(blocks(), TEXT + numbers), (zstandard.compress(TEXT), TEXT), (SKIPPABLE + b"abc", b"")]:
        frame, out, stored = ZstdFrame(), [], packed + b"next"
        for i in range(0, len(stored), size):
            out.append(frame.decompress(stored[i : i + size], MAX_BLOCK))
            while len(out[-1]) >= MAX_BLOCK:
                out.append(frame.decompress(b"", MAX_BLOCK))
            if frame.eof:
                break
        assert b"".join(out) == text
        assert max(map(len, out)) < 3 * MAX_BLOCK
        assert stored[: i + size].removesuffix(frame.unused_data) == packed


@pytest.mark.parametrize("stored", [b"no zstd", b"\x27\xb5\x2f\xfd\x04\x00", blocks()[:6] + b"\xff" * 99])
def test_other_bytes_are_refused(stored):
    with pytest.raises(zstandard.ZstdError):
        ZstdFrame().decompress(stored, MAX_BLOCK)
