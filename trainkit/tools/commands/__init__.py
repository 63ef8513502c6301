"""The commands of `python -m trainkit`: a file each, with `HELP`, `add(parser)`, `run(options)`.

`add` describes the command's flags to its parser; `run` does the work and returns what to print,
text or records, and the exit code. Heavy imports stay inside `run`, so that `--help` is quick.
"""
