"""The report of a run: what is recorded for it, its values, and the page that shows them."""
