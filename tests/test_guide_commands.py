"""Every command in every guide is run by a test, or is marked as needing what the tests do not have.

Above each block of shell commands in a guide is a comment, which readers of the site do not see:

    <!-- run by: tests/cli/test_stream_commands.py -->
    <!-- run from here by: tests/cli/test_dataset_commands.py -->
    <!-- needs: a GPU -->
    <!-- needs: systemd (systemctl, journalctl) -->

``run by`` names files that together have every subcommand and option of the block's commands; at least one is a test.
``run from here by`` names a test that reads the block from the guide. ``needs`` marks the lines with one of the words
in brackets, or without brackets the whole block.

Besides, every ``tplr`` command and every command of a neuron, also in a sentence, has arguments that the program takes.
"""

import argparse
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from tplr.cli import COMMANDS, parse_arguments

ROOT = Path(__file__).parents[1]
GUIDES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
BLOCK = re.compile(r"((?:^ *<!--[^\n]*-->\n)*)^( *)```(\w*)\n(.*?)^ *```$", re.M | re.S)
MARK = re.compile(r"<!-- (run by|run from here by|needs): (.*?)(?: \(([^)]*)\))? -->")
# What a line of a block of commands begins with. A block without a language has no such line.
PROGRAM = re.compile(
    r"^(?:[A-Z0-9_]+=\S* )*(?:\S*/)?(?:tplr|python3?|pip|pytest|torchrun|prometheus|promtool|curl|docker|git|install|"
    r"useradd|systemctl|journalctl|echo|[a-z_0-9]+\.sh)(?= |$)"
)
INLINE = re.compile(r"`((?:\.venv/bin/)?tplr [a-z][^`\n]*|[^`\n]*neurons/\w+\.py [^`\n]*)`")


class Block(NamedTuple):
    """A block of shell commands, with what is said above it."""

    guide: Path
    line: int
    marks: list[tuple[str, str, str]]
    commands: list[str]

    def __str__(self) -> str:
        return f"{self.guide.relative_to(ROOT)}:{self.line}"


def blocks(guide: Path) -> Iterator[Block]:
    text = guide.read_text()
    for found in BLOCK.finditer(text):
        above, indent, language, body = found.groups()
        if language in ("sh", "bash"):
            commands = [one for one in whole_commands(body, indent) if PROGRAM.match(one)]
            yield Block(guide, text[: found.start(3)].count("\n") + 1, MARK.findall(above), commands)


def whole_commands(body: str, indent: str) -> Iterator[str]:
    """The commands of a block; a quotation may go over several lines."""
    command = ""
    for line in body.splitlines():
        command += f"\n{line}".removeprefix("\n" if not command else "").removeprefix(indent)
        try:
            words(command)
        except ValueError:
            continue
        yield command
        command = ""


def words(command: str) -> list[str]:
    return shlex.split(command, comments=True)


def arguments(command: str) -> list[str] | None:
    """Those of ``tplr`` for a command of ours, None for others. What stands for a value becomes 1."""
    given = [re.sub(r"[A-Z][A-Z_]+$", "1", word) for word in words(command) if word != "…"]
    for at, word in enumerate(given):
        if word.endswith("/tplr") or word == "tplr":
            return given[at + 1 :]
        if found := re.search(r"neurons/(\w+)\.py$", word):
            return [found[1], *given[at + 1 :]]
    return None


def telling(command: str) -> list[str]:
    """The words of a command that a file that runs it has: subcommands and options."""
    given = [word.partition("=")[0] for word in words(command)]
    ours = arguments(command)
    verbs = ours[: 2 if ours[0] in ("data", "run") else 1] if ours else []
    scripts = [Path(word).name for word in given if re.search(r"\w\.(?:py|sh)$", word) and "neurons/" not in word]
    return [*verbs, *(word for word in given if word.startswith("--")), *scripts]


ALL = [block for guide in GUIDES for block in blocks(guide)]


def test_the_blocks_were_found() -> None:
    assert len(ALL) > 25
    assert sum(len(block.commands) for block in ALL) > 50


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_blocks_of_commands_are_called_so(guide: Path) -> None:
    others = [found for found in BLOCK.finditer(guide.read_text()) if found[3] in ("", "text", "console", "shell")]
    assert [line for found in others for line in found[4].splitlines() if PROGRAM.match(line.strip())] == []


@pytest.mark.parametrize("block", ALL, ids=str)
def test_a_command_is_run_or_says_what_it_needs(block: Block) -> None:
    assert block.commands, "no line of it is known as a command: extend PROGRAM"
    assert block.marks, "say above it which test runs it, or what it needs that the tests do not have"
    files = [ROOT / name for kind, names, _ in block.marks if kind != "needs" for name in names.split(", ")]
    assert [str(file) for file in files if not file.is_file()] == []
    exempt = [brackets.split(", ") if brackets else [""] for kind, _, brackets in block.marks if kind == "needs"]
    rest = [one for one in block.commands if not any(word in one for words in exempt for word in words)]
    if not rest:
        return
    assert any(file.is_relative_to(ROOT / "tests") for file in files), rest
    source = "".join(file.read_text() for file in files)
    if any(kind == "run from here by" for kind, _, _ in block.marks):
        assert block.guide.name in source
        return
    missing = {command: [word for word in telling(command) if word not in source] for command in rest}
    assert {command: words for command, words in missing.items() if words} == {}


@pytest.mark.parametrize("block", ALL, ids=str)
def test_our_commands_take_these_arguments(block: Block) -> None:
    for command in block.commands:
        if (given := arguments(command)) is not None:
            parse_arguments(given)
        for word in words(command):
            if re.match(r"(?:\./)?(?:scripts|neurons)/", word):
                assert (ROOT / word).is_file(), word


def options(given: list[str]) -> set[str]:
    """All options of the subcommand that ``given`` begins with."""
    place, _ = COMMANDS[given[0]]
    parser = argparse.ArgumentParser()
    parser.set_defaults(command=given[0])
    import_module(f"tplr.cli.{place}").add_arguments(parser)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and len(given) > 1:
            parser = action.choices[given[1]]
    return set(parser._option_string_actions)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_commands_in_sentences_have_options_that_exist(guide: Path) -> None:
    for command in INLINE.findall(guide.read_text()):
        given = arguments(command.replace("'", "").replace('"', ""))
        if given is None or given[0].startswith("-"):
            continue
        assert given[0] in COMMANDS, command
        unknown = {word.partition("=")[0] for word in given if word.startswith("--")} - options(given)
        assert not unknown, f"{command}: {unknown}"
