"""Object stores: S3 and what speaks like it, Google Cloud Storage, Azure, and plain web servers."""

import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.data.storage.base import FileInfo, NoListError, Storage, changed
from paceline.data.storage.settings import StoreSettings
from paceline.errors import DataError, SettingsError, StorageError, missing_extra

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

_CONNECT_S = 5.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 5.0

_CREDENTIALS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "s3": (
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket",
        (
            "AWS_ACCESS_KEY_ID",
            "AWS_SKIP_SIGNATURE",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            "AWS_METADATA_ENDPOINT",
        ),
    ),
    "gs": (
        "GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
        (
            "GOOGLE_APPLICATION_CREDENTIALS",
            "GOOGLE_SERVICE_ACCOUNT",
            "GOOGLE_SERVICE_ACCOUNT_PATH",
            "GOOGLE_SERVICE_ACCOUNT_KEY",
            "GOOGLE_SKIP_SIGNATURE",
        ),
    ),
    "az": (
        "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_SKIP_SIGNATURE=true for a public container",
        (
            "AZURE_STORAGE_ACCOUNT_KEY",
            "AZURE_STORAGE_SAS_KEY",
            "AZURE_STORAGE_SAS_TOKEN",
            "AZURE_STORAGE_TOKEN",
            "AZURE_CLIENT_ID",
            "AZURE_SKIP_SIGNATURE",
            "AZURE_STORAGE_USE_EMULATOR",
        ),
    ),
}
"""Advice by scheme, and the variables of the environment of which one must be set.

Without them the client would ask the cloud's metadata address, which nobody answers outside, and wait for it."""

OBJECT_SCHEMES = ("s3", "gs", "az", "http", "https")


class ObjectStorage(Storage):
    """A bucket, or a folder in one, through obstore. Credentials and end point come from the environment.

    Requests that fail with 5xx, a lost connection or silence are sent again, with pauses that double, for
    `settings.patience_s`; a transfer that breaks off goes on from the byte where it broke.

    Args:
        url: ``s3://bucket/folder``, ``gs://bucket/folder``, ``az://container/folder`` or ``https://host/folder``.
        settings: Time limits.

    Raises:
        SettingsError: The environment has no credentials, or the URL is invalid.
        MissingExtraError: obstore is not installed.
    """

    def __init__(self, url: str, settings: StoreSettings) -> None:
        self._url = url.rstrip("/")
        self._scheme = url.split("://")[0]
        self._settings = settings
        self._store = _open(self._url, self._scheme, settings)

    @property
    def url(self) -> str:
        """URL of the folder."""
        return self._url

    def list_files(self, prefix: str = "") -> list[FileInfo]:
        """Return the files below the folder; a web server must speak WebDAV for that."""
        import obstore

        folder, _, name = prefix.rpartition("/")
        store = self._store
        if self._scheme.startswith("http"):  # most web servers answer 501, which is not worth asking again
            store = _open(self._url, self._scheme, self._settings.model_copy(update={"patience_s": 0.5}))

        def ask() -> list[FileInfo]:
            with self._explained(prefix, "list"):
                chunks = obstore.list(store, folder or None, chunk_size=1000)
                return [_to_info(meta) for chunk in chunks for meta in chunk]

        found = self._until_whole(prefix, ask)
        kept = [file for file in found if file.path.startswith(f"{folder}/{name}" if folder else name)]
        return sorted(kept, key=lambda file: file.path)

    def find(self, path: str) -> FileInfo | None:
        """Return a file; its version is the etag, or else the time of its last change."""
        import obstore
        from obstore.exceptions import NotFoundError

        with self._explained(path, "find"):
            try:
                return _to_info(obstore.head(self._store, path))
            except (FileNotFoundError, NotFoundError):
                return None

    def read(self, path: str, start: int = 0, num_bytes: int | None = None, *, version: str = "") -> bytes:
        """Return bytes of a file."""
        if num_bytes == 0:
            return b""
        content, size = self._until_whole(path, lambda: self._get(path, start, num_bytes, version))
        wanted = size - start if num_bytes is None else num_bytes
        if len(content) < wanted:
            raise DataError(
                f"{self._url}/{path} must have {start + wanted} bytes, but has {size}; it was cut, or changed since "
                "its index was made"
            )
        return content

    def _get(self, path: str, start: int, num_bytes: int | None, version: str) -> tuple[bytes, int]:
        """Return what the store answers, and the object's size."""
        import obstore

        options: dict[str, Any] = {"range": {"offset": start} if num_bytes is None else (start, start + num_bytes)}
        if start == 0 and num_bytes is None:
            options = {}
        if version.startswith('"'):
            options["if_match"] = version
        with self._explained(path, "read"):
            answer = obstore.get(self._store, path, options=options)  # type: ignore[arg-type]
            size = answer.meta["size"]
            if version and _to_info(answer.meta).version != version:
                raise changed(f"{self._url}/{path}")
            return bytes(answer.bytes()), size

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return several ranges of a file, asked for at once."""
        import obstore

        starts, ends = [start for start, _ in ranges], [start + num_bytes for start, num_bytes in ranges]
        try:
            with self._explained(path, "read"):
                found = [bytes(part) for part in obstore.get_ranges(self._store, path, starts=starts, ends=ends)]
        except _BrokenAnswerError:
            found = []
        if [len(part) for part in found] != [num_bytes for _, num_bytes in ranges]:
            return super().read_ranges(path, ranges)  # one after the other, which says what is wrong
        return found

    def write(self, path: str, content: bytes) -> None:
        """Write a file as a whole: the store shows it when it is complete."""
        self._put(path, content)

    def write_from(self, path: str, file: Path) -> None:
        """Write a file from one of this machine, in parts where it is large."""
        self._put(path, file)

    def _put(self, path: str, content: bytes | Path) -> None:
        import obstore
        from obstore.exceptions import NotFoundError

        with self._explained(path, "write"):
            for is_last in (False, False, True):
                try:
                    obstore.put(self._store, path, content)
                    break
                except (
                    FileNotFoundError,
                    NotFoundError,
                ):  # it was complete, and completed again as the answer was lost
                    if is_last:
                        raise

    def remove(self, paths: Sequence[str]) -> None:
        """Remove files; those that are not there are passed over."""
        import obstore
        from obstore.exceptions import NotFoundError

        for path in paths:
            with self._explained(path, "remove"):
                try:
                    obstore.delete(self._store, path)
                except (FileNotFoundError, NotFoundError):
                    continue

    def _until_whole(self, path: str, request: Callable[[], T]) -> T:
        """Return the first answer that is whole, asked for in vain for `patience_s` at most.

        The client itself asks again for all but the body of a list, and an answer with too few bytes.
        """
        began_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                return request()
            except _BrokenAnswerError as error:
                reason = str(error)
            if time.monotonic() - began_s + pause_s > self._settings.patience_s:
                raise StorageError(
                    f"{self._url}/{path} must answer in full within {self._settings.patience_s:g} s, but breaks off: "
                    f"{reason}; check the network and the store, or raise store.patience_s"
                )
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    @contextmanager
    def _explained(self, path: str, verb: str) -> Iterator[None]:
        """Raise an error of ours, with one sentence, in place of the client's, which is a page long."""
        from obstore.exceptions import (
            BaseError,
            NotFoundError,
            NotSupportedError,
            PermissionDeniedError,
            PreconditionError,
            UnauthenticatedError,
        )

        url = f"{self._url}/{path}" if path else self._url
        try:
            yield
        except (FileNotFoundError, NotFoundError):
            raise DataError(f"{url} must be readable, but the store has no such file; check the path") from None
        except (PermissionDeniedError, UnauthenticatedError, PermissionError) as error:
            raise self._forbidden(url, verb, error) from None
        except PreconditionError:
            raise changed(url) from None
        except (NotSupportedError, NotImplementedError) as error:
            raise DataError(
                f"{url} must be able to {verb}, but: {_summary(error)}; take a server that does, such as nginx"
            ) from None
        except (BaseError, OSError, ValueError) as error:
            if verb in ("read", "list") and re.search(r"Requested \d|body error", str(error)):
                raise _BrokenAnswerError(_summary(error)) from None
            if verb == "list" and self._scheme.startswith("http"):
                raise NoListError(
                    f"{url} must list its files, but: {_summary(error)}; give the URL of a file, or index the folder "
                    "where it lies on a disk"
                ) from None
            if re.search(r"NoSuchBucket|ContainerNotFound", str(error)):
                raise DataError(
                    f"{url} must be in a bucket that is there, but this one is not; check the URL"
                ) from None
            if "invalid path" in str(error):
                raise DataError(
                    f"{url} must hold objects with names of parts between single /, but: {_summary(error)}; rename it"
                ) from None
            if verb == "list" and re.search(r"status code: 40[13]", str(error)):
                raise self._forbidden(url, verb, error) from None
            raise StorageError(
                f"{url} must answer within {self._settings.patience_s:g} s, but: {_summary(error)}; check the network, "
                "the URL and the end point, or raise store.patience_s"
            ) from None

    def _forbidden(self, url: str, verb: str, error: BaseException) -> DataError:
        advice = _CREDENTIALS[self._scheme][0] if self._scheme in _CREDENTIALS else "the rights there"
        return DataError(f"{url} must allow to {verb} it, but: {_summary(error)}; check {advice}")


def _open(url: str, scheme: str, settings: StoreSettings) -> "ObjectStore":
    try:
        import obstore.store
        from obstore.exceptions import BaseError
    except ImportError as error:
        raise missing_extra("obstore", "stores", f"reading {scheme}://") from error
    _check_credentials(scheme, url)
    endpoint = os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", url if scheme == "http" else ""))
    client: dict[str, Any] = {
        "allow_http": endpoint.startswith("http://") or "AZURE_STORAGE_USE_EMULATOR" in os.environ,
        "connect_timeout": timedelta(seconds=min(_CONNECT_S, settings.timeout_s)),
        "read_timeout": timedelta(seconds=settings.timeout_s),
        "timeout": timedelta(seconds=max(600.0, 10 * settings.timeout_s)),
    }
    retry: dict[str, Any] = {
        "max_retries": 1000,
        "retry_timeout": timedelta(seconds=settings.patience_s),
        "backoff": {
            "init_backoff": timedelta(seconds=_FIRST_PAUSE_S),
            "max_backoff": timedelta(seconds=_LAST_PAUSE_S),
            "base": 2,
        },
    }
    try:
        make: Callable[..., ObjectStore] = obstore.store.from_url
        return make(url, client_options=client, retry_config=retry)
    except (BaseError, ValueError) as error:
        raise SettingsError(
            f"{url} must be the URL of a store, but: {_summary(error)}; write it like s3://bucket/folder"
        ) from None


def _check_credentials(scheme: str, url: str) -> None:
    advice, names = _CREDENTIALS.get(scheme, ("", ()))
    if not names or any(os.environ.get(name) for name in names):
        return
    well_known = Path("~/.config/gcloud/application_default_credentials.json").expanduser()
    if scheme == "gs" and well_known.exists():
        return
    raise SettingsError(f"{url} must come with credentials, but the environment has none; set {advice}")


def _to_info(meta: Any) -> FileInfo:
    return FileInfo(meta["path"], meta["size"], meta["e_tag"] or meta["last_modified"].isoformat())


class _BrokenAnswerError(Exception):
    """An answer broke off, or held fewer bytes than were asked for and than there are."""


def _summary(error: BaseException) -> str:
    """Return the sentence of an error that says what happened, without the tree of its causes."""
    text = str(error).split("\n\nDebug source")[0].strip().rstrip(":").strip()
    return re.sub(r"\s+", " ", text)[:300]
