"""Hugging Face folders in and out, without `transformers`: configurations, weights, tokenizers.

`families` declares what is known, `configs` reads and writes a `config.json`, `links` is the map of
names and boxes both ways, `folder` reads a folder into any layout, `export` writes one;
`trained` opens a folder or a run of ours alike.
"""

from trainkit.weights.hub.configs import family_of, read_config, write_config
from trainkit.weights.hub.export import export_folder, stream_weights
from trainkit.weights.hub.families import FAMILIES, Family, Key
from trainkit.weights.hub.folder import (
    Folder,
    folder_weights,
    init_config,
    is_folder,
    load_weights,
    open_folder,
)
from trainkit.weights.hub.links import There
from trainkit.weights.hub.memory import export_tensors, import_tensors
from trainkit.weights.hub.resize import resized_weights
from trainkit.weights.hub.tokenizer import tokenizer_files
from trainkit.weights.hub.trained import Trained, base_run, open_trained, read_model

__all__ = [
    "FAMILIES",
    "Family",
    "Folder",
    "Key",
    "There",
    "Trained",
    "base_run",
    "export_folder",
    "export_tensors",
    "family_of",
    "folder_weights",
    "import_tensors",
    "init_config",
    "is_folder",
    "load_weights",
    "open_folder",
    "open_trained",
    "read_config",
    "read_model",
    "resized_weights",
    "stream_weights",
    "tokenizer_files",
    "write_config",
]
