"""The programs of benchmarks/ are tested here, and the pages that they write."""
