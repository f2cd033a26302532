"""The conformance kit: graphs with inputs and expected integers, run on a device, compared, and reported in one file.

`exporters.conformance` makes kits. What is here needs no more than the base install and onnxruntime-qnn.
"""
