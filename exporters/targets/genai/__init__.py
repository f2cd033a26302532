"""A bundle as a folder that onnxruntime-genai loads.

onnxruntime-genai drives static graphs as a pipeline with a sliding window over the prompt. It keeps one cache tensor
for all heads of a layer, pads prompts in front, and knows positions and a row of valid columns where the decoder reads
a mask and rotary tables: `write` makes the decoder's graphs with such a cache and the graphs around them, `config`
connects them.

Nothing is imported here: the child process needs onnxruntime-genai alone.
"""
