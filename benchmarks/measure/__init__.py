"""What the benchmarks share: machine, ranks, strategies, statistics, tables and plots.

The modules are imported as `measure.<noun>` with `benchmarks/` on the path (a script there has it
already).
"""
