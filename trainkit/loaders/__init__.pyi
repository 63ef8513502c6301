# The table of contents, which __init__.py loads lazily.
from .buffers import buffer_sorted_order as buffer_sorted_order
from .samples import TARGET_FIELDS as TARGET_FIELDS
from .samples import pad_stack as pad_stack
from .samples import pooling_mask as pooling_mask
from .samples import shift_tokens as shift_tokens
from .trees import Along as Along
from .trees import shard_tree as shard_tree
from .trees import unshard_tree as unshard_tree
