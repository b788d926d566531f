"""The study: every arm on identical data over several seeds, recorded, and the tables and figures made of the records.

`python -m experiments.study` runs it, `python -m experiments.results` (`make results`) writes docs/results.md.
"""
