"""The commands of the guides, for the tests that run them; and which test runs which.

A test takes a command from its guide, puts values in the place of the guide's, and runs what comes out:

    explain = from_guide("docs/scoring.md", "tplr explain --uid 4 --window 1234", {"4": 2, "1234": window})
    main(explain.arguments)

``from_guide`` fails if the guide has no such command, so a command that changes in a guide changes in its test.
"""

import ast
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"((?:^ *<!--[^\n]*-->\n)*)^( *)```(\w*)\n(.*?)^ *```$", re.M | re.S)
MARK = re.compile(r"<!-- (run by|needs): (.*?)(?: \(([^)]*)\))? -->")
# Prefixes of a command line in a block. A block without a language has no such line.
PROGRAM = re.compile(
    r"^(?:[A-Z0-9_]+=\S* )*(?:\S*/)?(?:tplr|python3?|pip|pytest|torchrun|prometheus|promtool|curl|docker|git|install|"
    r"useradd|systemctl|journalctl|echo|[a-z_0-9]+\.sh)(?= |$)"
)
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]+")
INTERPRETED = {"tplr": ("-m", "tplr.cli"), "python": (), "torchrun": ("-m", "torch.distributed.run")}


class Block(NamedTuple):
    """A block of shell commands, with the marks above it: kind, text, words in brackets."""

    guide: Path
    line: int
    marks: list[tuple[str, str, str]]
    commands: list[str]

    def __str__(self) -> str:
        return f"{self.guide.relative_to(ROOT)}:{self.line}"


def blocks(guide: Path) -> Iterator[Block]:
    """Yield the blocks of one guide; commands have no comment at their end."""
    text = guide.read_text()
    for found in BLOCK.finditer(text):
        above, indent, language, body = found.groups()
        if language in ("sh", "bash"):
            commands = [one for one in _whole_commands(body, indent) if PROGRAM.match(one)]
            yield Block(guide, text[: found.start(3)].count("\n") + 1, MARK.findall(above), commands)


def _whole_commands(body: str, indent: str) -> Iterator[str]:
    """Yield the commands of a block; a quotation may span several lines."""
    command = ""
    for line in body.splitlines():
        command += f"\n{line}".removeprefix("\n" if not command else "").removeprefix(indent)
        try:
            words(command)
        except ValueError:
            continue
        yield _without_comment(command)
        command = ""


def _without_comment(command: str) -> str:
    for found in re.finditer(r"\s+#", command):
        try:
            shlex.split(command[: found.start()])
        except ValueError:  # within quotes
            continue
        return command[: found.start()]
    return command.rstrip()


def words(command: str) -> list[str]:
    """Split a command like a shell."""
    return shlex.split(command, comments=True)


@dataclass(frozen=True)
class GuideCommand:
    """A command of a guide with a test's values; ``text`` is the guide's."""

    text: str
    words: list[str]

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of ``tplr``, for a test that calls ``main``."""
        assert Path(self.words[0]).name == "tplr", self.text
        return self.words[1:]

    @property
    def process(self) -> list[str]:
        """Return the command line for a separate process, with this interpreter; paths of the project's programs are
        absolute."""
        program, *rest = self.words
        if (module := INTERPRETED.get(Path(program).name)) is not None:
            program, rest = sys.executable, [*module, *rest]
        return [program, *(str(ROOT / one) if one.startswith("neurons/") else one for one in rest)]

    def check_run_by(self, executed: Sequence[object]) -> None:
        """Assert that a process was started with the guide's command; it may have more options."""
        line, at = [str(word) for word in executed], 0
        for word in self.process:
            # An option is with its value, at any place; the words before the first option come first.
            if word.startswith("--"):
                assert word in line, (word, self.text, line)
                at = line.index(word)
            else:
                assert line[at] == word, (word, self.text, line)
            at += 1


def from_guide(guide: str, command: str, values: Mapping[str, object] | None = None) -> GuideCommand:
    """Return the command of a block of ``guide``.

    Args:
        guide: relative to the project's folder.
        command: all of it, without its comment.
        values: for words of the command, or for parts of a word after ``=``; never for an option.

    Raises:
        LookupError: the guide has no such command, or the command no such word.
        ValueError: a placeholder has no value.
    """
    if command not in all_of_guide(guide):
        raise LookupError(f"{guide} has no command {command!r}")
    given = {name: str(value) for name, value in (values or {}).items()}
    program, *rest = (word for word in words(command) if word != "…")
    if unknown := given.keys() - set(rest):
        raise LookupError(f"{command!r} has no words {unknown}")
    if options := [name for name in given if name.startswith("-")]:
        raise LookupError(f"{command!r}: {options} are the guide's")
    filled = [program, *(given.get(word, word) for word in rest)]
    if left := [word for word in rest if PLACEHOLDER.fullmatch(word) and word not in given]:
        raise ValueError(f"{command!r}: no values for {left}")
    return GuideCommand(command, filled)


def all_of_guide(guide: str) -> list[str]:
    """Return the commands of all blocks of a guide, for a test that runs each of them."""
    return [command for block in blocks(ROOT / guide) for command in block.commands]


@cache
def taken_in(test: Path) -> frozenset[tuple[str, str | None]]:
    """Return guide and command of each call of ``from_guide`` in a test's file; None: the test runs the whole guide."""
    found: set[tuple[str, str | None]] = set()
    for node in ast.walk(ast.parse(test.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            constants = [one.value for one in node.args if isinstance(one, ast.Constant)]
            if node.func.id == "from_guide" and len(constants) > 1:
                found.add((str(constants[0]), str(constants[1])))
            elif node.func.id == "all_of_guide" and constants:
                found.add((str(constants[0]), None))
    return frozenset(found)
