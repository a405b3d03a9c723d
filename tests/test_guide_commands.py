"""Every command in every guide is run by a test, or is marked with a requirement that the tests do not have.

Above each block of shell commands in a guide is a comment, which readers of the site do not see:

    <!-- run by: tests/cli/test_stream_commands.py -->
    <!-- needs: a GPU -->
    <!-- needs: systemd (systemctl, journalctl) -->

``run by`` names test files. One of them takes each command of the block from the guide, with ``from_guide`` or
``all_of_guide`` (``tests/support/guides.py``), and runs it with the test's values instead of the guide's. ``needs``
marks the lines with one of the words in brackets, or without brackets the whole block.

In addition, every ``tplr`` command and every command of a neuron, also in a sentence, must have arguments that the
program accepts.
"""

import argparse
import re
from importlib import import_module
from pathlib import Path

import pytest
from guides import BLOCK, PROGRAM, ROOT, Block, GuideCommand, blocks, from_guide, taken_in, words

from tplr.cli import COMMANDS, parse_arguments

GUIDES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
INLINE = re.compile(r"`((?:\.venv/bin/)?tplr [a-z][^`\n]*|[^`\n]*neurons/\w+\.py [^`\n]*)`")


def arguments(command: str) -> list[str] | None:
    """Return the arguments of ``tplr`` for a command of this project, None for others. Placeholders become 1."""
    given = [re.sub(r"[A-Z][A-Z_]+$", "1", word) for word in words(command) if word != "…"]
    for at, word in enumerate(given):
        if word.endswith("/tplr") or word == "tplr":
            return given[at + 1 :]
        if found := re.search(r"neurons/(\w+)\.py$", word):
            return [found[1], *given[at + 1 :]]
    return None


ALL = [block for guide in GUIDES for block in blocks(guide)]


def test_the_blocks_were_found() -> None:
    assert len(ALL) > 25
    assert sum(len(block.commands) for block in ALL) > 50


def test_nobody_is_told_to_install_this_project_from_an_index() -> None:
    """It is in none: whoever has that name there may write what is installed."""
    files = [*GUIDES, *(ROOT / "src").rglob("*.py")]
    assert [str(file) for file in files if re.search(r"pip install [^\n]*tplr\b", file.read_text())] == []


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_blocks_of_commands_are_called_so(guide: Path) -> None:
    others = [found for found in BLOCK.finditer(guide.read_text()) if found[3] in ("", "text", "console", "shell")]
    assert [line for found in others for line in found[4].splitlines() if PROGRAM.match(line.strip())] == []


@pytest.mark.parametrize("block", ALL, ids=str)
def test_a_command_is_run_or_says_what_it_needs(block: Block) -> None:
    assert block.commands, "no line of it is known as a command: extend PROGRAM"
    assert block.marks, "say above it which test runs it, or what it needs that the tests do not have"
    files = [ROOT / name for kind, names, _ in block.marks if kind == "run by" for name in names.split(", ")]
    assert [str(file) for file in files if not (file.is_file() and file.is_relative_to(ROOT / "tests"))] == []
    exempt = [brackets.split(", ") if brackets else [""] for kind, _, brackets in block.marks if kind == "needs"]
    rest = [one for one in block.commands if not any(word in one for words in exempt for word in words)]
    guide = str(block.guide.relative_to(ROOT))
    taken = {command for file in files for name, command in taken_in(file) if name == guide}
    assert None in taken or [command for command in rest if command not in taken] == []
    idle = [
        file for file in files if not {None, *rest} & {command for name, command in taken_in(file) if name == guide}
    ]
    assert idle == [], "these run no command of the block"


def test_a_command_is_taken_with_values_and_never_with_other_options() -> None:
    guide, command = "docs/scoring.md", "tplr audit --window 1234 --from FOLDER"
    taken = from_guide(guide, command, {"FOLDER": "state", "1234": 7})
    assert taken.arguments == ["audit", "--window", "7", "--from", "state"]
    assert taken.process[1:3] == ["-m", "tplr.cli"]
    for wrong, values in ((command, {"7": 8}), (command, {"--from": "--local"}), ("tplr audit", {})):
        with pytest.raises(LookupError):
            from_guide(guide, wrong, values)
    with pytest.raises(ValueError, match="no values for"):
        from_guide(guide, command)


def test_a_process_is_compared_with_the_guide() -> None:
    taken = GuideCommand("", ["python", "neurons/miner.py", "--state", "x", "--check"])
    python, script, *_ = taken.process
    taken.check_run_by([python, script, "--device", "cpu", "--check", "--state", "x"])
    for other in ([python, script, "--state", "y", "--check"], [python, "x", "--check"], [python, script, "--check"]):
        with pytest.raises(AssertionError):
            taken.check_run_by(other)


@pytest.mark.parametrize("block", ALL, ids=str)
def test_our_commands_take_these_arguments(block: Block) -> None:
    for command in block.commands:
        if (given := arguments(command)) is not None:
            parse_arguments(given)
        for word in words(command):
            if re.match(r"(?:\./)?(?:scripts|neurons)/", word):
                assert (ROOT / word).is_file(), word


def options(given: list[str]) -> set[str]:
    """Return all options of the subcommand with which ``given`` begins."""
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
