"""Files of checkpoints, in a local directory or a hub repository."""

import json
import os
import pathlib
import socket
import urllib.parse
import urllib.request
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


def locate(source: str, name: str, hub: Mapping[str, Any] = MappingProxyType({})) -> str | None:
    """Returns the path of one file of a local directory or hub repository; None if it is missing.

    Args:
      source: a directory, which takes precedence, or a hub id.
      name: the name of the file.
      hub: `revision`, `subfolder`, `token` and the like.

    Raises:
      ValueError: neither a directory nor a repository of this name was found.
    """
    if os.path.isdir(source):
        path = os.path.join(source, hub.get("subfolder") or "", name)
        return path if os.path.isfile(path) else None
    if os.path.isfile(source):
        raise ValueError(f"{source!r} is a file: give the directory that contains it")
    if source.startswith(("/", ".")) or source.count("/") > 1 or "\\" in source:
        raise ValueError(f"no directory {source!r}: give one that exists, or a hub id (google-t5/t5-small)")
    from transformers.utils.hub import cached_file  # slow to import, and only needed for hub ids

    try:
        return cached_file(source, name, _raise_exceptions_for_missing_entries=False, **reachable(hub))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{source!r} is neither a local directory nor a model that could be fetched from the hub: {error}"
        ) from error


def reachable(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `hub`, set to local files if the host cannot be resolved, which would be retried for 20 s."""
    host = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    if not urllib.request.getproxies():
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            return {**hub, "local_files_only": True}
    return dict(hub)


def read_json(path: str) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
      ValueError: the file is not valid JSON, or not an object.
    """
    try:
        content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): fetch or copy it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object: fetch or copy it again")
    return content
