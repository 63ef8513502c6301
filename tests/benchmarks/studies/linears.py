"""Is a run in float8, or in QAT, as far from fp32 as another seed is? See precision.py.

python tests/benchmarks/studies/linears.py FOLDER                      # all rows
python tests/benchmarks/studies/linears.py FOLDER float8_tensorwise    # some

FOLDER may be that of precision.py, whose five seeds in fp32 are then read and not run again.
"""

import contextlib
import sys

import precision

from trainkit.post.adapters.fake import LINEARS

precision.ROWS = {
    name: (["--linears", name], contextlib.nullcontext) for name in LINEARS if name != "plain"
}

if __name__ == "__main__":
    precision.main(*sys.argv[1:])
