"""Index folders: written whole or not at all, without pickle and without absolute paths."""

import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from searchrl_jax.retrieval.documents import Collection, make_collection

FORMAT = "searchrl_jax index"
VERSION = 1
MANIFEST = "manifest.json"
COLLECTION = "collection.json"


@contextmanager
def new_index_folder(path: str | Path) -> Iterator[Path]:
    """A fresh folder to fill, which becomes `path` on leaving the block; an error leaves `path` as it was.

    The new folder stands beside `path`, so that moving it there is one rename. An index already at `path` is replaced.
    A kill between the two renames of a replacement leaves the old index beside `path`, in a folder named `*.old`.

    Raises:
        ValueError: something that is not an index is at `path`.
    """
    target = Path(path).resolve()
    is_replacement = _is_index(target)
    if not is_replacement and target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{path} exists and is not an index, so it isn't overwritten; choose another path")
    target.parent.mkdir(parents=True, exist_ok=True)
    unique = f".{target.name}.{uuid.uuid4().hex[:12]}"
    fresh, old = target.with_name(f"{unique}.new"), target.with_name(f"{unique}.old")
    fresh.mkdir()
    try:
        yield fresh
        if is_replacement:
            target.rename(old)
        try:
            fresh.rename(target)
        except OSError:
            if is_replacement:
                old.rename(target)
            raise
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    if is_replacement:
        shutil.rmtree(old)


def write_manifest(folder: Path, kind: str, options: Mapping[str, Any], collection: Collection) -> None:
    """Write what every index has: its kind, the options it was built with, and its collection."""
    manifest = {"format": FORMAT, "version": VERSION, "kind": kind, "documents": len(collection), "options": options}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    rows = {"doc_ids": collection.doc_ids, "metadata": collection.metadata.rows}
    (folder / COLLECTION).write_text(json.dumps(rows), encoding="utf-8")


def read_manifest(path: str | Path) -> tuple[str, dict[str, Any], Collection]:
    """Kind, options and collection of the index at `path`.

    Raises:
        ValueError: no index, one of another version, or a damaged one.
    """
    folder = Path(path)
    if not _is_index(folder):
        raise ValueError(f"{path} is not an index: expected a folder with a {MANIFEST} that {FORMAT} wrote")
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if manifest.get("version") != VERSION:
        raise ValueError(
            f"{path} is an index of version {manifest.get('version')!r}, {VERSION} is expected; build it again"
        )
    try:
        rows = json.loads((folder / COLLECTION).read_text(encoding="utf-8"))
        collection = make_collection(rows["doc_ids"], rows["metadata"])
        if not len(rows["doc_ids"]) == len(rows["metadata"]) == manifest["documents"]:
            raise ValueError(f"expected {manifest['documents']} rows, found {len(rows['doc_ids'])}")
        return manifest["kind"], manifest["options"], collection
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is a damaged index ({error}); build it again") from error


def _is_index(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT
