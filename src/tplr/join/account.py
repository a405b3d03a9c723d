"""Acts as the account of a service, so that files, links and code of that account get no rights of root."""

import contextlib
import os
import pwd
import sys
from collections.abc import Iterator
from pathlib import Path

from tplr.errors import ConfigError


def service_account(folder: Path) -> pwd.struct_passwd | None:
    """Return the account of a unit that root installs: the owner of ``folder``. None if this process is not root.

    A folder that does not exist yet will belong to the owner of the nearest one above it.

    Raises:
        ConfigError: the owner of ``folder`` has no name.
    """
    if os.geteuid() != 0:
        return None
    found = next(one for one in (folder, *folder.parents) if one.exists())
    try:
        return pwd.getpwuid(found.stat().st_uid)
    except KeyError:
        raise ConfigError(f"{found}: its owner has no user name: chown it to the account that runs the node") from None


@contextlib.contextmanager
def acting_as(account: pwd.struct_passwd | None) -> Iterator[None]:
    """Open and write files with the rights of ``account``, and with those of no group of root; None changes nothing.

    Its other processes can't trace this one, which stays root's. A program that is started meanwhile also needs
    ``user`` and ``group``: without them it could become root again.

    Raises:
        ConfigError: this process may not change its account; or the account can't read this program, so it could not
            run the service.
    """
    if account is None or account.pw_uid == os.geteuid():
        yield
        return
    groups, group = os.getgroups(), os.getegid()
    try:
        os.initgroups(account.pw_name, account.pw_gid)
        os.setegid(account.pw_gid)
        os.seteuid(account.pw_uid)
    except OSError as error:  # root of a container may lack the rights of root
        name = account.pw_name
        raise ConfigError(f"can't act as {name}, whose folder it is: {error.strerror}: run this as {name}") from None
    try:
        _check_program(account.pw_name)  # modules are imported meanwhile
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)


def _check_program(name: str) -> None:
    for path in (Path(sys.executable), Path(__file__)):
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror} for {name}, whose folder it is and who will run the node: install templar "
                "where that account can read it, such as /opt, or give a --folder of the account that has it"
            ) from None
