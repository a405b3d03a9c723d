"""The systemd unit that runs a node: it restarts after a failure, but not after a wrong configuration."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tplr.errors import ConfigError
from tplr.files import atomic_write
from tplr.home_paths import expanded
from tplr.node.checks import MISCONFIGURED, OUTDATED

# Settings that need the system manager: a user manager can't drop capabilities or remount file systems everywhere.
HARDENING = """\
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
ProtectProc=invisible
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
RemoveIPC=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
# NCCL enumerates network interfaces over netlink.
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
# No MemoryDenyWriteExecute: compiled kernels are written and run. GPUs, and nothing else of /dev:
DevicePolicy=closed
DeviceAllow=char-nvidia rw
DeviceAllow=char-nvidia-frontend rw
DeviceAllow=char-nvidia-uvm rw
DeviceAllow=char-nvidia-caps rw
# NCCL and pinned host memory.
LimitMEMLOCK=infinity
"""

# Variable → path in the folder's ``cache``, for downloaded or compiled data that can be recreated.
CACHES = {"TPLR_CACHE_FOLDER": "tplr", "XDG_CACHE_HOME": "", "TRITON_CACHE_DIR": "triton"}
STATES = Path("/var/lib")  # of StateDirectory=


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A node as a service.

    Attributes:
        name: name of the unit, without ``.service``.
        command: command line, each part as a process gets it.
        folder: working directory, with the ``.env`` file; the node writes there. Systemd creates it in ``/var/lib``.
        user: account that runs it; None for a unit of the user's own manager.
        options_file: file whose variable ``OPTIONS`` has more options of the node; None if ``command`` has them all.
    """

    name: str
    description: str
    command: Sequence[str]
    folder: Path
    user: str | None
    options_file: Path | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The environment that the unit itself sets."""
        return {name: str(self.folder / "cache" / place) for name, place in CACHES.items()}

    def text(self) -> str:
        """Return the content of the unit's file."""
        lines = [
            "[Unit]",
            f"Description={self.description.replace('%', '%%')}",
            "Wants=network-online.target",
            "After=network-online.target",
            "# An outage of hours must not end the restarts.",
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            "Type=exec",
            *([f"User={self.user}"] if self.user else []),
            "# The node reads the file .env in here, which helper processes do not inherit.",
            f"WorkingDirectory={_escaped(str(self.folder))}",
            f"Environment={' '.join(_quoted(f'{name}={value}') for name, value in self.variables.items())}",
            *([f"EnvironmentFile={self.options_file}"] if self.options_file else []),
            f"ExecStart={' '.join(map(_argument, self.command))}{' $OPTIONS' if self.options_file else ''}",
            "# After 2, misconfigured, and 4, outdated, a person must act; 1 is a crash, 3 something that is down.",
            "Restart=on-failure",
            f"RestartPreventExitStatus={MISCONFIGURED} {OUTDATED}",
            "RestartSec=30",
            "TimeoutStopSec=60",
            "UMask=0077",
            "NoNewPrivileges=yes",
        ]
        if self.user:
            lines += [*HARDENING.splitlines(), *self._writable()]
        target = "multi-user.target" if self.user else "default.target"
        return "\n".join([*lines, "", "[Install]", f"WantedBy={target}", ""])

    def _writable(self) -> list[str]:
        if self.folder.is_relative_to(STATES):
            return [f"StateDirectory={_quoted(str(self.folder.relative_to(STATES)))}", "StateDirectoryMode=0700"]
        return [f"ReadWritePaths={_quoted(str(self.folder))}"]


def standard_unit(role: str) -> Unit:
    """Return the unit for a host that is set up by hand (``docs/run.md``): ``docker/systemd`` has one for each role."""
    folder = STATES / "templar" / role
    return Unit(
        name=f"templar-{role}",
        description=f"templar {role}",
        command=["/opt/templar/.venv/bin/tplr", role, "--state", str(folder / "state")],
        folder=folder,
        user="templar",
        options_file=Path(f"/etc/templar/{role}.conf"),
    )


def install(unit: Unit, folder: Path) -> list[str]:
    """Write the unit's file; return the commands that start it. Raises StateError."""
    atomic_write(folder / f"{unit.name}.service", unit.text().encode())
    (folder / f"{unit.name}.service").chmod(0o644)
    manager = "systemctl" if unit.user else "systemctl --user"
    commands = [f"{manager} daemon-reload", f"{manager} enable --now {unit.name}"]
    return commands if unit.user else [*commands, "loginctl enable-linger"]


def start(commands: Sequence[str]) -> bool:
    """Run the commands of ``install``, if systemd runs here; return whether they all succeeded."""
    if not Path("/run/systemd/system").is_dir() or shutil.which("systemctl") is None:
        return False
    return all(subprocess.run(shlex.split(one), check=False).returncode == 0 for one in commands)  # noqa: S603


def units_folder() -> Path:
    """Return the folder for units of this process's user: the system's for root, else the user's."""
    return Path("/etc/systemd/system") if os.geteuid() == 0 else expanded(Path("~/.config/systemd/user"))


def _argument(part: str) -> str:
    """A part of a command line, the only place where systemd expands variables."""
    return _quoted(part).replace("$", "$$")


def _quoted(part: str) -> str:
    """A word of a list."""
    plain = _escaped(part)
    if plain and not any(one in plain for one in " \t'\"\\;"):
        return plain
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _escaped(text: str) -> str:
    if any(one in text for one in "\n\r\0"):
        raise ConfigError(f"{text!r}: a line break can't be part of a unit: give another path")
    return text.replace("%", "%%")
