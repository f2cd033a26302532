"""BLAS has the kernels that the command gives it: tests compare what both compute, to the bit."""

from edgekv.machine.blas import use_fastest_kernels

use_fastest_kernels()  # before a module of tests imports numpy
