"""Data: from packed corpora, or a stream, to the microbatches of a step on one rank."""

from trainkit.data.cache import cached_bins
from trainkit.data.corpus import TokenCorpus, documents_of, memory_corpus
from trainkit.data.dispatch import dispatch, stop_together
from trainkit.data.joined import JoinedCorpus, fingerprint, join_corpora
from trainkit.data.mapped import check_unchanged
from trainkit.data.packed import Packed, join_packed, pack_apart, packed_facts
from trainkit.data.prefetch import prefetch
from trainkit.data.steps import deal_rows, eval_batches, step_batch, strided_batch, with_noise_keys

__all__ = [
    "JoinedCorpus",
    "Packed",
    "TokenCorpus",
    "cached_bins",
    "check_unchanged",
    "deal_rows",
    "dispatch",
    "documents_of",
    "eval_batches",
    "fingerprint",
    "join_corpora",
    "join_packed",
    "memory_corpus",
    "pack_apart",
    "packed_facts",
    "prefetch",
    "step_batch",
    "stop_together",
    "strided_batch",
    "with_noise_keys",
]
