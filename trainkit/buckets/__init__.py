"""Buckets of object stores: their URLs, and the few functions on objects that a run needs.

Needs the extra `buckets`.
"""

from trainkit.buckets.files import find_object, mount_files
from trainkit.buckets.ranges import RangeArray, RangeFile, RemoteObject
from trainkit.buckets.store import (
    Store,
    check_store,
    clean_uploads,
    delete_files,
    get_bytes,
    get_file,
    get_range,
    list_files,
    list_objects,
    open_store,
    put_bytes,
    put_file,
)
from trainkit.buckets.urls import cache_folder, find_url

__all__ = [
    "RangeArray",
    "RangeFile",
    "RemoteObject",
    "Store",
    "cache_folder",
    "check_store",
    "clean_uploads",
    "delete_files",
    "find_object",
    "find_url",
    "get_bytes",
    "get_file",
    "get_range",
    "list_files",
    "list_objects",
    "mount_files",
    "open_store",
    "put_bytes",
    "put_file",
]
