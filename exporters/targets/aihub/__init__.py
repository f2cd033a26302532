"""Qualcomm AI Hub: compile, link, profile and run a bundle's graphs on hosted devices, through the `qai_hub` client."""
