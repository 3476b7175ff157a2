"""The JavaScript libraries of the pages: `python -m tests.ui.vendor` downloads them again.

Files are kept as npm ships them, but for import specifiers: a name such as "preact" becomes a path,
because an import map would have to be inline, which the pages' Content-Security-Policy forbids.
A script that is no module gets an export.
`SHA256SUMS` has the hash of every file.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "server" / "ui" / "vendor"
SUMS = FOLDER / "SHA256SUMS"
# By package: its version, and the path of each of its files by the name here.
PACKAGES: dict[str, tuple[str, dict[str, str]]] = {
    "preact": ("11.2.0", {"preact.js": "dist/preact.mjs", "hooks.js": "hooks/dist/hooks.mjs"}),
    "@preact/signals": ("2.11.4", {"signals.js": "dist/signals.mjs"}),
    "@preact/signals-core": ("1.14.5", {"signals-core.js": "dist/signals-core.mjs"}),
    "htm": ("3.1.1", {"htm.js": "dist/htm.mjs"}),
    "marked": ("18.2.1", {"marked.js": "lib/marked.esm.js"}),
    "temml": ("0.13.5", {"temml.js": "dist/temml.min.js"}),
    "uplot": ("1.6.32", {"uplot.js": "dist/uPlot.esm.js", "uplot.css": "dist/uPlot.min.css"}),
    "@highlightjs/cdn-assets": (
        "11.12.0",
        {"highlight.js": "es/core.min.js"}
        | {
            f"languages/{name}.js": f"es/languages/{name}.min.js"
            for name in (
                *("bash", "cpp", "css", "diff", "go", "java", "javascript", "json", "python"),
                *("rust", "sql", "typescript", "xml", "yaml"),
            )
        },
    ),
}
PATHS = {
    "preact": "./preact.js",
    "preact/hooks": "./hooks.js",
    "@preact/signals-core": "./signals-core.js",
}
# The small file of temml is a script; its module has twice the size.
EXPORTS = {"temml.js": b"\nexport default temml;\n"}
SPECIFIER = re.compile(rb'(\bfrom|\bimport)(\s*)"([@a-z][a-z/-]*)"')


def with_paths(source: bytes) -> bytes:
    """Return a module in which the names of packages are paths."""

    def path(match: re.Match[bytes]) -> bytes:
        keyword, space, name = match.groups()
        return keyword + space + b'"' + PATHS[name.decode()].encode() + b'"'

    return SPECIFIER.sub(path, source)


def download() -> dict[str, bytes]:
    """Return the files of all packages by their names here. Needs npm and its registry."""
    files: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        for package, (version, paths) in PACKAGES.items():
            command = ["npm", "pack", "--silent", "--pack-destination", folder]
            command.append(f"{package}@{version}")
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            archive = Path(folder) / done.stdout.split()[-1]
            with tarfile.open(archive) as members:
                for name, path in paths.items():
                    member = members.extractfile(f"package/{path}")
                    assert member is not None, f"{package} has no {path}"
                    content = member.read()
                    files[name] = with_paths(content) if name.endswith(".js") else content
                    files[name] += EXPORTS.get(name, b"")
                licence = members.extractfile("package/LICENSE")
                assert licence is not None
                short = package.rpartition("/")[2]
                files[f"licences/{short}.txt"] = licence.read()
    return files


def sums() -> dict[str, str]:
    """Return the SHA-256 that SHA256SUMS has of each file."""
    lines = [line.split("  ") for line in SUMS.read_text().splitlines()]
    return {name: digest for digest, name in lines}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def main() -> None:
    files = download()
    for name, content in files.items():
        file = FOLDER / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    SUMS.write_text("".join(f"{digest(files[name])}  {name}\n" for name in sorted(files)))
    sys.stderr.write(f"{len(files)} files in {FOLDER}\n")


if __name__ == "__main__":
    main()
