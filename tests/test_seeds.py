"""Seeds are written rules: golden values, the same in every process."""

import ast
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

from tplr import seeds
from tplr.seeds import PageDraw, derive, hash_parts, held_out_page_draw, page_draw, seed_window

HASH = "0x" + "ab" * 32
SOURCE = Path(seeds.__file__).parent
SIMULATIONS = ("localnet", "scale")  # their choices are no network's


def test_golden_values() -> None:
    # SHA-256 of "5:pages1:73:abc", first 8 bytes, big-endian.
    assert derive("pages", 7, "abc") == int("abff660b5d25864b", 16)


def test_no_two_lists_of_parts_share_a_text() -> None:
    lists = [("a", "bc"), ("ab", "c"), ("abc",), ("a", "b", "c"), (1, 23), (12, 3), (123,), ("1:a",), ("1", "a")]
    assert len({derive(*parts) for parts in lists}) == len(lists)
    assert hash_parts("a", "bc") != hash_parts("ab", "c")
    assert hash_parts("a", 1) == hash_parts("a", "1") != hash_parts("a", 1, "")


def test_hash_of_parts_is_of_their_texts_with_lengths_in_characters() -> None:
    assert hash_parts("größe", 12) == hashlib.sha256("5:größe2:12".encode()).hexdigest()


def test_documented_pages_follow_from_uid_and_window_alone() -> None:
    draw = page_draw("documented", uid=5, window=9, pages_per_window=6, block_hash=HASH)
    assert draw == PageDraw(offset=54, seed=5)


def test_hardened_pages_need_the_block_before_the_window() -> None:
    assert seed_window(9) == 8
    draws = {
        page_draw("hardened", uid=uid, window=9, pages_per_window=6, block_hash=block_hash)
        for uid in (5, 6)
        for block_hash in (HASH, HASH[:-1])
    }
    assert len(draws) == 4
    assert len({held_out_page_draw(hotkey=hotkey, block_hash=HASH) for hotkey in ("v1", "v2")}) == 2


def test_same_in_every_process() -> None:
    code = "from tplr.seeds import derive; print(derive('pages', 7, 'abc'))"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert printed == {f"{derive('pages', 7, 'abc')}\n"}


def test_the_table_has_every_rule() -> None:
    documented = re.findall(r"^``([^`]+)`` ", seeds.__doc__ or "", re.MULTILINE)
    first_parts = [
        (path.relative_to(SOURCE).as_posix(), call.args[0])
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] not in SIMULATIONS
        if "derive(" in (text := path.read_text())
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] == "derive"
    ]
    names = [one.value for _, one in first_parts if isinstance(one, ast.Constant)]
    assert sorted(documented) == sorted({*names})
    # The hash of a template, which is no seed.
    assert [file for file, one in first_parts if not isinstance(one, ast.Constant)] == [
        "stores/preprocess/tokenizing.py"
    ]
