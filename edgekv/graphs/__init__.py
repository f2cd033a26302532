"""The decoder over `Ops`, and the CPU's graphs, which are built from what a bundle says."""
