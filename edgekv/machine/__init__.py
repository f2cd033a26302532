"""The machine: memory, files that are safe to read and write, child processes, native output."""
