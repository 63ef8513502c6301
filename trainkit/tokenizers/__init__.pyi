# The table of contents, which __init__.py loads lazily.
from .bytes import ByteTokenizer as ByteTokenizer
from .bytes import byte_tokenizer as byte_tokenizer
from .documents import encode_document as encode_document
from .documents import sample_encoder as sample_encoder
from .documents import text_encoder as text_encoder
from .documents import text_of as text_of
from .hf import HFTokenizer as HFTokenizer
from .hf import add_tokens as add_tokens
from .hf import hf_tokenizer as hf_tokenizer
from .hf import save_tokenizer as save_tokenizer
from .hf import train_bpe as train_bpe
from .open import covered_hashes as covered_hashes
from .open import find_tokenizer as find_tokenizer
from .open import open_tokenizer as open_tokenizer
from .open import tokenizer_hash as tokenizer_hash
from .special import CHAT_SPECIAL as CHAT_SPECIAL
