# The table of contents, which __init__.py loads lazily.
from .formats import NF4_VALUES as NF4_VALUES
from .formats import Format as Format
from .formats import Quantized as Quantized
from .formats import dequantize as dequantize
from .formats import merge as merge
from .formats import quantize as quantize
from .formats import quantize_fp8_block as quantize_fp8_block
from .formats import quantize_int8 as quantize_int8
from .formats import quantize_nf4 as quantize_nf4
from .frozen import Packing as Packing
from .frozen import dequantized as dequantized
from .frozen import packing_of as packing_of
from .frozen import quantized as quantized
