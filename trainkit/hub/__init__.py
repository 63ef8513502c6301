"""Hugging Face folders in and out, without `transformers`: configurations, weights, tokenizers.

`families` declares what is known, `configs` reads and writes a `config.json`, `links` is the map of
names and boxes both ways, `folder` reads a folder into any layout, `export` writes one;
`pretrained` opens a folder or a run of ours alike.
"""

from __future__ import annotations

from trainkit.hub.configs import family_of, read_config, write_config
from trainkit.hub.export import export_folder
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
from trainkit.hub.pretrained import Pretrained, base_run, check_tokenizer, open_pretrained
from trainkit.hub.tokenizer import tokenizer_files

__all__ = [
    "FAMILIES",
    "Family",
    "Folder",
    "Key",
    "Pretrained",
    "There",
    "base_run",
    "check_tokenizer",
    "export_folder",
    "family_of",
    "folder_weights",
    "init_config",
    "is_folder",
    "load_weights",
    "open_folder",
    "open_pretrained",
    "read_config",
    "tokenizer_files",
    "write_config",
]
