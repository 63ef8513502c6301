"""Hugging Face folders in and out, without `transformers`: configurations, weights, tokenizers.

`families` declares what is known, `configs` reads and writes a `config.json`, `links` is the map of
names and boxes both ways, `folder` reads a folder into any layout, `export` writes one;
`trained` opens a folder or a run of ours alike.
"""

from __future__ import annotations

from trainkit.hub.configs import family_of, read_config, write_config
from trainkit.hub.export import export_folder, stream_weights
from trainkit.hub.families import FAMILIES, Family, Key
from trainkit.hub.folder import (
    Folder,
    folder_weights,
    init_config,
    is_folder,
    load_weights,
    open_folder,
)
from trainkit.hub.links import There
from trainkit.hub.resize import resized_weights
from trainkit.hub.tokenizer import tokenizer_files
from trainkit.hub.trained import Trained, base_run, open_trained

__all__ = [
    "FAMILIES",
    "Family",
    "Folder",
    "Key",
    "There",
    "Trained",
    "base_run",
    "export_folder",
    "family_of",
    "folder_weights",
    "init_config",
    "is_folder",
    "load_weights",
    "open_folder",
    "open_trained",
    "read_config",
    "resized_weights",
    "stream_weights",
    "tokenizer_files",
    "write_config",
]
