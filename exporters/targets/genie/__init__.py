"""A bundle as the folder that Qualcomm's Genie loads, and Genie itself, run in a child process.

Nothing is imported here: the child process needs the library's binding alone.
"""
