"""Tables as a person sees them."""

from rich.console import Console

from experiments.lib import results


def test_brackets_in_a_table_are_text():
    """Not markup, which would vanish."""
    for show in (results.show, results.show_lines):
        console = Console(width=80, record=True)
        show(console, "peers", [{"arm": "pip install -e '.[peers]'"}])
        assert "'.[peers]'" in console.export_text()
