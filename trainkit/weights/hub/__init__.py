"""Hugging Face folders in and out, without `transformers`: configurations, weights, tokenizers.

`families` declares the supported models, `configs` reads and writes a `config.json`, `links` maps
names and boxes both ways, `folder` reads a folder into any layout, `export` writes one, `trained`
opens a folder or a run.
"""

from trainkit.weights.hub.configs import read_decoder_config, write_decoder_config
from trainkit.weights.hub.export import export_folder, stream_weights
from trainkit.weights.hub.families import FAMILIES, Family
from trainkit.weights.hub.folder import (
    load_folder_weights,
    open_folder,
    open_folder_weights,
    read_init_config,
)
from trainkit.weights.hub.links import HFTensor
from trainkit.weights.hub.memory import export_tensors, import_tensors
from trainkit.weights.hub.resize import resize_weights
from trainkit.weights.hub.tokenizer import make_tokenizer_files
from trainkit.weights.hub.trained import ensure_base_run, open_model

__all__ = [
    "FAMILIES",
    "Family",
    "HFTensor",
    "ensure_base_run",
    "export_folder",
    "export_tensors",
    "import_tensors",
    "load_folder_weights",
    "make_tokenizer_files",
    "open_folder",
    "open_folder_weights",
    "open_model",
    "read_decoder_config",
    "read_init_config",
    "resize_weights",
    "stream_weights",
    "write_decoder_config",
]
