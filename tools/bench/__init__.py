"""Benchmarks: each module measures one row of docs/benchmarks.md."""
