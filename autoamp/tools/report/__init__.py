"""The report of a run: the recording, its plain values, and the page that shows them."""
