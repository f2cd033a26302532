"""Qualcomm's libraries on this machine: where they are, what keeps them from working, sessions on them."""
