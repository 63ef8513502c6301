"""Hugging Face folders in and out, without `transformers`: configurations, weights, tokenizers.

`families` declares what is known, `configs` reads and writes a `config.json`, `links` is the map of
names and boxes both ways, `folder` reads a folder into any layout, `export` writes one;
`trained` opens a folder or a run of ours alike.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
