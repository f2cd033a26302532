"""The report of `edgekv eval --html`: one page that needs nothing else."""

from exporters.inspect.page.page import check_page_path, render_page, write_html, write_page

__all__ = ["check_page_path", "render_page", "write_html", "write_page"]
