"""Runs a command in an unpacked image about as a hardened container would; started under ``unshare --mount``.

``contained.py ROOT UID KEY=VALUE... -- COMMAND...``: the root is mounted read-only, the user set by number,
no capability is left and no new privilege can be had. The network is the machine's.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

NO_NEW_PRIVILEGES, DROP_FROM_BOUNDING_SET = 38, 24
CAPABILITIES = 64  # more than there are; the kernel refuses the rest


def main(root: Path, uid: int, environ: dict[str, str], command: list[str]) -> None:
    """Become the command."""
    for mount in (
        ("--bind", root, root),
        ("-t", "proc", "proc", root / "proc"),
        ("--rbind", "/dev", root / "dev"),
        ("-o", "remount,bind,ro", root),
    ):
        subprocess.run(["/bin/mount", *map(str, mount)], check=True)
    control = ctypes.CDLL(None, use_errno=True).prctl
    os.chroot(root)
    os.chdir("/")
    for capability in range(CAPABILITIES):
        control(DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)
    control(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    os.execve(command[0], command, environ)


if __name__ == "__main__":
    split = sys.argv.index("--")
    main(
        Path(sys.argv[1]),
        int(sys.argv[2]),
        dict(pair.split("=", 1) for pair in sys.argv[3:split]),
        sys.argv[split + 1 :],
    )
