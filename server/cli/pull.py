"""`penstock pull`: download a model from huggingface.co into the shared Hugging Face cache.

Only this module downloads files. huggingface_hub lists them and manages the cache. Large files are
downloaded here, because huggingface_hub cannot resume a download that another process began.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import httpx2
from rich import progress as rich_progress
from rich.console import Console
from rich.filesize import decimal

from engine.checkpoint.bounded_json import read_json
from engine.checkpoint.folder import (
    CHECKPOINT_FILES,
    indexed_files,
    is_index,
    no_weights,
    weight_files,
    weights_entry,
)
from engine.checkpoint.gguf.parts import (
    image_encoders,
    is_first_part,
    is_gguf,
    is_sidecar,
    parts_of,
    present_parts,
)
from engine.errors import ConfigError, listed
from server.cli.console import say

try:  # huggingface_hub reads the environment when it is imported
    import huggingface_hub as hub
    from huggingface_hub import constants, errors, file_download, utils
    from huggingface_hub.constants import is_offline_mode as is_offline_mode
except ValueError as error:
    raise ConfigError(f"An environment variable HF_* is not valid: {error}.") from None

MAIN = "main"
MAX_FAILURES = 5  # consecutive requests that return no bytes
A_COMMIT = re.compile("[0-9a-f]{40}")
Check = Callable[[Path], None]
TRANSIENT = {408, 429, 500, 502, 503, 504}


@dataclass(frozen=True)
class Repository:
    """One commit of a repository, and its paths in the cache."""

    name: str
    commit: str
    sizes: dict[str, int]  # bytes of every file
    hashes: dict[str, str]  # SHA-256 of large files; small files have none

    @classmethod
    def look_up(cls, name: str, revision: str | None) -> Repository:
        info = hub.HfApi().model_info(name, revision=revision, files_metadata=True, timeout=30)
        files = info.siblings or []
        hashes = {file.rfilename: file.lfs.sha256 for file in files if file.lfs is not None}
        sizes = {file.rfilename: file.size or 0 for file in files}
        return cls(name, info.sha or "", sizes, hashes)

    @property
    def cache(self) -> Path:
        folder = file_download.repo_folder_name(repo_id=self.name, repo_type="model")
        return Path(constants.HF_HUB_CACHE, folder)

    @property
    def snapshot(self) -> Path:
        return self.cache / "snapshots" / self.commit

    def partial(self, file: str) -> Path:
        return self.cache / "blobs" / f"{self.hashes[file]}.incomplete"

    def link(self, file: str) -> Path:
        """Return the file in the snapshot; download it if its blob is not in the cache."""
        return Path(hub.hf_hub_download(self.name, file, revision=self.commit))


def cached(name: str, revision: str = MAIN, weights: bool = True) -> Path | None:
    """Return the folder of a revision if it is complete in the cache, else None.

    Without `weights` the weight files may be missing. Does not access the network.
    """
    try:
        config = hub.try_to_load_from_cache(name, "config.json", revision=revision)
        if not isinstance(config, str):
            return None
        folder = Path(config).parent
        if weights:
            weight_files(folder)
        elif not (folder / "tokenizer.json").is_file():  # other tools may cache only config.json
            return None
    except (ConfigError, errors.HFValidationError):  # `pull` completes it or reports the error
        return None
    return folder


def cached_gguf(name: str, file: str) -> Path | None:
    """Return a GGUF file of the main branch if all its parts are in the cache, else None."""
    with contextlib.suppress(ConfigError, errors.HFValidationError):
        found = hub.try_to_load_from_cache(name, file, revision=MAIN)
        if isinstance(found, str):
            present_parts(Path(found))
            return Path(found)
    return None


def locate(
    name: str,
    check: Check,
    tell: Callable[[str], None] = say,
    weights: bool = True,
    gguf_file: str | None = None,
) -> Path:
    """Return the folder, or the GGUF file, of ORG/NAME in the cache; download what is missing."""
    found = cached_gguf(name, gguf_file) if gguf_file else cached(name, weights=weights)
    return found or pull(name, None, check, tell, weights, gguf_file)


def pull(
    name: str,
    revision: str | None,
    check: Check,
    tell: Callable[[str], None] = say,
    weights: bool = True,
    gguf_file: str | None = None,
) -> Path:
    """Download the files of ORG/NAME that Penstock reads, and return their folder.

    With `gguf_file` only this file is downloaded, with the other parts if it is split and the image
    encoder in its folder, and its path is returned. Without `weights` the weight files are skipped.
    Files that are in the cache are not downloaded again. The hub is queried for a branch or tag,
    which may have moved; a commit that is complete in the cache needs no network. Raises
    ConfigError with advice if the download fails.
    `check` is called before the weights are downloaded, and may raise ConfigError to prevent it.
    """
    is_commit = revision and A_COMMIT.fullmatch(revision) and not gguf_file
    if is_commit and (folder := cached(name, revision or MAIN)):
        tell(f"penstock: {name} at {revision} is in the cache")
        return folder
    utils.disable_progress_bars()  # we show one bar for all files
    constants.HF_HUB_DISABLE_TELEMETRY = True
    try:
        repository = Repository.look_up(name, revision)
        if gguf_file:
            wanted = files = [*_parts(repository, gguf_file), *_encoder(repository, gguf_file)]
        else:
            described = _described(repository)
            wanted = _weights(repository) if weights else []
            files = [*described, *wanted]
        missing = [file for file in files if not (repository.snapshot / file).is_file()]
        _check_space(repository, missing)
        total = decimal(sum(repository.sizes[file] for file in files))
        tell(
            f"penstock: {name} at {repository.commit}: {len(files)} files, {total}; "
            f"{len(missing)} to download"
        )
        _load(repository, [file for file in missing if file not in wanted])
        if lacking := [file for file in missing if file in wanted]:
            if not gguf_file:  # a GGUF file describes itself, once it is there
                check(repository.snapshot)
            _load(repository, lacking)
        if revision != repository.commit:
            ref = repository.cache / "refs" / (revision or MAIN)
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(repository.commit)
    except KeyboardInterrupt:
        tell("penstock: stopped; the next pull resumes from the bytes downloaded so far")
        raise
    except (httpx2.HTTPError, OSError, ValueError) as error:
        raise ConfigError(_advice(error, name, revision)) from error
    return repository.snapshot / (gguf_file or "")


def _described(repository: Repository) -> list[str]:
    """Return the files that Penstock reads, apart from the weights."""
    names = repository.sizes.keys()
    if "config.json" not in names:
        _refuse_gguf(repository)
        raise ConfigError(
            f"{repository.name} has no config.json, so it is not a model; check the name."
        )
    return [n for n in names if any(fnmatch.fnmatchcase(n, p) for p in CHECKPOINT_FILES)]


def _weights(repository: Repository) -> list[str]:
    """Return the files of weights. Raises ConfigError if there are none in safetensors format."""
    names = repository.sizes.keys()
    entry = weights_entry(read_json(repository.link("config.json")), names)
    if entry not in names:
        _refuse_gguf(repository)
        raise ConfigError(
            f"{repository.name} has {no_weights(entry, names)} Pickles (*.bin, *.pt) are not "
            "supported, because reading one can run code. Use a revision or repository with "
            "safetensors."
        )
    if not is_index(entry):
        return [entry]
    files = indexed_files(repository.link(entry))
    if lost := [name for name in files if name not in names]:
        raise ConfigError(
            f"{entry} of {repository.name} lists {lost[0]}, but the repository has no such file; "
            "try another revision."
        )
    return [entry, *files]


def _refuse_gguf(repository: Repository) -> None:
    """Raise ConfigError if the repository has GGUF files, because one has to be chosen."""
    paths = [PurePosixPath(name) for name in sorted(repository.sizes)]
    found = [path for path in paths if is_gguf(path) and is_first_part(path)]
    if files := [str(path) for path in found if not is_sidecar(path)]:
        raise ConfigError(
            f"{repository.name} has GGUF files; choose one with --gguf-file: {listed(files, 8)}."
        )


def _parts(repository: Repository, gguf_file: str) -> list[str]:
    """Return the parts of a GGUF file. Raises ConfigError if the repository lacks one."""
    parts = [str(part) for part in parts_of(PurePosixPath(gguf_file))]
    if not is_gguf(PurePosixPath(gguf_file)) or any(part not in repository.sizes for part in parts):
        _refuse_gguf(repository)
        raise ConfigError(f"{repository.name} has no GGUF file {gguf_file}.")
    return parts


def _encoder(repository: Repository, gguf_file: str) -> list[str]:
    """Return the image encoder that is served with a GGUF file, if the repository has one."""
    folder = PurePosixPath(gguf_file).parent
    paths = [PurePosixPath(name) for name in repository.sizes]
    found = image_encoders(path for path in paths if path.parent == folder)
    return [str(path) for path in found[:1]]


def _check_space(repository: Repository, missing: Iterable[str]) -> None:
    parts = [repository.partial(name) for name in missing if name in repository.hashes]
    there = sum(part.stat().st_size for part in parts if part.is_file())
    needed = sum(repository.sizes[name] for name in missing) - there
    disk = next(
        folder for folder in (repository.cache, *repository.cache.parents) if folder.is_dir()
    )
    free = shutil.disk_usage(disk).free
    if needed > free:
        raise ConfigError(
            f"{repository.name} needs {decimal(needed)} more in {constants.HF_HUB_CACHE}; only "
            f"{decimal(free)} are free. Free space, or set HF_HOME to a folder on a larger disk."
        )


def _load(repository: Repository, missing: list[str]) -> None:
    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with rich_progress.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=sum(repository.sizes[name] for name in missing))
        for name in missing:
            bar.update(task, description=name)
            if name in repository.hashes:
                _stream(repository, name, lambda count: bar.advance(task, count))
            else:
                bar.advance(task, repository.sizes[name])
            repository.link(name)


def _stream(repository: Repository, name: str, advance: Callable[[float], None]) -> None:
    """Download a large file's blob into the cache, resuming an interrupted download.

    The interruption may be a closed connection or the end of an earlier process.
    """
    part = repository.partial(name)
    blob = part.with_suffix("")
    if blob.is_file():
        return advance(repository.sizes[name])
    part.parent.mkdir(parents=True, exist_ok=True)
    url = hub.hf_hub_url(repository.name, name, revision=repository.commit)
    with part.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends
        except BlockingIOError:
            raise ConfigError(
                f"Another process is pulling {repository.name}; wait until it has finished."
            ) from None
        advance(file.tell())
        failures = 0
        while (have := file.tell()) < repository.sizes[name]:
            try:
                _append(url, file, advance)
            except (httpx2.TransportError, errors.HfHubHTTPError) as error:
                failures = failures + 1 if file.tell() == have else 1
                if failures > MAX_FAILURES or not _is_transient(error):
                    raise
                time.sleep(failures)
        file.seek(0)
        if hashlib.file_digest(file, "sha256").hexdigest() != repository.hashes[name]:
            part.unlink()
            raise ConfigError(
                f"{name} of {repository.name} has the wrong SHA-256 and was deleted; pull it again."
            )
        part.rename(blob)


def _append(url: str, file: BinaryIO, advance: Callable[[float], None]) -> None:
    """Request the bytes that are missing at the end of `file`, and append them."""
    have = file.tell()
    headers = utils.build_hf_headers() | {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with utils.get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
        utils.hf_raise_for_status(response)
        if have and response.status_code != 206:  # the server ignored Range
            advance(-have)
            file.seek(0)
            file.truncate()
        before = file.tell()
        for chunk in response.iter_bytes():
            file.write(chunk)
            advance(len(chunk))
        if file.tell() == before:
            raise httpx2.RemoteProtocolError("the response was empty")


def _is_transient(error: Exception) -> bool:
    return not isinstance(error, errors.HfHubHTTPError) or error.response.status_code in TRANSIENT


def _advice(error: Exception, name: str, revision: str | None) -> str:
    hub_url = constants.ENDPOINT
    match error:
        case errors.GatedRepoError():
            return (
                f"{name} is gated: accept its conditions at {hub_url}/{name}, then set HF_TOKEN "
                f"to a token of {hub_url}/settings/tokens."
            )
        case errors.RepositoryNotFoundError():
            return (
                f"{name} is neither a local folder nor a public model at {hub_url}. Check the "
                "name; for a private model set HF_TOKEN."
            )
        case errors.RevisionNotFoundError():
            return f"{name} has no revision {revision!r}; see {hub_url}/{name}/tree/main."
        case errors.HfHubHTTPError() if error.response.status_code in (401, 403):
            return f"{hub_url} denies access to {name}: check HF_TOKEN, or unset it."
        case errors.HfHubHTTPError():
            status = error.response.status_code
            if status == 404 and "HF_ENDPOINT" in os.environ:
                return f"{name} is no local folder, and {hub_url} returned 404: check HF_ENDPOINT."
            return f"{hub_url} returned {status} for {name}. Try again; the download resumes."
        case errors.OfflineModeIsEnabled():
            return (
                f"{name} is not a local folder and not complete in {constants.HF_HUB_CACHE}. "
                "HF_HUB_OFFLINE forbids the download; unset it."
            )
        case httpx2.TransportError() | errors.LocalEntryNotFoundError():
            return (
                f"{name} is not a local folder, and {hub_url} cannot be reached "
                f"({error.__cause__ or error}). Check the name and the network, or set HF_ENDPOINT "
                "to a mirror. The next attempt resumes the download."
            )
        case errors.HFValidationError():
            return f"{name!r} is not a valid model name; give ORG/NAME."
        case UnicodeEncodeError():
            return "HF_TOKEN has characters that are not allowed in an HTTP header."
        case ValueError():
            return f"{hub_url} is not a Hugging Face hub ({error}); check HF_ENDPOINT."
    return f"Cannot store {name} in {constants.HF_HUB_CACHE}: {error}."
