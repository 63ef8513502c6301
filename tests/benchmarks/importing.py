"""Time of `import trainkit`, which loads neither torch nor numba, in processes of its own.

Run `python tests/benchmarks/importing.py`. An interpreter that imports trainkit takes turns with
one that imports nothing, and the figure is the difference of the medians: bytecode is there, and so
are the files in memory. The time is the processor's, which is that of the clock where nobody else
computes.
"""

import resource
import statistics
import subprocess
import sys

TURNS = 41
BOUND = 20.0  # ms
PROGRAM = "import trainkit, sys; sys.exit(bool({'torch', 'numba'} & sys.modules.keys()))"


def milliseconds(program):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def main():
    milliseconds(PROGRAM)  # writes the bytecode
    pairs = [(milliseconds(PROGRAM), milliseconds("pass")) for _ in range(TURNS)]
    both, alone = map(statistics.median, zip(*pairs, strict=True))
    verdict = "met" if both - alone <= BOUND else "MISSED"
    print(f"import trainkit {both - alone:.1f} ms (to reach: {BOUND:.0f}): {verdict}")
    print(f"an interpreter that imports nothing {alone:.1f} ms")
    return both - alone > BOUND


if __name__ == "__main__":
    sys.exit(main())
