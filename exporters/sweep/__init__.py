"""`edgekv sweep`: every combination of recipe, cache, chip and context, each shared piece of work once, on Dask."""
