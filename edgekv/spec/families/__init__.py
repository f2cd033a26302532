"""The supported architectures, one file each.

A file declares `MODEL_TYPES`, the values of `model_type` that it reads, and `describe(config)`, which returns the
`DecoderSpec`. Files are found by listing this folder: a new architecture needs nothing else.
"""
