"""The report of `edgekv eval --html`: one page that needs nothing else."""

from exporters.inspect.page.page import (
    check_page_path as check_page_path,
    render_page as render_page,
    write_html as write_html,
    write_page as write_page,
)
