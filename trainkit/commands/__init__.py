"""The commands of `python -m trainkit`: one file each, with `add(subparsers)` and `run(options)`.

`add` describes the command's flags; `run` does the work and returns what to print, text or records,
and the exit code. Heavy imports stay inside `run`, so that `--help` is quick.
"""
