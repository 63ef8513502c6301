# The table of contents, which __init__.py loads lazily.
from .batches import batch_hash as batch_hash
from .batches import batch_of_rows as batch_of_rows
from .batches import blank_batch as blank_batch
from .batches import count_tokens as count_tokens
from .batches import count_valid_tokens as count_valid_tokens
from .batches import map_tensors as map_tensors
from .batches import shift_labels as shift_labels
from .batches import spans as spans
from .batches import split_batch as split_batch
from .batches import to_device as to_device
from .collate import collate_bins as collate_bins
from .shards import contiguous_shard as contiguous_shard
from .shards import shard_batch as shard_batch
from .shards import shard_sequence as shard_sequence
from .shards import zigzag_shard as zigzag_shard
from .shards import zigzag_unshard as zigzag_unshard
