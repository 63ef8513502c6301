# The table of contents, which __init__.py loads lazily.
from .cache import cached_bins as cached_bins
from .dispatching import dispatch as dispatch
from .dispatching import stop_together as stop_together
from .packed import Packed as Packed
from .packed import join_packed as join_packed
from .packed import pack_apart as pack_apart
from .packed import packed_facts as packed_facts
from .prefetching import prefetch as prefetch
from .steps import deal_rows as deal_rows
from .steps import eval_batches as eval_batches
from .steps import step_batch as step_batch
from .steps import with_noise_keys as with_noise_keys
from .stream import StreamStep as StreamStep
from .stream import batch_maker as batch_maker
from .stream import documents_from as documents_from
from .stream import stream_counts as stream_counts
from .stream import stream_steps as stream_steps
