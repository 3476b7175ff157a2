"""Run a command as in a container: `python read_only_root.py FOLDER UID COMMAND...`.

Must run in its own mount namespace (`unshare --mount`). All file systems are read-only, except for
an empty one on FOLDER. The command runs as UID, with no capability except reading files. The
environment is passed on unchanged.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

READ = "+dac_read_search"  # the tests' Python may be in a home folder that other users cannot read


def mounts() -> dict[str, list[str]]:
    """Return the options of each mount point; of stacked mounts, the topmost."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    fields = [line.split() for line in lines]
    unescaped = (re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), f[4]) for f in fields)
    return {point: f[5].split(",") for point, f in zip(unescaped, fields, strict=True)}


def main() -> None:
    folder, uid, *command = sys.argv[1:]
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "cache", folder], check=True)
    for target in mounts():
        if target != folder:
            subprocess.run(["mount", "-o", "remount,bind,ro", target], check=True)
    writable = [target for target, options in mounts().items() if "ro" not in options]
    assert writable == [folder], writable
    identity = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs"]
    rights = [f"--inh-caps=-all,{READ}", f"--ambient-caps={READ}", f"--bounding-set=-all,{READ}"]
    os.chdir(folder)
    os.execvp("setpriv", ["setpriv", *identity, *rights, *command])


if __name__ == "__main__":
    main()
