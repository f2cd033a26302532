"""Folders that Qualcomm's GenieX loads."""
