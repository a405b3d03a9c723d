"""Joins a run: shows its needs, asks for missing values, writes ``.env``, checks everything, creates the service."""

from __future__ import annotations

import argparse
import getpass
import pwd
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.markup import escape

from tplr.config import Environment, Kind
from tplr.console import Console
from tplr.doctor import configured_kinds
from tplr.errors import ConfigError
from tplr.home_paths import expanded
from tplr.hparams import load_hparams
from tplr.join.account import acting_as, service_account
from tplr.join.description import RunDescription, load_description
from tplr.join.env_file import make_private, read_env_file, write_env_file
from tplr.join.requirements import show_costs, show_run
from tplr.join.unit import Unit, install, start, units_folder
from tplr.node.arguments import Arguments, add_arguments, node_arguments
from tplr.node.checks import MISCONFIGURED, check_device
from tplr.node.launch import PROGRAM
from tplr.node.state import StateFolder
from tplr.planner.host import Host
from tplr.planner.plan import make_plan

# The bucket that a node of each role writes to.
OWN_BUCKET: dict[str, Kind] = {"miner": "gradients", "validator": "gradients", "aggregator": "aggregator"}
OWN_PREFIXES = ("R2_", "TPLR_")
# Of this process's variables, what the checks get: a service has no others, such as a proxy or a key of the shell.
INHERITED = ("PATH", "PYTHONPATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TERM", "COLUMNS")


@dataclass(frozen=True, kw_only=True)
class Answers:
    """A newcomer's command line arguments; ``tplr join --help`` explains each field."""

    role: str
    wallet_name: str | None = None
    wallet_hotkey: str | None = None
    wallet_path: Path
    device: str
    ranks: int = 1
    folder: Path | None = None
    down: float
    up: float
    replace_env: bool = False
    dry_run: bool = False
    install: bool = False
    unit_folder: Path | None = None
    node_options: list[str]


class Questions:
    """Asks a person for missing values, or with ``silent`` collects them as problems."""

    def __init__(self, *, silent: bool) -> None:
        self.silent = silent
        self._missing: list[str] = []

    def value(self, name: str, expected: str, *, secret: bool = False) -> str:
        """Ask for the value of ``name``, and return it stripped; with ``silent``, return "" and add a problem."""
        if self.silent:
            self._missing.append(f"{name} is missing: expected {expected}")
            return ""
        return (getpass.getpass if secret else input)(f"{name} ({expected}): ").strip()

    def confirms(self, question: str) -> bool:
        """Return whether the person agrees; False with ``silent``."""
        return not self.silent and input(f"{question} [y/N] ").strip().lower() in ("y", "yes")

    def check(self) -> None:
        """Raise ConfigError with all missing values."""
        if self._missing:
            raise ConfigError(self._missing)


def join(path: Path, answers: Answers, questions: Questions, process: Mapping[str, str]) -> int:
    """Run all steps; ``process`` is the environment of this process.

    As root, everything but the installation is done as the owner of the folder, who will run the node.

    Returns:
        Exit status: 0 if all checks passed, else that of the checks (``tplr doctor``).

    Raises:
        ConfigError: the description, the arguments or the machine do not fit, or something is missing.
        StateError: a file can't be written.
    """
    folder = (answers.folder or path.parent).absolute()
    account, console = service_account(folder), Console()
    with acting_as(account):
        run = load_description(path)
        console.print(show_run(run))
        fits = _show_costs(run, path, answers, folder, console)
        if answers.dry_run:
            return 0 if fits else 1
        if not fits and not questions.confirms("This machine does not meet the requirements. Continue?"):
            return MISCONFIGURED
        options = _node_options(run, path, answers, folder, questions)
        variables = _variables(run, answers.role, folder, questions, process)
        questions.check()
        if not _write_env(folder / ".env", variables, run, questions, replace=answers.replace_env):
            return MISCONFIGURED
        unit = _unit(run, answers, options, folder, account)
        if status := _run_as_unit(unit, _checks(unit, answers, options, variables), process, account):
            console.print("Fix the listed problems and run this command again: nothing is installed.")
            return status
    _serve(unit, answers, console)
    return 0


def _show_costs(run: RunDescription, path: Path, answers: Answers, folder: Path, console: Console) -> bool:
    """Print a node's needs and costs on this machine; return whether it fits.

    A dry run also fails for a link that is too slow. A join does not: the rates of ``--down`` and ``--up`` may be the
    defaults, and a node on a slow link starts.
    """
    hparams = load_hparams(path.parent / run.hparams.file)
    if answers.role == "aggregator":
        console.print("An aggregator has no model; its requirements are in docs/costs.md.")
        return True
    device = check_device(answers.device)
    here = Host.here(device, folder, ranks=answers.ranks, down=answers.down * 1e6, up=answers.up * 1e6)
    # The saved states of a node that has run here make room for its next ones.
    states = (folder / "state").glob(f"{run.netuid}-*-{answers.role}")
    here = replace(here, disk=here.disk + sum(StateFolder(one).size for one in states))
    role = "validator" if answers.role == "validator" else "miner"
    settings = _parsed(answers.role, ["--device", answers.device, *answers.node_options]).device_settings
    plan = make_plan(hparams, here, role=role, settings=settings)
    console.print(show_costs(plan))
    return not (plan.problems if answers.dry_run else plan.memory_problems)


def _node_options(run: RunDescription, path: Path, answers: Answers, folder: Path, questions: Questions) -> list[str]:
    """Return the node's command line, without program and role."""
    wallets = expanded(answers.wallet_path, "--wallet.path").absolute()
    try:
        found = sorted(f"{one.parent.parent.name}/{one.name}" for one in wallets.glob("*/hotkeys/*") if one.is_file())
    except OSError as error:
        raise ConfigError(
            f"--wallet.path {wallets}: {error.strerror}: give a folder that the account of the node can read"
        ) from None
    there = f"in {wallets} are {', '.join(found[:9]) or 'none'}"
    name = answers.wallet_name or questions.value("--wallet.name", f"a coldkey's name; {there}")
    hotkey = answers.wallet_hotkey or questions.value("--wallet.hotkey", f"a hotkey's name; {there}")
    options = {
        "--netuid": run.netuid,
        "--wallet.name": name,
        "--wallet.hotkey": hotkey,
        "--wallet.path": wallets,
        "--subtensor.network": run.network,
        "--device": answers.device,
        "--hparams": path.parent.absolute() / run.hparams.file,
        "--state": folder / "state",
        "--events": folder / _events(answers.role),
    }
    return [*(str(part) for option in options.items() for part in option), *answers.node_options]


def _variables(
    run: RunDescription, role: str, folder: Path, questions: Questions, process: Mapping[str, str]
) -> dict[str, str]:
    """Return the node's variables: the run's, those of the old file and of this process, and the person's answers."""
    found = read_env_file(folder / ".env")
    found |= {name: value for name, value in process.items() if name.startswith(OWN_PREFIXES)}
    kind = OWN_BUCKET[role]
    # The old file's values for the run's own buckets may belong to another run.
    stale = ("TPLR_S3_ENDPOINT", *(f"R2_{one.upper()}_" for one in ("dataset", "aggregator") if one != kind))
    found = {name: value for name, value in found.items() if not name.startswith(stale)} | run.variables()
    found.setdefault("TPLR_CACHE_FOLDER", str(folder / "cache" / "tplr"))
    asked = set()
    while open_names := Environment(found).needed(kind, write=True).keys() - asked:
        needed = Environment(found).needed(kind, write=True)
        name = next(one for one in needed if one in open_names)
        account = found.get(f"R2_{kind.upper()}_ACCOUNT_ID")
        if name.endswith("_BUCKET_NAME") and account and kind == "gradients":
            found[name] = account  # the chain stores only one of the two
        else:
            secret = name.endswith("_SECRET_ACCESS_KEY")
            found[name] = questions.value(name, needed[name], secret=secret)
        if questions.silent:
            asked.add(name)
    return found


def _write_env(
    path: Path, variables: Mapping[str, str], run: RunDescription, questions: Questions, *, replace: bool
) -> bool:
    """Write the file unless it has these variables already; return False if it has others and must not be replaced."""
    if (old := read_env_file(path)) == dict(variables):
        make_private(path)
        return True
    if old and not replace and not questions.confirms(f"{path} has other variables. Replace it, keeping {path}.old?"):
        raise ConfigError(f"{path} has other variables: give --replace-env (the old file is kept), or another --folder")
    write_env_file(path, variables, comment=f"run {run.name}, written by tplr join; holds keys")
    return True


def _unit(
    run: RunDescription, answers: Answers, options: list[str], folder: Path, account: pwd.struct_passwd | None
) -> Unit:
    ranks = ["--ranks", str(answers.ranks)] if answers.ranks > 1 else []
    return Unit(
        name=f"tplr-{run.name}-{answers.role}",
        description=f"templar {answers.role} of run {run.name}",
        command=[sys.executable, *PROGRAM, answers.role, *options, *ranks],
        folder=folder,
        user=account.pw_name if account else None,
    )


def _checks(unit: Unit, answers: Answers, options: list[str], variables: Mapping[str, str]) -> list[list[str]]:
    """Return the commands that check the node: doctor, which performs all checks of the unit's own start.

    Doctor is one process, so with several ranks it tests the buckets, and the unit's command the devices of all ranks.
    """
    doctor = [sys.executable, *PROGRAM, "doctor"]
    if answers.ranks == 1:
        return [[*doctor, "--role", answers.role, *options]]
    kinds = configured_kinds(Environment(variables), OWN_BUCKET[answers.role])
    return [[*doctor, *kinds], [*unit.command, "--check"]]


def _run_as_unit(
    unit: Unit, commands: list[list[str]], process: Mapping[str, str], account: pwd.struct_passwd | None
) -> int:
    """Run commands in the folder and the environment of the unit and as its user, ``account``, until one fails.

    Returns its exit status, or 0.
    """
    env = {name: value for name, value in process.items() if name in INHERITED} | unit.variables
    if account:
        env |= {"HOME": account.pw_dir, "USER": account.pw_name, "LOGNAME": account.pw_name}
    user, group = (account.pw_uid, account.pw_gid) if account else (None, None)
    for command in commands:
        done = subprocess.run(  # noqa: S603 - our own commands
            command, cwd=unit.folder, env=env, user=user, group=group, umask=0o077, check=False
        )
        if done.returncode:
            return done.returncode
    return 0


def _serve(unit: Unit, answers: Answers, console: Console) -> None:
    """Print the node's unit, or install it."""
    if unit.user == "root":
        console.print(
            f"{escape(str(unit.folder))} is root's, so the node would run as root: chown it to another account."
        )
    if not answers.install:
        console.print(f"All checks passed. --install installs this unit as {unit.name}.service:\n")
        console.print(unit.text(), markup=False, highlight=False, soft_wrap=True)
        return
    commands = install(unit, answers.unit_folder or units_folder())
    if answers.unit_folder is None and start(commands):
        console.print(f"{unit.name} runs. Its log: journalctl -u {unit.name} -f")
        return
    console.print(f"{unit.name}.service is installed. To start it: {escape(' && '.join(commands))}", soft_wrap=True)


def _events(role: str) -> str:
    """Name of the file of a node's events."""
    return f"{role}-events.jsonl"


def _parsed(role: str, options: list[str]) -> Arguments:
    """Parse the command line like the node; a wrong option ends the process with the usage, as in the node."""
    parser = argparse.ArgumentParser(prog=f"tplr {role}")
    add_arguments(parser)
    return node_arguments(parser.parse_args(options, argparse.Namespace(command=role)))
