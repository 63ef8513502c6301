"""The commands of `python -m trainkit`: a file each, with `HELP`, `add(parser)`, `run(options)`.

`add` adds the command's flags to its parser; `run` does the work and returns (output, exit code),
where the output is text or records. Heavy imports stay inside `run`, so that `--help` is quick.
"""
